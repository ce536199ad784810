import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from steerlab.core._text import (
    EncodedPrompt,
    adds_bos,
    as_prompts,
    as_targets,
    common_prefix_length,
    encode_pair,
    encode_prompt,
    is_single_prompt,
    render_chat,
)
from steerlab.core.errors import PromptError, TargetError
from tests.tiny_models import BOS, EOS, build_tiny_tokenizer

PLAIN = build_tiny_tokenizer(chat=True)  # has a BOS and does not add it, like SmolLM2's
D_VOCAB = len(PLAIN)
USER = {"role": "user", "content": "Hi"}


def make_adding():
    tokenizer = copy.deepcopy(PLAIN)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    return tokenizer


def make_without():
    tokenizer = build_tiny_tokenizer(chat=False)
    tokenizer.bos_token = None
    return tokenizer


ADDING, WITHOUT = make_adding(), make_without()
B = PLAIN.bos_token_id


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return AutoTokenizer.from_pretrained(smollm2_path)


def ids(text):
    return tuple(PLAIN(text, add_special_tokens=False)["input_ids"])


def encode(prompt, tokenizer=PLAIN, **options):
    return encode_prompt(tokenizer, prompt, d_vocab=D_VOCAB, **options)


def pair(prompt, target, tokenizer=PLAIN, **options):
    encoded = encode_prompt(tokenizer, prompt, d_vocab=len(tokenizer))
    return encode_pair(tokenizer, encoded, target, d_vocab=len(tokenizer), **options)


# --- one BOS ------------------------------------------------------------------------------------------------------


def test_the_fixtures_are_what_they_say():
    assert not adds_bos(PLAIN)
    assert adds_bos(ADDING)
    assert not adds_bos(WITHOUT)


@pytest.mark.parametrize("tokenizer", [PLAIN, ADDING], ids=["plain", "adding"])
@pytest.mark.parametrize("text", [f"{BOS}The old clock", f"{BOS}{BOS}The old clock"])
def test_a_text_that_brings_its_bos_has_exactly_one(tokenizer, text):
    assert encode(text, tokenizer).token_ids == (B, *ids("The old clock"))


def test_bos_is_added_only_by_tokenizers_that_add_it():
    assert encode("The old clock").token_ids == ids("The old clock")
    assert encode("The old clock", ADDING).token_ids == (B, *ids("The old clock"))


@pytest.mark.parametrize("tokenizer", [PLAIN, ADDING], ids=["plain", "adding"])
def test_a_chat_template_that_brings_bos_gives_exactly_one(tokenizer):
    encoded = encode("Hi", tokenizer, chat=True)
    assert encoded.token_ids.count(B) == 1
    assert encoded.token_ids[0] == B


def test_real_tokenizer_adds_no_bos(smollm2):
    assert encode_prompt(smollm2, "The capital of France is", d_vocab=49152).token_ids == tuple(
        smollm2("The capital of France is")["input_ids"]
    )
    assert smollm2.bos_token_id not in smollm2("The capital")["input_ids"]


def test_an_empty_prompt_starts_from_bos_or_is_an_error():
    assert encode("").token_ids == (B,)
    assert encode("", ADDING).token_ids == (B,)
    with pytest.raises(PromptError, match="no BOS"):
        encode("", WITHOUT)


# --- ids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_ids", [[5, 6], (5, 6), [B, B, 5]])
@pytest.mark.parametrize("tokenizer", [PLAIN, ADDING], ids=["plain", "adding"])
def test_ids_are_taken_as_they_are(tokenizer, given_ids):
    assert encode(given_ids, tokenizer) == EncodedPrompt(tuple(given_ids), None)


@pytest.mark.parametrize("bad", [-1, D_VOCAB, 10**9])
def test_ids_outside_the_vocabulary_are_refused(bad):
    with pytest.raises(PromptError, match=f"token id {bad}, outside the model's vocabulary of 0 to {D_VOCAB - 1}"):
        encode([5, bad])
    with pytest.raises(TargetError, match=f"token id {bad}"):
        pair("The old", [5, bad])


# --- chats --------------------------------------------------------------------------------------------------------


def test_a_string_is_one_user_turn():
    assert encode("Hi", chat=True) == encode([USER])
    assert render_chat(PLAIN, [USER]) == f"{BOS}[user] Hi{EOS}[assistant] "


@pytest.mark.parametrize("content", ["Sure", "Sure, here", " spaced", "trailing ", ""])
def test_a_final_assistant_message_is_continued(content):
    text = render_chat(PLAIN, [USER, {"role": "assistant", "content": content}])
    assert text == f"{BOS}[user] Hi{EOS}[assistant] {content}"


