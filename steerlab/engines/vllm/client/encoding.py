"""From what a caller passes to token ids, each prompt checked by itself, so that a bad one can fail alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from steerlab.core.encoded_pairs import encode_pairs
from steerlab.core.engine import ModelInfo
from steerlab.core.errors import ContextLengthError, PromptError, SteerlabError, TargetError
from steerlab.core.numbers import as_list, check_flag
from steerlab.core.text import (
    Boundary,
    EncodedPair,
    EncodedPrompt,
    as_prompts,
    as_targets,
    check_no_table,
    encode_prompt,
    is_single_prompt,
    listed,
)


@dataclass(frozen=True)
class Encoder:
    """Encodes prompts and targets with a model's own tokenizer.

    Attributes:
        tokenizer: the tokenizer; None if the engine works with token ids only.
        info: the model.
    """

    tokenizer: Any
    info: ModelInfo

    def prompts(self, prompts: Any, chat: bool, room: int) -> list[EncodedPrompt | SteerlabError]:
        """Every prompt's ids, or what is wrong with it.

        Args:
            prompts: one prompt or several.
            chat: take strings as user turns.
            room: tokens that must fit after each.

        Raises:
            PromptError: if there are no prompts at all.
        """
        chat = check_flag(chat, "chat")
        check_no_table(prompts)
        found = None if is_single_prompt(prompts) else as_list(prompts, ordered=True)
        if not found:
            given: Any = prompts if found is None else []
            return [self._encoded(prompt, chat, room, 0) for prompt in as_prompts(given)]
        return [self._encoded(prompt, chat, room, index) for index, prompt in enumerate(found)]

    def _encoded(self, prompt: Any, chat: bool, room: int, index: int) -> EncodedPrompt | SteerlabError:
        try:
            if type(prompt) is list and prompt and all(type(i) is int for i in prompt):
                return self._plain_ids(prompt, room, index)
            (checked,) = as_prompts([prompt])
            if self.tokenizer is None and (isinstance(checked, str) or not all(isinstance(i, int) for i in checked)):
                raise PromptError("This engine has no tokenizer (skip_tokenizer_init=True); pass token ids.")
            encoded = encode_prompt(self.tokenizer, checked, chat=chat, d_vocab=self.info.d_vocab)
            self._check_room(len(encoded.token_ids), room, index)
        except SteerlabError as error:
            return error
        return encoded

    def _plain_ids(self, ids: list[int], room: int, index: int) -> EncodedPrompt:
        """The short way for what large batches are made of; the same checks as for any other prompt."""
        if min(ids) < 0 or max(ids) >= self.info.d_vocab:
            return encode_prompt(self.tokenizer, ids, d_vocab=self.info.d_vocab)  # raises, and says why
        self._check_room(len(ids), room, index)
        return EncodedPrompt(tuple(ids), None)

    def _check_room(self, length: int, room: int, index: int) -> None:
        self.check_length(length + room, f"Prompt {index}" + (f" and {room} new tokens" if room else ""))

    def pairs(
        self,
        prompts: Any,
        targets: Sequence[Any],
        boundary: Boundary,
        score_eos: bool,
        chat: bool,
        variants: Sequence[str] = ("",),
    ) -> list[tuple[int, int, EncodedPrompt, EncodedPair]]:
        """(prompt index, target index, prompt, ids) of every pair, in order.

        Raises:
            TargetError, PromptError, ContextLengthError: for a pair that cannot be scored.
        """
        prompts = listed(prompts)
        encoded = [raise_error(prompt) for prompt in self.prompts(prompts, chat, 0)]
        rows = as_targets(targets, len(encoded), is_single_prompt(prompts))
        if self.tokenizer is None and any(isinstance(target, str) for row in rows for target in row):
            raise TargetError("This engine has no tokenizer (skip_tokenizer_init=True); pass token ids.")
        pairs = encode_pairs(
            self.tokenizer,
            encoded,
            rows,
            d_vocab=self.info.d_vocab,
            boundary=boundary,
            variants=variants,
            score_eos=score_eos,
        )
        for i, j, pair in pairs:
            # the last target token is not run, and the token that vLLM adds takes its place
            self.check_length(len(pair.context_ids) + len(pair.target_ids), f"Prompt {i} and its target {j}")
        return [(i, j, encoded[i], pair) for i, j, pair in pairs]

    def check_length(self, length: int, what: str) -> None:
        """Checks that so many tokens fit the context.

        Raises:
            ContextLengthError: otherwise; says by how much.
        """
        limit = self.info.context_length
        if length > limit:
            raise ContextLengthError(
                f"{what} came to {length} tokens, {length - limit} more than the context of {limit}. Shorten it, or "
                "start the engine with a larger max_model_len; nothing is cut silently."
            )


def raise_error(found: Any) -> Any:
    """What was found, unless it is an error, which is raised."""
    if isinstance(found, SteerlabError):
        raise found
    return found
