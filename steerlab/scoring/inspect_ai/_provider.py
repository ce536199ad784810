"""The models of inspect_ai whose names begin with `steerlab/`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from inspect_ai.model import (  # pyright: ignore[reportMissingImports]
    ChatCompletionChoice,
    ChatMessageAssistant,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
)

from steerlab._runtime.encoding import Encoder, raise_error
from steerlab.core._spelling import token_text
from steerlab.core._text import PromptLike
from steerlab.core.engine import Engine
from steerlab.core.errors import ContextLengthError, InputError, SteerlabError
from steerlab.core.receipts import Receipt
from steerlab.core.results import Completion, Generations
from steerlab.scoring._model_arguments import engine_of, take_plan
from steerlab.scoring.inspect_ai._batches import Batches
from steerlab.scoring.inspect_ai._messages import prompt_of
from steerlab.scoring.inspect_ai._settings import MAX_TOKENS, Settings, seed_of, settings_of
from steerlab.steering.plan import Plan

_STEERED = re.compile(r"(.+)\+([0-9a-f]{16})")
_AT_ONCE = 32
_TURNS: dict[int, Lock] = {}
"""By an engine's id, what lets one call in at a time: inspect runs several models at once."""

_Asked = tuple[PromptLike, int]
"""A prompt, and the seed of its draws."""


@dataclass(frozen=True)
class Running:
    """An engine that runs already, and the plan that steers it."""

    engine: Engine
    plan: Plan | None


@dataclass(frozen=True)
class _Row:
    """What came of one request."""

    completions: Sequence[Completion]
    receipts: Sequence[Receipt]
    n_prompt_tokens: int
    ran_on: str


