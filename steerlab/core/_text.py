"""Prompts and targets as token ids: templates, the one BOS, and the boundary between prompt and target."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from jinja2 import TemplateError

from steerlab.core._characters import check_whole
from steerlab.core._numbers import as_integer, as_list
from steerlab.core._spelling import INCOMPLETE, decode, ids_after, plain_ids
from steerlab.core.errors import PromptError, TargetError

Message: TypeAlias = Mapping[str, str]
PromptLike: TypeAlias = str | Sequence[Message] | Sequence[int]
TargetLike: TypeAlias = str | Sequence[int]
Boundary: TypeAlias = Literal["joint", "separate"]

_MARK = "EdgeOfTheMessageToContinue"


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model sees it.

    Attributes:
        token_ids: the ids that are run, BOS included where there is one.
        text: the text they came from, after the chat template; None when the caller gave ids.
    """

    token_ids: tuple[int, ...]
    text: str | None


@dataclass(frozen=True)
class EncodedPair:
    """A prompt and a target, cut into what is conditioned on and what is scored.

    Attributes:
        context_ids: ids that are conditioned on.
        target_ids: ids that are scored, at least one.
        boundary: `clean` if the context is exactly the prompt's ids; `merged` if the tokenizer joined characters
            across the cut, so that scoring starts at the longest common token prefix.
        variant: the prefix that was put before the target's text.
        num_bytes: UTF-8 bytes of the text that is scored; None if nothing counted them.
    """

    context_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    boundary: Literal["clean", "merged"]
    variant: str = ""
    num_bytes: int | None = None


def as_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """A list of prompts; a single prompt (text, one conversation, or one list of ids) becomes a list of one.

    Raises:
        PromptError: if there is none, or an element is not a prompt.
    """
    return [check_prompt(item, index) for index, item in enumerate(prompt_items(prompts))]


def prompt_items(prompts: Any) -> list[Any]:
    """What was passed as prompts, one by one and not checked yet.

    Raises:
        PromptError: if there is none, or for a data frame or a dictionary, whose elements are names.
    """
    given = listed(prompts)
    if is_single_prompt(given):
        return [given]
    if isinstance(given, Mapping) or hasattr(given, "columns"):
        raise PromptError(
            f"Prompts are a string, chat messages, token ids, or a list of those; got {type(given).__name__}, whose "
            "elements are names: pass one of its columns."
        )
    found = as_list(given, ordered=True)
    if found is None:
        raise PromptError(f"Prompts are a string, chat messages, token ids, or a list of those; got {prompts!r:.80}.")
    if not found:
        raise PromptError("There are no prompts; pass at least one.")
    return found


def is_single_prompt(prompts: PromptLike | Sequence[PromptLike]) -> bool:
    """Whether this is one bare prompt (text, one conversation, or one list of ids) rather than a list of prompts."""
    if isinstance(prompts, str):
        return True
    found = None if isinstance(prompts, Iterator) else as_list(prompts, ordered=True)
    return bool(found) and (all(isinstance(item, Mapping) for item in found) or _all_ids(found))


def listed(values: Any) -> Any:
    """A generator's elements as a list, so that they can be read twice; anything else as it is."""
    return list(values) if isinstance(values, Iterator) else values


def plain_text(item: Any) -> Any:
    """A prompt or target as text, messages, or a list of Python's own integers: as JSON and hashes take it."""
    if type(item) is list and _are_plain(item):
        return item
    found = as_list(item)
    return item if found is None else found if not _all_ids(found) else [as_integer(i) for i in found]


def as_targets(targets: Sequence[Any], n_prompts: int, single: bool) -> list[list[TargetLike]]:
    """One list of targets per prompt.

    Args:
        targets: a list per prompt, of strings or lists of ids; for a single bare prompt also the list itself.
        n_prompts: how many prompts there are.
        single: whether the caller passed one bare prompt rather than a list.

    Raises:
        TargetError: if a list is missing or empty, or has the wrong nesting.
    """
    if isinstance(targets, str):
        raise TargetError(f"targets is one list per prompt, e.g. [[{targets!r}]]; got the string {targets!r}.")
    found = as_list(targets, ordered=True)
    if found is None:
        raise TargetError(f"targets is one list per prompt, got {targets!r:.80}.")
    rows = [found] if single and not _is_nested(found) else found
    if len(rows) != n_prompts:
        raise TargetError(f"There are {n_prompts} prompts and {len(rows)} lists of targets; pass one list per prompt.")
    return [_check_row(row, index) for index, row in enumerate(rows)]


