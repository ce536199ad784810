"""What works on a model of the user's own: each engine compared with plain Hugging Face, or with another engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from steerlab.core.errors import SteerlabError
from steerlab.models import resolve
from steerlab.steering.operators import add
from steerlab.steering.plan import Plan
from steerlab.steering.positions import where
from steerlab.steering.vectors import SteeringVector

PROMPT, TARGETS = "She opened the window, because the room", (" was warm", " four")
_NEAR = 5e-4
"""Of the largest value: what rounding in float32 explains after many layers."""


@dataclass(frozen=True)
class Finding:
    """One comparison.

    Attributes:
        engine: what ran.
        what: what was compared.
        state: `same`, `differs`, `refused`, or `failed`, with an error.
        detail: the difference, the reason, or the error's message.
    """

    engine: str
    what: str
    state: Literal["same", "differs", "refused", "failed"]
    detail: str


def examine(model: str | Path, *, vllm: bool = False) -> list[Finding]:
    """Compares a model's engines, in float32 on the device that `sl.load` takes.

    On TransformerLens the streams after all layers, the logits and the scores of a short text, unsteered and steered at
    the middle layer, are compared with plain Hugging Face and torch's own hook. Inside vLLM the scores are compared
    with those, and two runs of the same text with each other.

    Args:
        model: an alias, a model directory or a hub id.
        vllm: whether to start vLLM as well.

    Returns:
        The findings, in the order in which they were made.

    Raises:
        ModelNotFoundError: if there is no such model, or TransformerLens does not know its family.
    """
    from steerlab.engines.lens import load
    from steerlab.engines.lens._backends import embedding_device, fast_difference
    from steerlab.engines.lens._program_rows import why_no_program

    found: list[Finding] = []
    with load(model) as engine:
        plain = PlainModel(resolve(model).path, embedding_device(engine.model.original_model))
        plan = _plan(engine.info.n_layers, engine.info.d_model)
        for each, kind in ((None, "unsteered"), (plan, "steered")):
            found += _lens(engine, plain, each, kind)
        different = fast_difference(engine.model)
        state = "same" if different is None else "differs"
        found.append(Finding("fast", "hook points and logits", state, different or "equal to the bridge's"))
        reason = different or why_no_program(engine.model, plan, is_compiled=False)
        state = "same" if reason is None else "refused"
        found.append(Finding("graph", "single steps, steered", state, reason or "equal to the fast engine's"))
        scores = {kind: _scores(engine, each) for each, kind in ((None, "unsteered"), (plan, "steered"))}
    return found + (_vllm(model, plan, scores) if vllm else [])


class PlainModel:
    """Hugging Face's own model in float32, with the bridge's attention; edits are made by hooks of torch's own.

    Args:
        path: the model's directory.
        device: where it runs.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.model, self.device = model.eval().to(device), device
        count = model.config.get_text_config().num_hidden_layers
        lists = (part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == count)
        self.layers = list(next(lists))

    @torch.no_grad()
    def run(self, ids: Sequence[int], plan: Plan | None) -> tuple[list[Tensor], Tensor]:
        """The stream after each layer [tokens, d_model], and the logits [tokens, d_vocab]; on the CPU.

        Args:
            ids: token ids.
            plan: None, or one that adds a vector after one layer, everywhere.
        """
        streams: list[Tensor] = []

        def record(_: Any, __: Any, output: Any) -> Any:
            whole = output if isinstance(output, Tensor) else output[0]
            if plan is not None and len(streams) == plan.edits[0].hook_point.layer:
                whole = whole + plan.edits[0].vector.values.to(whole.device, whole.dtype)
            streams.append(whole[0].float().cpu())
            return whole if isinstance(output, Tensor) else (whole, *output[1:])

        handles = [layer.register_forward_hook(record) for layer in self.layers]
        try:
            logits = self.model(input_ids=torch.tensor([list(ids)], device=self.device), use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
        return streams, logits[0].float().cpu()


def _plan(n_layers: int, d_model: int) -> Plan:
    direction = torch.randn(d_model, generator=torch.Generator().manual_seed(0))
    return Plan(add(SteeringVector.from_tensor(direction, layer=n_layers // 2), coef=1.0, where=where.all()))


def _lens(engine: Any, plain: PlainModel, plan: Plan | None, kind: str) -> list[Finding]:
    """The bridge against the plain model."""
    ids = list(engine.tokenizer(PROMPT)["input_ids"])
    streams, logits = plain.run(ids, plan)
    captured = engine.capture([ids], layers="all", plan=plan)
    mine = torch.cat([captured.of(0, layer) for layer in range(engine.info.n_layers)])
    found = [_compared("bridge", f"streams, {kind}", mine, torch.cat(streams))]
    if plan is None:
        found.append(_compared("bridge", "logits", engine.logits(ids).cpu(), logits))
    targets = [list(engine.tokenizer(target, add_special_tokens=False)["input_ids"]) for target in TARGETS]
    expected = []
    for target in targets:
        log_probs = plain.run([*ids, *target], plan)[1].log_softmax(-1)
        expected.append(sum(float(log_probs[len(ids) - 1 + k, token]) for k, token in enumerate(target)))
    scores = [score.log_prob for score in engine.score([ids], [targets], plan=plan)]
    return [*found, _compared("bridge", f"scores, {kind}", torch.tensor(scores), torch.tensor(expected))]


def _scores(engine: Any, plan: Plan | None) -> Tensor:
    return torch.tensor([score.log_prob for score in engine.score([PROMPT], [list(TARGETS)], plan=plan)])


def _vllm(model: str | Path, plan: Plan, expected: dict[str, Tensor]) -> list[Finding]:
    """Inside vLLM: with the plan's layer wired, and where that fails without any."""
    from steerlab.engines.vllm import VLLMEngine

    found: list[Finding] = []
    for layers in ([point.layer for point in plan.hook_points], []):
        try:
            with VLLMEngine(model, layers=layers, dtype="float32", max_num_seqs=8) as engine:
                first = _scores(engine, None)
                found.append(_compared("vllm", "scores, unsteered", first, expected["unsteered"]))
                if layers:
                    found.append(_compared("vllm", "scores, steered", _scores(engine, plan), expected["steered"]))
                return [*found, _compared("vllm", "scores, again", _scores(engine, None), first)]
        except SteerlabError as error:
            found.append(Finding("vllm", f"start with layers={layers}", "failed", str(error)))
    return found


def _compared(engine: str, what: str, made: Tensor, expected: Tensor) -> Finding:
    """A tensor against what it must be."""
    far = float((made.double() - expected.double()).abs().max())
    is_near = far <= _NEAR * max(1.0, float(expected.double().abs().max()))
    return Finding(engine, what, "same" if is_near else "differs", f"largest difference {far:.1e}")
