"""Supports as masks of tensors, and the measurements of a step on a support that is given, not found."""

import math

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steerlab.core.policy import SamplingPolicy
from steerlab.core.token_sets import BITS, DROPPED, KEPT, TokenSets, id_dtype, shortest_forms
from steerlab.measures.nucleus import widen
from steerlab.measures.steps import PolicyShape, PolicySteps, policy_steps, policy_steps_gradient


def sets_of(inside: Bool[Tensor, "steps d_vocab"]) -> TokenSets:
    """Compact sets from masks on any device; what is read back is the compact form alone."""
    return TokenSets.of_masks(inside.numpy()) if inside.device.type == "cpu" else _sets_on_device(inside)


def _sets_on_device(inside: Tensor) -> TokenSets:
    d_vocab = inside.shape[1]
    sizes = inside.sum(dim=1).cpu().numpy()
    kinds = shortest_forms(sizes, d_vocab)
    parts = {}
    for kind in (KEPT, DROPPED):
        rows = _rows(inside, kinds == kind)
        ids = (rows if kind == KEPT else ~rows).nonzero()[:, 1].cpu().numpy()
        parts[kind] = ids.astype(id_dtype(d_vocab)).view(np.uint8)
    parts[BITS] = _packed(_rows(inside, kinds == BITS)).cpu().numpy().ravel()
    return TokenSets.assembled(d_vocab, kinds, sizes, parts)


def masks_of(sets: TokenSets, device: torch.device | str = "cpu") -> Bool[Tensor, "steps d_vocab"]:
    """Which tokens are in each set, on a device."""
    is_cpu = torch.device(device).type == "cpu"
    return torch.from_numpy(sets.masks()) if is_cpu else _masks_on_device(sets, device)


def _masks_on_device(sets: TokenSets, device: torch.device | str) -> Tensor:
    inside = torch.from_numpy(sets.kinds == DROPPED).to(device)[:, None].repeat(1, sets.d_vocab)
    for kind in (KEPT, DROPPED):
        steps, ids = (torch.from_numpy(values).to(device) for values in sets.listed(kind))
        inside[steps, ids] = kind == KEPT
    inside[torch.from_numpy(sets.kinds == BITS).to(device)] = torch.from_numpy(sets.bits()).to(device)
    return inside


@torch.no_grad()
def replayed_steps(
    logits: Float[Tensor, "rows d_vocab"],
    tokens: Int[Tensor, " rows"],
    policy: SamplingPolicy,
    inside: Bool[Tensor, "rows d_vocab"],
    *,
    dtype: torch.dtype | None = None,
    with_shape: bool = False,
    eos_ids: Int[Tensor, " eos"] | None = None,
) -> PolicySteps:
    """As `policy_steps`, on supports that are given: q is the softmax of logits / temperature over them.

    Args:
        logits: raw logits, after any repetition penalty.
        tokens: the token of each row; one outside its support has log q = −inf.
        policy: the sampling policy, of which only the temperature counts; a greedy one has supports of one token.
        inside: the supports, each with a token that has a finite logit.
        dtype: as in `policy_steps`.
        with_shape: as in `policy_steps`.
        eos_ids: as in `policy_steps`.

    Examples:
        >>> p = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
        >>> steps = replayed_steps(p.log(), torch.tensor([1]), SamplingPolicy(top_p=0.9), p > 0.2)
        >>> round(steps.log_qs.exp().item(), 4)
        0.375
    """
    whole = policy_steps(logits, tokens, SamplingPolicy(), dtype=dtype)
    kept = logits.masked_fill(~inside, -math.inf)
    found = policy_steps(kept, tokens, _temperature_only(policy), dtype=dtype, with_shape=with_shape, eos_ids=eos_ids)
    shape = None if found.shape is None else _against_the_rest(found.shape, logits, policy, inside, dtype)
    return PolicySteps(whole.log_probs, found.log_qs, found.entropies, None, shape)


@torch.no_grad()
def replayed_gradient(
    logits: Float[Tensor, "rows d_vocab"],
    tokens: Int[Tensor, " rows"],
    policy: SamplingPolicy,
    inside: Bool[Tensor, "rows d_vocab"],
    *,
    by_log_probs: Float[Tensor, " rows"] | None,
    by_log_qs: Float[Tensor, " rows"] | None,
    by_entropies: Float[Tensor, " rows"] | None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "rows d_vocab"]:
    """As `policy_steps_gradient`, of the measurements that `replayed_steps` makes."""
    total = policy_steps_gradient(
        logits,
        tokens,
        SamplingPolicy(),
        None,
        by_log_probs=by_log_probs,
        by_log_qs=None,
        by_entropies=None,
        dtype=dtype,
    )
    if policy.is_greedy or (by_log_qs is None and by_entropies is None):
        return total
    if by_log_qs is not None:
        by_log_qs = by_log_qs.masked_fill(~inside.gather(-1, tokens[:, None])[:, 0], 0.0)
    return total + policy_steps_gradient(
        logits.masked_fill(~inside, -math.inf),
        tokens,
        _temperature_only(policy),
        None,
        by_log_probs=None,
        by_log_qs=by_log_qs,
        by_entropies=by_entropies,
        dtype=dtype,
    )


def _temperature_only(policy: SamplingPolicy) -> SamplingPolicy:
    return SamplingPolicy() if policy.is_greedy else SamplingPolicy(temperature=policy.temperature)


def _against_the_rest(
    shape: PolicyShape, logits: Tensor, policy: SamplingPolicy, inside: Tensor, dtype: torch.dtype | None
) -> PolicyShape:
    """The shape on the support, with what compares it to the rest of the vocabulary."""
    scaled = widen(logits, dtype) / _temperature_only(policy).temperature
    total = scaled.logsumexp(dim=-1)
    head = (scaled.masked_fill(~inside, -math.inf).logsumexp(dim=-1) - total).exp()
    tail = (scaled.masked_fill(inside, -math.inf).logsumexp(dim=-1) - total).exp()
    best = logits.topk(min(2, logits.shape[-1]), dim=-1).values.to(scaled.dtype)
    margin = best[:, 0] - best[:, 1] if best.shape[-1] > 1 else torch.full_like(head, math.inf)
    entropy = torch.special.entr(head) + torch.special.entr(tail)
    own = {"head_mass": head, "tail_mass": tail, "two_point_entropy": entropy, "margin": margin}
    return PolicyShape(**(vars(shape) | own))


def _rows(inside: Tensor, chosen: np.ndarray) -> Tensor:
    return inside[torch.from_numpy(np.nonzero(chosen)[0]).to(inside.device)]


def _packed(inside: Tensor) -> Tensor:
    """Eight tokens a byte, the lowest id in the lowest bit."""
    missing = -inside.shape[1] % 8
    padded = torch.nn.functional.pad(inside.to(torch.uint8), (0, missing)).unflatten(-1, (-1, 8))
    return (padded << torch.arange(8, dtype=torch.uint8, device=inside.device)).sum(dim=-1, dtype=torch.uint8)
