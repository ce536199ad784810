"""Contrast pairs: the data a direction is extracted from."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steerlab.core._ab_questions import read_ab_questions
from steerlab.core._characters import check_whole
from steerlab.core._hashing import content_hash
from steerlab.core._numbers import as_list
from steerlab.core._records import PlacedRow, field, frame_rows, of_split, prompt_field, read_csv, read_jsonl
from steerlab.core._splitting import check_no_leak, row_indices, split_groups
from steerlab.core._text import PromptLike, is_prompt, plain_text, prompt_words
from steerlab.core._warning import warn
from steerlab.core.errors import DataError
from steerlab.display import Piece, Shown, Table, count

if TYPE_CHECKING:
    import pandas as pd

PAIRS_SHOWN = 20


@dataclass(frozen=True, repr=False)
class ContrastPairs(Shown):
    """Prompts in pairs that differ in one property: positive shows it, negative does not.

    Attributes:
        positives: prompts (text, chat messages or token ids) that show the property.
        negatives: their counterparts, in the same order.
        groups: a name per pair; pairs made from one template share it, and a split keeps a group together.

    Raises:
        DataError: if the lists differ in length, are empty, or hold something that is no prompt, or half a character.

    Examples:
        >>> pairs = ContrastPairs.from_lists(["I love it."], ["I hate it."])
        >>> len(pairs)
        1
    """

    positives: tuple[PromptLike, ...] = ()
    negatives: tuple[PromptLike, ...] = ()
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes = {len(self.positives), len(self.negatives), len(self.groups)}
        if len(sizes) != 1:
            raise DataError(
                "Positives, negatives and groups must have one length; got "
                f"{len(self.positives)}, {len(self.negatives)} and {len(self.groups)}. Lists become pairs with "
                "ContrastPairs.from_lists(positives, negatives)."
            )
        if not self.positives:
            raise DataError("There are no contrast pairs; pass at least one.")
        for index, pair in enumerate(self):
            for prompt in pair:
                if not is_prompt(prompt):
                    raise DataError(
                        f"Pair {index} has a side that is neither text, nor chat messages, nor token ids: "
                        f"{prompt!r:.80}."
                    )
                if len(prompt) == 0:
                    raise DataError(f"Pair {index} has an empty side.")
                check_whole(prompt, f"Pair {index}", DataError)
        check_whole(self.groups, "The name of a group", DataError)
        for side in ("positives", "negatives"):
            object.__setattr__(self, side, tuple(map(plain_text, getattr(self, side))))
        same = [index for index, (positive, negative) in enumerate(self) if positive == negative]
        if same:
            warn(
                f"{count(len(same), 'pair')} of {len(self)} have one prompt on both sides, which says nothing of a "
                f"difference; the first is pair {same[0]}, {self.positives[same[0]]!r:.60}."
            )

    def __len__(self) -> int:
        return len(self.positives)

    def __iter__(self) -> Iterator[tuple[PromptLike, PromptLike]]:
        return iter(zip(self.positives, self.negatives, strict=True))

    def _finding(self) -> str:
        return f"{count(len(self), 'pair')} in {count(len(set(self.groups)), 'group')}, {self.hash}"

    def _pieces(self) -> Sequence[Piece]:
        shown = range(min(len(self), PAIRS_SHOWN))
        rows = [(prompt_words(self.positives[k]), prompt_words(self.negatives[k]), self.groups[k]) for k in shown]
        return [Table(["positive", "negative", "group"], rows, more=".to_frame()", total=len(self))]

    @classmethod
    def from_lists(
        cls, positives: Sequence[PromptLike], negatives: Sequence[PromptLike], groups: Sequence[str] | None = None
    ) -> "ContrastPairs":
        """Pairs from two lists in the same order; without groups, each pair is a group of its own.

        Raises:
            DataError: if a side is one string rather than a list of prompts.
        """
        for side in (positives, negatives):
            if isinstance(side, str | bytes):
                raise DataError(f"Contrast pairs come as two lists of prompts, got the string {side!r:.60}.")
            if not isinstance(side, Iterable):
                raise DataError(f"Contrast pairs come as two lists of prompts, got {side!r:.60}.")
        positives, negatives = list(positives), list(negatives)
        if len(positives) != len(negatives):
            raise DataError(
                f"Contrast pairs come as two lists of one length; got {len(positives)} positives and {len(negatives)} "
                "negatives."
            )
        named = [str(i) for i in range(len(positives))] if groups is None else as_list(groups, ordered=True)
        if named is None:
            raise DataError(f"groups is a list with a name per pair, got {groups!r:.60}.")
        if len(named) != len(positives):
            raise DataError(f"groups names one group per pair; got {len(named)} groups for {len(positives)} pairs.")
        return cls(tuple(positives), tuple(negatives), tuple(map(_group_name, named, range(len(named)))))

    @classmethod
    def from_jsonl(
        cls,
        path: str | Path,
        *,
        positive: str = "positive",
        negative: str = "negative",
        group: str | None = None,
        split: str | None = None,
    ) -> "ContrastPairs":
        """Pairs from a JSON-lines file, or from one JSON array.

        Args:
            path: the file: one JSON object a line, or an array of objects.
            positive: key of the positive prompt.
            negative: key of the negative prompt.
            group: key of the group name; None makes each pair its own group.
            split: keep only rows whose `split` field equals this; None keeps all.

        Raises:
            DataError: with file and line, for a row that is not an object or lacks a key, or if no row is left.
        """
        rows = of_split(read_jsonl(path), split, path, "contrast pairs")
        return cls._from_places(rows, positive, negative, group)

    @classmethod
    def from_ab_questions(cls, path: str | Path, *, chat: bool = False, split: str | None = None) -> "ContrastPairs":
        """Pairs of one question each with the two letters for an answer, to be read at the letter, the last token.

        Each pair is its own group.

        Args:
            path: a JSON array (or JSON lines) of objects with `question`, `answer_matching_behavior` and
                `answer_not_matching_behavior`, such as "(A)".
            chat: as a chat, with the answer begun by the assistant, rather than as text.
            split: keep only rows whose `split` field equals this; None keeps all.

        Raises:
            DataError: with file and line, for a row that lacks a field, or whose answers are no two letters.

        Source:
            Rimsky et al. 2023 (arXiv:2312.06681), section 3.
        """
        found = read_ab_questions(path, split)
        positives = [question.prompt(question.matching, chat=chat) for question in found]
        negatives = [question.prompt(question.other, chat=chat) for question in found]
        return cls.from_lists(positives, negatives)

    @classmethod
    def from_csv(
        cls,
        path: str | Path,
        *,
        positive: str = "positive",
        negative: str = "negative",
        group: str | None = None,
        split: str | None = None,
    ) -> "ContrastPairs":
        """Pairs from a CSV file with a header. Each cell is text; chats and token ids need JSON lines.

        Args:
            path: the file, comma-separated, UTF-8.
            positive: column of the positive prompt.
            negative: column of the negative prompt.
            group: column of the group name; None makes each pair its own group.
            split: keep only rows whose `split` cell equals this; None keeps all.

        Raises:
            DataError: with file and line, for a row that is malformed or lacks a value, or if no row is left.
        """
        rows = of_split(read_csv(path), split, path, "contrast pairs")
        return cls._from_places(rows, positive, negative, group)

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        positive: str = "positive",
        negative: str = "negative",
        group: str | None = None,
        split: str | None = None,
    ) -> "ContrastPairs":
        """Pairs from a pandas or polars frame; a cell is text, a list of chat messages or a list of token ids.

        Args:
            frame: the frame, a pair a row.
            positive: column of the positive prompt.
            negative: column of the negative prompt.
            group: column of the group name; None makes each pair its own group.
            split: keep only rows whose `split` value equals this; None keeps all.

        Raises:
            DataError: with the row's number from 0, for a row that lacks a value, or if no row is left.

        Examples:
            >>> import pandas as pd
            >>> frame = pd.DataFrame({"positive": ["I love it."], "negative": ["I hate it."], "topic": ["it"]})
            >>> ContrastPairs.from_frame(frame, group="topic").groups
            ('it',)
        """
        rows = of_split(frame_rows(frame), split, "The frame", "contrast pairs")
        return cls._from_places(rows, positive, negative, group)

    @classmethod
    def _from_places(
        cls, rows: Sequence[PlacedRow], positive: str, negative: str, group: str | None
    ) -> "ContrastPairs":
        groups = None if group is None else [_group_name(field(row, group, place), place) for place, row in rows]
        return cls.from_lists(
            [prompt_field(row, positive, place) for place, row in rows],
            [prompt_field(row, negative, place) for place, row in rows],
            groups,
        )

    def to_frame(self) -> "pd.DataFrame":
        """A pandas frame of `positive`, `negative`, `group`, a row a pair; `from_frame(f, group="group")` reads it."""
        import pandas as pd

        columns = {"positive": list(self.positives), "negative": list(self.negatives), "group": list(self.groups)}
        return pd.DataFrame(columns)

    @property
    def hash(self) -> str:
        """Content hash of all pairs and groups, in order."""
        return content_hash([self.positives, self.negatives, self.groups])

    def take(self, indices: Any) -> "ContrastPairs":
        """The pairs at these indices, in this order."""
        chosen = row_indices(indices, len(self))
        return ContrastPairs(
            tuple(self.positives[i] for i in chosen),
            tuple(self.negatives[i] for i in chosen),
            tuple(self.groups[i] for i in chosen),
        )

    def flipped(self, flips: Sequence[bool]) -> "ContrastPairs":
        """The same pairs with positive and negative exchanged where `flips` is true."""
        if len(flips) != len(self):
            raise DataError(f"There are {len(self)} pairs and {len(flips)} flips; pass one per pair.")
        wrong = [flip for flip in flips if not isinstance(flip, bool | np.bool_) and flip not in (0, 1)]
        if wrong:
            raise DataError(f"flips holds True or False per pair, got {wrong[0]!r:.40}.")
        pairs = [(n, p) if flip else (p, n) for (p, n), flip in zip(self, flips, strict=True)]
        return ContrastPairs(tuple(p for p, _ in pairs), tuple(n for _, n in pairs), self.groups)

    def split(self, fraction: float = 0.8, *, seed: int = 0) -> tuple["ContrastPairs", "ContrastPairs"]:
        """Two disjoint sets of pairs; a group is never divided, and no text stands on both sides.

        Args:
            fraction: share of the pairs wanted in the first set; groups make it approximate.
            seed: of the shuffle over groups.

        Raises:
            DataError: if a side would be empty, or two groups share a text.
        """
        left, right = (self.take(part) for part in split_groups(self.groups, fraction, seed))
        check_no_leak(*([prompt for pair in part for prompt in pair] for part in (left, right)))
        return left, right


def _group_name(group: Any, place: Any) -> str:
    """The name of a pair's group.

    Raises:
        DataError: if it is missing; all pairs without one would share a group.
    """
    if group is None or group != group:  # NaN
        where = f"Pair {place}" if isinstance(place, int) else place
        raise DataError(f"{where}: the name of the group is missing ({group!r}); name one for every pair.")
    return str(group)


def balanced_flips(groups: Sequence[str], rng: np.random.Generator) -> list[bool]:
    """Flips exactly half the pairs within each group; odd pairs left over are balanced against each other.

    Independent flips of clean pairs mostly give the same axis back, up to sign and strength; exactly half cancels the
    group's shared direction and leaves what the labels do not explain. Pairs that are each their own group are
    balanced as a whole.
    """
    flips = np.zeros(len(groups), dtype=bool)
    left_over = []
    places: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    for name in sorted(places):
        members = rng.permutation(np.array(places[name]))
        flips[members[: len(members) // 2]] = True
        left_over += members[len(members) // 2 * 2 :].tolist()
    odd = rng.permutation(np.array(left_over, dtype=int))
    half = len(odd) // 2 + (int(rng.integers(2)) if len(odd) % 2 else 0)
    flips[odd[:half]] = True
    return flips.tolist()
