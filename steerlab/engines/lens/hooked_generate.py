"""Generation with hooks of your own: token ids in, token ids out."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from steerlab._runtime.decoding import Decoding, StopRules, eos_token_ids
from steerlab._runtime.growth import fresh_rows
from steerlab._runtime.hooks import HookPair
from steerlab.core._arguments import explains_arguments
from steerlab.core._not_finite_errors import not_finite
from steerlab.core._numbers import as_integer, as_list, as_number, check_flag, check_integer, shown
from steerlab.core._seeds import check_seed, draw_keys, row_key
from steerlab.core._spelling import decode
from steerlab.core._text import encode_prompt
from steerlab.core.errors import ContextLengthError, InputError, PromptError, VectorShapeError, VectorValueError
from steerlab.core.policy import SamplingPolicy
from steerlab.engines.lens._backends import choose_backend
from steerlab.engines.lens._hooking import find_hook_point
from steerlab.engines.lens._info import context_length
from steerlab.engines.lens._legacy import legacy_rows
from steerlab.steering._row_values import row_of, shape_of
from steerlab.steering._run import PlanRun
from steerlab.steering.plan import Plan

HookFunction = Callable[..., Any]


class SteeringHook:
    """A hook that adds alpha times a vector at every position. Made by `create_steering_hook`.

    The vector is copied once per device and dtype, not per call.
    """

    def __init__(self, vector: Tensor, alpha: float) -> None:
        self.vector, self.alpha = vector.detach(), float(alpha)
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __call__(self, value: Tensor, hook: Any = None) -> Tensor:
        """The activation with the vector added, in its own dtype."""
        key = (value.device, value.dtype)
        if key not in self._copies:
            if value.shape[-1] != self.vector.numel():
                raise VectorShapeError(
                    f"The steering vector has shape {tuple(self.vector.shape)}, the activation "
                    f"{tuple(value.shape)}; its last dimension must be {value.shape[-1]}."
                )
            scaled = self.alpha * self.vector.to(value.device, torch.float32)
            self._copies[key] = scaled.to(value.dtype)
        return value + self._copies[key]


@explains_arguments
def create_steering_hook(steering_vector: Tensor, alpha: float) -> SteeringHook:
    """A hook function that adds `alpha * steering_vector` to an activation, at every position.

    Args:
        steering_vector: shape [d_model]; any float dtype, any device.
        alpha: raw coefficient.

    Raises:
        VectorShapeError: if the vector is not one row; here, or at the first call if its width is not the model's.
        VectorValueError: if the vector or alpha is not finite.
    """
    row = row_of(steering_vector) if hasattr(steering_vector, "shape") else None
    factor = as_number(alpha)
    if row is None:
        raise VectorShapeError(f"A steering vector has shape [d_model], got {shape_of(steering_vector)}.")
    if factor is None or not bool(row.isfinite().all()):
        raise VectorValueError(f"alpha and every entry of a steering vector are finite; alpha is {shown(alpha)}.")
    return SteeringHook(row, factor)


@explains_arguments
@torch.no_grad()
def hooked_generate(
    model: Any,
    input_ids: Int[Tensor, "batch prompt"],
    max_tokens: int,
    layer_name: str | Sequence[HookPair],
    hook_fn: HookFunction | None = None,
    temperature: float = 0.7,
    do_sample: bool = True,
    top_p: float = 0.9,
    *,
    attention_mask: Int[Tensor, "batch prompt"] | None = None,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
    use_cache: bool = True,
    engine: str = "auto",
) -> Int[Tensor, "batch total"]:
    """Generates with hooks active in every forward pass.

    Hooks are called as `hook_fn(activation, hook=point)`; what they return replaces the activation, None leaves it.
    With a cache the passes after the first hold one position; `steerlab.current_step()` gives a hook the absolute
    positions.

    Args:
        model: a TransformerBridge, or anything with `.hooks(fwd_hooks=...)` and a forward pass on token ids, such as a
            HookedTransformer.
        input_ids: prompts, padded on either side if `attention_mask` says where; on any device.
        max_tokens: tokens to add at most; 0 returns the prompts.
        layer_name: a hook point, e.g. `blocks.14.hook_resid_post`; or a list of (name, function) pairs with
            `hook_fn=None`.
        hook_fn: the hook function.
        temperature: of sampling; 0 is greedy.
        do_sample: False is greedy.
        top_p: nucleus mass.
        attention_mask: 1 for tokens, 0 for padding; all ones by default, whatever the ids.
        top_k: keep the k most probable tokens; 0 keeps all.
        min_p: drop tokens less probable than this share of the most probable.
        seed: of the draws, each row with its own; None draws one from torch's global generator.
        stop_token_ids: a row ends after any of these; None means the model's EOS ids, () never.
        use_cache: False runs the whole sequence again for every token.
        engine: `auto`, `bridge` or `fast`; for other models than a TransformerBridge, `auto`.

    Returns:
        The prompts followed by the new tokens, on the device of `input_ids`; rows that ended early are right-padded.

    Raises:
        HookPointError: for an unknown hook point, or one that never fired.
        PolicyError, ContextLengthError, InputError: for values outside their range.
    """
    do_sample, use_cache = check_flag(do_sample, "do_sample"), check_flag(use_cache, "use_cache")
    policy = SamplingPolicy(temperature if do_sample else 0.0, top_p, top_k, min_p)
    max_tokens = check_integer(max_tokens, "max_tokens", least=0)
    hooks = _hook_pairs(layer_name, hook_fn)
    mask = _check_ids(input_ids, attention_mask)
    if hasattr(model, "original_model"):
        for name, _ in hooks:
            find_hook_point(model, name)
    if max_tokens == 0:
        return input_ids.clone()
    prompts = [row[keep].tolist() for row, keep in zip(input_ids.cpu(), mask, strict=True)]
    eos, pad = _ends(model, stop_token_ids)
    _check_vocabulary(model, prompts)
    _check_context(model, prompts, max_tokens)
    rows, around = _rows(model, prompts, max_tokens, hooks, use_cache, engine)
    key = int(torch.randint(2**62, ()).item()) if seed is None else check_seed(seed, len(prompts))
    keys = torch.from_numpy(np.stack([draw_keys(row_key(key, i, 0), max_tokens) for i in range(len(prompts))]))
    rules = StopRules(eos, (), max_tokens)
    with around:
        outputs = Decoding(rows, prompts, policy, keys, rules, with_log_probs=False).run()
    failed = [row for row, output in enumerate(outputs) if output.finish_reason == "error"]
    if failed:
        what = f"The logits of row{'s' * (len(failed) > 1)} {', '.join(map(str, failed))}"
        raise not_finite(what, next(model.parameters()).dtype, steered=bool(hooks))
    width = max(len(output.token_ids) for output in outputs)
    new = [output.token_ids + [pad] * (width - len(output.token_ids)) for output in outputs]
    return torch.cat([input_ids, torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device)], dim=1)


@explains_arguments
def generate_steered_response(
    model: Any,
    tokenizer: Any,
    prompt: str,
    layer_name: str,
    steering_vector: Tensor,
    alpha: float,
    max_tokens: int = 150,
    temperature: float = 0.7,
    do_sample: bool = True,
    top_p: float = 0.9,
) -> str:
    """The model's answer to one prompt with `alpha * steering_vector` added at a hook point, at every position.

    Args:
        model: as in `hooked_generate`.
        tokenizer: the model's tokenizer; with a chat template the prompt becomes a user turn, otherwise it runs plain.
        prompt: the user's text.
        layer_name: the hook point.
        steering_vector: shape [d_model].
        alpha: raw coefficient; 0 is the unsteered model.
        max_tokens: tokens to generate at most.
        temperature: of sampling.
        do_sample: False is greedy.
        top_p: nucleus mass.

    Returns:
        The answer alone, without special tokens, stripped.
    """
    chat = getattr(tokenizer, "chat_template", None) is not None
    encoded = encode_prompt(tokenizer, prompt, chat=chat, d_vocab=max(len(tokenizer), tokenizer.vocab_size))
    ids = torch.tensor([encoded.token_ids])
    hook = create_steering_hook(steering_vector, alpha)
    output = hooked_generate(model, ids, max_tokens, layer_name, hook, temperature, do_sample, top_p)
    return decode(tokenizer, output[0, ids.shape[1] :].tolist()).strip()


def _hook_pairs(layer_name: str | Sequence[HookPair], hook_fn: HookFunction | None) -> list[HookPair]:
    if isinstance(layer_name, str):
        if hook_fn is None:
            raise InputError(f"layer_name is {layer_name!r}, but hook_fn is missing; pass the hook function.")
        return [(layer_name, hook_fn)]
    pairs = list(layer_name)
    if hook_fn is not None:
        raise InputError("layer_name is a list of (name, function) pairs; leave hook_fn=None.")
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and callable(pair[1])):
            raise InputError(f"layer_name takes a name or (name, function) pairs, got {pair!r:.80}.")
    return pairs


def _check_ids(input_ids: Any, attention_mask: Any) -> Tensor:
    """The mask as bool on the CPU."""
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
        shape = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise PromptError(f"input_ids is an integer tensor of shape [batch, prompt], got {shape}.")
    if attention_mask is None:
        mask = torch.ones(input_ids.shape, dtype=torch.bool)
    else:
        if attention_mask.shape != input_ids.shape:
            raise PromptError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}."
            )
        mask = attention_mask.cpu().bool()
    empty = (~mask.any(dim=1)).nonzero()[:, 0].tolist()
    if empty or input_ids.shape[0] == 0:
        raise PromptError(f"Rows without a token: {empty or 'there are no rows'}. Start from the model's BOS, say.")
    return mask


def _ends(model: Any, stop_token_ids: Sequence[int] | None) -> tuple[frozenset[int], int]:
    """Ids that end a row, and the id that pads it afterwards."""
    tokenizer = getattr(model, "tokenizer", None)
    eos = eos_token_ids(getattr(model, "original_model", model), tokenizer)
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        pad = min(eos, default=0)
    return (eos if stop_token_ids is None else _token_ids(stop_token_ids)), pad


def _token_ids(ids: Any) -> frozenset[int]:
    listed = as_list(ids)
    found = frozenset() if listed is None else frozenset(map(as_integer, listed))
    if listed is None or None in found:
        raise InputError(f"stop_token_ids is None or a sequence of token ids, e.g. (2,); got {ids!r:.80}.")
    return frozenset(i for i in found if i is not None)


def _check_vocabulary(model: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Checks that the model has every id; on a GPU an unknown one would end the process's use of the device."""
    if hasattr(model, "original_model"):
        d_vocab = int(model.original_model.get_input_embeddings().weight.shape[0])
    else:
        d_vocab = getattr(getattr(model, "cfg", None), "d_vocab", None) or math.inf
    for row, prompt in enumerate(prompts):
        if not (0 <= min(prompt) and max(prompt) < d_vocab):
            bad = next(i for i in prompt if not 0 <= i < d_vocab)
            raise PromptError(f"Row {row} holds token id {bad}, outside the model's vocabulary of 0 to {d_vocab - 1}.")


