"""Every form of edit inside vLLM against the TransformerLens engine, with CUDA graphs where there is a GPU.

    python benchmarks/vllm_forms.py

Runs tests/vllm/test_forms.py on an engine as a GPU has it: Model Runner V2, compiled, with CUDA graphs, Triton's
attention in full float32. So every operator, option, kind of positions, site and condition is compared within 1e-4
nats, as on a CPU. TF32, which Triton uses by default, would hide faults smaller than 3e-3.
"""

import argparse
import inspect
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_steering import make_plugin_visible


def main() -> None:
    """Runs every test once; the exit status says whether all held."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    os.environ["VLLM_PLUGINS"] = "steerlab"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    make_plugin_visible(Path(tempfile.mkdtemp()))
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    warnings.simplefilter("ignore")
    import torch

    import steerlab as sl
    from tests.tiny_models import build_tiny_llama
    from tests.vllm import conftest, test_forms

    folder = Path(tempfile.mkdtemp()) / "llama"
    path = build_tiny_llama(folder, context=512, hidden_size=conftest.WIDTH, intermediate_size=256)
    options: dict[str, Any] = {"layers": [1, 2], "sites": ["attn_out", "resid_mid", "mlp_out", "resid_post"]}
    options |= {"max_directions": 5, "max_num_batched_tokens": 16}
    if torch.cuda.is_available():
        graphs = {"enforce_eager": False, "kv_cache_memory_bytes": 2 << 30}
        options |= graphs | {"attention_config": {"backend": "TRITON_ATTN"}}
    failed = 0
    with sl.load(path, device="cpu") as lens, conftest.started(path, **options) as engine:
        print("workers:", engine._running.workers, flush=True)
        have = {"engine": engine, "lens": lens, "vector": conftest.vector.__wrapped__()}
        for name, test, case in cases(test_forms):
            try:
                test(**{key: (have | case)[key] for key in inspect.signature(test).parameters})
                print("ok  ", name, *case.values(), flush=True)
            except Exception:
                failed += 1
                print("FAIL", name, *case.values(), traceback.format_exc(), sep="\n", flush=True)
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", "failed:", failed)
    raise SystemExit(failed > 0)


def cases(module: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The tests of a module, those of one site once for each."""
    for name, test in vars(module).items():
        if name.startswith("test_"):
            by_site = "site" in inspect.signature(test).parameters
            for case in [{"site": site} for site in (*module.SITES, "resid_post")] if by_site else [{}]:
                yield name, test, case


if __name__ == "__main__":
    main()
