"""What a SequenceProcessor returns: sequences, and what scoring says of their tokens.

B prompts, G responses per prompt. All results keep the nesting `[prompt][response]`; everything in it is about the
generated tokens alone. Quantities are in nats.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from steerlab.core._text import prompt_words
from steerlab.core.errors import InputError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.receipts import Receipt, Receipts, receipts_fold
from steerlab.core.token_sets import TokenSets
from steerlab.display import Piece, Shown, Table, count, figure
from steerlab.sequences._storage import as_arrays, cut, joined, joined_arrays, read_results, write_results

if TYPE_CHECKING:
    import pandas as pd

Nested = list[list[Any]]
Support: TypeAlias = Literal["recomputed", "replayed"]
"""Which set q is taken on: the nucleus of the scoring pass, or the set that the sampler drew the token from."""
ROWS_SHOWN = 50
"""Responses that a notebook shows."""


@dataclass(frozen=True, repr=False)
class BatchedSequences(Shown):
    """Prompts with their responses, as token ids.

    A row is `left padding, prompt, response, right padding`: every prompt ends at column `prompt_lens[0]`, and the
    response (b, g) fills the `gen_lens[b][g]` columns after it. The token at column i is scored by the logits at i − 1.
    Padding is what the attention mask says, never an id: an emitted EOS is scored even if it is the padding id.

    Attributes:
        sequences: token ids, [B, G, L_total], int64, on the CPU.
        prompt_lens: the padded prompt length, the same number for each of the B prompts.
        gen_lens: generated tokens of each response, `[B][G]`; an emitted EOS and the token that completes a stop string
            count.
        attention_masks: 1 for tokens, 0 for padding, [B, G, L_total].
        responses_text: decoded responses, `[B][G]`, special tokens left out, up to the end of a stop string.
        finish_reasons: `eos`, `stop`, `length` or `error`, `[B][G]`; None if unknown.
        sampler_logqs: log q of each token as the sampler recorded it, nats, `[B][G]` arrays; None if unknown. Every
            engine records the exact one under every policy.
        prompts: the prompts as given; None if unknown.
        examples: the data set's row of each prompt; None without a data set.
        supports: the set of tokens that each token was drawn from, `[B][G]`, one set per token, stored compactly; None
            if unknown.
        policy: the policy they were drawn under; None if unknown.
        rewards: one float per response, `[B][G]`; None until some were computed.
        pool_indices: which row of its pool each prompt is, int64 [B]; None unless drawn with replacement.
        receipts: what the call's plan edited, one per response in order b·G + g; not saved.

    Raises:
        InputError: if shapes, lengths and mask contradict each other.
    """

    sequences: Tensor
    prompt_lens: list[int]
    gen_lens: list[list[int]]
    attention_masks: Tensor
    responses_text: list[list[str]]
    finish_reasons: list[list[str]] | None = None
    sampler_logqs: list[list[np.ndarray]] | None = field(default=None, repr=False)
    prompts: list[Any] | None = field(default=None, repr=False)
    examples: list[Mapping[str, Any]] | None = field(default=None, repr=False)
    supports: list[list[TokenSets]] | None = field(default=None, repr=False)
    policy: SamplingPolicy | None = None
    rewards: list[list[float]] | None = field(default=None, repr=False)
    pool_indices: np.ndarray | None = field(default=None, repr=False)
    receipts: tuple[Receipt, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "receipts", Receipts(self.receipts))
        ids, mask = self.sequences, self.attention_masks
        if ids.dim() != 3 or ids.shape != mask.shape:
            raise InputError(
                f"sequences and attention_masks have one shape [B, G, L], got {tuple(ids.shape)} and "
                f"{tuple(mask.shape)}."
            )
        n_prompts, n_samples = ids.shape[:2]
        sizes = {"prompt_lens": len(self.prompt_lens), "gen_lens": len(self.gen_lens)}
        for name, size in sizes.items():
            if size != n_prompts:
                raise InputError(f"{name} holds one entry per prompt, {n_prompts}, got {size}.")
        if any(len(row) != n_samples for row in self.gen_lens):
            raise InputError(f"gen_lens holds {n_samples} lengths per prompt, got {[len(r) for r in self.gen_lens]}.")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise InputError(f"sequences holds integer token ids, got {ids.dtype}.")
        self._check_nested()
        _check_mask(mask, self.prompt_lens, self.gen_lens)

    def _finding(self) -> str:
        n_tokens = sum(map(sum, self.gen_lens))
        return f"{count(self.n_prompts, 'prompt')} × {count(self.n_samples, 'response')}, {count(n_tokens, 'token')}"

    def _pieces(self) -> Sequence[Piece]:
        places = [(b, g) for b in range(self.n_prompts) for g in range(self.n_samples)]
        rows = [
            (
                b,
                g,
                None if self.prompts is None else prompt_words(self.prompts[b]),
                self.responses_text[b][g],
                self.gen_lens[b][g],
                None if self.finish_reasons is None else self.finish_reasons[b][g],
                None if self.sampler_logqs is None else float(self.sampler_logqs[b][g].sum()),
            )
            for b, g in places[:ROWS_SHOWN]
        ]
        columns = ["prompt", "sample", "prompt's text", "response", "tokens", "ended by", "log q (nats)"]
        known = [k for k in range(len(columns)) if any(row[k] is not None for row in rows)]
        shown = [[row[k] for k in known] for row in rows]
        table = Table([columns[k] for k in known], shown, ROWS_SHOWN, ".to_frame()", total=len(places))
        return [table, *receipts_fold(self.receipts)]

    def _check_nested(self) -> None:
        per_prompt = ("prompts", "examples", "pool_indices")
        per_response = ("responses_text", "finish_reasons", "sampler_logqs", "supports", "rewards")
        for name in per_response + per_prompt:
            value = getattr(self, name)
            if value is None:
                continue
            nested = name in per_response
            if len(value) != self.n_prompts or (nested and any(len(row) != self.n_samples for row in value)):
                inner = f", each with {self.n_samples} for its responses" if nested else ""
                raise InputError(f"{name} holds one entry for each of the {self.n_prompts} prompts{inner}.")
        if self.supports is not None and [[len(sets) for sets in row] for row in self.supports] != self.gen_lens:
            raise InputError("supports holds one set per generated token, and the lengths differ from gen_lens.")

    @property
    def n_prompts(self) -> int:
        """B."""
        return self.sequences.shape[0]

    @property
    def n_samples(self) -> int:
        """G."""
        return self.sequences.shape[1]

    def prompt_ids(self, prompt: int, sample: int = 0) -> list[int]:
        """Ids of a prompt without its padding."""
        end = self.prompt_lens[prompt]
        ids = self.sequences[prompt, sample, :end]
        return ids[self.attention_masks[prompt, sample, :end].bool()].tolist()

    def response_ids(self, prompt: int, sample: int) -> list[int]:
        """Ids of a response without padding."""
        start = self.prompt_lens[prompt]
        return self.sequences[prompt, sample, start : start + self.gen_lens[prompt][sample]].tolist()

    def select(self, places: Sequence[tuple[int, int]]) -> "BatchedSequences":
        """The responses at these (prompt, sample) places, each with its prompt, as B = number of places and G = 1.

        Raises:
            InputError: for a place that is not there.
        """
        sizes = self.n_prompts, self.n_samples
        outside = [place for place in places if not all(-n <= k < n for k, n in zip(place, sizes, strict=True))]
        if outside:
            raise InputError(
                f"Places are (prompt, sample), of {sizes[0]} prompts with {sizes[1]} samples; got {outside[0]}."
            )
        made = BatchedSequences.from_ids(
            [self.prompt_ids(b, g) for b, g in places],
            [[self.response_ids(b, g)] for b, g in places],
            responses_text=[[self.responses_text[b][g]] for b, g in places],
        )
        return replace(
            made,
            finish_reasons=self.finish_reasons and [[self.finish_reasons[b][g]] for b, g in places],
            sampler_logqs=self.sampler_logqs and [[self.sampler_logqs[b][g]] for b, g in places],
            prompts=self.prompts and [self.prompts[b] for b, _ in places],
            examples=self.examples and [self.examples[b] for b, _ in places],
            supports=self.supports and [[self.supports[b][g]] for b, g in places],
            policy=self.policy,
            rewards=self.rewards and [[self.rewards[b][g]] for b, g in places],
            pool_indices=None if self.pool_indices is None else self.pool_indices[[b for b, _ in places]],
        )

    def save(self, path: str | Path) -> Path:
        """Writes a JSON file and, beside it, the tensors; see `steerlab.sequences._storage`."""
        tensors = {"sequences": self.sequences, "attention_masks": self.attention_masks}
        if self.sampler_logqs is not None:
            tensors["sampler_logqs"] = joined_arrays(self.sampler_logqs)
        if self.pool_indices is not None:
            tensors["pool_indices"] = torch.from_numpy(self.pool_indices)
        names = ("prompt_lens", "gen_lens", "responses_text", "finish_reasons", "prompts", "examples")
        data = {name: getattr(self, name) for name in names}
        data["policy"] = None if self.policy is None else asdict(self.policy)
        data["rewards"] = None if self.rewards is None else without_nan(self.rewards)
        if self.supports is not None:
            every = TokenSets.joined([sets for row in self.supports for sets in row])
            data["support_vocabulary"] = every.d_vocab
            tensors |= {f"support_{name}": torch.from_numpy(getattr(every, name)) for name in SUPPORT_PARTS}
        return write_results(path, "sequences", data, tensors)

    @classmethod
    def load(cls, path: str | Path) -> "BatchedSequences":
        """Reads what `save` wrote.

        Raises:
            DataError: if there is no such file, or it is damaged.
        """
        return read_results(path, "sequences", _sequences)

    @classmethod
    def from_ids(
        cls,
        prompt_ids: Sequence[Sequence[int]],
        response_ids: Sequence[Sequence[Sequence[int]]],
        *,
        pad_id: int = 0,
        responses_text: list[list[str]] | None = None,
        **more: Any,
    ) -> "BatchedSequences":
        """Sequences from ids: one list per prompt, and as many lists of responses, G each.

        Args:
            prompt_ids: ids of each prompt.
            response_ids: `[B][G]` ids of each response.
            pad_id: what padding holds; any id will do.
            responses_text: decoded responses, if known.
            **more: the optional fields.

        Raises:
            InputError: for an empty prompt, or rows of unequal length.

        Examples:
            >>> made = BatchedSequences.from_ids([[5, 6], [7]], [[[1]], [[2, 3]]])
            >>> made.sequences.tolist(), made.attention_masks.tolist()
            ([[[5, 6, 1, 0]], [[0, 7, 2, 3]]], [[[1, 1, 1, 0]], [[0, 1, 1, 1]]])
        """
        if not all(hasattr(response, "__len__") for row in response_ids for response in row):
            raise InputError(
                "response_ids is, per prompt, a list of responses, each of them a list of ids: [[[3, 4]]] for one "
                f"prompt with one response; got {response_ids!r:.60}."
            )
        sizes = {len(row) for row in response_ids}
        if len(prompt_ids) != len(response_ids) or len(sizes) != 1 or not all(map(len, prompt_ids)):
            raise InputError(
                f"from_ids takes at least one non-empty prompt, and as many lists of responses of one length each; got "
                f"{len(prompt_ids)} prompts and lists of {sorted(sizes)} responses for {len(response_ids)} prompts."
            )
        width = max(map(len, prompt_ids))
        longest = max((len(ids) for row in response_ids for ids in row), default=0)
        ids = torch.full((len(prompt_ids), sizes.pop(), width + longest), pad_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for b, (prompt, row) in enumerate(zip(prompt_ids, response_ids, strict=True)):
            for g, response in enumerate(row):
                place = slice(width - len(prompt), width + len(response))
                ids[b, g, place] = torch.tensor([*prompt, *response])
                mask[b, g, place] = 1
        gen_lens = [[len(response) for response in row] for row in response_ids]
        text = responses_text or [[""] * len(row) for row in response_ids]
        return cls(ids, [width] * len(prompt_ids), gen_lens, mask, text, **more)

    def to_frame(self) -> "pd.DataFrame":
        """A row per response: prompt_index, sample_index, num_tokens, finish_reason, text."""
        import pandas as pd

        rows = [
            (b, g, self.gen_lens[b][g], self.finish_reasons[b][g] if self.finish_reasons else None, text)
            for b, row in enumerate(self.responses_text)
            for g, text in enumerate(row)
        ]
        return pd.DataFrame(rows, columns=["prompt_index", "sample_index", "num_tokens", "finish_reason", "text"])


def _check_mask(mask: Tensor, prompt_lens: Sequence[int], gen_lens: Sequence[Sequence[int]]) -> None:
    """Every row must be left padding, tokens without a gap, right padding."""
    inside = mask.bool()
    starts = torch.tensor(prompt_lens)[:, None]
    generated = torch.tensor(gen_lens).reshape(inside.shape[:2])
    ends, columns = starts + generated, torch.arange(mask.shape[2])
    first = torch.where(inside, columns, mask.shape[2]).amin(dim=-1)
    whole = (columns >= first[..., None]) & (columns < ends[..., None])
    sound = (generated >= 0) & (first < starts) & (ends <= mask.shape[2]) & (inside == whole).all(dim=-1)
    for b, row in enumerate([] if bool(sound.all()) else gen_lens):
        for g, generated in enumerate(row):
            if generated < 0:
                raise InputError(f"gen_lens holds numbers ≥ 0, got {generated} for row ({b}, {g}).")
            end = prompt_lens[b] + generated
            found = mask[b, g].bool()
            places = found.nonzero()[:, 0]
            if not len(places) or places[0] >= prompt_lens[b]:
                raise InputError(f"Row ({b}, {g}) has no prompt token, so nothing predicts its first generated token.")
            if end > len(found) or int(places[-1]) + 1 != end or len(places) != end - int(places[0]):
                raise InputError(
                    f"Row ({b}, {g}): the attention mask must be 1 from the prompt's first token to the last of its "
                    f"{generated} generated tokens (column {end - 1}) and 0 elsewhere; it is 1 at {len(places)} of "
                    f"{len(found)} columns, from {int(places[0])} to {int(places[-1])}."
                )


@dataclass(frozen=True, repr=False)
class LogprobResults(Shown):
    """What scoring says of every generated token. Nesting `[B][G]`; T is the response's length.

    Attributes:
        logprobs: log p of each token under the model's softmax, tensors [T]: on the CPU without a graph from a call
            without gradients, with a graph and on the model's device from one with.
        entropies: naive per-token surprisal −log p of the realised token, NumPy [T].
        sequence_logprobs: their sums Σ log p, floats.
        rb_entropies: entropy of the sampling distribution q at each step, NumPy [T]; empty lists unless computed.
        rewards: one float per response; NaN where no reward or no gold answer is known.
        rb_entropies_torch: the same entropies as tensors [T], from a call with gradients; they carry a graph if
            `rb_requires_grad` is set. None otherwise.
        baseline_feats_torch: [T, 7] detached features per step (see `FEATURE_NAMES`); None unless asked for.
        token_logqs: log q of each token under the sampling policy, tensors like `logprobs`; −inf outside the nucleus.
        sequence_logqs: their sums Σ log q, floats.
        policy: the sampling policy of q.
        support: the sets that q was taken on: `recomputed`, the nuclei of this pass, or `replayed`, those the tokens
            were drawn from.
        support_flips: where the nucleus of this pass is another set than the replayed one, NumPy bool [T]; None unless
            compared, see `SequenceProcessor.ratio_health`; not saved.
        receipts: what the call's plan edited, one per response with a token, in order b·G + g; not saved.
    """

    logprobs: list[list[Tensor]]
    entropies: list[list[np.ndarray]]
    sequence_logprobs: list[list[float]]
    rb_entropies: list[list[np.ndarray]]
    rewards: list[list[float]]
    rb_entropies_torch: list[list[Tensor]] | None
    baseline_feats_torch: list[list[Tensor]] | None
    token_logqs: list[list[Tensor]]
    sequence_logqs: list[list[float]]
    policy: SamplingPolicy = field(default_factory=SamplingPolicy)
    support: Support = "recomputed"
    support_flips: list[list[np.ndarray]] | None = field(default=None, repr=False)
    receipts: tuple[Receipt, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "receipts", Receipts(self.receipts))

    def _finding(self) -> str:
        responses = [values for row in self.logprobs for values in row]
        n_tokens = sum(map(len, responses))
        total = math.fsum(value for row in self.sequence_logprobs for value in row)
        mean = f", mean log p {figure(total / n_tokens)} nats" if n_tokens else ""
        return f"{count(len(responses), 'response')}, {count(n_tokens, 'token')}{mean}"

    def _pieces(self) -> Sequence[Piece]:
        places = [(b, g) for b, row in enumerate(self.logprobs) for g in range(len(row))]
        rows = [
            (
                b,
                g,
                len(self.logprobs[b][g]),
                self.sequence_logprobs[b][g],
                self.sequence_logqs[b][g],
                float(np.mean(self.rb_entropies[b][g])) if len(self.rb_entropies[b][g]) else None,
                int((as_array(self.token_logqs[b][g]) == -math.inf).sum()),
                self.rewards[b][g],
            )
            for b, g in places[:ROWS_SHOWN]
        ]
        columns = ["prompt", "sample", "tokens", "log p (nats)", "log q (nats)", "mean RB entropy (nats)"]
        columns += ["tokens outside the nucleus", "reward"]
        table = Table(columns, rows, ROWS_SHOWN, ".to_frame()", total=len(places))
        return [table, *receipts_fold(self.receipts)]

    @property
    def policy_surprisals(self) -> list[list[np.ndarray]]:
        """−log q of each realised token, NumPy [T]: what pairs with `rb_entropies`; +inf outside the nucleus."""
        return [[surprisal(as_array(values)) for values in row] for row in self.token_logqs]

    @property
    def outside_nucleus(self) -> list[list[np.ndarray]]:
        """Which realised tokens the policy could not have drawn, NumPy bool [T]."""
        return [[as_array(values) == -math.inf for values in row] for row in self.token_logqs]

    def save(self, path: str | Path) -> Path:
        """Writes a JSON file and, beside it, the tensors, without graphs; see `steerlab.sequences._storage`."""
        lens = [[len(values) for values in row] for row in self.logprobs]
        tensors = {"logprobs": joined(self.logprobs), "token_logqs": joined(self.token_logqs)}
        computed = [[len(values) for values in row] for row in self.rb_entropies] == lens
        if computed:
            tensors["rb_entropies"] = joined_arrays(self.rb_entropies)
        if self.rb_entropies_torch is not None:
            tensors["rb_entropies_torch"] = joined(self.rb_entropies_torch)
        if self.baseline_feats_torch is not None:
            tensors["baseline_feats_torch"] = joined(self.baseline_feats_torch)
        data = {"lens": lens, "rewards": without_nan(self.rewards), "policy": asdict(self.policy)}
        return write_results(path, "logprobs", data | {"support": self.support}, tensors)

    @classmethod
    def load(cls, path: str | Path) -> "LogprobResults":
        """Reads what `save` wrote.

        Raises:
            DataError: if there is no such file, or it is damaged.
        """
        return read_results(path, "logprobs", _logprobs)

    def to_frame(self) -> "pd.DataFrame":
        """A row per token: prompt_index, sample_index, step, log_prob, surprisal, log_q, rb_entropy (NaN if none)."""
        import pandas as pd

        parts = []
        for b, row in enumerate(self.logprobs):
            for g, values in enumerate(row):
                n = len(values)
                entropy = self.rb_entropies[b][g] if len(self.rb_entropies[b][g]) == n else np.full(n, np.nan)
                columns = {"log_prob": as_array(values), "surprisal": self.entropies[b][g]}
                columns |= {"log_q": as_array(self.token_logqs[b][g]), "rb_entropy": entropy}
                parts.append(pd.DataFrame({"prompt_index": b, "sample_index": g, "step": np.arange(n), **columns}))
        return pd.concat(parts, ignore_index=True)


FEATURE_NAMES = ("rb_entropy", "top1_prob", "margin", "head_mass", "two_point_entropy", "logit_var", "progress")
"""The columns of `baseline_feats_torch`, in order.

