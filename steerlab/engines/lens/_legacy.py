"""Models that are not TransformerBridges: HookedTransformer (TransformerLens before 4.0), and others with `.hooks`."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from steerlab._runtime.arguments import optional_arguments
from steerlab._runtime.hooks import HookPair, alone, require_fired, same_shape_hook
from steerlab._runtime.step import Step, running
from steerlab.core.errors import BackendMissingError, InputError, PromptError
from steerlab.engines.lens._hooking import find_hook_point
from steerlab.steering.positions._rows import RowPositions

# Where the key-value cache of HookedTransformer is: in 3.x, and in 2.x.
CACHES = [
    ("transformer_lens.cache.key_value_cache", "TransformerLensKeyValueCache"),
    ("transformer_lens.past_key_value_caching", "HookedTransformerKeyValueCache"),
]
# Settings of a HookedTransformer whose arithmetic counts places in the batch, padding included.
COUNT_PADDING = ("use_dynamic_ntk_rope", "use_logn_attn")


def legacy_rows(
    model: Any, prompt_lens: Sequence[int], hooks: Sequence[HookPair], *, use_cache: bool
) -> tuple["LegacyRows", AbstractContextManager[None]]:
    """Rows on such a model, and the context in which they run with these hooks.

    Args:
        model: a HookedTransformer; or any module with `.hooks(fwd_hooks=...)` whose call on token ids returns logits.
            It runs uncached unless its forward takes `past_kv_cache`.
        prompt_lens: prompt length of each row.
        hooks: (name, function) pairs, with the model's own names.
        use_cache: False runs all tokens again in every pass.

    Raises:
        InputError: for a model without `.hooks`.
        HookPointError: for an unknown hook point; in the context, for one that never fired.
    """
    if not isinstance(model, nn.Module) or not callable(getattr(model, "hooks", None)):
        raise InputError(
            f"{type(model).__name__} is no module with .hooks(fwd_hooks=...); pass a TransformerBridge "
            "(steerlab.load(...).model) or a HookedTransformer."
        )
    if hasattr(model, "hook_dict"):
        for name, _ in hooks:
            find_hook_point(model, name)
    return LegacyRows(model, prompt_lens, use_cache=use_cache), _attached(model, hooks)


@contextmanager
def _attached(model: Any, hooks: Sequence[HookPair]) -> Iterator[None]:
    checked = [(name, same_shape_hook(function)) for name, function in hooks]
    with alone(model), require_fired(checked) as listening, model.hooks(fwd_hooks=listening):
        yield


class LegacyRows:
    """Rows that grow by blocks of tokens; the counterpart of `Rows`.

    The mask is always stated, so that the model never guesses padding from ids. HookedTransformer counts positions
    along the mask, so that a row gives the same numbers alone and in any batch.

    Args:
        model: the model to call.
        prompt_lens: prompt length of each row.
        use_cache: False runs all tokens again in every pass.
    """

    can_narrow = True

    def __init__(self, model: Any, prompt_lens: Sequence[int], *, use_cache: bool = True) -> None:
        self.model = model
        self.device: torch.device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
        self.prompt_lens: Int[Tensor, " batch"] = torch.tensor(list(prompt_lens), device=self.device)
        self._optional = optional_arguments(model, "attention_mask", "past_kv_cache")
        self._cache = _new_cache(model, len(prompt_lens)) if use_cache and "past_kv_cache" in self._optional else None
        self._counts = torch.zeros_like(self.prompt_lens)
        self._rows = torch.arange(len(prompt_lens), device=self.device)
        self._passes = 0
        self._blocks: list[tuple[Tensor, Tensor, Tensor]] = []

    def extend(
        self, ids: Int[Tensor, "batch pos"], valid: Bool[Tensor, "batch pos"], *, keep: int = 0
    ) -> Float[Tensor, "batch kept d_vocab"]:
        """Runs one more block of tokens; see `Rows.extend`.

        Raises:
            PromptError: for padding on a model that cannot leave it out of account.
        """
        reason = None if bool(valid.all()) else self._why_no_padding()
        if reason is not None:
            raise PromptError(f"{reason} Prompts of different lengths cannot share a batch; call once for each.")
        ids, valid = ids.to(self.device), valid.to(self.device)
        own = (self._counts[:, None] + valid.cumsum(dim=-1) - 1).masked_fill(~valid, -1)
        self._counts = self._counts + valid.sum(dim=-1)
        return self._pass(ids, valid, own)[:, -keep:]

    def step(self, tokens: Int[Tensor, " batch"]) -> Float[Tensor, "batch 1 d_vocab"]:
        """Runs one token per row; a negative id means that the row has ended."""
        fed = tokens.to(self.device)[:, None]
        own = self._counts[:, None].masked_fill(fed < 0, -1)
        self._counts = self._counts + 1
        return self._pass(fed.clamp_min(0), torch.ones_like(fed, dtype=torch.bool), own)[:, -1:]

    def narrow(self, kept: Int[Tensor, " rows"]) -> None:
        """Drops all rows but these."""
        chosen = kept.to(self.device)
        self.prompt_lens, self._counts, self._rows = self.prompt_lens[chosen], self._counts[chosen], self._rows[chosen]
        self._blocks = [(ids[chosen], valid[chosen], own[chosen]) for ids, valid, own in self._blocks]
        if self._cache is not None:
            _narrow_cache(self._cache, chosen)

    def _pass(self, ids: Tensor, valid: Tensor, own: Tensor) -> Tensor:
        """One call of the model; `own` has −1 where there is no live token."""
        if self._cache is None:
            ended = (own < 0).all(dim=-1, keepdim=True)
            self._blocks.append((ids, valid, own))
            ids, valid, own = (torch.cat(parts, dim=1) for parts in zip(*self._blocks, strict=True))
            own = own.masked_fill(ended, -1)
        known = {"attention_mask": valid.long(), "past_kv_cache": self._cache}
        with running(Step(RowPositions(own, self.prompt_lens), self._passes, self._rows)):
            logits = self.model(ids, **{name: known[name] for name in self._optional})
        self._passes += 1
        return logits

    def _why_no_padding(self) -> str | None:
        """Why this model cannot take a padded batch, in a sentence; None if it can."""
        if "attention_mask" not in self._optional:
            return f"The forward pass of {type(self.model).__name__} takes no attention_mask."
        counting = [name for name in COUNT_PADDING if getattr(getattr(self.model, "cfg", None), name, False)]
        return f"With {counting[0]} the model counts padding as tokens." if counting else None


def _new_cache(model: Any, n_rows: int) -> Any:
    """An empty key-value cache of HookedTransformer."""
    for module, name in CACHES:
        try:
            return getattr(importlib.import_module(module), name).init_cache(model.cfg, model.cfg.device, n_rows)
        except ModuleNotFoundError:
            continue
    raise BackendMissingError(
        f"The forward pass of {type(model).__name__} takes past_kv_cache, but no TransformerLens with that cache is "
        "installed; pip install 'transformer-lens>=2.16,<4', or pass use_cache=False."
    )


def _narrow_cache(cache: Any, chosen: Int[Tensor, " rows"]) -> None:
    for entry in cache.entries:
        index = chosen.to(entry.past_keys.device)
        entry.past_keys, entry.past_values = entry.past_keys[index], entry.past_values[index]
    cache.previous_attention_mask = cache.previous_attention_mask[chosen.to(cache.previous_attention_mask.device)]
