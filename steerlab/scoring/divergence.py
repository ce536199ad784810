"""How far two models, or one model under two plans, disagree on the next token of a text, position by position."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core._arguments import explains_arguments
from steerlab.core._progress import progress
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError, PolicyError
from steerlab.core.policy import SamplingPolicy
from steerlab.display import Facts, Histogram, Piece, Shown, Table, count, figure
from steerlab.measures.divergence import jensen_shannon, normalised_kl
from steerlab.measures.nucleus import policy_log_probs
from steerlab.measures.quantities import LogDistribution
from steerlab.scoring._source import TextLike
from steerlab.scoring._stream import TextWindows, window_values
from steerlab.scoring.windows import window_sizes

if TYPE_CHECKING:
    import pandas as pd

WINDOW_BYTES = 1 << 30  # of one window's log-distributions of one engine
ROWS = 64  # positions compared at once

_COLUMNS = ("kl", "reverse_kl", "jensen_shannon", "overlap", "reverse_overlap", "nll_a", "nll_b")


@dataclass(frozen=True, repr=False)
class Divergence(Shown):
    """Two next-token distributions a and b at every scored position of a text; in nats, one value per position.

    Attributes:
        positions: absolute position in the text of the token that is predicted.
        token_ids: the token that stands there.
        kl: KL(a ‖ b); infinite where a can draw a token that b cannot (only under a policy).
        reverse_kl: KL(b ‖ a).
        jensen_shannon: ½·KL(a ‖ m) + ½·KL(b ‖ m) with m = (a + b) / 2; at most ln 2, so never infinite.
        overlap: a's probability of the tokens that b can draw; 1 without a policy that leaves tokens out.
        reverse_overlap: b's probability of the tokens that a can draw.
        nll_a: negative log-probability of the token under engine a's softmax, whatever the policy.
        nll_b: the same under engine b.
        context_length: tokens per window.
        stride: new tokens per window.
        policy: the sampling policy whose distributions were compared; None for the softmax itself.
        dtypes: of the weights and activations of engine a and of engine b.
    """

    positions: np.ndarray = field(repr=False)
    token_ids: np.ndarray = field(repr=False)
    kl: np.ndarray = field(repr=False)
    reverse_kl: np.ndarray = field(repr=False)
    jensen_shannon: np.ndarray = field(repr=False)
    overlap: np.ndarray = field(repr=False)
    reverse_overlap: np.ndarray = field(repr=False)
    nll_a: np.ndarray = field(repr=False)
    nll_b: np.ndarray = field(repr=False)
    context_length: int
    stride: int
    policy: SamplingPolicy | None = None
    dtypes: tuple[str, str] | None = None

    def _finding(self) -> str:
        means = f"mean KL {figure(self.mean_kl)} nats, reverse {figure(self.mean_reverse_kl)}"
        return f"{means}, Jensen–Shannon {figure(self.mean_jensen_shannon)}, {count(self.num_tokens, 'token')}"

    def _pieces(self) -> Sequence[Piece]:
        names = {"KL(a ‖ b)": self.kl, "KL(b ‖ a)": self.reverse_kl, "Jensen–Shannon": self.jensen_shannon}
        rows = [
            (name, float(x.mean()), float(np.median(x)), float(x.max()), int(self.positions[int(x.argmax())]))
            for name, x in names.items()
        ]
        table = Table(["nats per token", "mean", "median", "largest", "at position"], rows)
        facts = Facts(
            [
                ("tokens compared", self.num_tokens),
                ("infinite KL at", self.num_infinite or None),
                ("policy", None if self.policy is None else str(self.policy)),
                ("dtypes", None if self.dtypes is None else " and ".join(self.dtypes)),
            ]
        )
        return [table, facts, Histogram({"tokens": self.kl.tolist()}, "KL(a ‖ b) of each token (nats)")]

    @property
    def num_tokens(self) -> int:
        """How many positions were compared."""
        return len(self.positions)

    @property
    def mean_kl(self) -> float:
        """Mean of `kl` over positions; infinite if it is so anywhere (see `num_infinite`)."""
        return float(self.kl.mean())

    @property
    def mean_reverse_kl(self) -> float:
        """Mean of `reverse_kl` over positions."""
        return float(self.reverse_kl.mean())

    @property
    def mean_jensen_shannon(self) -> float:
        """Mean of `jensen_shannon` over positions."""
        return float(self.jensen_shannon.mean())

    @property
    def mean_nll_a(self) -> float:
        """Mean of `nll_a`: log of the text's perplexity under a."""
        return float(self.nll_a.mean())

    @property
    def mean_nll_b(self) -> float:
        """Mean of `nll_b`."""
        return float(self.nll_b.mean())

    @property
    def num_infinite(self) -> int:
        """At how many positions `kl` is infinite."""
        return int(np.isinf(self.kl).sum())

    def to_frame(self) -> "pd.DataFrame":
        """A row per position: position, token_id, and every quantity."""
        import pandas as pd

        first = {"position": self.positions, "token_id": self.token_ids}
        return pd.DataFrame(first | {name: getattr(self, name) for name in _COLUMNS})


