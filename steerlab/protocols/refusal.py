"""The direction of refusal: position × layer grid, KL filter, ablation in all layers (Arditi et al. 2024)."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from steerlab.core._arguments import explains_arguments
from steerlab.core._hashing import content_hash
from steerlab.core._hook_points import resolve_layers
from steerlab.core._numbers import check_flag, check_integer, check_number
from steerlab.core._progress import progress
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.errors import InputError
from steerlab.experiment._store.run import Run
from steerlab.experiment.experiment import Experiment
from steerlab.experiment.measurements.protocols import ProtocolResult
from steerlab.protocols._arguments import split_both, texts_of
from steerlab.protocols._next_tokens import kl_of_next_tokens, refusal_log_odds
from steerlab.protocols._recording import kept, run_of
from steerlab.steering.operators import ablate, add
from steerlab.steering.plan import Plan
from steerlab.steering.positions import where
from steerlab.steering.vectors import SteeringVector

PAPER: Final = "Arditi et al. 2024, Refusal in Language Models Is Mediated by a Single Direction"
SITES: Final = ("resid_mid", "resid_post")
SHARES: Final = (0.5, 0.25, 0.25)
SAME: Final = (
    "Candidates are differences between the mean activations of harmful and harmless instructions, one per position "
    "(the last tokens of the prompt, where the template follows the instruction) and layer.",
    "Refusal is measured as the log-odds that the reply begins with a refusal token, from the exact probabilities of "
    "those tokens, with 1e-8 added to both sides.",
    "A candidate is scored on validation instructions: refusal of harmful ones with its direction ablated (bypass), "
    "refusal of harmless ones with it added once (induce), and the KL divergence of next-token distributions on "
    "harmless ones under ablation from those without.",
    "Left out are candidates of the last 20 % of the layers, with a KL above 0.1, or that induce no refusal; of the "
    "others the one that leaves least refusal is chosen.",
    "Ablation acts in every layer and at every position as one plan; addition at every position of one layer.",
)
DIFFERS: Final = (
    "Layers are counted by their output: resid_post of layer l is what the paper calls the input of layer l + 1.",
    "Ablated is the stream after attention and after the MLP of every layer, which is what the parts' outputs add up "
    "to; the input of the first layer, the embedding, is left as it is (vLLM cannot reach it).",
    "The KL divergence has no 1e-6 inside its logarithms.",
    "Instructions and refusal tokens are those given here.",
    "Generated replies are not judged.",
)
GRID: Final = ["position", "layer", "bypass", "induce", "kl", "left_out"]


def ablation_everywhere(vector: SteeringVector, layers: Iterable[int], sites: Sequence[str] = SITES) -> Plan:
    """One plan that takes a direction out of the stream of every layer given, at every position.

    Args:
        vector: the direction.
        layers: the layers, usually all.
        sites: where in each.

    Examples:
        >>> vector = sl.SteeringVector.from_tensor([3.0, 4.0], layer=1)
        >>> len(ablation_everywhere(vector, range(3)))
        6
    """
    places = [(layer, site) for layer in layers for site in sites]
    moved = [SteeringVector.from_tensor(vector.values, layer=k, site=site, name=vector.name) for k, site in places]
    return Plan(*(ablate(one, where=where.all()) for one in moved))


@explains_arguments
def refusal(
    exp: Experiment,
    harmful: Sequence[str],
    harmless: Sequence[str],
    *,
    refusal_tokens: Sequence[str] = ("I", "As"),
    positions: int = 5,
    layers: Any = "all",
    max_kl: float = 0.1,
    least_induced: float = 0.0,
    late: float = 0.2,
    sites: Sequence[str] = SITES,
    chat: bool = True,
) -> ProtocolResult:
    """Finds the direction that mediates refusal, and what ablating and adding it do on held-out instructions.

    Args:
        exp: the experiment; its engine runs, its seed splits. On vLLM it needs `layers="all"` and these `sites`.
        harmful: instructions that the model refuses.
        harmless: as many that it follows.
        refusal_tokens: how refusals begin; their probabilities are added.
        positions: how many of a prompt's last tokens are tried.
        layers: layers whose output is tried.
        max_kl: candidates whose ablation moves harmless instructions further are left out (nats).
        least_induced: candidates whose addition leaves the log-odds of refusal below are left out.
        late: share of the last layers that is left out.
        sites: where in each layer the direction is ablated.
        chat: ask in a turn of a chat.

    Returns:
        A `ProtocolResult`. `table`: one row: `position` and `layer` of the direction (`of_layers` in all), `bypass`,
        `induce` (mean log-odds of refusal on validation instructions) and `kl` (nats); on held-out instructions the
        mean log-odds `harmful`, `harmful_ablated`, `harmless`, `harmless_added`. NaN, with a sentence, if every
        candidate is left out. `rows`: a row per candidate: `position`, `layer`, `bypass`, `induce`, `kl`, `left_out`
        (why; empty for those that stay).

    Raises:
        InputError: for unusable arguments.
        DataError: for too few instructions, or not as many of both kinds.

    Source:
        Arditi et al. 2024, sections 2.3 to 2.5 and appendix C; thresholds as in the authors' code.
    """
    run = run_of(exp)
    info = run.session.info
    tokens, as_chat = texts_of(refusal_tokens, "refusal_tokens"), check_flag(chat, "chat")
    tried = list(range(-check_integer(positions, "positions", least=1), 0))
    bounds = [check_number(max_kl, "max_kl", least=0, infinite=True), check_number(least_induced, "least_induced")]
    last = int(info.n_layers * (1 - check_number(late, "late", least=0)))
    wanted = [layer for layer in resolve_layers(layers, info.n_layers) if layer + 1 < last]
    if not wanted:
        raise InputError(f"No layer is left to try: outputs of layers before {last - 1} are, and layers is {layers!r}.")
    parts = _split(texts_of(harmful, "harmful"), texts_of(harmless, "harmless"), exp.seed)
    settings = {
        "refusal_tokens": tokens,
        "positions": tried,
        "layers": wanted,
        "max_kl": bounds[0],
        "least_induced": bounds[1],
        "late": float(late),
        "sites": list(sites),
        "chat": as_chat,
        "harmful": content_hash(texts_of(harmful, "harmful")),
        "harmless": content_hash(texts_of(harmless, "harmless")),
    }
    (train_bad, val_bad, test_bad), (train_good, val_good, test_good) = parts
    with run.measuring("refusal", lambda: ([*parts[0], *parts[1]], settings)):
        vectors = _candidates(exp, train_bad, train_good, tried, wanted, as_chat)
        measure = _Measure(run, tokens, list(sites), as_chat)
        rows = _grid(measure, vectors, val_bad, val_good, bounds)
        best = _chosen(rows)
        chosen = None if best is None else vectors[best]
        held_out = measure.held_out(chosen, test_bad, test_good)
    of_best: Any = rows.iloc[0:0] if best is None else rows[(rows.position == best[0]) & (rows.layer == best[1])]
    table = _table(of_best, info.n_layers, held_out)
    result = ProtocolResult("refusal", PAPER, table, rows, SAME, DIFFERS, settings, _sentences(table, rows))
    return kept(run, settings, result)


Candidates = dict[tuple[int, int], SteeringVector]
"""A vector per position and layer."""


def _candidates(
    exp: Experiment, bad: list[str], good: list[str], positions: list[int], layers: list[int], chat: bool
) -> Candidates:
    """Differences of means; pairs only count the instructions, as both kinds have equally many."""
    pairs = ContrastPairs.from_lists(bad, good)
    found: Candidates = {}
    for position in positions:
        vectors = exp.extract(pairs, layers=layers, read=where.index(position), chat=chat, name=f"refusal, {position}")
        found |= {(position, layer): vectors[layer] for layer in layers}
    return found


class _Measure:
    """What plans do to refusal and to harmless instructions; every figure is a cell."""

    def __init__(self, run: Run, tokens: list[str], sites: list[str], chat: bool) -> None:
        self.run, self.tokens, self.sites, self.chat = run, tokens, sites, chat

    def ablated(self, vector: SteeringVector) -> Plan:
        return ablation_everywhere(vector, range(self.run.session.info.n_layers), self.sites)

    @staticmethod
    def added(vector: SteeringVector) -> Plan:
        return Plan(add(vector, coef=1.0, where=where.all()))

    def refusal(self, prompts: list[str], plan: Plan | None) -> float:
        return float(refusal_log_odds(self.run, prompts, plan, self.tokens, chat=self.chat).mean())

    def kl(self, prompts: list[str], plan: Plan) -> float:
        return float(kl_of_next_tokens(self.run, prompts, plan, chat=self.chat).mean())

    def held_out(self, vector: SteeringVector | None, bad: list[str], good: list[str]) -> dict[str, float]:
        found = {"harmful": self.refusal(bad, None), "harmful_ablated": np.nan}
        found |= {"harmless": self.refusal(good, None), "harmless_added": np.nan}
        if vector is not None:
            found["harmful_ablated"] = self.refusal(bad, self.ablated(vector))
            found["harmless_added"] = self.refusal(good, self.added(vector))
        return found


def _grid(
    measure: _Measure, vectors: Candidates, bad: list[str], good: list[str], bounds: Sequence[float]
) -> pd.DataFrame:
    found = []
    with progress(len(vectors), "refusal", "direction") as bar:
        for (position, layer), vector in vectors.items():
            everywhere = measure.ablated(vector)
            bypass, kl = measure.refusal(bad, everywhere), measure.kl(good, everywhere)
            induce = measure.refusal(good, measure.added(vector))
            found.append((position, layer, bypass, induce, kl, _left_out(induce, kl, bounds)))
            bar.update()
    return pd.DataFrame(found, columns=GRID)


def _left_out(induce: float, kl: float, bounds: Sequence[float]) -> str:
    max_kl, least_induced = bounds
    reasons = [f"KL above {max_kl:g}"] if kl > max_kl else []
    return "; ".join([*reasons, *([f"induces less than {least_induced:g}"] if induce < least_induced else [])])


def _chosen(rows: pd.DataFrame) -> tuple[int, int] | None:
    """Position and layer of the candidate that leaves least refusal; None if all are left out."""
    left: Any = rows[rows.left_out == ""]
    if left.empty:
        return None
    best = left.loc[left.bypass.idxmin()]
    return int(best.position), int(best.layer)


def _table(best: pd.DataFrame, n_layers: int, held_out: dict[str, float]) -> pd.DataFrame:
    names = ["position", "layer", "bypass", "induce", "kl"]
    figures = dict.fromkeys(names, np.nan) if best.empty else {name: float(best[name].iloc[0]) for name in names}
    row = {"position": figures.pop("position"), "layer": figures.pop("layer"), "of_layers": n_layers}
    return pd.DataFrame([{**row, **figures, **held_out}])


def _sentences(table: pd.DataFrame, rows: pd.DataFrame) -> tuple[str, ...]:
    row = table.iloc[0]
    without = f"Without steering the log-odds of refusal are {row.harmful:+.2f} on harmful held-out instructions and "
    base = f"{without}{row.harmless:+.2f} on harmless ones."
    if np.isnan(row.layer):
        return (f"All {len(rows)} candidates are left out; see why in the rows. Nothing was chosen.", base)
    chosen = (
        f"Of {len(rows)} candidates {int((rows.left_out == '').sum())} stay; chosen is position {row.position:.0f}, "
    )
    return (
        f"{chosen}layer {row.layer:.0f} of {row.of_layers:.0f}.",
        base,
        f"Ablating the direction makes the first {row.harmful_ablated:+.2f}; adding it makes the second "
        f"{row.harmless_added:+.2f}.",
    )


def _split(harmful: list[str], harmless: list[str], seed: int) -> list[list[list[str]]]:
    """Both kinds of instructions in parts to extract from, to choose on and to report on."""
    return split_both({"harmful": harmful, "harmless": harmless}, SHARES, seed)
