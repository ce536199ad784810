"""What `test_devices.py` runs in a process of its own: models on simulated devices, beside the same on the CPU.

`run_scenarios` saves tiny models in a directory and returns what each named scenario found, in numbers and texts.
"""

import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, AutoTokenizer

import steerlab as sl
from steerlab.engines.lens._recording import RecordedTransfers
from steerlab.engines.lens.hooked_generate import create_steering_hook, hooked_generate
from tests.simulated_devices import Transfer, place, simulated_devices
from tests.tiny_models import FAMILIES, build_tiny_gpt2, build_tiny_llama, save_tiny

PROMPTS = [[5, 60, 7, 90, 33, 18], [12, 200], [20, 41, 22, 130]]
EQUAL = [[5, 60, 7, 90], [12, 200, 31, 44]]
GREEDY = sl.SamplingPolicy.greedy()
SAMPLED = sl.SamplingPolicy(temperature=0.9, top_p=0.95, top_k=50)
NEW = 4
NEW_WITH_ENDS = 12  # on an accelerator the loop looks every 8 steps which rows have ended, and drops them
ENDS = list(range(3, 80))

# Engine, the layers to edit, policy.
Run = tuple[str, slice, sl.SamplingPolicy]
EVERY, LAST = slice(None), slice(-1, None)
TWO_RUNS: list[Run] = [("fast", EVERY, GREEDY), ("bridge", LAST, SAMPLED)]
FOUR_RUNS: list[Run] = [*TWO_RUNS, ("fast", LAST, SAMPLED), ("bridge", EVERY, GREEDY)]


def build_alternating(path: Path) -> Path:
    """A Gemma-3 whose blocks need the masks and rotary tables of two kinds in turn."""
    config_class, options = FAMILIES["gemma3_narrow"]
    types = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return save_tiny(AutoModelForCausalLM.from_config, config_class, path, **{**sizes, **options, **types})


_BUILDERS: dict[str, Callable[[Path], Path]] = {
    "llama": build_tiny_llama,
    "llama_6": lambda path: build_tiny_llama(path, num_hidden_layers=6),
    "llama_tied": lambda path: build_tiny_llama(path, tie_word_embeddings=True),
    "llama_ending": lambda path: build_tiny_llama(path, eos_token_id=ENDS),
    "gpt2": build_tiny_gpt2,
    "gemma3": build_alternating,
}


# --- models -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Models:
    """Loads each model on the CPU, and spread over devices, once for all scenarios."""

    directory: Path

    @cache  # noqa: B019
    def path(self, name: str) -> Path:
        return _BUILDERS[name](self.directory / name)

    @cache  # noqa: B019
    def on_cpu(self, name: str) -> sl.LensEngine:
        return self._engine(name, self._plain(name))

    def spread(self, name: str, n_devices: int, *, accelerate: bool = False) -> sl.LensEngine:
        """The model on `sim:0` … in equal parts; with accelerate, its hooks move what a module needs, as they do when
        a model is loaded with a device map.
        """
        return self._spread(name, n_devices, accelerate)

    @cache  # noqa: B019
    def _spread(self, name: str, n_devices: int, accelerate: bool) -> sl.LensEngine:
        model = self._plain(name)
        device_map = device_map_of(model, n_devices)
        place(model, device_map)
        if accelerate:
            attach_align_device_hook_on_blocks(
                model,
                execution_device={"": device_map[next(iter(device_map))]} | device_map,
                offload=dict.fromkeys(device_map, False),
                skip_keys=model._skip_keys_device_placement,
            )
        return self._engine(name, model)

    def _plain(self, name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.path(name), dtype=torch.float32).eval()

    def _engine(self, name: str, model: Any) -> sl.LensEngine:
        path = self.path(name)
        own, changed = (AutoTokenizer.from_pretrained(path) for _ in range(2))
        bridge = TransformerBridge.boot_transformers(str(path), hf_model=model, tokenizer=changed)
        return sl.load(bridge, tokenizer=own)


