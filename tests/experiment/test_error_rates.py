"""The script that measures how often a verdict is wrong: few runs of each kind, and what it makes of them."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import steerlab as sl
from benchmarks.error_rates import (
    RUNS,
    captured_once,
    drawn_items,
    drawn_pairs,
    finish,
    parse,
    print_table,
    rates,
    resampled,
)
from steerlab.core.shipped import shipped_vectors

few_draws = pytest.mark.filterwarnings("ignore:4 .* draws cannot rank below")  # enough for how runs are made


def options(out: Path, *arguments: str) -> Namespace:
    return parse(["--items", "2", "--draws", "4", "--neutral", "1", "--out", str(out), *arguments])


def true_pairs() -> sl.ContrastPairs:
    return sl.ContrastPairs.from_jsonl(shipped_vectors() / "sentiment" / "pairs.jsonl", group="group", split="train")


def run(kind: str, verdict: str, ci: tuple[float, float], **null_ranks: float) -> dict[str, Any]:
    return {"kind": kind, "verdict": verdict, "ci": list(ci), "null_ranks": null_ranks, "slope": 1.0, "seconds": 30.0}


# --- how runs are made, on a tiny one -----------------------------------------------------------------------------


@few_draws
def test_runs_are_kept_and_done_once(
    tiny_llama_engine: sl.LensEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs.jsonl"
    first = finish(tiny_llama_engine, options(out, "--layer", "1", "--runs", "1"))
    assert [found["kind"] for found in first] == list(RUNS)
    assert [list(found["null_ranks"]) for found in first] == [
        ["random"],
        ["random", "shuffled"],
        ["random", "shuffled"],
    ]
    assert [json.loads(line) for line in out.read_text().splitlines()] == first
    assert len(capsys.readouterr().err.splitlines()) == 3
    both = finish(tiny_llama_engine, options(out, "--layer", "1", "--runs", "2", "--kind", "random"))
    assert both[0] == first[0]
    assert both[1]["slope"] != both[0]["slope"]  # another number draws another direction
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert len(out.read_text().splitlines()) == 4


@few_draws
def test_a_run_depends_on_seed_and_number_only(tiny_llama_engine: sl.LensEngine, tmp_path: Path) -> None:
    arguments = ["--layer", "1", "--runs", "1", "--kind", "random"]
    (one,) = finish(tiny_llama_engine, options(tmp_path / "a.jsonl", *arguments))
    (two,) = finish(tiny_llama_engine, options(tmp_path / "b.jsonl", *arguments))
    (other,) = finish(tiny_llama_engine, options(tmp_path / "c.jsonl", *arguments, "--seed", "1"))
    del one["seconds"], two["seconds"]
    assert one == two
    assert other["slope"] != one["slope"]


@few_draws
def test_runs_of_other_settings_are_refused(tiny_llama_engine: sl.LensEngine, tmp_path: Path) -> None:
    arguments = ["--layer", "1", "--runs", "1", "--kind", "random"]
    finish(tiny_llama_engine, options(tmp_path / "runs.jsonl", *arguments))
    with pytest.raises(SystemExit, match=r"runs of other settings.*pass another --out"):
        finish(tiny_llama_engine, options(tmp_path / "runs.jsonl", *arguments, "--seed", "1"))


def test_activations_read_once_are_those_the_engine_reads(tiny_llama_engine: sl.LensEngine) -> None:
    texts, arguments = ["A good day", "A bad day", "So it goes"], {"layers": [0, 1], "pool": "last"}
    own = tiny_llama_engine.capture([texts[1], texts[2], texts[1]], **arguments)
    with captured_once(tiny_llama_engine):
        tiny_llama_engine.capture(texts[:2], **arguments)
        found = tiny_llama_engine.capture([texts[1], texts[2], texts[1]], **arguments)
        other = tiny_llama_engine.capture(texts[1:2], layers=[0], pool="last")
    torch.testing.assert_close(found.stack(), own.stack(), atol=1e-4, rtol=1e-4)  # other batches, other rounding
    assert (found.layers, found.positions, found.prompt_token_ids) == (own.layers, own.positions, own.prompt_token_ids)
    assert other.layers == (0,)
    assert "capture" not in vars(tiny_llama_engine)


# --- draws --------------------------------------------------------------------------------------------------------


def test_items_are_of_different_groups() -> None:
    drawn = [drawn_items(5, np.random.default_rng(seed)) for seed in range(4)]
    assert all(len({item.group for item in items}) == len(items) == 5 for items in drawn)
    assert len({items.hash for items in drawn}) == 4
    with pytest.raises(SystemExit, match="9 groups"):
        drawn_items(10, np.random.default_rng(0))


def test_flipped_pairs_are_the_true_ones_half_exchanged() -> None:
    true, flipped = true_pairs(), drawn_pairs("flipped", np.random.default_rng(0))
    assert flipped is not None
    exchanged = [a == b[::-1] for a, b in zip(true, flipped, strict=True)]
    assert sum(exchanged) == len(true) // 2
    assert all(set(a) == set(b) for a, b in zip(true, flipped, strict=True))
    assert drawn_pairs("random", np.random.default_rng(0)) is None


def test_resampled_pairs_stay_in_their_groups() -> None:
    true = true_pairs()
    drawn = resampled(true, np.random.default_rng(0))
    known = dict(zip(true, true.groups, strict=True))
    assert [known[pair] for pair in drawn] == list(drawn.groups)
    assert sorted(drawn.groups) == sorted(true.groups)
    assert len(set(drawn)) < len(true)  # with replacement


# --- counts -------------------------------------------------------------------------------------------------------


def test_rates_count_verdicts_and_their_conditions() -> None:
    runs = [
        run("flipped", "effect", (0.5, 2.0), random=0.048, shuffled=0.048),
        run("flipped", "no effect", (-2.0, -0.5), random=0.048, shuffled=0.9),
        run("flipped", "no effect", (-1.0, 1.0), random=0.3, shuffled=0.9),
        run("flipped", "no effect", (-1.0, 1.0), random=0.048, shuffled=0.048),
    ]
    found = rates(runs)
    assert (found["runs"], found["effect"], found["excludes_zero"]) == (4, 1, 2)
    assert found["beyond"] == {"random": 3, "shuffled": 2}
    # Clopper and Pearson for 1 of 4: the lower end solves 1 − (1 − p)⁴ = 0.025
    assert found["low"] == pytest.approx(1 - 0.975**0.25)


def test_the_table_joins_both_kinds_of_false_effects(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run("random", "effect", (0.5, 2.0), random=0.048)] + [
        run("flipped", "no effect", (0.5, 2.0), random=0.048, shuffled=0.9) for _ in range(3)
    ]
    print_table(runs)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| random | 1 | 1 | 100.0% (2.5% to 100.0%) | 1 | 1 | not run |"
    assert lines[4].startswith("| random or flipped | 4 | 1 | 25.0% ")
    assert "resampled" not in "".join(lines)
    assert lines[-1] == "2 minutes, 4 runs"
