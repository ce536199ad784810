"""Checks, searches and comparisons of engines as findings: what they say, and their tables."""

from typing import Any

import pandas as pd

from steerlab.experiment.confirmation import Confirmation
from steerlab.experiment.interaction import Interaction
from steerlab.experiment.parity import Parity
from steerlab.experiment.report.material import Finding
from steerlab.experiment.selection import Selection
from steerlab.experiment.selfcheck import SelfCheck

_WORST = 20


def selfcheck_finding(selfcheck: SelfCheck) -> Finding:
    """Whether steering does what it says on the experiment's own engine and model."""
    failed = [f"Failed: {check.name}. {check.detail}" for check in selfcheck.failures]
    sentences = [f"{selfcheck.engine}; plan {selfcheck.plan}; seed {selfcheck.seed}.", *failed]
    caption = "Largest deviation of each property, and what is allowed"
    return Finding(sentences, selfcheck.to_frame(), selfcheck.passed, caption=caption)


def selection_finding(selection: Selection, place: str) -> Finding:
    """What was chosen, from how many tries, and every try with the chosen one first."""
    table: Any = selection.table
    ordered = table.sort_values(["chosen", "satisfied", "gain"], ascending=False, kind="stable")
    kept = [column for column in ordered.columns if column not in ("plan_hash", "vector_hash")]
    return Finding([f"{selection}."], ordered[kept], place=place, caption=f"All {len(table)} tries, best first")


def selection_maps(selection: Selection) -> dict[str, pd.DataFrame]:
    """For each vector tried at several layers: `layer`, `dose`, `value` (the gain)."""
    table: Any = selection.table
    maps = {}
    for name, part in table.groupby("vector", sort=False):
        if part.layer.nunique() > 1 and not part.duplicated(["layer", "dose"]).any():
            maps[str(name)] = part[["layer", "dose", "gain"]].rename(columns={"gain": "value"})
    return maps


def confirmation_finding(confirmation: Confirmation, place: str) -> Finding:
    """The gain on held-out items, and what to know before believing it."""
    sentences = [f"Look {confirmation.look}: {str(confirmation).splitlines()[0]}.", *confirmation.notes]
    items: Any = confirmation.rows
    ordered = items.sort_values("change")
    return Finding(sentences, ordered, place=place, caption="Held-out items, from the most anti-steerable on")


def parity_finding(parity: Parity, place: str) -> Finding:
    """Whether two engines agree, why, and the tokens they agree on least."""
    sentences = [f"{parity.engine_a} against {parity.engine_b}.", *parity.reasons]
    rows: Any = parity.rows
    worst = rows.loc[rows.delta.abs().sort_values(ascending=False).index]
    shown = worst[["text", "position", "token_id", "log_prob_a", "log_prob_b", "delta", "unsteered_delta"]]
    return Finding(sentences, shown, parity.passed, place, "Tokens, from the largest difference on (nats)", _WORST)


def interaction_finding(interaction: Interaction) -> Finding:
    """What two plans do together beyond the sum of what each does alone."""
    table = interaction.table.drop(columns="plan_hash").rename(
        columns={"low": "interaction_low", "high": "interaction_high"}
    )
    text = f"{interaction.metric} of {interaction.plan_a} (a) with {interaction.plan_b} (b)."
    return Finding(
        [text], table, caption="Means over items; interaction is what the sum of both alone does not explain"
    )
