"""Completions side by side: the same prompts and draws, unsteered and steered, with what differs marked."""

from collections.abc import Sequence
from typing import Any

from steerlab.core._text import PromptLike, as_prompts, prompt_words
from steerlab.core.errors import InputError
from steerlab.core.results import Generations
from steerlab.display import SideBySide, TextRow, shortened
from steerlab.display import side_by_side as compared

_FRAME = ("prompt_index", "sample_index", "prompt", "dose", "text")


def side_by_side(
    *made: Any, names: Sequence[str] = (), prompts: Sequence[PromptLike] | PromptLike | None = None
) -> SideBySide:
    """Shows completions of the same prompts and seeds beside each other; words that the first one lacks are marked.

    Args:
        made: what `engine.generate` returned, several times, with the same prompts, `n` and seed; or the one frame that
            `exp.generate` returned, whose doses become columns.
        names: a heading for each; `unsteered` and `steered` for two.
        prompts: the prompts, to show them too.

    Raises:
        InputError: for completions of different prompts, or fewer than two arms.

    Examples:
        >>> from steerlab.engines.toy import ToyEngine
        >>> engine = ToyEngine()
        >>> side_by_side(*(engine.generate("abc", seed=0, max_new_tokens=2) for _ in range(2)))
        SideBySide(unsteered | steered: 1 row, 1 of them the same)
    """
    if len(made) == 1 and hasattr(made[0], "columns"):
        return _of_frame(made[0])
    if len(made) < 2 or not all(isinstance(one, Generations) for one in made):
        raise InputError(
            "side_by_side takes what engine.generate returned, at least twice, or the frame of exp.generate; got "
            f"{', '.join(type(one).__name__ for one in made) or 'nothing'}."
        )
    places = [[(c.prompt_index, c.sample_index) for c in one] for one in made]
    prompts_run = [one.prompt_token_ids for one in made]
    if any(ids != prompts_run[0] for ids in prompts_run) or any(place != places[0] for place in places):
        raise InputError("The completions are of different prompts or numbers of samples; generate them alike.")
    headings = list(names) or (
        ["unsteered", "steered"] if len(made) == 2 else [f"{k}" for k in range(1, len(made) + 1)]
    )
    if len(headings) != len(made):
        raise InputError(f"There are {len(made)} arms and {len(headings)} names; give one for each.")
    words = None if prompts is None else [prompt_words(prompt) for prompt in as_prompts(prompts)]
    rows = [
        TextRow(_row_name(words, prompt, sample), tuple(one[k].text for one in made))
        for k, (prompt, sample) in enumerate(places[0])
    ]
    return compared(headings, rows, names="prompt, sample")


def _of_frame(frame: Any) -> SideBySide:
    """Completions of a frame, a column per dose."""
    missing = [name for name in _FRAME if name not in frame.columns]
    if missing:
        raise InputError(f"This frame has no column {missing[0]!r}; pass the one that exp.generate returned.")
    doses = sorted(frame.dose.unique(), key=lambda dose: (dose != 0, dose))
    rows = []
    for (prompt, sample), part in frame.groupby(["prompt_index", "sample_index"], sort=False):
        texts = dict(zip(part.dose, part.text, strict=True))
        if len(texts) < len(doses) or len(part) > len(doses):
            raise InputError(f"Prompt {prompt}, sample {sample} does not have one completion at every dose.")
        name = _row_name({prompt: str(part.prompt.iloc[0])}, prompt, sample)
        rows.append(TextRow(name, tuple(texts[dose] for dose in doses)))
    return compared([f"dose {dose:g}" for dose in doses], rows, names="prompt, sample")


def _row_name(words: Any, prompt: int, sample: int) -> str:
    return f"{prompt}, {sample}" if words is None else f"{shortened(words[prompt], 200)}, {sample}"
