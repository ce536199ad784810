"""The report as a document: which sections there are, and in which order."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from steerlab.experiment.confirmation import Confirmation
from steerlab.experiment.effect import Effect
from steerlab.experiment.report.blocks import (
    Block,
    Bullets,
    Document,
    Facts,
    Paragraph,
    Plots,
    Section,
    Subsection,
    Verdict,
)
from steerlab.experiment.report.effects import effect_section
from steerlab.experiment.report.findings import (
    confirmation_finding,
    interaction_finding,
    parity_finding,
    selection_finding,
    selection_maps,
    selfcheck_finding,
)
from steerlab.experiment.report.limits import limits
from steerlab.experiment.report.material import Finding, Material
from steerlab.experiment.report.measurements import (
    cost_blocks,
    entropy_blocks,
    finding_blocks,
    generation_blocks,
    layer_dose_plots,
    numbered,
    token_blocks,
    vector_blocks,
    vector_table,
)
from steerlab.experiment.report.transfers import transfer_sections

FACT_NAMES = {"name": "model", "n_layers": "layers", "d_model": "width of the stream", "d_vocab": "logits"}


def document(material: Material) -> Document:
    """All sections for which there is something to show: verdicts first, limits last."""
    m = material
    sections = [
        *_effects(m.effects),
        *_findings("Selfcheck", [selfcheck_finding(one) for one in m.selfchecks]),
        *_selections(m),
        *_confirmations(m),
        *numbered("Entropy and divergence", _framed(m.entropies, entropy_blocks, "entropy")),
        *numbered("Cost on further text", _framed(m.costs, cost_blocks, "cost")),
        *numbered("Generations side by side", _framed(m.generations, generation_blocks, "generations")),
        *numbered("Token by token", _framed(m.token_texts, token_blocks, "entropy")),
        *_findings("Parity of engines", _placed(parity_finding, m.parities, "parity")),
        *_findings("Interaction of plans", [interaction_finding(one) for one in m.interactions]),
        *transfer_sections(m.transfers, m.effects),
        *(section for title, found in m.others.items() for section in _findings(title, found)),
        *numbered("Vectors", [*map(vector_blocks, m.vectors), *([[vector_table(m.used)]] if m.used else [])]),
        _provenance(m),
        Section("Limits: what these numbers cannot say", [Bullets(limits(m))]),
    ]
    return Document(m.name, _lead(m), sections)


def _lead(m: Material) -> str:
    words = [effect.verdict for effect in m.effects]
    parts = [f"A steering experiment, seed {m.seed}"]
    if words:
        parts.append(f"{len(words)} effects: {', '.join(words)}" if len(words) > 1 else f"verdict: {words[0]}")
    dtype = m.facts.get("dtype")
    return "; ".join(parts) + f". Log-probabilities are in nats{f', computed in {dtype}' if dtype else ''}."


def _effects(effects: Sequence[Effect]) -> list[Section]:
    if len(effects) == 1:
        return [effect_section(effects[0], "Effect", "effects/000")]
    return [effect_section(effect, f"Effect {k + 1}", f"effects/{k:03d}") for k, effect in enumerate(effects)]


def _findings(title: str, found: Sequence[Finding], each: str = "") -> list[Section]:
    return numbered(title, [finding_blocks(finding) for finding in found], each)


def _selections(m: Material) -> list[Section]:
    parts: list[list[Block]] = []
    for k, selection in enumerate(m.selections):
        maps = [plot for name, frame in selection_maps(selection).items() for plot in layer_dose_plots(frame, name)]
        drawn: list[Block] = [Plots(maps)] if maps else []
        finding = selection_finding(selection, f"findings/selection-{k:03d}/table.parquet")
        parts.append([*drawn, *finding_blocks(finding)])
    sections = numbered("Selection on development items", parts, "Selection")
    given = [Plots(layer_dose_plots(frame, "")) for frame in m.layer_doses]
    return [*sections, *([Section("Layers and doses", given)] if given else [])]


def _confirmations(m: Material) -> list[Section]:
    title = "Confirmation on held-out items"
    sections = _findings(title, _placed(confirmation_finding, m.confirmations, "confirmation"), "Confirmation")
    return [Section(title, [_look_count(m), *section.blocks]) for section in sections]


def _look_count(m: Material) -> Block:
    """How often the items of a confirmation were measured on, and by what, whether before it or after."""
    found = [[look for look in m.looks or m.confirmations if look.prompts & one.prompts] for one in m.confirmations]
    looks = max(found, key=len)
    most = max(len(looks), *(one.look for one in m.confirmations))
    if most == 1:
        return Paragraph("Held-out items were looked at once.")
    kinds = Counter("confirm" if isinstance(look, Confirmation) else look.kind for look in looks)
    told = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    reasons = [
        f"They were measured on by {told}." if len(looks) == most else "",
        "Only a confirmation that is the first look is one; whatever looked before makes it selection again.",
    ]
    return Verdict(f"{most} looks at the same held-out items", "bad", list(filter(None, reasons)))


def _placed(make: Callable[[Any, str], Finding], found: Sequence[Any], kind: str) -> list[Finding]:
    return [make(one, f"findings/{kind}-{k:03d}/rows.parquet") for k, one in enumerate(found)]


def _framed(frames: Sequence[Any], blocks: Any, kind: str) -> list[list[Block]]:
    return [blocks(frame, f"frames/{kind}-{k:03d}.parquet") for k, frame in enumerate(frames)]


def _provenance(m: Material) -> Section:
    blocks: list[Block] = []
    if m.facts:
        blocks.append(Facts(flat(m.facts)))
    for number, effect in enumerate(m.effects, start=1):
        facts = Facts(_effect_facts(effect))
        blocks.append(facts if len(m.effects) == 1 else Subsection(f"Of effect {number}", [facts]))
    return Section("Provenance", blocks or [Facts([("seed", str(m.seed))])])


def _effect_facts(effect: Effect) -> list[tuple[str, str]]:
    settings = effect.settings
    return flat(
        {"plan": effect.plan_text, "plan hash": effect.plan_hash}
        | dict(effect.provenance)
        | {
            "vector hash": ", ".join(map(str, _vector_hashes(effect))),
            "metric": settings.metric,
            "bootstrap draws": settings.n_resamples,
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