@pytest.mark.parametrize("content", ["Sure, ", "Sure", ""])
def test_a_final_assistant_message_is_continued_on_the_real_model(smollm2, content):
    text = render_chat(smollm2, [USER, {"role": "assistant", "content": content}])
    assert text.endswith(f"<|im_start|>assistant\n{content}")


TRIMMING = "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] | trim }}</end>\n{% endfor %}"
DROPPING = "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'].split('</think>')[-1] }}</end>\n{% endfor %}"
SILENT = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}\n{% endfor %}"


def templated(template):
    tokenizer = copy.deepcopy(PLAIN)
    tokenizer.chat_template = template + "{% if add_generation_prompt %}<assistant>\n{% endif %}"
    return tokenizer


@pytest.mark.parametrize(
    "content", ["1, 2, ", "1, 2", "", " ", "\n", " spaced", "ends in a line\n\n", "<user>\nHi</end>\n"]
)
def test_a_message_to_continue_stays_whole_where_the_template_trims(content):
    tokenizer = templated(TRIMMING)
    text = render_chat(tokenizer, [USER, {"role": "assistant", "content": content}])
    assert text == f"<user>\nHi</end>\n<assistant>\n{content}"
    assert encode([USER, {"role": "assistant", "content": content}], tokenizer).token_ids == ids(text)


@pytest.mark.parametrize("template", [DROPPING, SILENT])
def test_a_template_that_leaves_out_what_is_to_be_continued_is_refused(template):
    message = {"role": "assistant", "content": "Hm.</think>So"}
    with pytest.raises(PromptError, match=r"leaves out parts of the last message.*'Hm.</think>So'"):
        render_chat(templated(template), [USER, message])


@pytest.mark.parametrize("messages", [[{"role": "user"}], [{"content": "Hi"}], [USER, {}], [USER, "Hi"]])
def test_malformed_messages_are_refused(messages):
    with pytest.raises(PromptError, match="'role' and 'content'"):
        encode(messages)


def test_an_empty_conversation_is_refused():
    with pytest.raises(PromptError, match="empty"):
        encode([])


def test_a_tokenizer_without_template_says_so():
    with pytest.raises(PromptError, match="no chat template"):
        encode("Hi", WITHOUT, chat=True)


def test_what_a_template_refuses_is_a_prompt_error():
    tokenizer = copy.deepcopy(PLAIN)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match="roles must alternate"):
        encode([USER, USER], tokenizer)


# --- the cut between prompt and target ----------------------------------------------------------------------------


def test_a_clean_cut_is_the_prompt_and_the_rest():
    found = pair("The old clock", " had stopped")
    assert found.boundary == "clean"
    assert found.context_ids == ids("The old clock")
    assert found.context_ids + found.target_ids == ids("The old clock had stopped")


def test_a_merge_across_the_cut_scores_from_the_common_prefix(smollm2):
    found = pair("The cap", "ital of France", smollm2)
    assert found.boundary == "merged"
    assert found.context_ids + found.target_ids == tuple(smollm2("The capital of France")["input_ids"])
    assert found.context_ids == tuple(smollm2("The")["input_ids"])


def test_a_complete_merge_is_conditioned_on_bos(smollm2):
    found = pair("Ans", "wer", smollm2)
    assert found.boundary == "merged"
    assert found.context_ids == (smollm2.bos_token_id,)
    assert found.target_ids == tuple(smollm2("Answer")["input_ids"])
    assert len(found.target_ids) == 1


def test_a_complete_merge_without_bos_is_an_error_that_says_so(smollm2):
    tokenizer = copy.deepcopy(smollm2)
    tokenizer.bos_token = None
    with pytest.raises(TargetError, match=r"no BOS.*separate"):
        pair("Ans", "wer", tokenizer)


def test_separate_never_merges(smollm2):
    found = pair("Ans", "wer", smollm2, boundary="separate")
    assert found.boundary == "clean"
    assert found.context_ids == tuple(smollm2("Ans")["input_ids"])
    assert found.target_ids == tuple(smollm2("wer")["input_ids"])


@pytest.mark.parametrize("tokenizer", [PLAIN, ADDING], ids=["plain", "adding"])
@pytest.mark.parametrize("start", ["", BOS, BOS + BOS])
def test_the_bos_is_part_of_the_context_once(tokenizer, start):
    found = pair(f"{start}The old clock", " had stopped", tokenizer)
    assert found.boundary == "clean"
    assert found.context_ids == encode(f"{start}The old clock", tokenizer).token_ids
    assert found.context_ids.count(B) == (1 if start or tokenizer is ADDING else 0)
    assert found.context_ids[-3:] + found.target_ids == ids("The old clock had stopped")[-len(found.target_ids) - 3 :]


