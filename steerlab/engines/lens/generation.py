"""The generation loop: one cached pass per token, hooks and plan active in each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steerlab.core.policy import SamplingPolicy
from steerlab.engines.lens.rows import Rows, left_padded
from steerlab.measures.log_probs import chosen_log_probs
from steerlab.measures.nucleus import apply_repetition_penalty, policy_log_probs, sample_by_inverse_cdf

FinishReason = Literal["eos", "stop", "length", "error"]


@dataclass(frozen=True)
class StopRules:
    """When a row ends.

    Attributes:
        eos_ids: a row ends after any of these.
        strings: a row ends when its decoded text contains any of these.
        max_new_tokens: a row ends after this many tokens.
    """

    eos_ids: frozenset[int]
    strings: tuple[str, ...]
    max_new_tokens: int


@dataclass
class RowOutput:
    """What a row has produced so far."""

    token_ids: list[int] = field(default_factory=list)
    token_log_probs: list[float] = field(default_factory=list)
    token_log_qs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


def generate_rows(
    rows: Rows,
    prompts: Sequence[Sequence[int]],
    policy: SamplingPolicy,
    uniforms: Float[Tensor, "batch steps"],
    rules: StopRules,
    tokenizer: Any,
) -> list[RowOutput]:
    """Continues every prompt until each row has ended.

    Args:
        rows: fresh rows, one per prompt.
        prompts: the ids of each prompt.
        policy: the sampling policy.
        uniforms: each row's draws, one per step; unused when greedy.
        rules: when rows end.
        tokenizer: decodes for stop strings.
    """
    outputs = [RowOutput() for _ in prompts]
    if rules.max_new_tokens == 0:
        for output in outputs:
            output.finish_reason = "length"
        return outputs
    ids, valid = left_padded(prompts, rows.device)
    logits = rows.extend(ids, valid, keep=1)[:, -1]
    seen = _seen(ids, valid, logits.shape[-1])
    for step in range(rules.max_new_tokens):
        tokens, log_probs, log_qs = _draw(logits, seen, policy, uniforms[:, step])
        _record(outputs, tokens, log_probs, log_qs, rules, tokenizer)
        live = torch.tensor([output.finish_reason is None for output in outputs], device=rows.device)
        if not live.any():
            break
        fed = tokens.to(rows.device)[:, None]
        seen.scatter_(1, fed.to(seen.device), True)
        logits = rows.extend(fed, live[:, None], keep=1)[:, -1]
    return outputs


def _draw(
    logits: Float[Tensor, "batch d_vocab"], seen: Tensor, policy: SamplingPolicy, uniforms: Float[Tensor, " batch"]
) -> tuple[Int[Tensor, " batch"], Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Tokens with their log p under the model and log q under the policy."""
    penalised = apply_repetition_penalty(logits.to(torch.float32), seen, policy)
    log_q = policy_log_probs(penalised, policy)
    if policy.is_greedy:
        tokens = log_q.argmax(dim=-1)
    else:
        tokens = sample_by_inverse_cdf(log_q, uniforms.to(logits.device))
    return tokens, chosen_log_probs(logits, tokens), log_q.gather(-1, tokens[:, None])[:, 0]


def _record(
    outputs: list[RowOutput], tokens: Tensor, log_probs: Tensor, log_qs: Tensor, rules: StopRules, tokenizer: Any
) -> None:
    values = zip(outputs, tokens.tolist(), log_probs.tolist(), log_qs.tolist(), strict=True)
    for output, token, log_prob, log_q in values:
        if output.finish_reason is not None:
            continue
        output.token_ids.append(token)
        output.token_log_probs.append(log_prob)
        output.token_log_qs.append(log_q)
        output.finish_reason = _ended(output, rules, tokenizer)


def _ended(output: RowOutput, rules: StopRules, tokenizer: Any) -> FinishReason | None:
    if output.token_ids[-1] in rules.eos_ids:
        return "eos"
    if rules.strings and find_stop(decode(tokenizer, output.token_ids), rules.strings) is not None:
        return "stop"
    return "length" if len(output.token_ids) == rules.max_new_tokens else None


def _seen(ids: Tensor, valid: Tensor, d_vocab: int) -> Tensor:
    """Which tokens each row holds."""
    seen = torch.zeros(ids.shape[0], d_vocab + 1, dtype=torch.bool, device=ids.device)
    return seen.scatter_(1, ids.masked_fill(~valid, d_vocab), True)[:, :d_vocab]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of generated ids, special tokens left out, spaces as they are."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def find_stop(text: str, strings: Sequence[str]) -> int | None:
    """Where the earliest stop string begins, if there is one."""
    found = [place for place in (text.find(string) for string in strings) if place >= 0]
    return min(found) if found else None
