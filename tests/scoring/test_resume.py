import time

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import InputError, PlanError, PromptError, RunError
from steerlab.core.shipped import reference_text
from steerlab.scoring import _pieces as pieces
from steerlab.scoring._journal import Journal
from tests.forked import start_forked
from tests.scoring.other_processes import measure
from tests.tiny_models import SENTENCES

TEXT = " ".join(SENTENCES) * 2
LONG = reference_text()[:1500]
SIZES = {"context_length": 40, "stride": 20, "batch_tokens": 80}
WIDE = {"context_length": 256, "stride": 128, "batch_tokens": 512}


class Counting:
    """An engine that counts calls and can fail after some."""

    def __init__(self, engine, calls=10**6):
        self.engine, self.calls = engine, calls

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def score(self, *arguments, **options):
        if self.calls == 0:
            raise KeyboardInterrupt
        self.calls -= 1
        return self.engine.score(*arguments, **options)


@pytest.fixture
def interrupted(tiny_llama_engine, tmp_path):
    """A journal of a run that ended after three batches."""
    path = tmp_path / "run.journal"
    with pytest.raises(KeyboardInterrupt):
        sl.perplexity(Counting(tiny_llama_engine, 3), TEXT, **SIZES, resume=path)
    return path


# --- streaming ----------------------------------------------------------------------------------------------------


@pytest.fixture
def short_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_CHARS", 500)


def test_a_streamed_text_has_the_scores_of_the_whole(tiny_llama_engine, tmp_path, short_pieces):
    path = tmp_path / "long.txt"
    path.write_text(LONG)
    whole = sl.perplexity(tiny_llama_engine, LONG, **WIDE)
    for text in (path, (LONG[k : k + 97] for k in range(0, len(LONG), 97)), iter([LONG])):
        found = sl.perplexity(tiny_llama_engine, text, **WIDE)
        assert np.array_equal(found.token_nlls, whole.token_nlls)
        assert (found.num_bytes, found.nll, found.num_tokens) == (whole.num_bytes, whole.nll, whole.num_tokens)
    with_bos = sl.perplexity(tiny_llama_engine, path, **WIDE, bos_each_window=True)
    assert with_bos.num_bytes == len(LONG.encode())
    assert np.array_equal(
        with_bos.token_nlls, sl.perplexity(tiny_llama_engine, LONG, **WIDE, bos_each_window=True).token_nlls
    )


def test_batches_do_not_change_scores(tiny_llama_engine):
    wanted = sl.perplexity(tiny_llama_engine, TEXT, context_length=40, stride=20).token_nlls
    for budget in (1, 41, 10_000):
        found = sl.perplexity(tiny_llama_engine, TEXT, context_length=40, stride=20, batch_tokens=budget)
        assert found.token_nlls == pytest.approx(wanted, abs=1e-5)


def test_a_plan_on_a_streamed_text(tiny_llama_engine, tmp_path, short_pieces):
    path = tmp_path / "long.txt"
    path.write_text(LONG)
    vector = sl.SteeringVector.from_tensor(torch.ones(64), layer=1)
    plan = sl.Plan(sl.add(vector, coef=2.0))
    found = sl.perplexity(tiny_llama_engine, path, **WIDE, plan=plan)
    assert np.array_equal(found.token_nlls, sl.perplexity(tiny_llama_engine, LONG, **WIDE, plan=plan).token_nlls)
    with pytest.raises(PlanError, match="streamed text"):
        sl.perplexity(
            tiny_llama_engine, path, **WIDE, plan=sl.Plan(sl.add(vector, coef=2.0, where=sl.where.index(10**5)))
        )