def _is_nested(targets: Sequence[Any]) -> bool:
    """Whether the elements are themselves lists of targets (and not targets)."""
    return all(not isinstance(row, str) and not is_token_ids(row) for row in targets)


def _check_row(row: Any, index: int) -> list[TargetLike]:
    if isinstance(row, str):
        raise TargetError(
            f"Prompt {index} has the string {row!r} where a list of targets belongs; write [{row!r}] for one target."
        )
    found = as_list(row, ordered=True)
    if found is None:
        raise TargetError(f"Prompt {index} needs a list of targets, got {row!r:.80}.")
    row = found
    if not row:
        raise TargetError(f"Prompt {index} has no targets; pass at least one.")
    if _all_ids(row):
        raise TargetError(
            f"Prompt {index} has a list of ids where a list of targets belongs; write [{row}] for one target."
        )
    for target in row:
        if not is_target(target):
            raise TargetError(f"A target is a string or a list of token ids; prompt {index} has {target!r}.")
        if len(target) == 0:
            raise TargetError(f"Prompt {index} has an empty target; pass text or ids to score.")
    return [plain_text(target) for target in row]


def check_prompt(item: Any, index: int) -> PromptLike:
    """One prompt as text, messages, or a list of Python's own integers.

    Raises:
        PromptError: if it is none of these.
    """
    if not is_prompt(item):
        raise PromptError(
            f"Prompt {index} is neither a string, nor a list of chat messages, nor a list of token ids: {item!r:.80}."
        )
    return plain_text(item)


def is_prompt(item: Any) -> bool:
    """Whether this is text, a list of chat messages, or token ids; it may be empty."""
    if isinstance(item, Sequence) and not isinstance(item, str | bytes) and all(isinstance(m, Mapping) for m in item):
        return True
    return is_target(item)


def prompt_words(prompt: PromptLike) -> str:
    """A prompt as a reader sees it: text as it is, a message a line, ids as numbers.

    Examples:
        >>> prompt_words([{"role": "user", "content": "Hi"}]), prompt_words([5, 6])
        ('user: Hi', '[5, 6]')
    """
    if isinstance(prompt, str):
        return prompt
    if all(isinstance(part, Mapping) for part in prompt):
        return "\n".join(f"{part.get('role')}: {part.get('content')}" for part in prompt)  # pyright: ignore
    return str(list(prompt))


def is_target(item: Any) -> bool:
    """Whether this is text or token ids; it may be empty."""
    return isinstance(item, str) or is_token_ids(item)


def is_token_ids(item: Any) -> bool:
    """Whether this is a sequence of integers; it may be empty."""
    if type(item) in (list, tuple) and _are_plain(item):
        return True
    found = as_list(item) if isinstance(item, Sequence) or hasattr(item, "tolist") else None
    return found is not None and _all_ids(found)


def _all_ids(items: Sequence[Any]) -> bool:
    return _are_plain(items) or all(as_integer(item) is not None for item in items)


def _are_plain(ids: Sequence[Any]) -> bool:
    """Whether all are Python's own integers: a fast path for large batches."""
    return set(map(type, ids)) == {int}


