"""Whether rows that overflow inside vLLM reach other rows: one request in ten, on a random Llama.

    python benchmarks/vllm_overflow.py                                   # float32, vLLM's own choice of attention
    python benchmarks/vllm_overflow.py --dtype float16 --backend FLASH_ATTN

One token of the model has an embedding of NaN, another one of infinity. Prompts under several plans run in an engine
that has seen nothing yet; then batches of them, one request in ten with such a token in it or under a plan that
overflows. Those must end with an error, and all others answer as before. There are so few cache blocks that each is
soon used again.
"""

import argparse
import math
import os
import tempfile
from collections import Counter
from pathlib import Path

from vllm_steering import SHAPES, build_model, make_plugin_visible

NAN, INF = SHAPES["small"]["vocab_size"] - 2, SHAPES["small"]["vocab_size"] - 1
LENGTHS = (3, 9, 31, 33, 70, 131)
BATCH = 50


def main() -> None:
    """Runs the check; the exit status says whether it held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", help="attention, by vLLM's name for it, e.g. TRITON_ATTN")
    parser.add_argument("--requests", type=int, default=500)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault(
        "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
    )  # plans that are refused are let through in this process
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    make_plugin_visible(Path(tempfile.mkdtemp()))
    raise SystemExit(0 if check(options) else 1)


def check(options: argparse.Namespace) -> bool:
    """Whether every row that overflows ends with an error, and no other row changes."""
    import numpy as np
    import torch

    import steerlab as sl
    from steerlab.steering import plan as plan_module

    plan_module.check_finite_range = lambda edits, info: None
    plans, deadly = make_plans()
    prompts = [[(7 * i + k) % 500 for i in range(length)] for k, length in enumerate(LENGTHS)]
    greedy = {"policy": sl.SamplingPolicy.greedy(), "max_new_tokens": 10, "on_error": "return"}
    attention = {} if options.backend is None else {"attention_config": {"backend": options.backend}}
    rng, seen = np.random.default_rng(0), Counter()
    with sl.VLLMEngine(
        with_overflowing_tokens(build_model("small")),
        layers=[1, 2],
        dtype=options.dtype,
        skip_tokenizer_init=True,
        max_num_seqs=16,
        max_model_len=512,
        num_gpu_blocks_override=64,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.3,
        **attention,
    ) as engine:
        cases = [(p, q) for p in range(len(prompts)) for q in range(len(plans))]
        first = engine.generate([prompts[p] for p, _ in cases], plan=[plans[q] for _, q in cases], **greedy)
        clean = dict(zip(cases, first, strict=True))
        broken = [case for case, row in clean.items() if not is_whole(row)]
        print(f"broken before anything overflowed: {broken or 'none'}")
        for start in range(0, options.requests, BATCH):
            drawn = [cases[int(k)] for k in rng.integers(len(cases), size=BATCH)]
            given, chosen = [prompts[p] for p, _ in drawn], [plans[q] for _, q in drawn]
            bad = [row for row in range(BATCH) if row % 10 == 3]
            for row in bad:
                kind = ("nan", "inf", "plan")[(start + row) // 10 % 3]
                if kind == "plan":
                    chosen[row] = deadly
                else:
                    place = int(rng.integers(len(given[row])))
                    given[row] = [*given[row][:place], NAN if kind == "nan" else INF, *given[row][place:]]
            rows = engine.generate(given, plan=chosen, **greedy)
            for index, row in enumerate(rows):
                if index in bad:
                    seen["ended with an error" if row.finish_reason == "error" and not row.token_ids else "missed"] += 1
                elif not is_whole(row):
                    seen["harmed"] += 1
                    finite = [bool(math.isfinite(p)) for p in row.token_log_probs]
                    print(f"harmed: row {start + index}, case {drawn[index]}, {row.finish_reason}, {finite}")
                else:
                    seen["same" if row.token_ids == clean[drawn[index]].token_ids else "other tokens"] += 1
        runner = engine._running.workers[0]["runner"]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, runner {runner}, {options.dtype}, attention {options.backend or 'by default'}: {dict(seen)}")
    return not broken and not seen["harmed"] and not seen["missed"]


def is_whole(row) -> bool:
    """Whether a completion has its tokens, and a finite log-probability of each."""
    return row.finish_reason != "error" and bool(row.token_ids) and all(map(math.isfinite, row.token_log_probs))


def make_plans() -> tuple[list, object]:
    """Four harmless plans, and one that overflows: its strength and its scale are numbers, their product is not."""
    import torch

    import steerlab as sl

    def v(layer: int, seed: int):
        width = SHAPES["small"]["hidden_size"]
        values = torch.randn(width, generator=torch.Generator().manual_seed(seed))
        return sl.SteeringVector.from_tensor(values, layer=layer)

    everywhere = sl.where.all()
    plans = [
        None,
        sl.Plan(sl.add(v(1, 1), coef=1.0, where=everywhere)),
        sl.Plan(sl.add(v(2, 2), coef=2.0)),
        sl.Plan(sl.ablate(v(1, 3), where=sl.where.index(2, -1))),
    ]
    return plans, sl.Plan(sl.add(v(1, 9), coef=1e30, where=everywhere)).scaled(1e20)


def with_overflowing_tokens(path: Path) -> Path:
    """The model with embeddings of NaN and infinity for its last two tokens."""
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][NAN] = math.nan
    weights["model.embed_tokens.weight"][INF] = math.inf
    weights["lm_head.weight"][[NAN, INF]] = 0.0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


if __name__ == "__main__":
    main()