def device_map_of(model: Any, n_devices: int) -> dict[str, torch.device]:
    """Blocks in equal parts; embeddings on the first device, norm and head on the last; a tied head stays with them."""
    devices = [torch.device("sim", index) for index in range(n_devices)]
    body, blocks = ("transformer", "h") if hasattr(model, "transformer") else ("model", "layers")
    norm = f"{body}.ln_f" if body == "transformer" else f"{body}.norm"
    embeddings = [f"{body}.{name}" for name in ("embed_tokens", "rotary_emb", "wte", "wpe")]
    n_layers = model.config.num_hidden_layers
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return {
        **{name: devices[0] for name in embeddings if hasattr(model.get_submodule(body), name.split(".")[1])},
        **{f"{body}.{blocks}.{layer}": devices[layer * n_devices // n_layers] for layer in range(n_layers)},
        norm: devices[-1],
        "lm_head": devices[0] if tied else devices[-1],
    }


def plan_on(engine: sl.LensEngine, layers: Sequence[int]) -> sl.Plan:
    """An addition and a clamp at each layer, at all positions and at the default ones."""
    edits = []
    for layer in layers:
        values = torch.randn(engine.info.d_model, generator=torch.Generator().manual_seed(layer))
        vector = sl.SteeringVector.from_tensor(values, layer=layer)
        edits += [sl.add(vector, coef=1.0, where=sl.where.all()), sl.clamp(vector, lo=-1.0, hi=1.0)]
    return sl.Plan(*edits)


# --- the same tokens and receipts ---------------------------------------------------------------------------------


def generated(
    engine: sl.LensEngine, layers: Sequence[int], policy: sl.SamplingPolicy, name: str, new: int
) -> dict[str, Any]:
    """Tokens and receipts of one call."""
    plan = plan_on(engine, layers)
    found = engine.generate(PROMPTS, plan=plan, policy=policy, max_new_tokens=new, seed=3, engine=name)
    return {
        "engine": found.engine,
        "tokens": [c.token_ids for c in found],
        "reasons": [c.finish_reason for c in found],
        "edited": [[entry.edited for entry in receipt.edits] for receipt in engine.receipts],
    }


def compare(
    models: Models,
    name: str,
    n_devices: int,
    runs: Sequence[Run] = TWO_RUNS,
    *,
    new: int = NEW,
    accelerate: bool = False,
) -> list[Any]:
    """[on the CPU, on the devices] for each run."""
    plain, spread = models.on_cpu(name), models.spread(name, n_devices, accelerate=accelerate)
    layers = range(plain.info.n_layers)
    return [
        [generated(engine, layers[part], policy, kind, new) for engine in (plain, spread)]
        for kind, part, policy in runs
    ]


COMPARED: dict[str, Callable[[Models], Any]] = {
    "two_devices_llama": lambda models: compare(models, "llama", 2, FOUR_RUNS),
    "two_devices_gpt2": lambda models: compare(models, "gpt2", 2, FOUR_RUNS),
    "head_tied_to_the_first_device": lambda models: compare(models, "llama_tied", 2),
    "rows_that_end": lambda models: compare(models, "llama_ending", 3, new=NEW_WITH_ENDS),
    "masks_of_two_kinds": lambda models: compare(models, "gemma3", 3),
    "more_devices_than_layers": lambda models: compare(models, "llama", 6),
    "four_devices_for_six_layers": lambda models: compare(models, "llama_6", 4),
    "with_accelerate": lambda models: compare(models, "llama", 3, accelerate=True),
}


# --- hooks of the user's own --------------------------------------------------------------------------------------


def vector_elsewhere(models: Models, log: list[Transfer]) -> Any:
    """The vector on the first device, the layer on the second, ids and mask on the CPU, padding on the left."""
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in PROMPTS])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in PROMPTS])
    values = torch.randn(64, generator=torch.Generator().manual_seed(1))

    def run(engine: sl.LensEngine, vector: torch.Tensor, kind: str) -> dict[str, Any]:
        hook = create_steering_hook(vector, 2.0)
        out = hooked_generate(
            engine.model, ids, NEW, "blocks.3.hook_resid_post", hook, attention_mask=mask, seed=0, engine=kind
        )
        return {"tokens": out.tolist(), "device": str(out.device)}

    plain, spread = models.on_cpu("llama"), models.spread("llama", 2)
    return [[run(plain, values, kind), run(spread, values.double().to("sim:0"), kind)] for kind in ("fast", "bridge")]


