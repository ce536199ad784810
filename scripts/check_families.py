"""Compares families of models inside vLLM with TransformerLens, on tiny random models in float32 (one in bfloat16).

Usage: `python scripts/check_families.py [FAMILY …]`; a start takes half a minute on a CPU. It prints a line for each:
the largest difference of the scores, unsteered and steered, of a second unsteered run after that from the first, and of
the stream after each layer. What it finds is put into `steerlab/models/families.json` by hand.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
PROMPTS = ["Where did you put the keys?", "She opened the window, because the room was warm and quiet"]
TARGETS = [[" on the table", " four"]] * 2
HALF = {"qwen3_next": "bfloat16"}
"""vLLM's kernel for linear attention on a CPU takes no other dtype."""


def main() -> None:
    """Runs the families that are named, or all."""
    from tests.tiny_families import MODELS, build_family

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=[[], *MODELS], default=list(MODELS))
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for name in parser.parse_args().families:
            print(name, _compared(build_family(Path(folder) / name, name), HALF.get(name, "float32")), flush=True)


def _compared(path: Path, dtype: str) -> str:
    import torch

    import steerlab as sl

    direction = torch.randn(128, generator=torch.Generator().manual_seed(0))
    plan = sl.Plan(sl.add(sl.SteeringVector.from_tensor(direction, layer=1), coef=3.0))
    options = {"dtype": dtype, "enforce_eager": True, "max_num_seqs": 8, "max_model_len": 256}

    def scores(engine, each):
        return torch.tensor([score.log_prob for score in engine.score(PROMPTS, TARGETS, plan=each)])

    with sl.load(path, device="cpu") as lens:
        expected = [scores(lens, each) for each in (None, plan)]
        streams = lens.capture(PROMPTS, layers="all")
    try:
        with sl.VLLMEngine(path, layers="all", **options) as engine:
            found = [scores(engine, each) for each in (None, plan, None)]
            read = engine.capture(PROMPTS, layers="all")
    except sl.SteerlabError as error:
        return f"failed: {error}"
    far = [float((a - b).abs().max()) for a, b in zip(found, [*expected, found[0]], strict=True)]
    layers = max(float((read[layer] - streams[layer]).abs().max()) for layer in range(3))
    return "scores {:.1e}, steered {:.1e}, again {:.1e}, ".format(*far) + f"streams {layers:.1e}"


if __name__ == "__main__":
    main()
