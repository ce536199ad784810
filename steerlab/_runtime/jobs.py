"""The rows of one call that generates: which sample of which prompt each is, and what it draws by."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steerlab._runtime.decoding import RowOutput
from steerlab.core._numbers import check_integer
from steerlab.core._seeds import SeedLike, draw_keys, row_key
from steerlab.core.receipts import Receipt
from steerlab.steering._run import PlanRun


@dataclass(frozen=True)
class GenerationJob:
    """One row to generate: which sample of which prompt, its ids, and the keys of its draws."""

    row_index: int
    prompt_index: int
    sample_index: int
    prompt: tuple[int, ...]
    keys: np.ndarray


def generation_jobs(
    prompts: Sequence[tuple[int, ...]], n: int, seed: SeedLike, max_new_tokens: int
) -> list[GenerationJob]:
    """A job per prompt and sample, in order.

    Raises:
        InputError: if n is not an integer ≥ 1.
    """
    samples = check_integer(n, "n", least=1)
    return [
        GenerationJob(i * samples + g, i, g, prompt, draw_keys(row_key(seed, i, g), max_new_tokens))
        for i, prompt in enumerate(prompts)
        for g in range(samples)
    ]


def job_receipts(
    run: PlanRun, jobs: Sequence[GenerationJob], ran: Sequence[Sequence[int]], plan_hash: str | None
) -> dict[int, Receipt]:
    """By row index, the receipt of each row of a batch.

    Args:
        run: the plan at work.
        jobs: the rows.
        ran: per row, the tokens that went through the model.
        plan_hash: of the plan as the caller gave it.
    """
    made = run.receipts(
        token_ids=ran,
        prompt_lens=[len(job.prompt) for job in jobs],
        prompt_indices=[job.prompt_index for job in jobs],
        row_indices=[job.row_index for job in jobs],
        plan_hash=plan_hash,
    )
    return {receipt.row_index: receipt for receipt in made}


def ran_tokens(job: GenerationJob, output: RowOutput) -> tuple[int, ...]:
    """The tokens of a row that went through the model: all but the last sampled one; all if the row ended in error."""
    if output.finish_reason == "error":
        return (*job.prompt, *output.token_ids)
    return (*job.prompt, *output.token_ids[:-1]) if output.token_ids else ()
