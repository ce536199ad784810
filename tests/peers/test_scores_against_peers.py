"""Our scores against independent implementations, to be run by `make test-peers` in its own environment."""

import importlib.util
import os

import pytest
import torch

import steerlab as sl
from steerlab.core.shipped import neutral_text, reference_text

PEERS = ["lm_eval", "minicons"]

missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
if missing and os.environ.get("STEERLAB_REQUIRE_PEERS"):
    raise ImportError(f"not installed: {', '.join(missing)}")

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        bool(missing), reason=f"{' and '.join(missing)} not in this environment; `make test-peers` makes one with them"
    ),
]

SHORT = [
    ("The capital of France is", " Paris"),
    ("Two plus two equals", " four"),
    ("The film was so dull that I", " fell asleep before the end"),
    ("The waiter smiled and brought us", " two cups of coffee"),
    ("After the storm the village", " had no electricity for three days"),
    ("She has always wanted to learn", " how to play the violin"),
    ("In winter the lake", " freezes over"),
    ("My neighbour's dog barks", " at every passing car"),
    ("The train from Hamburg arrived", " forty minutes late"),
    ("If you heat ice, it", " melts"),
    ("The committee decided to", " postpone the vote until Tuesday"),
    ("He forgot his umbrella, so he", " got wet"),
    ("The recipe asks for", " 250 grams of flour and a pinch of salt"),
    ("Nobody expected the small team to", " win the championship"),
    ("The museum is closed", " on Mondays"),
    ("Her answer was short:", " no, thank you"),
    ("The old bridge was replaced by", " a wider one in 1987"),
    ("Birds fly south", " when the days get shorter"),
    ("The teacher asked the children to", " draw their favourite animal"),
    ("What I like most about this town is", " that everything is within walking distance"),
]


def cut_from_text(n: int) -> list[tuple[str, str]]:
    """Pairs from the shipped texts: at most twelve words of a paragraph, and its next 1 to 9 words."""
    found = []
    for paragraph in f"{reference_text()}\n\n{neutral_text()}".split("\n\n"):
        words = paragraph.split()
        found += [
            (" ".join(words[max(0, cut - 12) : cut]), " " + " ".join(words[cut : cut + 1 + cut % 9]))
            for cut in range(4, len(words) - 9, 6)
        ]
    assert len(found) >= n
    return found[:: len(found) // n][:n]


PAIRS = [*SHORT, *cut_from_text(80)]
BATCH = 20


@pytest.fixture(scope="module")
def reference(smollm2_path):
    """The plain model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(smollm2_path)


@pytest.fixture(scope="module")
def ours(smollm2_path) -> list[float]:
    prompts = [prompt for prompt, _ in PAIRS]
    with sl.load(str(smollm2_path), dtype="float32") as engine:
        scores = engine.score(prompts, [[target] for _, target in PAIRS])
    assert set(scores.boundary) == {"clean"}
    assert len(set(PAIRS)) == len(scores) == 100
    return list(scores.log_prob)


def test_lm_eval_harness(reference, ours):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = reference
    # Its float32 softmax over 49,152 tokens alone is up to 1.1e-4 from the float64 sum of a target here.
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH, softmax_dtype="float64")
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
    theirs = [log_prob for log_prob, _ in harness.loglikelihood(requests, disable_tqdm=True)]
    assert ours == pytest.approx(theirs, abs=1e-4)


def test_minicons(reference, ours):
    from minicons.scorer import IncrementalLMScorer

    model, tokenizer = reference
    scorer = IncrementalLMScorer(model, "cpu", tokenizer=tokenizer)
    theirs = []
    for start in range(0, len(PAIRS), BATCH):
        prompts, targets = zip(*PAIRS[start : start + BATCH], strict=True)
        targets = [target.removeprefix(" ") for target in targets]
        theirs += scorer.conditional_score(list(prompts), targets, reduction=lambda log_probs: log_probs.sum().item())
    assert ours == pytest.approx(theirs, abs=1e-4)
