"""What `test_devices.py` runs in a process of its own: a model spread over simulated devices, beside it on the CPU.

`run_scenarios` saves tiny models in a directory and returns what was found.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from transformers import AutoModelForCausalLM, AutoTokenizer

import steerlab as sl
from steerlab.sequences import BatchedSequences, SequenceProcessor
from tests.lens.device_scenarios import device_map_of
from tests.simulated_devices import place, simulated_devices
from tests.tiny_models import build_tiny_llama

CONFIG = {"generation": {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 6}}
MOVED = ("model.layers.0.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight")


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def spread(path: Path, n_devices: int) -> Any:
    """The model on `sim:0` …, with the hooks that accelerate puts on a model loaded with a device map."""
    model = load(path)
    device_map = device_map_of(model, n_devices)
    place(model, device_map)
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"": device_map[next(iter(device_map))]} | device_map,
        offload=dict.fromkeys(device_map, False),
        skip_keys=model._skip_keys_device_placement,
    )
    return model


def sequences() -> BatchedSequences:
    generator = torch.Generator().manual_seed(3)

    def ids(n: int) -> list[int]:
        return torch.randint(5, 200, (n,), generator=generator).tolist()

    return BatchedSequences.from_ids([ids(4), ids(9)], [[ids(7), ids(1)], [[], ids(3)]])


def plan() -> sl.Plan:
    """Edits on both sides of a boundary between devices, one of them with a dose."""
    one, two = (torch.randn(64, generator=torch.Generator().manual_seed(k)) for k in (1, 2))
    first, second = sl.SteeringVector.from_tensor(one, layer=0), sl.SteeringVector.from_tensor(two, layer=2)
    return sl.Plan(sl.add(first, coef=0.5, where=sl.where.all()), sl.add(second, dose=0.4))


def found(model: Any, path: Path) -> dict[str, Any]:
    """Scores of every kind, the samples, and receipts."""
    processor = SequenceProcessor(model, AutoTokenizer.from_pretrained(path), config=CONFIG)
    v = {name: torch.ones(model.get_parameter(name).shape) for name in MOVED}
    override = processor.params_override(v, 0.01)
    calls = {
        "plain": {},
        "graph": {"with_grad": True},
        "plan": {"plan": plan()},
        "graph_and_plan": {"with_grad": True, "plan": plan()},
        "override": {"params_override": override},
        "graph_and_override": {"with_grad": True, "params_override": override},
    }
    results = {name: measured(processor, **options) for name, options in calls.items()}
    drawn = processor.generate_batched([sequences().prompt_ids(b) for b in range(2)], 2, seed=0, plan=plan())
    edited = [receipt.edited for receipt in processor.receipts]
    return {**results, "samples": drawn.sequences.tolist(), "edited": edited}


def measured(processor: SequenceProcessor, **options: Any) -> list[float]:
    """Log p, log q, entropy and diagnostics of every token."""
    scored, diagnostics = processor.teacher_force_logprobs_with_diagnostics(sequences(), **options)
    nested = (scored.logprobs, scored.token_logqs, scored.rb_entropies)
    flat = [float(x) for part in nested for row in part for values in row for x in torch.as_tensor(values).tolist()]
    return flat + diagnostics.steps_frame().drop(columns=["eos_prob"]).to_numpy(dtype=float).ravel().tolist()


def run_scenarios(directory: Path) -> dict[str, Any]:
    """What was found, by model, number of devices and kind."""
    paths = {
        "llama": build_tiny_llama(directory / "llama"),
        "tied": build_tiny_llama(directory / "tied", tie_word_embeddings=True),
    }
    results: dict[str, Any] = {}
    for name, path in paths.items():
        results[name] = {"1": found(load(path), path)}
        with simulated_devices():
            results[name]["2"] = found(spread(path, 2), path)
    return results
