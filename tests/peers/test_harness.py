"""The harness adapter against the harness's own Hugging Face model, to be run by `make test-peers`."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import steerlab as sl
from tests.tiny_models import SENTENCES

missing = [name for name in ("lm_eval",) if importlib.util.find_spec(name) is None]
if missing and os.environ.get("STEERLAB_REQUIRE_PEERS"):
    raise ImportError(f"not installed: {', '.join(missing)}")

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(bool(missing), reason="lm_eval is not in this environment; `make test-peers` makes one with it"),
]

MAX_LENGTH = 255
LONG = " ".join(SENTENCES * 4)
PAIRS = [
    ("The ferry leaves", " the harbour"),
    ("The ferry leaves", " at seven"),
    ("The ferry leaves ", "at seven"),  # the space belongs to the continuation
    ("Two plus two equals", " four"),
    ("", "The old clock had stopped."),
    ("", "<s>The old clock"),
    ("<s>Nobody knew", " why"),
    (LONG, " and it would run again."),  # cut from the left
    ("naïve caf", "é"),
]
TEXTS = ["She opened the window.", "x", LONG, "Übung macht den Meister – naïve café, 東京, ✓."]


@pytest.fixture(scope="module")
def theirs(tiny_llama_path):
    from lm_eval.models.huggingface import HFLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama_path, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_path)
    return HFLM(pretrained=model.eval(), tokenizer=tokenizer, batch_size=1, max_length=MAX_LENGTH)


@pytest.fixture(scope="module")
def ours(tiny_llama_engine):
    from steerlab.scoring.harness import HarnessModel

    return HarnessModel(tiny_llama_engine)


@pytest.fixture(scope="module")
def plan():
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    return sl.Plan(sl.add(sl.SteeringVector.from_tensor(values, layer=1), coef=1.0))


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


def test_loglikelihood(theirs, ours):
    requests = instances("loglikelihood", PAIRS)
    wanted, found = theirs.loglikelihood(requests, disable_tqdm=True), ours.loglikelihood(requests, disable_tqdm=True)
    assert [log_prob for log_prob, _ in found] == pytest.approx([log_prob for log_prob, _ in wanted], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]


def test_greedy_continuations_are_known_as_such(theirs, ours):
    tokenizer = theirs.tokenizer
    rows = []
    for sentence in SENTENCES[:4]:
        ids = tokenizer.encode(sentence)
        logits = theirs.model(torch.tensor([ids])).logits[0, -1]
        best, second = logits.topk(2).indices.tolist()
        rows += [((sentence, "best"), ids, [best]), ((sentence, "second"), ids, [second])]
    found = ours._loglikelihood_tokens(rows)
    assert [greedy for _, greedy in found] == [True, False] * 4
    assert found == [
        (pytest.approx(log_prob, abs=1e-4), greedy)
        for log_prob, greedy in theirs._loglikelihood_tokens(rows, disable_tqdm=True)
    ]


def test_loglikelihood_rolling(theirs, ours):
    requests = instances("loglikelihood_rolling", [(text,) for text in TEXTS])
    wanted = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    assert ours.loglikelihood_rolling(requests, disable_tqdm=True) == pytest.approx(wanted, abs=2e-3)
    assert len(ours.tok_encode(LONG)) > 2 * MAX_LENGTH


def test_generate_until(theirs, ours):
    options = [
        {"until": ["."], "max_gen_toks": 12},
        {"until": ["e", "\n"], "max_gen_toks": 20, "do_sample": False},
        {"max_gen_toks": 5, "temperature": 0.0},
    ]
    requests = instances("generate_until", [(text, one) for one in options for text in (*SENTENCES[:4], LONG)])
    found = ours.generate_until(requests, disable_tqdm=True)
    assert found == theirs.generate_until(requests, disable_tqdm=True)
    assert len(set(found)) > 5


def test_sampling_and_options_without_counterpart(ours):
    sample = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "max_gen_toks": 8, "until": []}
    requests = instances("generate_until", [(SENTENCES[0], sample)] * 3)
    found = ours.generate_until(requests)
    assert len(set(found)) == 3
    assert found == ours.generate_until(requests)
    for bad, wanted in (({"num_beams": 4, "max_gen_toks": 5}, "num_beams"), ({"max_gen_toks": 255}, "leave no room")):
        with pytest.raises(sl.InputError, match=wanted):
            ours.generate_until(instances("generate_until", [("a", bad)]))
    with pytest.raises(sl.InputError, match="at most 255"):
        ours._loglikelihood_tokens([(None, [1], [2] * 256)])


# --- whole tasks --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with one task of each kind over a few local rows."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": "The soup was", "choices": ["good", "stale", "quiet"], "answer": 0, "text": SENTENCES[3]},
        {"question": "Two plus two equals", "choices": ["four", "seven", "ten"], "answer": 0, "text": SENTENCES[4]},
        {"question": "The street was", "choices": ["warm", "quiet", "old"], "answer": 1, "text": LONG},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
    }
    written = {
        "local_choice": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "local_rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "local_words": {
            "output_type": "generate_until",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 8},
            "doc_to_target": "{{choices[answer]}}",
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, task in written.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **base, **task}))
    return folder, list(written)


def run(model, tasks):
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder, names = tasks
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(model, tasks=names, task_manager=manager, bootstrap_iters=0)


def answers(results):
    """Per task, what the model answered to every request."""
    return {name: [sample["resps"] for sample in samples] for name, samples in results["samples"].items()}


def flat(values):
    if isinstance(values, list | tuple):
        return [item for value in values for item in flat(value)]
    return [values]


def figures(results):
    return [
        value
        for name in sorted(results["results"])
        for _, value in sorted(results["results"][name].items())
        if isinstance(value, float | int)
    ]


def test_a_local_task_gives_the_same_results(theirs, ours, plan, tasks, tiny_llama_engine):
    from steerlab.scoring.harness import HarnessModel

    wanted, found = run(theirs, tasks), run(ours, tasks)
    assert figures(found) == pytest.approx(figures(wanted), rel=1e-4)
    for name, given in answers(wanted).items():
        assert flat(answers(found)[name]) == [
            pytest.approx(value, abs=2e-3) if isinstance(value, float) else value for value in flat(given)
        ]
    steered = answers(run(HarnessModel(tiny_llama_engine, plan), tasks))
    assert flat(steered["local_words"]) != flat(answers(wanted)["local_words"])
    prompts = ["The soup was", "Two plus two equals", "The street was"]
    choices = [["good", "stale", "quiet"], ["four", "seven", "ten"], ["warm", "quiet", "old"]]
    scores = tiny_llama_engine.score(prompts, [[f" {word}" for word in row] for row in choices], plan=plan)
    log_probs = [value for value in flat(steered["local_choice"]) if isinstance(value, float)]
    assert log_probs == pytest.approx(scores.log_prob.tolist(), abs=1e-4)
    plain = tiny_llama_engine.score(prompts, [[f" {word}" for word in row] for row in choices])
    assert np.abs(scores.log_prob - plain.log_prob).min() > 1e-3
    rolling = [value for value in flat(steered["local_rolling"]) if isinstance(value, float)]
    bos = tiny_llama_engine.tokenizer.bos_token_id
    ids = tiny_llama_engine.tokenizer.encode(SENTENCES[3])
    assert rolling[0] == pytest.approx(tiny_llama_engine.score([[bos]], [[ids]], plan=plan)[0].log_prob, abs=1e-4)


def test_what_is_written_beside_the_results(ours, plan, tiny_llama_engine):
    from steerlab.scoring.harness import HarnessModel

    found = HarnessModel(tiny_llama_engine, plan).get_model_info()
    assert found["plan_hash"] == plan.hash
    assert found["weights_hash"] == tiny_llama_engine.info.weights_hash
    assert ours.get_model_info()["plan_hash"] is None


def test_from_the_command_line(tiny_llama_path, tasks, plan, tmp_path):
    (edit,) = plan
    edit.vector.save(tmp_path / "v.safetensors")
    folder, _ = tasks
    arguments = f"pretrained={tiny_llama_path},vector={tmp_path / 'v.safetensors'},coef=1.0"
    command = [sys.executable, "-m", "steerlab.scoring.harness", "--model", "steerlab", "--model_args", arguments]
    command += ["--tasks", "local_choice", "--include_path", str(folder), "--output_path", str(tmp_path / "out")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(written.read_text())["config"]["plan_hash"] == plan.hash


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("dtype=float32", "pretrained=MODEL"),
        ("pretrained=x,engine=tpu", "engine='tpu'"),
        ("pretrained=x,dose=0.2", "needs vector=FILE"),
    ],
)
def test_bad_arguments(arguments, wanted):
    from steerlab.scoring.harness import HarnessModel

    with pytest.raises(sl.InputError, match=wanted):
        HarnessModel.create_from_arg_string(arguments)


def test_max_length(tiny_llama_engine):
    from steerlab.scoring.harness import HarnessModel

    assert HarnessModel(tiny_llama_engine).max_length == 255
    assert HarnessModel(tiny_llama_engine, max_length=100).max_length == 100
    with pytest.raises(sl.InputError, match="from 1 to 255, got 256"):
        HarnessModel(tiny_llama_engine, max_length=256)


@pytest.fixture(scope="module")
def with_bos(tiny_llama_path, tmp_path_factory):
    """The tiny Llama with a tokenizer that puts BOS before every text, as Gemma's does."""
    from tokenizers.processors import TemplateProcessing

    path = tmp_path_factory.mktemp("bos")
    AutoModelForCausalLM.from_pretrained(tiny_llama_path).save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_path)
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    tokenizer.save_pretrained(path)
    assert AutoTokenizer.from_pretrained(path).encode("Hi")[0] == bos[1]
    with sl.load(path, device="cpu") as engine:
        yield path, engine


