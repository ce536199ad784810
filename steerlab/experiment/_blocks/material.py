"""What a report is made from: results and facts of a run, independent of the experiment that made them."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from steerlab.experiment._blocks.findings import Finding
from steerlab.steering.vectors import SteeringVector


class Material:
    """Everything a report may show; whatever is empty has no section.

    Args:
        name: of the experiment.
        seed: of controls and sampling.
        used: vectors that results were measured with and that no vector set holds.
        token_texts: a row per token of one text: `token`, `base`, `steered` (log p in nats).
        layer_doses: a row per layer and dose: `layer`, `dose`, `value` (change of the metric). Maps of the selections
            are drawn without being listed here.
        looks: every time items were measured on, by whatever call.
        prompts: texts of the items by the hash of their targets.
        others: further findings by title.
        facts: provenance of the whole run, by name: hashes, versions, engine.
        results: results of each kind, named as in `Experiment.results`, e.g. `effects`, `costs`, `selections`.
        **further: the same, as keywords.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        *,
        used: Sequence[SteeringVector] = (),
        token_texts: Sequence[pd.DataFrame] = (),
        layer_doses: Sequence[pd.DataFrame] = (),
        looks: Sequence[Any] = (),
        prompts: Mapping[str, Sequence[str]] | None = None,
        others: Mapping[str, Sequence[Finding]] | None = None,
        facts: Mapping[str, Any] | None = None,
        results: Mapping[str, Sequence[Any]] | None = None,
        **further: Sequence[Any],
    ) -> None:
        self.name, self.seed = name, seed
        self.used, self.token_texts, self.layer_doses, self.looks = used, token_texts, layer_doses, looks
        self.prompts = prompts or {}
        self.others, self.facts, self.results = others or {}, facts or {}, {**(results or {}), **further}

    def of(self, kind: str) -> Sequence[Any]:
        """The results of one kind, e.g. `effects`; empty if there are none."""
        return self.results.get(kind, ())
