"""From what a caller passes to the token ids of a batch, checked against the model's context."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from steerlab.core.encoded_pairs import encode_pairs
from steerlab.core.engine import ModelInfo
from steerlab.core.errors import ContextLengthError
from steerlab.core.numbers import check_flag
from steerlab.core.text import (
    Boundary,
    EncodedPair,
    EncodedPrompt,
    PromptLike,
    as_prompts,
    as_targets,
    encode_prompt,
    is_single_prompt,
    listed,
)
from steerlab.steering.positions.prompt_lookup import PromptContent


@dataclass(frozen=True)
class Encoder:
    """Encodes prompts and targets with a model's own tokenizer.

    Attributes:
        tokenizer: the tokenizer.
        info: the model.
    """

    tokenizer: Any
    info: ModelInfo

    def prompts(self, prompts: Sequence[PromptLike] | PromptLike, chat: bool) -> list[EncodedPrompt]:
        """Every prompt's ids.

        Raises:
            PromptError, ContextLengthError: for a prompt that cannot run.
        """
        as_chat = check_flag(chat, "chat")
        encoded = [
            encode_prompt(self.tokenizer, prompt, chat=as_chat, d_vocab=self.info.d_vocab)
            for prompt in as_prompts(prompts)
        ]
        self.check_lengths([len(prompt.token_ids) for prompt in encoded], "the prompt")
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
    ) -> tuple[list[tuple[int, int, EncodedPair]], list[PromptContent]]:
        """(prompt index, target index, ids) of every pair, in order; and what the prompts hold.

        Raises:
            TargetError, PromptError, ContextLengthError: for a pair that cannot be scored.
        """
        prompts = listed(prompts)
        encoded = self.prompts(prompts, chat)
        rows = as_targets(targets, len(encoded), is_single_prompt(prompts))
        pairs = encode_pairs(
            self.tokenizer,
            encoded,
            rows,
            d_vocab=self.info.d_vocab,
            boundary=boundary,
            variants=variants,
            score_eos=score_eos,
        )
        self.check_lengths([len(p.context_ids) + len(p.target_ids) for _, _, p in pairs], "prompt and target")
        return pairs, self.contents(encoded)

    def check_lengths(self, lengths: Sequence[int], what: str) -> None:
        """Nothing, if every row fits the context.

        Raises:
            ContextLengthError: otherwise; says by how much.
        """
        limit = self.info.context_length
        for index, length in enumerate(lengths):
            if length > limit:
                raise ContextLengthError(
                    f"Row {index}: {what} came to {length} tokens, {length - limit} more than the context of {limit}. "
                    "Shorten it; nothing is cut silently."
                )
