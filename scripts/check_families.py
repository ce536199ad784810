"""Compares families of models on TransformerLens with plain Hugging Face, and inside vLLM with TransformerLens.

    python scripts/check_families.py [FAMILY …]                    # inside vLLM on a CPU, half a minute each
    python scripts/check_families.py --on lens vllm --device cuda  # programs and vLLM with CUDA graphs
    python scripts/check_families.py --all-experts qwen3_next      # whether a difference is the choice of experts

The models are tiny and random, in float32, or inside vLLM in bfloat16 where its kernels take nothing else. It prints a
line for each family and engine; a figure is the largest difference. *Streams* are those after each layer, by token:
where experts are chosen, a token that is rounded otherwise may get others. *Again* is the difference of a second
unsteered run, after a steered one, from the first. What it finds is put into `steerlab/models/families.json` by hand.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
PROMPTS = ["Where did you put the keys?", "She opened the window, because the room was warm and quiet"]
TARGETS = [[" on the table", " four"]] * 2
HALF = ("qwen3_next", "qwen3_5_text", "deepseek_v3")
"""vLLM's kernels for linear attention and for MLA take no other dtype than bfloat16."""


def main() -> None:
    """Runs the families that are named, or all."""
    from tests.tiny_families import MODELS, N_EXPERTS, build_family

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--on", nargs="+", choices=list(_CHECKS), default=["vllm"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--all-experts", action="store_true", help="send every token to every expert")
    options = parser.parse_args()
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.families:
            takes_all = options.all_experts and "num_experts_per_tok" in MODELS[name][1]
            path = build_family(
                Path(folder) / name,
                name,
                real_heads=options.device == "cuda" or name in HALF,
                **({"num_experts_per_tok": N_EXPERTS} if takes_all else {}),
            )
            for engine in options.on:
                start = time.monotonic()
                try:
                    found = _CHECKS[engine](path, name, options)
                except Exception as error:  # one family must not take the others' figures with it
                    found = f"failed: {type(error).__name__}: {str(error)[:600]}"
                print(f"{name}, {engine}: {found} ({time.monotonic() - start:.0f} s)", flush=True)


def _lens(path: Path, _: str, options: argparse.Namespace) -> str:
    """The bridge against Hugging Face, fast against the bridge, programs against fast: steps and generated tokens."""
    import steerlab as sl
    from steerlab.engines._doctor import examine

    said = [f"{one.engine} {one.what} {one.state}: {one.detail}" for one in examine(path)]
    for dtype in ("float32", "bfloat16"):
        with sl.load(path, device=options.device, dtype=dtype) as engine:
            plan, policy = _plan(sl, engine.info.d_model), sl.SamplingPolicy.greedy()
            made = {}
            for kind in ("graph", "fast"):
                try:
                    rows = engine.generate(PROMPTS * 4, plan=plan, policy=policy, max_new_tokens=24, engine=kind)
                    made[kind] = [tuple(row.token_ids) for row in rows]
                except sl.SteerlabError as error:
                    said.append(f"{dtype} {kind} refused: {error}")
            if len(made) == 2:
                same = sum(a == b for a, b in zip(*made.values(), strict=True))
                said.append(f"{dtype} tokens of graph and fast equal in {same} of 8 rows")
    return "; ".join(said)


def _vllm(path: Path, name: str, options: argparse.Namespace) -> str:
    import torch

    import steerlab as sl

    dtype = "bfloat16" if name in HALF else "float32"
    start: dict[str, Any] = {"dtype": dtype, "max_num_seqs": 8, "max_model_len": 256}
    if options.device == "cpu":
        start |= {"enforce_eager": True}
    else:
        sizes = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8]}  # nothing is compiled
        linear = {"gdn_prefill_backend": "triton"}  # the other takes a package of its own
        start |= {"kv_cache_memory_bytes": 1 << 28, "compilation_config": sizes, "additional_config": linear}

    def scores(engine: sl.Engine, each: sl.Plan | None) -> torch.Tensor:
        return torch.tensor([score.log_prob for score in engine.score(PROMPTS, TARGETS, plan=each)])

    with sl.load(path, device=options.device) as lens:
        plan, policy = _plan(sl, lens.info.d_model), sl.SamplingPolicy.greedy()
        expected = [scores(lens, each) for each in (None, plan)]
        streams = lens.capture(PROMPTS, layers="all")
        drawn = [row.token_ids for row in lens.generate(PROMPTS, plan=plan, policy=policy, max_new_tokens=12)]
    with sl.VLLMEngine(path, layers="all", **start) as engine:
        found = [scores(engine, each) for each in (None, plan, None)]
        read = engine.capture(PROMPTS, layers="all")
        rows = engine.generate(PROMPTS, plan=plan, policy=policy, max_new_tokens=12)
    far = [float((a - b).abs().max()) for a, b in zip(found, [*expected, found[0]], strict=True)]
    effects = [float(one[1].mean() - one[0].mean()) for one in (found, expected)]
    layers = range(lens.info.n_layers)
    away = torch.stack([(read[k] - streams[k]).norm(dim=-1) / streams[k].norm(dim=-1) for k in layers]).flatten()
    same = sum(row.token_ids == ids for row, ids in zip(rows, drawn, strict=True))
    return (
        "scores {:.1e}, steered {:.1e}, again {:.1e}, ".format(*far)
        + f"streams {float(away.median()):.1e} (most {float(away.max()):.1e}) of a token's norm, "
        + f"effect {effects[0]:.3f} for {effects[1]:.3f}, "
        + f"steered tokens equal in {same} of {len(drawn)} rows, {dtype}"
    )


def _plan(sl: Any, d_model: int) -> Any:
    import torch

    direction = torch.randn(d_model, generator=torch.Generator().manual_seed(0))
    return sl.Plan(sl.add(sl.SteeringVector.from_tensor(direction, layer=1), coef=3.0))


_CHECKS: dict[str, Callable[[Path, str, argparse.Namespace], str]] = {"lens": _lens, "vllm": _vllm}

if __name__ == "__main__":
    main()
