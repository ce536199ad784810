"""What a report is made from: results as frames and effects, independent of the experiment that made them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from steerlab.core.errors import InputError
from steerlab.experiment.confirmation import Confirmation
from steerlab.experiment.effect import Effect
from steerlab.experiment.interaction import Interaction
from steerlab.experiment.looks import Look
from steerlab.experiment.parity import Parity
from steerlab.experiment.selection import Selection
from steerlab.experiment.selfcheck import SelfCheck
from steerlab.experiment.transfer import Transfer
from steerlab.steering.vectors import SteeringVector


@dataclass(frozen=True)
class Finding:
    """A result that is said in sentences and shown as a table.

    Attributes:
        sentences: what was found.
        frame: its rows; None if the sentences are all.
        passed: whether a check held; None if nothing was checked.
        place: file in the run directory that holds all rows.
        caption: what the table shows.
        max_rows: rows shown at most.
    """

    sentences: Sequence[str] = ()
    frame: pd.DataFrame | None = field(default=None, repr=False)
    passed: bool | None = None
    place: str = ""
    caption: str = "Table"
    max_rows: int = 60

    def __post_init__(self) -> None:
        if isinstance(self.sentences, str):
            raise InputError("Finding takes a sequence of sentences, got one string; put it in a list.")


@dataclass(frozen=True)
class Material:
    """Everything a report may show; whatever is empty has no section.

    Attributes:
        name: of the experiment.
        seed: of controls, bootstrap and sampling.
        effects: measured effects.
        vectors: vector sets, as `extract` gave them.
        used: further vectors that the effects were measured with.
        costs: a row per dose: `dose`, `nll`, `perplexity`, `ppl_ratio`, with `_low` and `_high` where known.
        entropies: as `entropies.entropy_change` makes them; optionally `plan` and `policy`, the same in every row.
        generations: a row per prompt, sample and dose: `prompt_index`, `sample_index`, `prompt`, `dose`, `text`.
        token_texts: a row per token of one text: `token`, `base`, `steered` (log p in nats).
        layer_doses: a row per layer and dose: `layer`, `dose`, `value` (change of the metric). Maps of the selections
            are drawn without being listed here.
        selfchecks: whether steering on this engine and model does what it says, before anything was measured.
        selections: searches on development items.
        confirmations: measurements on held-out items, in order.
        looks: every time items were measured on, by whatever call.
        parities: comparisons of two engines.
        interactions: two-factor grids.
        transfers: the same plan elsewhere.
        others: further findings by title.
        facts: provenance of the whole run, by name: hashes, versions, engine.
    """

    name: str
    seed: int
    effects: Sequence[Effect] = ()
    vectors: Sequence[Any] = ()
    used: Sequence[SteeringVector] = ()
    costs: Sequence[pd.DataFrame] = ()
    entropies: Sequence[pd.DataFrame] = ()
    generations: Sequence[pd.DataFrame] = ()
    token_texts: Sequence[pd.DataFrame] = ()
    layer_doses: Sequence[pd.DataFrame] = ()
    selfchecks: Sequence[SelfCheck] = ()
    selections: Sequence[Selection] = ()
    confirmations: Sequence[Confirmation] = ()
    looks: Sequence[Look | Confirmation] = ()
    parities: Sequence[Parity] = ()
    interactions: Sequence[Interaction] = ()
    transfers: Sequence[Transfer] = ()
    others: Mapping[str, Sequence[Finding]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
