"""Reading responses: the model continues each prompt, and what it wrote is read.

Where positions of generated tokens are to be read, the model first writes completions of its own, and the whole then
runs once more, with the chosen tokens of the completion read. An EOS that ended a completion is no part of it. This
takes nothing of an engine but `generate` and `capture`.

Source:
    Chen et al. 2025, Persona Vectors (arXiv:2507.21509), section 2: the mean activation over response tokens, averaged
    over responses, of responses that show a trait less that of responses that do not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core._hashing import content_hash
from steerlab.core._numbers import check_integer
from steerlab.core._seeds import check_single_seed
from steerlab.core._text import PromptLike
from steerlab.core.engine import DEFAULT_POLICY, Engine
from steerlab.core.errors import DataError, InputError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.results import Activations, Completion, Generations
from steerlab.steering.positions._rows import RowPositions
from steerlab.steering.positions._sets import Generated, Marked, Where
from steerlab.steering.positions.where import mask


@dataclass(frozen=True)
class Responses:
    """How the model's own completions are drawn before they are read.

    Attributes:
        max_new_tokens: tokens of a completion at most.
        policy: the sampling policy.
        n: completions of each prompt, which count alike.
        seed: of the draws, which depend on it and on the prompt, not on what is read beside it.
    """

    max_new_tokens: int = 64
    policy: SamplingPolicy = DEFAULT_POLICY
    n: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "n"):
            object.__setattr__(self, name, check_integer(getattr(self, name), name, least=1))
        object.__setattr__(self, "seed", check_single_seed(self.seed))
        if not isinstance(self.policy, SamplingPolicy):
            raise InputError(f"policy is a SamplingPolicy, got {type(self.policy).__name__}.")

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable description."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Responses":
        """What `to_json` described."""
        return cls(**{**data, "policy": SamplingPolicy(**data["policy"])})

    def __str__(self) -> str:
        draws = f"{self.n} responses of at most {self.max_new_tokens} tokens each"
        return f"{draws}, {self.policy}, seed {self.seed}"


def reads_responses(where: Where) -> bool:
    """Whether positions are of generated tokens, so that there must be some."""
    return any(isinstance(leaf, Generated) for leaf in where.leaves())


def check_readable(where: Where) -> None:
    """Checks that positions can be found in prompts with completions.

    Raises:
        InputError: for those that are looked up in the prompt's text.
    """
    if any(isinstance(leaf, Marked) for leaf in where.leaves()):
        raise InputError(
            f"{where} looks something up in the prompt's text, which is not done where responses are read; use "
            "sl.where.generated(after, until), index(…) or prompt()."
        )


def read_responses(
    engine: Engine,
    prompts: Sequence[PromptLike],
    options: dict[str, Any],
    where: Where,
    chat: bool,
    settings: Responses,
) -> tuple[Activations, list[int]]:
    """Activations of every completion's tokens, and which prompt each completion continues.

    Args:
        engine: the engine.
        prompts: the prompts.
        options: `layers`, `site` and `pool` of `capture`.
        where: positions in prompt and completion.
        chat: take strings as user turns of a chat.
        settings: how completions are drawn.

    Raises:
        DataError: for a prompt whose completion is empty, or not finite.
        InputError: if the positions select nothing of a completion.
    """
    made = engine.generate(
        prompts,
        policy=settings.policy,
        max_new_tokens=settings.max_new_tokens,
        n=settings.n,
        seed=[_seed(settings.seed, prompt) for prompt in prompts],
        chat=chat,
    )
    rows = [_row(made, completion) for completion in made]
    starts = [len(made.prompt_token_ids[completion.prompt_index]) for completion in made]
    chosen = [_chosen(where, *row) for row in zip(rows, starts, strict=True)]
    empty = [completion.prompt_index for completion, row in zip(made, chosen, strict=True) if not any(row)]
    if empty:
        raise InputError(
            f"{where} selects no token of the response to prompt {empty[0]}; nothing can be read there. Read other "
            "positions, or let responses be longer."
        )
    width = max(map(len, chosen))
    table = torch.tensor([row + [False] * (width - len(row)) for row in chosen])
    found = engine.capture([list(row) for row in rows], where=mask(table), **options)
    return found, [completion.prompt_index for completion in made]


def mean_by_prompt(
    rows: Float[Tensor, "n_layers completions d_model"], prompts: Sequence[int]
) -> Float[Tensor, "n_layers prompts d_model"]:
    """The mean row of each prompt's completions."""
    index = torch.tensor(list(prompts))
    n_prompts = int(index.max()) + 1
    total = rows.new_zeros(rows.shape[0], n_prompts, rows.shape[2]).index_add_(1, index, rows)
    return total / index.bincount(minlength=n_prompts)[:, None]


def _row(made: Generations, completion: Completion) -> tuple[int, ...]:
    if completion.finish_reason == "error":
        raise DataError(f"The response to prompt {completion.prompt_index} ended with an error; it cannot be read.")
    written = completion.token_ids[:-1] if completion.finish_reason == "eos" else completion.token_ids
    if not written:
        raise DataError(
            f"The response to prompt {completion.prompt_index} is empty, so there is nothing to read of it; leave the "
            "prompt out, or ask so that the model answers."
        )
    return (*made.prompt_token_ids[completion.prompt_index], *written)


def _chosen(where: Where, row: Sequence[int], start: int) -> list[bool]:
    return where.resolve(RowPositions.of_tokens([list(row)], [start]))[0].tolist()


def _seed(seed: int, prompt: PromptLike) -> int:
    """A seed of the prompt's own, so that its draws are the same whatever is read beside it."""
    digest = content_hash([seed, prompt]).rpartition(":")[2]
    return int(digest[:8], 16) >> 1
