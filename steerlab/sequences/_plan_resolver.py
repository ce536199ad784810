"""A plan on a plain Hugging Face model: forward hooks on its decoder layers, put on for a call and taken off again."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from steerlab._runtime.evaluation import evaluating
from steerlab._runtime.hooks import install_input_hook, install_output_hook
from steerlab._runtime.model_parts import ModelParts
from steerlab._runtime.reference_norm import reference_windows
from steerlab._runtime.weights import hash_of_weights
from steerlab.core._hook_points import HookPoint
from steerlab.core._quantisation import quantisation
from steerlab.core.engine import ModelInfo
from steerlab.core.errors import InputError, PlanError
from steerlab.sequences._weights_match import parameters_fingerprint
from steerlab.steering._plan_assignment import AssignedPlan, PlanArgument, assign_plans
from steerlab.steering._run import PlanRun
from steerlab.steering.plan import Plan

SITES = ("resid_pre", "resid_post")


@contextmanager
def apply_plan(layers: Sequence[nn.Module], run: PlanRun) -> Iterator[None]:
    """Runs the body with a plan's edits in the stream. The hooks are gone afterwards, also after an error."""
    with ExitStack() as stack:
        for point in run.hook_points:
            install = install_input_hook if point.site == "resid_pre" else install_output_hook
            stack.callback(install(layers[point.layer], _editor(run, point)).remove)
        yield


def _editor(run: PlanRun, point: HookPoint) -> Any:
    return lambda value: run.edit(point, value)


@dataclass
class PlanResolver:
    """Checks plans against a model and resolves their doses; finds the layers that hooks go on.

    Attributes:
        parts: the model's parts.
        tokenizer: encodes the reference text behind doses.
    """

    parts: ModelParts
    tokenizer: Any
    _layers: list[nn.Module] | None = None
    _median_norms: dict[HookPoint, float] = field(default_factory=dict)
    _info: ModelInfo | None = None
    _fingerprint: tuple[Any, ...] = ()

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers, checked once: each must take exactly what the one before gives.

        Raises:
            InputError: if they do not.
        """
        if self._layers is None:
            found = self.parts.layers()
            self._check(found)
            self._layers = found
        return self._layers

    def assign(self, plan: PlanArgument, n_prompts: int) -> list[AssignedPlan]:
        """One plan per prompt, checked and with doses resolved.

        Raises:
            PlanError: for a plan at another site than `resid_pre` or `resid_post`.
        """
        given: list[Any] = list(plan) if isinstance(plan, list | tuple) else [plan]
        if any(one is not None and not isinstance(one, Plan) for one in given):
            return assign_plans(plan, n_prompts, _NO_MODEL, _no_norm)  # which says what is wrong
        if all(one is None for one in given):
            return assign_plans(plan, n_prompts, _NO_MODEL, _no_norm)
        for one in given:
            for point in () if one is None else [*one.hook_points, *(c.hook_point for c in one.conditions)]:
                if point.site not in SITES:
                    raise PlanError(
                        f"A plan at {point.name} cannot run on a plain Hugging Face model; its layers can be edited at "
                        f"{' and '.join(SITES)}. Use sl.load for other sites."
                    )
        self.layers  # noqa: B018  found and checked before anything runs
        self._forget_if_trained()
        return assign_plans(plan, n_prompts, self.info, self.median_norm, self.tokenizer)

    @property
    def info(self) -> ModelInfo:
        """What the model is, as of the last call with a plan."""
        if self._info is None:
            weight = self.parts.head.weight
            self._info = ModelInfo(
                name=getattr(self.parts.causal, "name_or_path", "") or type(self.parts.causal).__name__,
                revision=None,
                weights_hash=hash_of_weights(self.parts.causal),
                weight_processing=quantisation(self.parts.causal.config),
                n_layers=len(self.layers),
                d_model=int(weight.shape[1]),
                d_vocab=int(weight.shape[0]),
                context_length=self.parts.context_length or 0,
                dtype=str(weight.dtype).removeprefix("torch."),
            )
        return self._info

    def median_norm(self, layer: int, site: str = "resid_post") -> float:
        """Median norm of the stream on the shipped reference text without its windows' first tokens: a dose's unit."""
        point = HookPoint(layer, site)
        if point not in self._median_norms:
            self._measure_norms(site)
        return self._median_norms[point]

    def _forget_if_trained(self) -> None:
        fingerprint = parameters_fingerprint(self.parts.root)
        if fingerprint != self._fingerprint:
            self._fingerprint, self._info = fingerprint, None
            self._median_norms.clear()

    def _measure_norms(self, site: str) -> None:
        if self.tokenizer is None:
            raise InputError(
                "A dose is measured on reference text, which needs the model's tokenizer, and this SequenceProcessor "
                "has none; make one with it, or state coef= in place of dose=."
            )
        windows = reference_windows(self.tokenizer, self.parts.d_vocab, self.parts.context_length)
        norms: list[list[Tensor]] = [[] for _ in self.layers]
        for window in windows:
            for layer, stream in enumerate(self._streams(torch.tensor([window]), site)):
                norms[layer].append(stream[0, 1:].float().norm(dim=-1).cpu())
        for layer, found in enumerate(norms):
            self._median_norms[HookPoint(layer, site)] = float(torch.cat(found).median())

    @torch.no_grad()
    def _streams(self, ids: Tensor, site: str) -> list[Tensor]:
        """The stream at a site of every layer, [batch, pos, d_model] each."""
        seen: list[Tensor] = []
        install = install_input_hook if site == "resid_pre" else install_output_hook
        with ExitStack() as stack, evaluating(self.parts.causal):
            for layer in self.layers:
                stack.callback(install(layer, lambda value: seen.append(value)).remove)
            given = ids.to(self.parts.device)
            self.parts.in_forward(lambda: self.parts.decoder(input_ids=given, use_cache=False))
        return seen

    @torch.no_grad()
    def _check(self, layers: list[nn.Module]) -> None:
        ids = torch.arange(1, 5, device=self.parts.device)[None] % self.parts.d_vocab
        before: list[Tensor] = []
        after: list[Tensor] = []
        with ExitStack() as stack, evaluating(self.parts.causal):
            for layer in layers:
                stack.callback(install_input_hook(layer, lambda value: before.append(value.clone())).remove)
                stack.callback(install_output_hook(layer, lambda value: after.append(value.clone())).remove)
            # not output_hidden_states=True: that would leave hooks of transformers' own on the model
            self.parts.in_forward(lambda: self.parts.decoder(input_ids=ids, use_cache=False))
        alike = len(before) == len(after) == len(layers) and all(map(_equal, after, before[1:]))
        if not alike:
            raise InputError(
                f"The layers of {type(self.parts.causal).__name__} do not pass the residual stream on to each other, "
                "so a plan cannot run on them; score without a plan, or through an engine."
            )


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.to(b.device), b)


def _no_norm(layer: int, site: str) -> float:
    raise AssertionError("no plan, no dose")


_NO_MODEL = ModelInfo("", None, "", "none", 0, 0, 0, 0, "")
