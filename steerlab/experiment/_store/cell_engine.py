"""An engine that stores its scores as cells: a measurement that runs on it can be resumed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from steerlab.core._text import Boundary, PromptLike
from steerlab.core.engine import Engine, ModelInfo
from steerlab.core.results import Score, Scores
from steerlab.experiment._store.batches import batch_plans, row_tokens, tokens_per_call_of
from steerlab.experiment._store.cells import Cell, StoredCell
from steerlab.experiment._store.fingerprint import Fingerprint
from steerlab.experiment._store.session import Session
from steerlab.steering.plan import Plan

COLUMNS = ["prompt_index", "target_index", "token_ids", "token_log_probs", "boundary", "num_bytes"]


@dataclass(frozen=True)
class _Block:
    """Neighbouring rows of one call that share a plan; one cell."""

    start: int
    rows: list[list[Any]]
    plan: Plan | None


class CellEngine:
    """Scores through the cells of an experiment; everything else is the engine's own.

    Its scores carry no receipts: a cell holds none.

    Args:
        session: the experiment's session.
        engine: another engine to score with; the session's own if None.
    """

    def __init__(self, session: Session, engine: Engine | None = None) -> None:
        self._session = session
        self._engine: Any = session.lazy if engine is None else engine
        self._fingerprint = session.fingerprint if engine is None else Fingerprint.of(engine, {})
        self._about = {} if engine is None else {"weights_hash": self._fingerprint.info.weights_hash}

    @property
    def info(self) -> ModelInfo:
        return self._fingerprint.info

    def median_norm(self, layer: int, site: str = "resid_post") -> float:
        """As an engine's; a method of its own, so that naming it does not load the model."""
        return self._engine.median_norm(layer, site)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def score(
        self,
        prompts: Sequence[PromptLike],
        targets: Sequence[Sequence[Any]],
        *,
        plan: Any = None,
        boundary: Boundary = "joint",
        score_eos: bool = False,
        chat: bool = False,
    ) -> Scores:
        """As an engine's `score`; neighbouring prompts under one plan are a cell. Cells that are there are not scored.

        Args:
            prompts: a list of prompts.
            targets: one list of targets per prompt.
            plan: a plan, None, or a list with one per prompt.
            boundary: as in the engine.
            score_eos: as in the engine.
            chat: as in the engine.
        """
        options = {"boundary": boundary, "score_eos": score_eos, "chat": chat}
        blocks = _blocks(prompts, targets, plan)
        cells = [self._cell(block, options) for block in blocks]
        found = [self._session.cells.find(cell, self._fingerprint.hash) for cell in cells]
        missing = [k for k, frame in enumerate(found) if frame is None]
        for batch in self._batches(blocks, missing):
            made = self._scored([blocks[k] for k in batch], options)
            for k, frame in zip(batch, made, strict=True):
                found[k] = self._session.cells.add(cells[k], self._fingerprint.hash, frame)
        rows = [row for block, frame in zip(blocks, found, strict=True) for row in _score_rows(frame, block.start)]
        return Scores(tuple(rows), self.info.dtype)

    def _cell(self, block: _Block, options: dict[str, Any]) -> Cell:
        inputs = self._session.inputs
        plan = None if block.plan is None else inputs.add_plan(block.plan)
        return Cell("score_rows", {"plan": plan, "data": inputs.add_data(block.rows), **options}, self._about)

    def _batches(self, blocks: Sequence[_Block], missing: Sequence[int]) -> Any:
        budget = tokens_per_call_of(self._fingerprint.backend)
        longest = max((row_tokens(self._engine, blocks[k].rows) for k in missing), default=0) if budget else 0
        return batch_plans(missing, longest, budget)

    def _scored(self, blocks: Sequence[_Block], options: dict[str, Any]) -> list[pd.DataFrame]:
        rows = [row for block in blocks for row in block.rows]
        plans = [block.plan for block in blocks for _ in block.rows]
        scores = self._engine.score([prompt for prompt, _ in rows], [row for _, row in rows], plan=plans, **options)
        by_prompt: list[list[Score]] = [[] for _ in rows]
        for score in scores:
            by_prompt[score.prompt_index].append(score)
        frames, start = [], 0
        for block in blocks:
            stop = start + len(block.rows)
            frames.append(score_frame([score for own in by_prompt[start:stop] for score in own], start))
            start = stop
        return frames


def cell_engine_for(session: Session, engine: Engine | None = None) -> Engine:
    """The session's engine, or another one, with scores kept as cells."""
    made: Any = CellEngine(session, engine)  # what it does not define itself is the engine's
    return made


def score_frame(scores: Sequence[Score], start: int = 0) -> pd.DataFrame:
    """A row per score, its prompts counted from `start`; token ids and log-probs (nats) as lists."""
    rows = [
        (
            s.prompt_index - start,
            s.target_index,
            list(s.token_ids),
            list(s.token_log_probs),
            s.boundary,
            math.nan if s.num_bytes is None else s.num_bytes,
        )
        for s in scores
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def _score_rows(frame: pd.DataFrame | None, start: int) -> list[Score]:
    assert frame is not None
    frame = frame.reindex(columns=COLUMNS)  # a cell of an earlier version says nothing of bytes
    return [
        Score(
            int(p) + start,
            int(t),
            tuple(map(int, ids)),
            tuple(map(float, values)),
            boundary,
            num_bytes=None if math.isnan(num_bytes) else int(num_bytes),
        )
        for p, t, ids, values, boundary, num_bytes in frame.itertuples(index=False)
    ]


def score_rows_again(session: Session, stored: StoredCell) -> pd.DataFrame:
    """What a cell holds, measured again."""
    what = dict(stored.cell.what)
    plan_hash, rows = what.pop("plan"), session.inputs.data(what.pop("data"))
    plan = None if plan_hash is None else session.inputs.stored_plan(plan_hash)
    prompts, targets = [prompt for prompt, _ in rows], [row for _, row in rows]
    again = score_frame(session.engine.score(prompts, targets, plan=[plan] * len(prompts), **what))
    return again.drop(columns=again.columns.difference(stored.frame.columns))  # those that an earlier version kept


def _blocks(prompts: Sequence[PromptLike], targets: Sequence[Sequence[Any]], plan: Any) -> list[_Block]:
    plans = list(plan) if isinstance(plan, list | tuple) else [plan] * len(prompts)
    found: list[_Block] = []
    for index, (prompt, row, own) in enumerate(zip(prompts, targets, plans, strict=True)):
        if not found or found[-1].plan != own:
            found.append(_Block(index, [], own))
        found[-1].rows.append([prompt, list(row)])
    return found
