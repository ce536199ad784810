"""Every form of edit inside vLLM against the TransformerLens engine, with CUDA graphs where there is a GPU.

    python benchmarks/vllm_forms.py
    python benchmarks/vllm_forms.py -k generated_tokens

Runs tests/vllm/test_forms.py, with what follows as pytest's own options, on an engine as a GPU has it: Model Runner V2,
compiled, with CUDA graphs, Triton's attention in full float32. So every operator, option, kind of positions, site and
condition is compared within 1e-4 nats, as on a CPU. TF32, which Triton uses by default, would hide faults smaller than
3e-3. Needs what the tests need: pytest and hypothesis.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from vllm_steering import make_plugin_visible

ROOT = Path(__file__).resolve().parent.parent
ON_A_GPU = {
    "enforce_eager": False,
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 2 << 30,
    "attention_config": {"backend": "TRITON_ATTN"},
}


def main() -> int:
    """Runs the tests; the exit status says whether all held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, given = parser.parse_known_args()
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    os.environ["VLLM_PLUGINS"] = "steerlab"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    make_plugin_visible(Path(tempfile.mkdtemp()))
    sys.path.insert(0, str(ROOT))
    import pytest
    import torch

    card = "CPU"
    if torch.cuda.is_available():
        card = torch.cuda.get_device_name()
        os.environ["STEERLAB_TEST_VLLM"] = json.dumps(ON_A_GPU)
    print(card, flush=True)
    options = ["-p", "no:cacheprovider", "-q", "-rA", "--durations=5", *given]
    return pytest.main([str(ROOT / "tests/vllm/test_forms.py"), f"--rootdir={ROOT}", *options])


if __name__ == "__main__":
    sys.exit(main())
