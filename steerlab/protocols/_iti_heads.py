"""Heads of inference-time intervention: their ranking, kept as a cell of the run, and the shifts of the best."""

from typing import Any

import pandas as pd
import torch

from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.experiment._store.cells import Cell
from steerlab.experiment._store.run import Run
from steerlab.steering.extraction.head_ranking import HeadRanking, rank_heads
from steerlab.steering.heads import weights_at_hand
from steerlab.steering.vectors import VectorSet


class Heads:
    """The ranked heads of some contrast pairs.

    Args:
        run: the run, which keeps ranking and vectors.
        pairs: the pairs.
        layers: layers whose heads are ranked.
        folds: parts of the groups that are held out in turn.
        reader: the TransformerLens engine whose heads are read; the run's own if None.
        most: how many of them will be shifted at most.

    Raises:
        InputError: before anything is ranked, if there are fewer heads than that.
    """

    def __init__(
        self, run: Run, pairs: ContrastPairs, layers: list[int], folds: int, reader: Engine | None, most: int
    ) -> None:
        self._run, self._pairs, self._reader, self._most = run, pairs, reader, most
        self._options = {"layers": layers, "folds": folds}
        self._what = {"data": pairs.hash, **self._options}
        self.ranking = self._ranked()

    def vectors(self, k: int) -> VectorSet:
        """The shifts of the k best heads, a vector per layer at attn_out."""
        what = ["iti", self._what, k]
        found = self._run.find("vectors", what)
        return found if found is not None else self._run.keep("vectors", what, self.ranking.vectors(self._engine, k))

    @property
    def _engine(self) -> Any:  # one that reads heads, which `rank_heads` checks
        return self._run.session.engine if self._reader is None else self._reader

    def _ranked(self) -> HeadRanking:
        session = self._run.session
        cell = Cell("head_ranking", self._what, {"data": session.inputs.add_data(list(self._pairs))})
        rows = session.cells.get(cell, session.engine_hash, self._measured)
        shifts = {
            (int(layer), int(head)): torch.tensor([float(value) for value in shift])
            for layer, head, shift in zip(rows["layer"], rows["head"], rows["shift"], strict=True)
        }
        n_groups = len(set(self._pairs.groups))
        return HeadRanking(rows.drop(columns="shift"), len(self._pairs), n_groups, int(self._options["folds"]), shifts)

    def _measured(self) -> pd.DataFrame:
        """The ranking's rows, each with its head's shift."""
        self._check_enough()
        ranking = rank_heads(self._engine, self._pairs, **self._options)
        places = zip(ranking.rows["layer"], ranking.rows["head"], strict=True)
        return ranking.rows.assign(shift=[ranking.shifts[layer, head].tolist() for layer, head in places])

    def _check_enough(self) -> None:
        engine, layers = self._engine, self._options["layers"]
        weights_at_hand(engine)
        found = sum(len(engine.head_outputs(layer)) for layer in layers)
        if self._most > found:
            raise InputError(
                f"heads asks for {self._most} heads, and there are {found} in the layers {layers}; ask for fewer, or "
                "name more layers."
            )
