"""Prompts with their targets, as the pairs that an engine scores: spelling variants, the EOS step, and bytes."""

import logging
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from steerlab.core._numbers import check_flag
from steerlab.core._spelling import Continuation, spelled_bytes
from steerlab.core._text import Boundary, EncodedPair, EncodedPrompt, TargetLike, common_prefix_length, encode_pair
from steerlab.core.errors import TargetError

_LOG = logging.getLogger(__name__)
_LAST_TOKENS = 8
_SHOWN = 60


def encode_pairs(
    tokenizer: Any,
    prompts: Sequence[EncodedPrompt],
    targets: Sequence[Sequence[TargetLike]],
    *,
    d_vocab: int,
    boundary: Boundary = "joint",
    variants: Sequence[str] = ("",),
    score_eos: bool = False,
) -> list[tuple[int, int, EncodedPair]]:
    """(prompt index, target index, ids) of everything to score, in order of prompt, target, variant.

    A variant is a prefix: with `("", " ")` the target "Paris" is scored as "Paris" and as " Paris", two strings with
    two results. Neither is chosen over the other.

    Args:
        tokenizer: the model's own tokenizer; None if all targets are ids.
        prompts: the encoded prompts.
        targets: one list of strings (or lists of ids) per prompt.
        d_vocab: number of logits.
        boundary: how prompt and target are cut; see `steerlab.core._text.encode_pair`.
        variants: prefixes; each makes a separate string of every target.
        score_eos: append the tokenizer's EOS to every target.

    Raises:
        TargetError: for a target that gives no token, variants that are no prefixes, a variant of token ids, or
            `score_eos` without an EOS.
    """
    prefixes = check_variants(variants)
    eos = _eos(tokenizer) if check_flag(score_eos, "score_eos") else ()
    pair = partial(_pair, tokenizer, eos=eos, boundary=boundary, d_vocab=d_vocab)
    once = cache(pair)  # of texts: the plans of a call share prompts and targets
    return [
        (i, j, once(prompt, target, prefix) if isinstance(target, str) else pair(prompt, target, prefix))
        for i, (prompt, row) in enumerate(zip(prompts, targets, strict=True))
        for j, target in enumerate(row)
        for prefix in prefixes
    ]


def check_variants(variants: Sequence[str]) -> tuple[str, ...]:
    """The prefixes as a tuple.

    Raises:
        TargetError: if there are none, one is no string, or one is listed twice.

    Examples:
        >>> check_variants(["", " "])
        ('', ' ')
    """
    if isinstance(variants, str) or not isinstance(variants, Sequence):
        raise TargetError(f"variants is a sequence of prefixes, e.g. ('', ' '); got {variants!r}.")
    wrong = [variant for variant in variants if not isinstance(variant, str)]
    if wrong:
        raise TargetError(f"A variant is a string to put before each target, got {wrong[0]!r}.")
    if not variants:
        raise TargetError("There are no variants; ('',) scores each target as it is.")
    if len(set(variants)) < len(variants):
        raise TargetError(f"A variant is listed twice in {list(variants)}; list each once.")
    return tuple(variants)


def _pair(
    tokenizer: Any,
    prompt: EncodedPrompt,
    target: TargetLike,
    prefix: str,
    *,
    eos: tuple[int, ...],
    boundary: Boundary,
    d_vocab: int,
) -> EncodedPair:
    pair = encode_pair(tokenizer, prompt, _spelling(target, prefix), boundary=boundary, d_vocab=d_vocab)
    if tokenizer is None:
        return pair
    if isinstance(target, str):
        _hint_if_glued(tokenizer, prompt, prefix + target)
    num_bytes = _scored_bytes(tokenizer, prompt, pair, target, prefix)
    return replace(pair, target_ids=pair.target_ids + eos, variant=prefix, num_bytes=num_bytes)


def _scored_bytes(tokenizer: Any, prompt: EncodedPrompt, pair: EncodedPair, target: TargetLike, prefix: str) -> int:
    """UTF-8 bytes of what is scored: a text with the prompt's characters that merged with it, or what ids spell."""
    if not isinstance(target, str):
        return spelled_bytes(tokenizer, pair.context_ids, pair.target_ids)
    cut = common_prefix_length(prompt.token_ids, pair.context_ids)
    merged = spelled_bytes(tokenizer, prompt.token_ids[:cut], prompt.token_ids[cut:])
    return merged + len((prefix + target).encode("utf-8"))


_hinted = False


def _hint_if_glued(tokenizer: Any, prompt: EncodedPrompt, target: str) -> None:
    """Says, once in a process, that a target goes on with the prompt's last word."""
    global _hinted
    if _hinted or not _is_of_word(target[0]):
        return
    text = Continuation(tokenizer, ()).text(prompt.token_ids[-_LAST_TOKENS:]) if prompt.text is None else prompt.text
    if not text or not _is_of_word(text[-1]) or (text[-1].isdigit() and target[0].isdigit()):
        return
    _hinted = True
    read = (text.split()[-1] + target)[:_SHOWN]
    _LOG.warning(
        "The target %r follows the prompt's last word without a space, so that the model reads %r. Put the space "
        "into the target where a new word is meant, or score both with variants=('', ' '). This is said once.",
        target[:_SHOWN],
        read,
    )


def _is_of_word(character: str) -> bool:
    """A cased letter or a digit: scripts without case may be written without spaces."""
    return unicodedata.category(character) in ("Ll", "Lu", "Nd")


def _spelling(target: TargetLike, prefix: str) -> TargetLike:
    if isinstance(target, str):
        return prefix + target
    if prefix:
        raise TargetError(
            f"The variant {prefix!r} cannot be put before the token ids {list(target)!r:.80}; pass the target as text, "
            "or leave variants=('',)."
        )
    return target


def _eos(tokenizer: Any) -> tuple[int, ...]:
    eos = getattr(tokenizer, "eos_token_id", None)
    if eos is None:
        raise TargetError("score_eos=True needs an EOS token, and this engine's tokenizer has none.")
    return (eos,)