def encode_prompt(tokenizer: Any, prompt: PromptLike, *, chat: bool = False, d_vocab: int) -> EncodedPrompt:
    """The ids of one prompt, with exactly one BOS where the tokenizer adds one.

    A list of messages goes through the tokenizer's chat template; so does a string with `chat=True`, as one user turn.
    A final assistant message is continued rather than closed. Ids are taken as they are.

    Raises:
        PromptError: for an empty prompt on a tokenizer without BOS, half a character, ids outside the vocabulary,
            messages without `role` and `content`, or a tokenizer without a chat template.
    """
    if not isinstance(prompt, str) and len(prompt) > 0 and _all_ids(prompt):
        return EncodedPrompt(_check_ids(prompt, d_vocab, PromptError, "prompt"), None)  # pyright: ignore[reportArgumentType]
    check_whole(prompt, "The prompt", PromptError)
    if isinstance(prompt, str) and not chat:
        return EncodedPrompt(_text_ids(tokenizer, prompt), prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    text = render_chat(tokenizer, messages)  # pyright: ignore[reportArgumentType]
    ids = plain_ids(tokenizer, text)
    return EncodedPrompt(_one_bos(ids, tokenizer.bos_token_id), text)


def render_chat(tokenizer: Any, messages: Sequence[Message]) -> str:
    """The text of a conversation, ready for the assistant's next words.

    Raises:
        PromptError: if a message lacks `role` or `content`, the tokenizer has no chat template, or the template
            refuses the conversation (e.g. two user turns in a row) or leaves out parts of a message to continue.
    """
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise PromptError(f"A chat message needs 'role' and 'content', got {message!r:.80}.")
        if not isinstance(message["content"], str):
            raise PromptError(f"A chat message's content is text, got {message['content']!r:.80}.")
    if not messages:
        raise PromptError("A prompt is empty: it holds neither a token id nor a chat message.")
    if getattr(tokenizer, "chat_template", None) is None:
        raise PromptError("This model's tokenizer has no chat template; pass plain text, and leave chat=False.")
    if messages[-1]["role"] == "assistant":
        return continued_chat(tokenizer, messages)
    return _rendered(tokenizer, messages, add_generation_prompt=True)


def continued_chat(tokenizer: Any, messages: Sequence[Message]) -> str:
    """The text of a conversation that ends inside its last message, exactly as that is written.

    A template may trim messages, so the last one is marked at both ends, and put there as it is.

    Raises:
        PromptError: if the template refuses the conversation, or leaves out parts of the last message.
    """
    content = messages[-1]["content"]
    marked = [*messages[:-1], {**messages[-1], "content": f"{_MARK}{content}{_MARK}"}]
    parts = _rendered(tokenizer, marked, add_generation_prompt=False).rsplit(_MARK, 2)
    if len(parts) != 3 or parts[1] != content:
        raise PromptError(
            f"The model's chat template leaves out parts of the last message, which is to be continued: "
            f"{content!r:.80}. End with a user's message, or write the prompt as plain text."
        )
    return parts[0] + content


def _rendered(tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (TemplateError, ValueError) as error:
        raise PromptError(f"The model's chat template refuses this conversation: {error}") from error


def encode_pair(
    tokenizer: Any, prompt: EncodedPrompt, target: TargetLike, *, boundary: Boundary = "joint", d_vocab: int
) -> EncodedPair:
    """Cuts prompt + target into context ids and target ids.

    `joint` encodes both texts together, as the model would read them; if the cut between them is not a token boundary,
    the target starts after the longest common token prefix and the result says `merged`. `separate` encodes each
    alone; a tokenizer that puts a space before every text puts none before a target that has none. Ids, of prompt or
    target, always mean `separate`.

    Raises:
        TargetError: if the target gives no token of its own, nothing is left to condition on and the model has no
            BOS, or the tokenizer cannot spell a target that is encoded alone after other tokens.
    """
    if boundary not in ("joint", "separate"):
        raise TargetError(f"boundary is 'joint' or 'separate', got {boundary!r}.")
    if not isinstance(target, str):
        ids = _check_ids(plain_text(target), d_vocab, TargetError, "target")
        return EncodedPair(prompt.token_ids, ids, "clean")
    check_whole(target, "The target", TargetError)
    if boundary == "separate" or prompt.text is None:
        ids = ids_after(tokenizer, prompt.token_ids, target)
        return EncodedPair(prompt.token_ids, _nonempty(ids, target), "clean")
    return _joint_pair(tokenizer, prompt, prompt.text, target)


def _joint_pair(tokenizer: Any, prompt: EncodedPrompt, text: str, target: str) -> EncodedPair:
    joint = _one_bos(plain_ids(tokenizer, text + target), tokenizer.bos_token_id)
    bos = prompt.token_ids[:1]
    if joint[:1] != bos and bos == (tokenizer.bos_token_id,):
        joint = bos + joint
    cut = common_prefix_length(prompt.token_ids, joint)
    clean = cut == len(prompt.token_ids)
    target_ids = _nonempty(joint[cut:], target)
    if cut == 0:
        if tokenizer.bos_token_id is None:
            raise TargetError(
                f"The tokenizer merges {text!r} and {target!r} completely; nothing is left to condition on, and "
                "the model has no BOS to start from; use boundary='separate', or a longer prompt."
            )
        return EncodedPair((tokenizer.bos_token_id,), target_ids, "merged")
    return EncodedPair(joint[:cut], target_ids, "clean" if clean else "merged")


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading ids two sequences share."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def token_offsets(tokenizer: Any, token_ids: Sequence[int], text: str | None) -> tuple[str, list[tuple[int, int]]]:
    """The text that a prompt's tokens spell, and each token's characters in it as (start, stop).

    A token that spells nothing of the text, such as a BOS put before it, has an empty range.

    Args:
        tokenizer: the model's own tokenizer.
        token_ids: the prompt's ids, as `encode_prompt` gave them.
        text: the text they came from; None decodes the ids.
    """
    if text is not None and getattr(tokenizer, "is_fast", False):
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = tuple(found["input_ids"]), [tuple(pair) for pair in found["offset_mapping"]]
        surplus = len(ids) - len(token_ids)
        if surplus > 0:  # several BOS in the text became one
            ids, offsets = ids[surplus:], offsets[surplus:]
        if ids == tuple(token_ids[len(token_ids) - len(ids) :]):
            return text, [(0, 0)] * (len(token_ids) - len(ids)) + offsets
    return _decoded_offsets(tokenizer, token_ids)


def _decoded_offsets(tokenizer: Any, token_ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """The same from the ids alone; a token that ends inside a character counts up to that character's end."""

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    ends = [len(decode(token_ids[: n + 1])) for n in range(len(token_ids))]
    starts = [0, *(len(decode(token_ids[:n]).rstrip(INCOMPLETE)) for n in range(1, len(token_ids)))]
    return decode(token_ids), list(zip(starts, ends, strict=True))


def _text_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    ids = plain_ids(tokenizer, text)
    bos = tokenizer.bos_token_id
    if adds_bos(tokenizer) or (not ids and bos is not None):
        ids = (bos, *ids)
    if not ids:
        raise PromptError("The prompt is empty, and this model has no BOS token to start from; pass some text.")
    return _one_bos(ids, bos)


def first_token_bytes(tokenizer: Any, text: str, token_id: int) -> int:
    """UTF-8 bytes of a text that its first token stands for.

    They are none for a BOS that was put before it, and none of a character that the token begins only; a special token
    stands for its name, or for what the tokenizer does not know.

    Args:
        tokenizer: the model's own tokenizer.
        text: the text's beginning.
        token_id: its first token.
    """
    spelled = decode(tokenizer, [token_id])
    for start in (spelled.rstrip(INCOMPLETE), spelled.lstrip(" ")):
        if spelled and text.startswith(start):
            return len(start.encode("utf-8"))
    _, offsets = token_offsets(tokenizer, _text_ids(tokenizer, text), text)
    return len(text[: offsets[0][1]].encode("utf-8"))


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its BOS before plain text by default."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


def _one_bos(ids: tuple[int, ...], bos: int | None) -> tuple[int, ...]:
    while bos is not None and ids[:2] == (bos, bos):
        ids = ids[1:]
    return ids


def _nonempty(ids: tuple[int, ...], target: str) -> tuple[int, ...]:
    if not ids:
        raise TargetError(f"The target {target!r} gives no token of its own after this prompt; nothing can be scored.")
    return ids


def _check_ids(ids: Sequence[int], d_vocab: int, error: type[Exception], what: str) -> tuple[int, ...]:
    if _are_plain(ids) and min(ids) >= 0 and max(ids) < d_vocab:
        return tuple(ids)
    bad = [i for i in ids if not 0 <= i < d_vocab]
    if bad:
        raise error(f"A {what} holds token id {bad[0]}, outside the model's vocabulary of 0 to {d_vocab - 1}.")
    return tuple(int(i) for i in ids)
