"""Diagnostics of the sampling distribution, per step and per sequence."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from steerlab.core._numbers import as_integer, as_list
from steerlab.core.errors import InputError
from steerlab.core.policy import SamplingPolicy
from steerlab.display import Facts, Fold, Piece, Remarks, Shown, Table, count, figure
from steerlab.measures.steps import PolicySteps, policy_steps
from steerlab.sequences._storage import cut, joined_arrays, read_results, write_results
from steerlab.sequences.config import check_count
from steerlab.sequences.types import as_array, surprisal

if TYPE_CHECKING:
    import pandas as pd

EARLY_STEPS = 16
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_ROWS_AT_ONCE = 64


@dataclass(frozen=True, repr=False)
class TokenStepDiagnostics(Shown):
    """The sampling distribution at each step of one response; NumPy arrays [T].

    a = logits / temperature, p = softmax(a), S the nucleus, q = softmax of a over S.

    Attributes:
        rb_entropy: entropy of q, nats.
        head_mass: Σ_S p.
        tail_mass: Σ p outside S, summed directly.
        two_point_entropy: entropy of (head mass, tail mass), nats.
        top1_prob: the largest q.
        margin: highest minus second-highest raw logit over the full vocabulary.
        collision: Σ q².
        renyi2: −log Σ q², nats.
        effective_support: exp(rb_entropy), tokens.
        support_size: tokens in S.
        logit_mean: E_q[a].
        logit_var: Var_q[a], centred.
        eos_prob: q of the end-of-text tokens together; NaN if none is known.
        surprisal: −log p of the realised token under the model's softmax, nats.
        policy_surprisal: −log q of the realised token, nats; +inf outside S.
    """

    rb_entropy: np.ndarray
    head_mass: np.ndarray
    tail_mass: np.ndarray
    two_point_entropy: np.ndarray
    top1_prob: np.ndarray
    margin: np.ndarray
    collision: np.ndarray
    renyi2: np.ndarray
    effective_support: np.ndarray
    support_size: np.ndarray
    logit_mean: np.ndarray
    logit_var: np.ndarray
    eos_prob: np.ndarray
    surprisal: np.ndarray
    policy_surprisal: np.ndarray

    def _finding(self) -> str:
        means = f"mean entropy {figure(_mean(self.rb_entropy))} nats, mean surprisal {figure(_mean(self.surprisal))}"
        return f"{count(len(self.rb_entropy), 'step')}, {means}"

    def _pieces(self) -> Sequence[Piece]:
        return [Table.of_frame(_headed(self.to_frame()), limit=60, more=".to_frame()")]

    def to_frame(self) -> "pd.DataFrame":
        """A row per step."""
        import pandas as pd

        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return pd.DataFrame({"step": np.arange(len(self.rb_entropy)), **values})


@dataclass(frozen=True, repr=False)
class SequenceDiagnostics(Shown):
    """One response's diagnostics in single numbers; NaN where there is nothing to average.

    Attributes:
        num_tokens: T.
        rb_entropy_sum: Σ of the steps' RB entropies, nats.
        rb_entropy_mean: their mean.
        rb_entropy_min: their minimum.
        rb_entropy_max: their maximum.
        early_rb_entropy_mean: their mean over the early window, the first 16 steps unless set otherwise.
        late_rb_entropy_mean: their mean over the steps after it; NaN if there are none.
        surprisal_mean: mean of −log p of the realised tokens, nats.
        surprisal_std: their standard deviation (over the T tokens themselves).
        surprisal_quantiles: their quantiles at 0.05, 0.25, 0.5, 0.75, 0.95.
        policy_surprisal_mean: mean of −log q, nats; infinite if a token lies outside the nucleus.
        policy_surprisal_std: standard deviation of −log q.
        policy_surprisal_quantiles: its quantiles.
        means: mean over steps of every other per-step diagnostic, by name.
    """

    num_tokens: int
    rb_entropy_sum: float
    rb_entropy_mean: float
    rb_entropy_min: float
    rb_entropy_max: float
    early_rb_entropy_mean: float
    late_rb_entropy_mean: float
    surprisal_mean: float
    surprisal_std: float
    surprisal_quantiles: Mapping[float, float]
    policy_surprisal_mean: float
    policy_surprisal_std: float
    policy_surprisal_quantiles: Mapping[float, float]
    means: Mapping[str, float] = field(default_factory=dict)

    def _finding(self) -> str:
        mean = f"mean entropy {figure(self.rb_entropy_mean)} nats"
        return f"{count(self.num_tokens, 'token')}, {mean}, mean surprisal {figure(self.surprisal_mean)} nats"

    def _pieces(self) -> Sequence[Piece]:
        return [Facts([(name.replace("_", " "), value) for name, value in _flat(self).items()])]

    @classmethod
    def of(cls, steps: TokenStepDiagnostics, *, early_steps: int = EARLY_STEPS) -> "SequenceDiagnostics":
        """The summary of per-step diagnostics.

        Args:
            steps: one response's steps.
            early_steps: length of the early window.

        Raises:
            InputError: for a window that is not an integer ≥ 0.
        """
        check_count(early_steps, "early_steps", least=0)
        entropy, naive, policy = steps.rb_entropy, steps.surprisal, steps.policy_surprisal
        means = _means(steps)
        return cls(
            num_tokens=len(entropy),
            rb_entropy_sum=float(entropy.sum()),
            rb_entropy_mean=means.pop("rb_entropy"),
            rb_entropy_min=float(entropy.min()) if len(entropy) else math.nan,
            rb_entropy_max=float(entropy.max()) if len(entropy) else math.nan,
            early_rb_entropy_mean=_mean(entropy[:early_steps]),
            late_rb_entropy_mean=_mean(entropy[early_steps:]),
            surprisal_mean=means.pop("surprisal"),
            surprisal_std=_std(naive),
            surprisal_quantiles=_quantiles(naive),
            policy_surprisal_mean=means.pop("policy_surprisal"),
            policy_surprisal_std=_std(policy),
            policy_surprisal_quantiles=_quantiles(policy),
            means=means,
        )


@dataclass(frozen=True, repr=False)
class DiagnosticsPack(Shown):
    """One response's diagnostics.

    Attributes:
        steps: per step.
        sequence: in single numbers.
    """

    steps: TokenStepDiagnostics
    sequence: SequenceDiagnostics

    def _finding(self) -> str:
        return self.sequence._finding()

    def _pieces(self) -> Sequence[Piece]:
        return [*self.sequence._pieces(), Fold(count(self.sequence.num_tokens, "step"), self.steps._pieces())]


@dataclass(frozen=True, repr=False)
class DiagnosticsResults(Shown):
    """Diagnostics of every response.

    Attributes:
        diagnostics: one pack per response, `[B][G]`.
        early_steps: length of the early window.
    """

    diagnostics: list[list[DiagnosticsPack]]
    early_steps: int = EARLY_STEPS

    def _finding(self) -> str:
        packs = [pack.sequence for row in self.diagnostics for pack in row]
        n_tokens = sum(pack.num_tokens for pack in packs)
        total = math.fsum(pack.rb_entropy_sum for pack in packs)
        mean = f", mean entropy {figure(total / n_tokens)} nats" if n_tokens else ""
        return f"{count(len(packs), 'response')}, {count(n_tokens, 'token')}{mean}"

    def _pieces(self) -> Sequence[Piece]:
        columns = ["prompt_index", "sample_index", "num_tokens", "rb_entropy_mean", "early_rb_entropy_mean"]
        columns += ["late_rb_entropy_mean", "surprisal_mean", "policy_surprisal_mean", "mean_support_size"]
        table = Table.of_frame(_headed(self.to_frame()[columns]), more=".to_frame()")
        return [table, Remarks(["Means over steps, in nats; the support is the number of tokens in the nucleus."])]

    def save(self, path: str | Path) -> Path:
        """Writes a JSON file and, beside it, the tensors; see `steerlab.sequences._storage`."""
        lens = [[pack.sequence.num_tokens for pack in row] for row in self.diagnostics]
        tensors = {
            name: joined_arrays([[getattr(pack.steps, name) for pack in row] for row in self.diagnostics])
            for name in COLUMNS
        }
        return write_results(path, "diagnostics", {"lens": lens, "early_steps": self.early_steps}, tensors)

    @classmethod
    def load(cls, path: str | Path) -> "DiagnosticsResults":
        """Reads what `save` wrote.

        Raises:
            DataError: if there is no such file, or it is damaged.
        """
        return read_results(path, "diagnostics", _diagnostics)

    def to_frame(self) -> "pd.DataFrame":
        """A row per response: its indices and every single number; means over steps are named `mean_…`."""
        import pandas as pd

        return pd.DataFrame(
            [
                {"prompt_index": b, "sample_index": g, **_flat(pack.sequence)}
                for b, row in enumerate(self.diagnostics)
                for g, pack in enumerate(row)
            ]
        )

    def steps_frame(self) -> "pd.DataFrame":
        """A row per step: its indices and every per-step diagnostic."""
        import pandas as pd

        parts = []
        for b, row in enumerate(self.diagnostics):
            for g, pack in enumerate(row):
                frame = pack.steps.to_frame()
                frame.insert(0, "sample_index", g)
                frame.insert(0, "prompt_index", b)
                parts.append(frame)
        return pd.concat(parts, ignore_index=True)


class DistributionDiagnostics:
    """Diagnostics straight from logits, for those who have them.

    Args:
        top_p: of the sampling policy.
        temperature: of the sampling policy; 0 is greedy.
        eos_token_id: one id or several, for `eos_prob`; None leaves it NaN.
        early_steps: length of the early window.
        dtype: of the computation; None means float32, or the logits' own if wider.

    Examples:
        >>> found = DistributionDiagnostics(top_p=0.8).compute_from_logits(
        ...     torch.tensor([[0.3, 0.1, 0.1, 0.5]]).log(), torch.tensor([3])
        ... )
        >>> found.steps.support_size.tolist(), round(found.steps.head_mass.item(), 4)
        ([2.0], 0.8)
    """

    def __init__(
        self,
        top_p: float = 1.0,
        temperature: float = 1.0,
        eos_token_id: int | list[int] | tuple[int, ...] | None = None,
        *,
        early_steps: int = EARLY_STEPS,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.policy = SamplingPolicy(temperature=temperature, top_p=top_p)
        one = as_integer(eos_token_id)
        self.eos_ids = (as_list(eos_token_id) or []) if one is None else [one]
        self.early_steps, self.dtype = early_steps, dtype

    def compute_from_logits(
        self, gen_logits: Float[Tensor, "steps d_vocab"], realized_tokens: Int[Tensor, " steps"]
    ) -> DiagnosticsPack:
        """Diagnostics of one response.

        Args:
            gen_logits: raw logits that predicted each token.
            realized_tokens: the tokens.

        Raises:
            InputError: if the shapes do not fit, or a token is none of the V.
        """
        if gen_logits.dim() != 2 or gen_logits.shape[:1] != realized_tokens.shape:
            raise InputError(
                f"gen_logits is [T, V] and realized_tokens [T], got {tuple(gen_logits.shape)} and "
                f"{tuple(realized_tokens.shape)}."
            )
        named = [*self.eos_ids, *realized_tokens.tolist()]
        wrong = [token for token in named if not 0 <= token < gen_logits.shape[1]]
        if wrong:
            raise InputError(f"Token {wrong[0]} is not among the {gen_logits.shape[1]} that gen_logits has values for.")
        eos = torch.tensor(self.eos_ids, dtype=torch.long, device=gen_logits.device)
        found = [
            policy_steps(rows, tokens, self.policy, dtype=self.dtype, with_shape=True, eos_ids=eos)
            for rows, tokens in zip(gen_logits.split(_ROWS_AT_ONCE), realized_tokens.split(_ROWS_AT_ONCE), strict=True)
        ]
        return pack_of(
            {name: torch.cat([values[name] for values in map(columns_of, found)]) for name in COLUMNS},
            early_steps=self.early_steps,
        )


COLUMNS = tuple(entry.name for entry in fields(TokenStepDiagnostics))


def columns_of(steps: PolicySteps) -> dict[str, Tensor]:
    """Every per-step diagnostic by name."""
    assert steps.shape is not None
    shape = {entry.name: getattr(steps.shape, entry.name) for entry in fields(steps.shape)}
    own = {
        "rb_entropy": steps.entropies,
        "surprisal": surprisal(steps.log_probs),
        "policy_surprisal": surprisal(steps.log_qs),
    }
    return own | shape


def pack_of(columns: Mapping[str, Tensor | np.ndarray], *, early_steps: int = EARLY_STEPS) -> DiagnosticsPack:
    """Diagnostics of one response from tensors or arrays [T] by name."""
    arrays = {name: columns[name] for name in COLUMNS}
    steps = TokenStepDiagnostics(**{n: as_array(v) if isinstance(v, Tensor) else v for n, v in arrays.items()})
    return DiagnosticsPack(steps, SequenceDiagnostics.of(steps, early_steps=early_steps))


def _diagnostics(data: dict[str, Any], tensors: dict[str, Tensor]) -> DiagnosticsResults:
    parts = {name: cut(values, data["lens"]) for name, values in tensors.items()}
    early = int(data["early_steps"])
    packs = [
        [pack_of({name: parts[name][b][g] for name in COLUMNS}, early_steps=early) for g in range(len(row))]
        for b, row in enumerate(data["lens"])
    ]
    return DiagnosticsResults(packs, early)


def _flat(sequence: SequenceDiagnostics) -> dict[str, float]:
    found: dict[str, float] = {}
    for entry in fields(sequence):
        value = getattr(sequence, entry.name)
        if entry.name == "means":
            found |= {f"mean_{name}": mean for name, mean in value.items()}
        elif isinstance(value, Mapping):
            stem = entry.name.removesuffix("_quantiles")
            found |= {f"{stem}_q{round(100 * at):02d}": quantile for at, quantile in value.items()}
        else:
            found[entry.name] = value
    return found


def _headed(frame: Any) -> "pd.DataFrame":
    """The frame with headings in words."""
    return frame.rename(columns=lambda name: name.replace("_", " "))


def _means(steps: TokenStepDiagnostics) -> dict[str, float]:
    """The mean of every column."""
    if not len(steps.rb_entropy):
        return dict.fromkeys(COLUMNS, math.nan)
    table = np.stack([getattr(steps, name) for name in COLUMNS])
    return dict(zip(COLUMNS, table.mean(axis=1).tolist(), strict=True))


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _std(values: np.ndarray) -> float:
    return float(values.std()) if len(values) and np.isfinite(values).all() else math.nan


def _quantiles(values: np.ndarray) -> Mapping[float, float]:
    if not len(values):
        return dict.fromkeys(QUANTILES, math.nan)
    # as np.quantile, which takes ten times as long for so few values
    ordered = np.sort(values).astype(np.float64)
    places = np.array(QUANTILES) * (len(ordered) - 1)
    below, above = ordered[np.floor(places).astype(int)], ordered[np.ceil(places).astype(int)]
    # between a finite value and an infinite one there is no point on the line: take the observation above
    found = below + (above - below) * (places % 1) if np.isfinite(ordered[-1]) else above
    return dict(zip(QUANTILES, found.tolist(), strict=True))
