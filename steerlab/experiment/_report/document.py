"""The report as a document: which sections there are, and in which order."""

from collections.abc import Mapping
from typing import Any

from steerlab.core.errors import InputError
from steerlab.experiment._blocks import Block, Bullets, Document, Facts, Section, Subsection
from steerlab.experiment._blocks.findings import finding_sections
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._report.limits import limits
from steerlab.experiment._wording import metric_label
from steerlab.experiment.measurements._interval_rule import STUDENT_T
from steerlab.experiment.measurements._registry import MEASUREMENTS
from steerlab.experiment.measurements.effect import Effect
from steerlab.experiment.measurements.effect._section import verdict_sentence

FACT_NAMES = {"name": "model", "n_layers": "layers", "d_model": "width of the stream", "d_vocab": "logits"}


def document(material: Material) -> Document:
    """All sections for which there is something to show: verdicts first, limits last.

    Raises:
        InputError: for results of a kind that there is not.
    """
    m = material
    unknown = sorted(m.results.keys() - {measurement.kind.attribute for measurement in MEASUREMENTS})
    if unknown:
        raise InputError(f"There is no kind of result {unknown[0]!r}; a finding of another kind goes into others=.")
    sections = [
        *(section for measurement in MEASUREMENTS for section in measurement.sections(m)),
        *(section for title, found in m.others.items() for section in finding_sections(title, found)),
        _provenance(m),
        Section("Limits: what these numbers cannot say", [Bullets(limits(m))]),
    ]
    return Document(m.name, _lead(m), sections, _title_block(m))


def _lead(m: Material) -> str:
    effects = m.of("effects")
    if len(effects) == 1:
        return verdict_sentence(effects[0])
    if effects:
        return f"{len(effects)} effects: {', '.join(effect.verdict for effect in effects)}."
    return "No effect was measured, so there is no verdict."


def _title_block(m: Material) -> list[tuple[str, str]]:
    dtype = m.facts.get("dtype")
    facts = {
        "question": _question(m),
        "model": m.facts.get("model"),
        "date": m.facts.get("date"),
        "numbers": f"log-probabilities in nats{f', computed in {dtype}' if dtype else ''}; seed {m.seed}",
    }
    return [(name, str(value)) for name, value in facts.items() if value]


def _question(m: Material) -> str:
    """What the experiment asked, as far as its results say."""
    effects = m.of("effects")
    if effects:
        plans = list(dict.fromkeys(effect.plan_text for effect in effects))
        plan = plans[0] if len(plans) == 1 else f"any of {len(plans)} plans"
        metric = metric_label(effects[0].settings.metric)
        return f"Does {plan} move the {metric} of {len(effects[0].item_slopes)} items, and more than control arms do?"
    return "Which vector, layer and dose gain most within the bounds?" if m.of("selections") else ""


def _provenance(m: Material) -> Section:
    blocks: list[Block] = []
    if m.facts:
        blocks.append(Facts(flat(m.facts)))
    for number, effect in enumerate(m.of("effects"), start=1):
        facts = Facts(_effect_facts(effect))
        blocks.append(facts if len(m.of("effects")) == 1 else Subsection(f"Of effect {number}", [facts]))
    return Section("Provenance", blocks or [Facts([("seed", str(m.seed))])])


def _effect_facts(effect: Effect) -> list[tuple[str, str]]:
    settings = effect.settings
    intervals = {"bootstrap draws": settings.n_resamples} if settings.rule == 1 else {"intervals": STUDENT_T}
    return flat(
        {"plan": effect.plan_text, "plan hash": effect.plan_hash}
        | dict(effect.provenance)
        | {
            "vector hash": ", ".join(map(str, _vector_hashes(effect))),
            "metric": settings.metric,
            **intervals,
            "seed": settings.seed,
        }
    )


def _vector_hashes(effect: Effect) -> list[str]:
    rows: Any = effect.rows
    return list(rows[rows.family == "vector"].vector_hash.unique()) if "vector_hash" in rows.columns else []


def flat(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Facts as pairs of text, nested ones on one line."""
    pairs = []
    for name, value in facts.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)
        pairs.append((FACT_NAMES.get(str(name), str(name).replace("_", " ")), "not given" if value is None else text))
    return pairs
