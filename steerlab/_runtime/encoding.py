"""From what a caller passes to the token ids of a batch, checked against the model's context."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

from steerlab.core._encoded_pairs import encode_pairs
from steerlab.core._numbers import check_flag
from steerlab.core._text import (
    Boundary,
    EncodedPair,
    EncodedPrompt,
    as_targets,
    check_prompt,
    encode_prompt,
    is_single_prompt,
    is_token_ids,
    listed,
    prompt_items,
)
from steerlab.core.engine import ModelInfo
from steerlab.core.errors import ContextLengthError, PromptError, SteerlabError, TargetError
from steerlab.steering.positions._prompt_lookup import PromptContent

Pair = tuple[int, int, EncodedPair]
"""Prompt index, target index, and the ids of both."""

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Encoder:
    """Encodes prompts and targets with a model's own tokenizer.

    Attributes:
        tokenizer: the tokenizer; None if the engine works with token ids only.
        info: the model.
        advice: what else than shortening a row makes it fit, as the end of "Shorten it…"; empty if nothing does.
    """

    tokenizer: Any
    info: ModelInfo
    advice: str = ""

    def prompts(self, prompts: Any, chat: bool, n_new: int = 0) -> list[EncodedPrompt]:
        """Every prompt's ids.

        Args:
            prompts: one prompt or several.
            chat: take strings as user turns.
            n_new: tokens that must fit after each.

        Raises:
            PromptError: for a prompt that cannot run.
            ContextLengthError: if a prompt and its new tokens exceed the context.
        """
        return [raise_error(prompt) for prompt in self.each_prompt(prompts, chat, n_new)]

    def each_prompt(self, prompts: Any, chat: bool, n_new: int = 0) -> list[EncodedPrompt | SteerlabError]:
        """Every prompt's ids, or what is wrong with it, so that a bad one can fail alone; arguments as in `prompts`.

        Raises:
            PromptError: if there are no prompts at all.
        """
        chat = check_flag(chat, "chat")
        encode = partial(encode_prompt, self.tokenizer, chat=chat, d_vocab=self.info.d_vocab)
        once = cache(encode)  # of texts: the plans of a call share prompts
        return [
            self._encoded(prompt, once if isinstance(prompt, str) else encode, n_new, index)
            for index, prompt in enumerate(prompt_items(prompts))
        ]

    def _encoded(
        self, given: Any, encode: Callable[[Any], EncodedPrompt], n_new: int, index: int
    ) -> EncodedPrompt | SteerlabError:
        try:
            prompt = check_prompt(given, index)
            if self.tokenizer is None and not is_token_ids(prompt):
                raise PromptError("This engine has no tokenizer (skip_tokenizer_init=True); pass token ids.")
            encoded = encode(prompt)
            self._check_length(index, len(encoded.token_ids), "the prompt")
            self._check_length(index, len(encoded.token_ids) + n_new, "prompt and new tokens")
        except SteerlabError as error:
            return error
        return encoded

    def contents(self, encoded: Sequence[EncodedPrompt]) -> list[PromptContent]:
        """What `span` and `mask` positions look at, per prompt."""
        return [
            PromptContent(index, len(encoded), prompt.token_ids, prompt.text, self.tokenizer)
            for index, prompt in enumerate(encoded)
        ]

    def pairs(
        self,
        prompts: Any,
        targets: Sequence[Any],
        *,
        boundary: Boundary = "joint",
        variants: Sequence[str] = ("",),
        score_eos: bool = False,
        chat: bool = False,
    ) -> tuple[list[Pair], list[PromptContent]]:
        """Every pair, in order of prompt, target, variant; and what the prompts hold. Arguments as in `Engine.score`.

        Raises:
            TargetError, PromptError, ContextLengthError: for a pair that cannot be scored.
        """
        prompts = listed(prompts)
        encoded = self.prompts(prompts, chat)
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
        for row, (_, _, pair) in enumerate(pairs):
            self._check_length(row, len(pair.context_ids) + len(pair.target_ids), "prompt and target")
        return pairs, self.contents(encoded)

    def _check_length(self, row: int, length: int, what: str) -> None:
        limit = self.info.context_length
        if length > limit:
            raise ContextLengthError(
                f"Row {row}: {what} came to {length} tokens, {length - limit} more than the context of {limit}. "
                f"Shorten it{self.advice}; nothing is cut silently."
            )


def raise_error(found: _Found | SteerlabError) -> _Found:
    """What was found, unless it is an error, which is raised."""
    if isinstance(found, SteerlabError):
        raise found
    return found