Entropy of q; largest q; top-1 minus top-2 logit; mass of the nucleus under softmax(logits / T); entropy of that mass
against the rest; variance of logits / T under q; and step j / max_new_tokens. (j over the response's final length would
tell of the future, which a baseline must not know.) All are functions of the prefix alone, not of the token drawn next.
"""


def surprisal(log_probs: Any) -> Any:
    """−log p of an array or tensor, with 0 and not −0 for certainty."""
    return 0.0 - log_probs


def as_array(values: Tensor) -> np.ndarray:
    """A tensor's values as a NumPy array."""
    return values.detach().cpu().numpy()


SUPPORT_PARTS = ("kinds", "lengths", "data")


def without_nan(nested: list[list[float]]) -> list[list[float | None]]:
    """Nested numbers as JSON can hold them: None for NaN."""
    return [[None if math.isnan(value) else value for value in row] for row in nested]


def with_nan(nested: list[list[float | None]]) -> list[list[float]]:
    """What `without_nan` was given."""
    return [[math.nan if value is None else float(value) for value in row] for row in nested]


def _sequences(data: dict[str, Any], tensors: dict[str, Tensor]) -> BatchedSequences:
    stored, indices = tensors.pop("sampler_logqs", None), tensors.pop("pool_indices", None)
    supports = _supports(data.pop("support_vocabulary", None), data["gen_lens"], tensors)
    policy, rewards = data.pop("policy", None), data.pop("rewards", None)
    fields: dict[str, Any] = {**data, **tensors}
    return BatchedSequences(
        **fields,
        sampler_logqs=None if stored is None else as_arrays(cut(stored, data["gen_lens"])),
        pool_indices=None if indices is None else indices.numpy(),
        supports=supports,
        policy=None if policy is None else SamplingPolicy(**policy),
        rewards=None if rewards is None else with_nan(rewards),
    )