# --- scores and activations ---------------------------------------------------------------------------------------


def scores(models: Models, log: list[Transfer]) -> Any:
    """Log-probs of targets that share prompts, with edits on every layer."""
    targets = [[[7, 8, 9], [30]], [[100, 101]], [[5, 6, 7, 8, 9]]]

    def run(engine: sl.LensEngine) -> list[list[float]]:
        found = engine.score(PROMPTS, targets, plan=plan_on(engine, range(engine.info.n_layers)))
        return [score.token_log_probs for score in found]

    return [[run(models.on_cpu("llama")), run(models.spread("llama", 2))]]


def activations(models: Models, log: list[Transfer]) -> Any:
    """Activations of every layer, in prompts and while generating, kept and pooled."""

    def run(engine: sl.LensEngine, **options: Any) -> list[Any]:
        found = engine.capture(PROMPTS, layers="all", plan=plan_on(engine, [1, 3]), **options)
        return [found[layer].tolist() for layer in found.layers]

    plain, spread = models.on_cpu("llama"), models.spread("llama", 2)
    cases: list[dict[str, Any]] = [{}, {"max_new_tokens": NEW}, {"max_new_tokens": NEW, "pool": "mean"}]
    return [[run(plain, **case), run(spread, **case)] for case in cases]


# --- transfers ----------------------------------------------------------------------------------------------------


def per_step(log: list[Transfer], run: Callable[[int], Any]) -> dict[str, float]:
    """Copies that one more step costs: between devices, and between a device and the host."""

    def counted(steps: int) -> tuple[int, int]:
        log.clear()
        run(steps)
        between = sum(transfer.between_devices for transfer in log)
        return between, len(log) - between

    counted(1)  # vectors travel once
    (short, short_host), (long, long_host) = counted(2), counted(4)
    return {"between_devices": (long - short) / 2, "with_host": (long_host - short_host) / 2}


def transfers_per_step(models: Models, log: list[Transfer]) -> Any:
    """With edits on every layer."""
    found = []
    for model, n_devices, kind, prompts in (
        ("llama", 2, "fast", PROMPTS),
        ("llama_6", 4, "bridge", PROMPTS),
        ("llama_6", 4, "fast", EQUAL),
        ("llama_tied", 2, "fast", EQUAL),
        ("gpt2", 2, "fast", EQUAL),
        ("gpt2", 2, "bridge", EQUAL),
        ("gemma3", 3, "fast", PROMPTS),
    ):
        engine = models.spread(model, n_devices)
        found.append(
            {"model": model, "n_devices": n_devices, "engine": kind, "padded": prompts is PROMPTS}
            | per_step(log, partial(steered_by, engine, kind, prompts))
        )
    accelerated = models.spread("llama", 3, accelerate=True)
    return [
        *found,
        {"model": "llama", "n_devices": 3, "engine": "bridge", "padded": True, "accelerate": True}
        | per_step(log, partial(steered_by, accelerated, "bridge", PROMPTS)),
    ]


def steered_by(engine: sl.LensEngine, kind: str, prompts: list[list[int]], steps: int) -> None:
    """Generates with edits on every layer."""
    plan = plan_on(engine, range(engine.info.n_layers))
    engine.generate(prompts, plan=plan, policy=GREEDY, max_new_tokens=steps, engine=kind)


