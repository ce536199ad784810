"""Prompts with their targets, as the pairs that an engine scores: spelling variants, the EOS step, and bytes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from steerlab.core.errors import TargetError
from steerlab.core.text import Boundary, EncodedPair, EncodedPrompt, TargetLike, encode_pair

CONTEXT_TAIL = 8  # tokens before a target that can hold the beginning of its first character, with room to spare


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
        boundary: how prompt and target are cut; see `steerlab.core.text.encode_pair`.
        variants: prefixes; each makes a separate string of every target.
        score_eos: append the tokenizer's EOS to every target.

    Raises:
        TargetError: for a target that gives no token, variants that are no prefixes, a variant of token ids, or
            `score_eos` without an EOS.
    """
    prefixes = check_variants(variants)
    eos = _eos(tokenizer) if score_eos else ()
    return [
        (i, j, _pair(tokenizer, prompt, target, prefix, eos, boundary, d_vocab))
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


def spelled_bytes(tokenizer: Any, context_ids: Sequence[int], target_ids: Sequence[int]) -> int | None:
    """UTF-8 bytes of the text that target tokens spell after their context; special tokens spell none.

    A character that begins in the context and ends in the target counts whole; one that the target leaves unfinished
    does not count. After a merged boundary these are the bytes really scored, the prompt's own last characters
    included.

    Args:
        tokenizer: the model's own tokenizer; None gives None.
        context_ids: the ids before.
        target_ids: the ids whose text is measured.
    """
    if tokenizer is None:
        return None
    before = tuple(context_ids[-CONTEXT_TAIL:])
    return _bytes(tokenizer, before + tuple(target_ids)) - _bytes(tokenizer, before)


def _bytes(tokenizer: Any, ids: Sequence[int]) -> int:
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return len(text.replace("\N{REPLACEMENT CHARACTER}", "").encode("utf-8"))


def _pair(
    tokenizer: Any,
    prompt: EncodedPrompt,
    target: TargetLike,
    prefix: str,
    eos: tuple[int, ...],
    boundary: Boundary,
    d_vocab: int,
) -> EncodedPair:
    pair = encode_pair(tokenizer, prompt, _spelling(target, prefix), boundary=boundary, d_vocab=d_vocab)
    if tokenizer is None:
        return pair
    num_bytes = spelled_bytes(tokenizer, pair.context_ids, pair.target_ids)
    return replace(pair, target_ids=pair.target_ids + eos, variant=prefix, num_bytes=num_bytes)


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
