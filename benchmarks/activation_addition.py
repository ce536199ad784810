"""Activation addition on real text: does a wedding vector make wedding text likelier, and shipping text less so?

Usage::

    python benchmarks/activation_addition.py wedding.txt shipping.txt
    python benchmarks/activation_addition.py --layers 6 10 --sentences 28 a.txt b.txt

Each file's first sentences of more than 4 words are scored, their tokens after [<|endoftext|>] and a space. The vector
is the difference of the stream before a layer, at position 1, between [<|endoftext|>] " weddings" and [<|endoftext|>]
" "; it is added once, at position 1, with coefficient 1. A file's ratio is exp of the mean over its sentences of the
change in nats per token, so below 1 means likelier.

Source:
    Turner et al. 2023, Activation Addition (arXiv:2308.10248), section 4.1.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import steerlab as sl

CONCEPT, NEUTRAL = " weddings", " "


def main() -> None:
    """Runs the benchmark and prints a table."""
    options = parse(sys.argv[1:])
    engine = sl.load(options.model, dtype="float32", device="cpu")
    print("| layer | " + " | ".join(f"{path.name}: ratio (sentences)" for path in options.files) + " |")
    print("| --- |" + " --- |" * len(options.files))
    texts = [sentences(path.read_text(encoding="utf-8"))[: options.sentences] for path in options.files]
    plain = [log_probs(engine, found, None) for found in texts]
    for layer in options.layers:
        plan = concept_plan(engine, layer)
        ratios = [ratio(log_probs(engine, found, plan), base) for found, base in zip(texts, plain, strict=True)]
        cells = [f"{value:.3f} ({len(found)})" for value, found in zip(ratios, texts, strict=True)]
        print(f"| {layer} | " + " | ".join(cells) + " |")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="text files")
    parser.add_argument("--model", default="smollm2-135m", help="what steerlab.load takes")
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 10])
    parser.add_argument("--sentences", type=int, default=28, help="sentences of each file")
    return parser.parse_args(arguments)


def sentences(text: str) -> list[str]:
    """Sentences of more than 4 words; one ends with a full stop, question or exclamation mark, or with its line."""
    found = (part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", text))
    return [part for part in found if len(part.split()) > 4]


def concept_plan(engine: sl.LensEngine, layer: int) -> sl.Plan:
    """Adds the concept once, where the neutral space stands."""
    at = sl.where.index(1)
    start = start_token(engine)
    one = sl.ContrastPairs.from_lists([[start, *ids(engine, CONCEPT)]], [[start, *ids(engine, NEUTRAL)]])
    vector = sl.extract(engine, one, "act_add", "resid_pre", layers=layer, read=at)[layer]
    return sl.Plan(sl.add(vector, coef=1.0, where=at))


def log_probs(engine: sl.LensEngine, texts: Sequence[str], plan: sl.Plan | None) -> np.ndarray:
    """Nats per token of each sentence after the start token and the neutral space."""
    prompts = [[start_token(engine), *ids(engine, NEUTRAL)]] * len(texts)
    scores = engine.score(prompts, [[ids(engine, text)] for text in texts], plan=plan)
    return np.array([score.mean_log_prob for score in scores])


def ratio(steered: np.ndarray, plain: np.ndarray) -> float:
    """Exp of the mean change of the surprisal per token over sentences; below 1 the plan makes them likelier."""
    return float(np.exp((plain - steered).mean()))


def ids(engine: sl.LensEngine, text: str) -> list[int]:
    """Token ids of a text and nothing else."""
    return engine.tokenizer(text, add_special_tokens=False)["input_ids"]


def start_token(engine: sl.LensEngine) -> int:
    """The token that stands for the start of a text."""
    found = engine.tokenizer.get_vocab().get("<|endoftext|>", engine.tokenizer.bos_token_id)
    if found is None:
        raise SystemExit("The model has neither <|endoftext|> nor a BOS token.")
    return int(found)


if __name__ == "__main__":
    main()