@explains_arguments
def divergence(
    engine_a: Engine,
    engine_b: Engine,
    text: TextLike,
    *,
    plan_a: Any = None,
    plan_b: Any = None,
    context_length: int | None = None,
    stride: int | None = None,
    policy: SamplingPolicy | None = None,
    bos_each_window: bool = False,
) -> Divergence:
    """KL(a ‖ b) of the next-token distributions at every position of a text but its first.

    The two may be one engine under two plans: `divergence(engine, engine, text, plan_a=plan)` says how far the plan
    moves the model on this text. One window is in memory at a time.

    Args:
        engine_a: where a comes from.
        engine_b: where b comes from; its vocabulary must be the same.
        text: as in `perplexity`.
        plan_a: the plan of a, or None.
        plan_b: the plan of b, or None.
        context_length: tokens per window; by default the shorter context of the two, and at most as many as have one
            GiB of log-probabilities.
        stride: new tokens per window; the context length by default.
        policy: compare the distributions that this policy samples from, instead of the softmax.
        bos_each_window: put BOS before every window, as models that were trained with it need; the text's first token
            is then compared too.

    Raises:
        InputError: for engines of different vocabularies, a context or stride outside its range, or `bos_each_window`
            on a model without BOS.
        PolicyError: for a policy with a repetition penalty, which depends on all tokens before.
        PromptError, PlanError: as in `perplexity`.

    Examples:
        >>> found = divergence(engine, engine, text, plan_a=plan)  # doctest: +SKIP
        >>> found.mean_kl, found.to_frame().nlargest(5, "kl")  # doctest: +SKIP

    Source:
        Kullback and Leibler 1951; Lin 1991, Divergence measures based on the Shannon entropy (Jensen-Shannon).
    """
    if policy is not None and policy.repetition_penalty != 1:
        raise PolicyError("Divergence on given text does not cover repetition_penalty; use a policy without it.")
    check_same_vocabulary(engine_a, engine_b)
    at_most = WINDOW_BYTES // (4 * engine_a.info.d_vocab)
    sizes = window_sizes([engine_a, engine_b], context_length, stride, at_most=at_most, bos_each_window=bos_each_window)
    windows = TextWindows(engine_a, text, sizes, plan_a, plan_b)
    rows: list[dict[str, np.ndarray]] = []
    with progress(windows.n_scored, "divergence", "token") as bar:
        for part in windows:
            n_scored = part.n_scored
            row = (*sizes.prefix, *part.ids)
            log_a, log_b = (
                torch.as_tensor(window_values(engine, row, n_scored, {"all": LogDistribution()}, plan)["all"])
                for engine, plan in ((engine_a, plan_a), (engine_b, plan_b))
            )
            ids = torch.tensor(part.ids[-n_scored:])
            found = {"positions": np.arange(part.first_scored, part.stop), "token_ids": ids.numpy()}
            rows.append(found | _compare(log_a, log_b, ids, policy))
            bar.update(n_scored)
    joined = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    dtypes = (engine_a.info.dtype, engine_b.info.dtype)
    return Divergence(**joined, context_length=sizes.context, stride=sizes.stride, policy=policy, dtypes=dtypes)


def check_same_vocabulary(engine_a: Engine, engine_b: Engine) -> None:
    """Checks that token ids and logits mean the same in both engines.

    Raises:
        InputError: otherwise.
    """
    if engine_a is engine_b:
        return
    sizes = engine_a.info.d_vocab, engine_b.info.d_vocab
    if sizes[0] != sizes[1]:
        raise InputError(
            f"{engine_a.info.name} has {sizes[0]} logits and {engine_b.info.name} {sizes[1]}; distributions can only "
            "be compared over one vocabulary."
        )
    vocabularies = [engine.tokenizer.get_vocab() for engine in (engine_a, engine_b)]
    if vocabularies[0] != vocabularies[1]:
        differing = sorted(
            token
            for token in {*vocabularies[0], *vocabularies[1]}
            if vocabularies[0].get(token) != vocabularies[1].get(token)
        )
        raise InputError(
            f"The tokenizers of {engine_a.info.name} and {engine_b.info.name} differ in {len(differing)} tokens "
            f"(e.g. {differing[0]!r}); distributions can only be compared over one vocabulary."
        )


def _compare(
    log_a: Float[Tensor, "pos d_vocab"],
    log_b: Float[Tensor, "pos d_vocab"],
    ids: Tensor,
    policy: SamplingPolicy | None,
) -> dict[str, np.ndarray]:
    """Every quantity per position, a few positions at a time, in float64."""
    found: dict[str, list[Tensor]] = {name: [] for name in _COLUMNS}
    for a, b, tokens in zip(log_a.split(ROWS), log_b.split(ROWS), ids.split(ROWS), strict=True):
        a, b = a.double(), b.double()
        found["nll_a"].append(-a.gather(-1, tokens[:, None])[:, 0])
        found["nll_b"].append(-b.gather(-1, tokens[:, None])[:, 0])
        # normalised again in float64, so that rounding to float32 cannot make a divergence negative
        a, b = (row.log_softmax(-1) if policy is None else policy_log_probs(row, policy) for row in (a, b))
        found["kl"].append(normalised_kl(a, b))
        found["reverse_kl"].append(normalised_kl(b, a))
        found["jensen_shannon"].append(jensen_shannon(a, b))
        found["overlap"].append(_mass(a, b))
        found["reverse_overlap"].append(_mass(b, a))
    return {name: torch.cat(values).numpy() for name, values in found.items()}


def _mass(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Probability under a of the tokens that b can draw."""
    return log_a.exp().masked_fill(log_b == -math.inf, 0.0).sum(dim=-1)