class SteerlabAPI(ModelAPI):
    """An engine under a plan, with the interface of inspect's models.

    Args:
        model_name: what `sl.load` takes; after `+` it may end in the hash of the plan, which is then checked.
        base_url: the address of a `steerlab serve`, to be used instead.
        api_key: the key of that server.
        config: settings of generation.
        running: an engine that runs already, and its plan.
        chat: whether messages go through the chat template.
        **arguments: of plan and engine, see `steerlab.scoring._model_arguments`.

    Raises:
        InputError: for arguments that do not go together.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 -- as inspect's own
        *,
        running: Running | None = None,
        chat: bool = True,
        **arguments: Any,
    ) -> None:
        super().__init__(model_name=model_name, base_url=base_url, api_key=api_key, config=config)
        if not isinstance(chat, bool):
            raise InputError(f"chat is true or false, got {chat!r:.40}.")
        self._owns = running is None
        name, found = _started(model_name, base_url, api_key, arguments) if running is None else (model_name, running)
        if not isinstance(found, Running):
            raise InputError(
                f"The model was an engine in the process of that evaluation ({found!r:.40}). Make it again with "
                "steerlab.scoring.inspect_ai.inspect_model(engine, plan)."
            )
        self.engine, self.plan, self.chat = found.engine, found.plan, chat
        self.model_name = name if self.plan is None else f"{name}+{self.plan.hash}"
        self._encoder = Encoder(self.engine.tokenizer, self.engine.info)
        self._batches = Batches[Settings, _Asked, _Row](self._rows)

    # --- as inspect asks for it -----------------------------------------------------------------------------------

    async def generate(
        self, input: list[Any], tools: list[Any], tool_choice: Any, config: GenerateConfig
    ) -> ModelOutput:
        """The completions of one request.

        Raises:
            InputError: for tools, content that is no text, or settings that an engine does not have.
            SteerlabError: what the engine says is wrong.
        """
        if tools:
            names = ", ".join(tool.name for tool in tools)
            raise InputError(f"An engine answers in text and calls no tools; the task offers {names}.")
        prompt = prompt_of(input, chat=self.chat)
        (encoded,) = self._encoder.each_prompt([prompt], False, 1)
        if isinstance(encoded, ContextLengthError):
            return ModelOutput.from_content(self.model_name, str(encoded), "model_length", str(encoded))
        room = self.engine.info.context_length - len(raise_error(encoded).token_ids)
        settings, seed = settings_of(config, room), seed_of(config)
        row = await self._batches.answer(settings, (prompt, seed))
        at_length = "max_tokens" if settings.max_new_tokens < room else "model_length"
        return self._output(row, {"eos": "stop", "stop": "stop", "length": at_length}, seed, config)

    def max_tokens(self) -> int:
        """Tokens at most where neither task nor caller says."""
        return MAX_TOKENS

    def max_connections(self) -> int:
        """Requests under way at once, and so prompts in one batch, where the number is fixed."""
        return _AT_ONCE

    def connection_key(self) -> str:
        """What shares a limit of requests: the engine."""
        return str(id(self.engine))

    def collapse_user_messages(self) -> bool:
        """Two user's messages in a row become one: most templates take no others."""
        return True

    async def tokenize(self, text: str) -> list[int]:
        """A text's ids, without special tokens."""
        return self.engine.tokenizer.encode(text, add_special_tokens=False)

    async def count_text_tokens(self, text: str) -> int:
        """Tokens of a text."""
        return len(await self.tokenize(text))

    def close(self) -> None:
        """Frees the engine, unless it ran before."""
        if self._owns:
            self.engine.close()

    # --- batches --------------------------------------------------------------------------------------------------

    def _rows(self, settings: Settings, asked: Sequence[_Asked]) -> list[_Row | SteerlabError]:
        """One call to the engine, which other models may have too."""
        with _TURNS.setdefault(id(self.engine), Lock()):
            made = self.engine.generate(
                [prompt for prompt, _ in asked],
                plan=self.plan,
                policy=settings.policy,
                max_new_tokens=settings.max_new_tokens,
                n=settings.n,
                seed=[seed for _, seed in asked],
                stop=settings.stop,
            )
        return [made.errors[index] if index in made.errors else _row(made, index) for index in range(len(asked))]

    def _output(self, row: _Row, reasons: Mapping[str, Any], seed: int, config: GenerateConfig) -> ModelOutput:
        n_new = sum(len(completion.token_ids) for completion in row.completions)
        return ModelOutput(
            model=self.model_name,
            choices=[
                ChatCompletionChoice(
                    message=ChatMessageAssistant(content=completion.text, model=self.model_name, source="generate"),
                    stop_reason=reasons[completion.finish_reason],
                    logprobs=self._logprobs(completion) if config.logprobs else None,
                )
                for completion in row.completions
            ],
            usage=ModelUsage(
                input_tokens=row.n_prompt_tokens, output_tokens=n_new, total_tokens=row.n_prompt_tokens + n_new
            ),
            metadata={
                "seed": seed,
                "plan_hash": None if self.plan is None else self.plan.hash,
                "edited": [receipt.edited for receipt in row.receipts],
                "ran_on": row.ran_on,
            },
        )

    def _logprobs(self, completion: Completion) -> Logprobs:
        """Log p of each token under the model, nats."""
        pairs = zip(completion.token_ids, completion.token_log_probs, strict=True)
        tokenizer = self.engine.tokenizer
        return Logprobs(content=[Logprob(token=token_text(tokenizer, one), logprob=value) for one, value in pairs])


def _row(made: Generations, index: int) -> _Row:
    return _Row(
        [completion for completion in made if completion.prompt_index == index],
        [receipt for receipt in made.receipts if receipt.prompt_index == index],
        len(made.prompt_token_ids[index]),
        made.engine,
    )


def _started(
    model_name: str, base_url: str | None, api_key: str | None, arguments: dict[str, Any]
) -> tuple[str, Running]:
    """The model's own name, and its engine with the plan."""
    options = {**arguments, **({"api_key": api_key} if api_key is not None else {})}
    plan = take_plan(options)
    steered = _STEERED.fullmatch(model_name)
    name, expected = (model_name, None) if steered is None else steered.groups()
    found = None if plan is None else plan.hash
    if expected not in (None, found):
        raise InputError(
            f"The model's name ends in the hash of its plan, {expected}, and the plan here has {found}. Leave the hash "
            "out of the name, or pass the plan that it is of."
        )
    return name, Running(engine_of(base_url or name, plan, options), plan)