def _supports(
    d_vocab: int | None, gen_lens: list[list[int]], tensors: dict[str, Tensor]
) -> list[list[TokenSets]] | None:
    if d_vocab is None:
        return None
    every = TokenSets(d_vocab, *(tensors.pop(f"support_{name}").numpy() for name in SUPPORT_PARTS))
    ends = iter(np.cumsum([n for row in gen_lens for n in row]).tolist())
    return [[every[end - n : end] for n in row for end in [next(ends)]] for row in gen_lens]


def _logprobs(data: dict[str, Any], tensors: dict[str, Tensor]) -> LogprobResults:
    parts = {name: cut(values, data["lens"]) for name, values in tensors.items()}
    log_probs, log_qs = parts["logprobs"], parts["token_logqs"]
    empty = [[log_probs[b][g][:0] for g in range(len(row))] for b, row in enumerate(log_probs)]
    return LogprobResults(
        logprobs=log_probs,
        entropies=[[-values.numpy() for values in row] for row in log_probs],
        sequence_logprobs=[[float(values.double().sum()) for values in row] for row in log_probs],
        rb_entropies=as_arrays(parts.get("rb_entropies", empty)),
        rewards=with_nan(data["rewards"]),
        rb_entropies_torch=parts.get("rb_entropies_torch"),
        baseline_feats_torch=parts.get("baseline_feats_torch"),
        token_logqs=log_qs,
        sequence_logqs=[[float(values.double().sum()) for values in row] for row in log_qs],
        policy=SamplingPolicy(**data["policy"]),
        support=data.get("support", "recomputed"),
    )