def test_nothing_to_stream(tiny_llama_engine, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    for text in (tmp_path / "empty.txt", iter([]), iter(["", ""])):
        with pytest.raises(PromptError, match="empty"):
            sl.perplexity(tiny_llama_engine, text)


def test_distributions_of_a_stream_need_its_length(tiny_llama_engine, tmp_path, short_pieces):
    path = tmp_path / "long.txt"
    path.write_text(LONG)
    with pytest.raises(InputError, match="pass a path or a string"):
        sl.perplexity(tiny_llama_engine, iter([LONG]), **WIDE, distributions=tmp_path / "a")
    found = sl.perplexity(tiny_llama_engine, path, **WIDE, distributions=tmp_path / "b")
    assert found.nll == pytest.approx(sl.perplexity(tiny_llama_engine, LONG, **WIDE).nll, abs=1e-6)


# --- resuming -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["text", "ids", "chunks"])
def test_an_interrupted_run_goes_on_where_it_ended(tiny_llama_engine, tmp_path, given):
    ids = tiny_llama_engine.tokenizer(TEXT)["input_ids"]

    def text():
        return {"text": TEXT, "ids": ids, "chunks": iter([TEXT])}[given]

    whole = Counting(tiny_llama_engine)
    wanted = sl.perplexity(whole, text(), **SIZES)
    n_calls = 10**6 - whole.calls
    path = tmp_path / "run.journal"
    with pytest.raises(KeyboardInterrupt):
        sl.perplexity(Counting(tiny_llama_engine, 3), text(), **SIZES, resume=path)
    rest = Counting(tiny_llama_engine)
    found = sl.perplexity(rest, text(), **SIZES, resume=path)
    assert 10**6 - rest.calls == n_calls - 3
    assert np.array_equal(found.token_nlls, wanted.token_nlls)
    assert (found.nll, found.num_bytes) == (wanted.nll, wanted.num_bytes)
    again = sl.perplexity(Counting(tiny_llama_engine, 0), text(), **SIZES, resume=path)
    assert again.nll == wanted.nll


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stride": 10}, "stride was 20, now 10"),
        ({"context_length": 30}, "context_length was 40, now 30"),
        ({"bos_each_window": True}, "bos_each_window was False, now True"),
        (
            {"plan": sl.Plan(sl.add(sl.SteeringVector.from_tensor(torch.ones(64), layer=1), coef=2.0))},
            "plan was None, now",
        ),
    ],
)
def test_another_measurement_is_refused(tiny_llama_engine, interrupted, options, named):
    with pytest.raises(RunError, match=named):
        sl.perplexity(tiny_llama_engine, TEXT, **{**SIZES, **options}, resume=interrupted)


def test_another_model_or_text_is_refused(tiny_llama_engine, tiny_gpt2_engine, interrupted):
    with pytest.raises(RunError, match="weights was"):
        sl.perplexity(tiny_gpt2_engine, TEXT, **SIZES, resume=interrupted)
    with pytest.raises(RunError, match="text was"):
        sl.perplexity(tiny_llama_engine, TEXT + "!", **SIZES, resume=interrupted)


def test_another_stream_is_refused_where_it_differs(tiny_llama_engine, tmp_path):
    path = tmp_path / "run.journal"
    with pytest.raises(KeyboardInterrupt):
        sl.perplexity(Counting(tiny_llama_engine, 3), iter([TEXT]), **SIZES, resume=path)
    with pytest.raises(RunError, match="another text: it differs before token 60"):
        sl.perplexity(Counting(tiny_llama_engine), iter(["X" + TEXT]), **SIZES, resume=path)
    with pytest.raises(RunError, match="another text"):
        sl.perplexity(Counting(tiny_llama_engine), iter([TEXT[:30]]), **SIZES, resume=path)


def test_a_killed_process_resumes_to_the_same_number(tiny_llama_path, tiny_llama_engine, tmp_path):
    (tmp_path / "text.txt").write_text(LONG)
    path = tmp_path / "run.journal"
    process = start_forked(measure, tiny_llama_path, tmp_path / "text.txt", path, SIZES).process
    empty = 1000
    while not (path.exists() and path.stat().st_size > empty):  # a few records
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    with Journal(path, _fingerprint_of(path)) as journal:
        n_done = sum(len(record.nlls) for record in journal.records)
    wanted = sl.perplexity(tiny_llama_engine, LONG, **SIZES)
    assert 0 < n_done < wanted.num_tokens
    found = sl.perplexity(tiny_llama_engine, tmp_path / "text.txt", **SIZES, resume=path)
    assert found.nll == pytest.approx(wanted.nll, abs=1e-7)
    assert found.token_nlls == pytest.approx(wanted.token_nlls, abs=1e-5)


def _fingerprint_of(path):
    import json

    with open(path, "rb") as file:
        return json.loads(file.readline())
