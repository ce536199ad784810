"""Running the contexts of targets: how much at once, and what all of them begin with as one row."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from steerlab._runtime.backend import HookedModel
from steerlab._runtime.capturing import plan_hooks
from steerlab._runtime.growth import AnyRows, fresh_rows
from steerlab._runtime.rows import left_padded
from steerlab._runtime.shared_prefix import shared_prefix
from steerlab.steering._run import PlanRun
from steerlab.steering.plan import Plan

Tokens = tuple[int, ...]

CACHED_PER_RUN = 2  # with 512-token contexts on a CPU faster than 1 and than 8: copies of the cache cost time as well


@dataclass(frozen=True)
class Budget:
    """How much runs at once.

    Attributes:
        tokens: tokens per pass, padding included.
        logit_bytes: bytes of float32 logits held at once.
    """

    tokens: int
    logit_bytes: int = 256 << 20

    def cost(self, n_run: int, n_cached: int) -> int:
        """What a row takes of the tokens per pass: those it runs, and a share of the cache that it holds a copy of.

        A cached token takes its keys and values only, less than the activations and attention scores of a token that
        runs.
        """
        return n_run + n_cached // CACHED_PER_RUN

    def logit_rows(self, d_vocab: int) -> int:
        """How many rows of logits fit."""
        return max(1, self.logit_bytes // (4 * d_vocab))


def prefix_row(
    model: HookedModel, plan: Plan, contexts: Sequence[Tokens], budget: Budget, own: int = 1
) -> AnyRows | None:
    """One row that holds what all contexts begin with, if it may run once for all of them under a plan.

    Args:
        model: the model.
        plan: the plan that runs on all of them.
        contexts: different contexts.
        budget: how much runs at once.
        own: how many tokens every context keeps at least.
    """
    length = shared_prefix(model.causal, plan, contexts, own)
    if not length:
        return None
    run = PlanRun(plan, 1)
    backend = model.exact_backend(plan_hooks(run))
    row = fresh_rows(backend.model, run, [len(contexts[0])], "block")
    with backend.attached(plan_hooks(run)):
        extend_in_blocks(row, [contexts[0][:length]], budget)
    return row


def extend_in_blocks(rows: AnyRows, tokens: Sequence[Tokens], budget: Budget) -> Tensor:
    """Runs long rows block by block, so that attention scores stay small.

    Args:
        rows: the rows, under hooks that are attached.
        tokens: what continues each row; the rows end together.
        budget: how much runs at once.

    Returns:
        The logits of each row's last token, [rows, d_vocab].
    """
    ids, valid = left_padded(tokens)
    width = max(1, budget.tokens // len(ids))
    logits = None
    for start in range(0, ids.shape[1], width):
        logits = rows.extend(ids[:, start : start + width], valid[:, start : start + width], keep=1)
    assert logits is not None
    return logits[:, -1]