@pytest.mark.parametrize(("own", "wanted"), [(None, False), (False, False), (True, True)])
def test_a_tokenizer_that_adds_bos(with_bos, own, wanted):
    """BOS was scored after the prefix token, and counted as part of every text."""
    from lm_eval.models.huggingface import HFLM

    from steerlab.scoring.harness import HarnessModel

    path, engine = with_bos
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    options = {"batch_size": 1, "max_length": MAX_LENGTH}
    theirs = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(path), add_bos_token=wanted, **options)
    ours = HarnessModel(engine, add_bos_token=own)
    rolling = instances("loglikelihood_rolling", [(text,) for text in TEXTS])
    expected = theirs.loglikelihood_rolling(rolling, disable_tqdm=True)
    assert ours.loglikelihood_rolling(rolling, disable_tqdm=True) == pytest.approx(expected, abs=2e-3)
    if own is None:  # contexts are as the tokenizer makes them, as with lm-eval's None
        theirs = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(path), **options)
    pairs = instances("loglikelihood", PAIRS)
    found = [log_prob for log_prob, _ in ours.loglikelihood(pairs, disable_tqdm=True)]
    assert found == pytest.approx([p for p, _ in theirs.loglikelihood(pairs, disable_tqdm=True)], abs=1e-4)


def test_add_bos_token_is_checked(tiny_llama_engine):
    from steerlab.scoring.harness import HarnessModel

    with pytest.raises(sl.InputError, match="add_bos_token is True, False or None"):
        HarnessModel(tiny_llama_engine, add_bos_token="yes")