@pytest.mark.parametrize("tokenizer", [PLAIN, ADDING], ids=["plain", "adding"])
def test_a_target_after_the_empty_prompt(tokenizer):
    found = pair("", "The old clock", tokenizer)
    assert (found.context_ids, found.target_ids, found.boundary) == ((B,), ids("The old clock"), "clean")


def test_chat_prompts_are_joined_as_text():
    encoded = encode("Hi", chat=True)
    found = encode_pair(PLAIN, encoded, "Two plus two", d_vocab=D_VOCAB)
    joint = PLAIN(encoded.text + "Two plus two", add_special_tokens=False)["input_ids"]
    assert found.context_ids + found.target_ids == tuple(joint)


def test_ids_imply_separate(smollm2):
    ans, wer = (tuple(smollm2(text)["input_ids"]) for text in ("Ans", "wer"))
    for prompt, target in ((list(ans), "wer"), ("Ans", list(wer)), (list(ans), torch.tensor(wer))):
        found = pair(prompt, target, smollm2)
        assert (found.context_ids, found.target_ids, found.boundary) == (ans, wer, "clean")


def test_a_target_without_tokens_is_refused():
    for boundary in ("joint", "separate"):
        with pytest.raises(TargetError, match="no token of its own"):
            pair("The old clock", "", boundary=boundary)


def test_a_target_the_tokenizer_drops_is_refused():
    tokenizer = copy.deepcopy(PLAIN)
    from tokenizers.normalizers import Strip

    tokenizer.backend_tokenizer.normalizer = Strip()
    for boundary in ("joint", "separate"):
        with pytest.raises(TargetError, match="no token of its own"):
            pair("The old clock", "  ", tokenizer, boundary=boundary)


def test_unknown_boundary():
    with pytest.raises(TargetError, match="'joint' or 'separate'"):
        pair("The old", " clock", boundary="auto")


@given(st.text(max_size=12), st.text(min_size=1, max_size=12))
def test_joint_pairs_spell_the_joint_text(prompt, target):
    found = pair(prompt, target)
    context = (
        found.context_ids[1:] if found.context_ids[:1] == (B,) and not prompt.startswith(BOS) else found.context_ids
    )
    joint = PLAIN(prompt + target, add_special_tokens=False)["input_ids"]
    assert list(context + found.target_ids) == joint
    assert found.target_ids


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_prefix(a, b):
    n = common_prefix_length(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


# --- what callers may pass ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("single", ["text", "", [1, 2], (1, 2), torch.tensor([1, 2]), [USER], [USER, USER]])
def test_a_bare_prompt_is_a_list_of_one(single):
    assert is_single_prompt(single)
    assert len(as_prompts(single)) == 1


@pytest.mark.parametrize(
    "several", [["a", "b"], [[1], [2]], [torch.tensor([1]), torch.tensor([2])], [[USER], [USER]], ["a", [1]]]
)
def test_lists_of_prompts(several):
    assert not is_single_prompt(several)
    assert len(as_prompts(several)) == 2


def test_no_prompts():
    with pytest.raises(PromptError, match="no prompts"):
        as_prompts([])


@pytest.mark.parametrize("bad", [[None], [3.5], [["a", "b"]], [[1, "a"]], ["a", 1], [b"bytes"], [[True]], [[USER, 1]]])
def test_what_is_no_prompt_is_refused_by_index(bad):
    with pytest.raises(PromptError, match=r"Prompt \d is neither"):
        as_prompts(bad)


def test_targets_are_one_list_per_prompt():
    assert as_targets([["a", [1]], ["b"]], 2, False) == [["a", [1]], ["b"]]
    assert as_targets(["a", "b"], 1, True) == [["a", "b"]]
    assert as_targets([[1, 2], [3]], 1, True) == [[[1, 2], [3]]]
    assert as_targets([["a", "b"]], 1, True) == [["a", "b"]]


@pytest.mark.parametrize(
    "bad",
    ["a", [], [["a"]], [["a"], []], [["a"], "b"], [["a"], [1, 2]], [["a"], [""]], [["a"], [[]]], [["a"], [None]]],
)
def test_bad_targets_are_refused(bad):
    with pytest.raises(TargetError):
        as_targets(bad, 2, False)