def transfers_of_capture(models: Models, log: list[Transfer]) -> Any:
    """Reading every layer while generating."""
    engine = models.spread("llama", 2)

    def run(steps: int) -> None:
        engine.capture(EQUAL, layers="all", max_new_tokens=steps, pool="mean")

    return [{"n_devices": 2} | per_step(log, run)]


def transfers_of_prefill(models: Models, log: list[Transfer]) -> Any:
    """How many elements the pass over long prompts sends to the first device, and to the host, in each copy."""
    prompts = [list(range(100, 140)), list(range(200, 230))]
    found = []
    for model, kind, accelerate in (
        ("llama", "fast", False),
        ("llama", "bridge", True),
        ("llama_tied", "fast", False),
        ("llama_tied", "bridge", False),
    ):
        engine = models.spread(model, 3 if accelerate else 2, accelerate=accelerate)
        engine.generate([[1]], plan=plan_on(engine, [3]), max_new_tokens=1)  # what is read once per model
        log.clear()
        engine.generate(prompts, plan=plan_on(engine, [3]), policy=GREEDY, max_new_tokens=1, engine=kind)
        sizes = {
            "to_first_device": [t.elements for t in log if t.between_devices and t.target.index == 0],
            "to_host": [t.elements for t in log if t.target.type == "cpu"],
        }
        found.append({"model": model, "engine": kind, "accelerate": accelerate} | sizes)
    shape = {"n_rows": len(prompts), "d_model": engine.info.d_model, "d_vocab": engine.info.d_vocab}
    return {"runs": found, **shape}


def kept_between_steps(models: Models, log: list[Transfer]) -> Any:
    """How many earlier steps' activations are still there, asked at each step where the stream leaves a device."""
    engine = models.spread("llama", 2)
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def watch(value: torch.Tensor, hook: Any) -> None:
        alive.append(sum(reference() is not None for reference in seen))
        seen.append(weakref.ref(value))

    hooked_generate(engine.model, torch.tensor(EQUAL), NEW, "blocks.1.hook_resid_post", watch, engine="fast")
    return {"alive": alive}


def state_of_a_program(models: Models, log: list[Transfer]) -> Any:
    """What a program's state is on each device after the stream went there, after it went back, and the copies made."""
    places = [torch.device("sim", index) for index in range(3)]
    states = {device: torch.zeros(4, dtype=torch.long).to(device) for device in places}
    states[places[0]].copy_(torch.arange(1, 5).to(places[0]))
    transfers = RecordedTransfers(states)
    stream = torch.ones(2, 3).to(places[0])
    log.clear()
    for device in (*places[1:], places[0]):
        (stream,) = transfers.send([stream], device)
        if device != places[0]:
            states[device].add_(1)  # which must not come back
    copies = sum(t.between_devices for t in log)
    return {"states": [state.cpu().tolist() for state in states.values()], "copies": copies, "sum": float(stream.sum())}


SCENARIOS: dict[str, Callable[[Models, list[Transfer]], Any]] = {
    scenario.__name__: scenario
    for scenario in (
        vector_elsewhere,
        scores,
        activations,
        transfers_per_step,
        transfers_of_capture,
        transfers_of_prefill,
        kept_between_steps,
        state_of_a_program,
    )
}


def run_scenarios(directory: Path, names: Sequence[str]) -> dict[str, Any]:
    """What each scenario found; one that raised gives its traceback under "error"."""
    models = Models(directory)
    found: dict[str, Any] = {}
    for name in names:
        with simulated_devices() as log:
            try:
                found[name] = COMPARED[name](models) if name in COMPARED else SCENARIOS[name](models, log)
            except Exception:
                found[name] = {"error": traceback.format_exc()}
    return found