def _check_context(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    limit = context_length(model)
    longest = max(map(len, prompts))
    if limit is not None and longest + max_tokens > limit:
        raise ContextLengthError(
            f"A prompt of {longest} tokens and {max_tokens} new ones need {longest + max_tokens - limit} tokens more "
            f"than the model's context of {limit}."
        )


def _rows(
    model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, hooks: list[HookPair], use_cache: bool, engine: str
) -> tuple[Any, AbstractContextManager[None]]:
    """Rows on the right backend, and the context in which they run."""
    lens = [len(prompt) for prompt in prompts]
    if not hasattr(model, "original_model"):
        if engine != "auto":
            raise InputError(
                f"engine={engine!r} is for a TransformerBridge; {type(model).__name__} runs one way only, so leave "
                "engine='auto'."
            )
        return legacy_rows(model, lens, hooks, use_cache=use_cache)
    if engine in ("graph", "compiled"):
        raise InputError(
            f"engine={engine!r} runs plans, whose edits are data; call engine.generate(plan=…, engine={engine!r}). "
            "A function of yours runs on 'fast' or 'bridge'."
        )
    backend = choose_backend(model, [name for name, _ in hooks], engine)
    run = PlanRun(Plan(), len(prompts))
    return fresh_rows(backend.model, run, lens, "step", use_cache=use_cache), backend.attached(hooks)
