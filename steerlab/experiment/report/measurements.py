"""The parts of a report on further measurements: entropy, cost, generations, tokens, vectors, checks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd

from steerlab.experiment import plots
from steerlab.experiment.entropies import entropy_summary
from steerlab.experiment.plots.style import number
from steerlab.experiment.report.blocks import (
    Block,
    Completions,
    Folded,
    Paragraph,
    Plot,
    Plots,
    Section,
    Subsection,
    Table,
    TokenText,
    Verdict,
)
from steerlab.experiment.report.material import Finding
from steerlab.experiment.report.pictures import picture
from steerlab.experiment.report.tables import count, table_of
from steerlab.steering.vectors import SteeringVector

MAX_PROMPTS = 20
MAX_TOKENS = 400
LONG_TABLE = 15
QUANTITIES = {
    "base": "policy entropy, unsteered (nats)",
    "steered": "policy entropy, steered (nats)",
    "change": "change of policy entropy (nats)",
    "raw_base": "model entropy, unsteered (nats)",
    "raw_steered": "model entropy, steered (nats)",
    "raw_change": "change of model entropy (nats)",
    "kl": "KL(steered‖base) of the model (nats)",
    "policy_kl": "KL(steered‖base) of the policy (nats)",
    "kept": "share of the unsteered nucleus kept",
    "jaccard": "overlap of both nuclei (Jaccard)",
    "policy_kl_infinite": "share of tokens with infinite policy KL",
    "policy_kl_finite": "policy KL over the other tokens (nats)",
}
_PERPLEXITY = ("dose", "nll", "perplexity", "ppl_ratio", "ppl_ratio_low", "ppl_ratio_high", "num_tokens", "num_texts")
_RESAMPLES = 1000


def entropy_blocks(frame: pd.DataFrame, place: str) -> list[Block]:
    """Entropies and divergences on the same text in both arms; `frame` as in `Material.entropies`."""
    finding = plots.describe_entropy(frame)
    caption = (
        "Entropy of the sampling policy's next-token distribution on the same text in both arms, and below it the "
        "divergence of the model's distributions, KL(steered‖base)."
    )
    drawn = picture("entropy", partial(plots.plot_entropy, frame), finding, caption)
    table = table_of(_entropy_table(frame), "Means over all tokens, with intervals that resample whole texts")
    where = Paragraph(f"Every position is in {place}.", quiet=True)
    return [Paragraph(finding), *_conditions(frame), Plots([drawn]), table, where]


def _entropy_table(frame: pd.DataFrame) -> pd.DataFrame:
    table = entropy_summary(frame, n_resamples=_RESAMPLES)
    return table.assign(quantity=[QUANTITIES[name] for name in table.quantity])


def _conditions(frame: pd.DataFrame) -> list[Block]:
    """Plan and policy, as far as the frame states them."""
    named = [(name, frame[name].iloc[0]) for name in ("plan", "policy") if name in frame.columns]
    return [Paragraph("; ".join(f"{name}: {value}" for name, value in named) + ".", quiet=True)] if named else []


def generation_blocks(frame: pd.DataFrame, place: str) -> list[Block]:
    """Completions side by side; `frame` as in `Material.generations`."""
    groups = list(frame.groupby(["prompt_index", "sample_index"], sort=False))
    doses = ", ".join(number(dose) for dose in sorted(frame.dose.unique()))
    intro = f"Each prompt's samples use the same random draws at every dose ({doses})."
    if len(groups) > MAX_PROMPTS:
        intro += f" {MAX_PROMPTS} of {count(len(groups))} samples; all in {place}."
    shown: list[Block] = [
        Completions(
            str(part.prompt.iloc[0]),
            [(number(dose, "+g") if dose else "0", str(text)) for dose, text in zip(part.dose, part.text, strict=True)],
        )
        for _, part in groups[:MAX_PROMPTS]
    ]
    return [Paragraph(intro, quiet=True), *_conditions(frame), *shown]


def token_blocks(frame: pd.DataFrame, place: str) -> list[Block]:
    """A text with each token's change; `frame` as in `Material.token_texts`."""
    shown = frame.head(MAX_TOKENS)
    note = "" if len(frame) <= MAX_TOKENS else f" {MAX_TOKENS} of {count(len(frame))} tokens; all in {place}."
    changes = shown.assign(change=shown.steered - shown.base)
    order = changes.change.abs().sort_values(ascending=False).index
    moved = changes.loc[order, ["token", "base", "steered", "change"]]
    return [
        Paragraph(plots.describe_token_differences(frame)),
        TokenText(plots.token_differences_html(shown), "".join(map(str, shown.token))),
        Paragraph(
            "Tokens on blue became likelier, on orange and underlined less likely; pointing at one shows its log-probs."
            + note,
            quiet=True,
        ),
        Folded(
            "Tokens that moved most",
            [table_of(moved, "Log p in nats", max_rows=20, place=place)],
        ),
    ]


def cost_blocks(frame: Any, place: str) -> list[Block]:
    """Perplexity of further text, and the form of completions if it is there; `frame` as in `Material.costs`."""
    other = [column for column in frame.columns if column not in _PERPLEXITY and column != "plan_hash"]
    text = frame[[column for column in _PERPLEXITY if column in frame.columns]]
    tables: list[Block] = [table_of(text, "Perplexity of text per dose, with intervals over texts", place=place)]
    if other:
        tables.append(table_of(frame[["dose", *other]], "Form of what was generated, per dose", place=place))
    return tables


def vector_blocks(vectors: Any) -> list[Block]:
    """Geometry and origin of a set of vectors."""
    found = list(vectors.values())
    table = vector_table(found)
    if len(found) < 2:
        return [table]
    cosines, norms = plots.cosine_frame(vectors), plots.norm_frame(vectors)
    pictures = [
        picture(
            "cosines",
            partial(plots.plot_cosines, cosines),
            plots.describe_cosines(cosines),
            "Cosine between the vectors of every two layers.",
        ),
        picture(
            "norms",
            partial(plots.plot_norms, norms),
            plots.describe_norms(norms),
            "Norm of each layer's vector, beside the stream's median norm there (log scale).",
        ),
    ]
    return [Plots(pictures), Folded(f"The {len(found)} vectors", [table]) if len(found) > LONG_TABLE else table]


def vector_table(vectors: Sequence[SteeringVector]) -> Table:
    """Name, place and origin of vectors, a row each."""
    columns = ["hook_point", "name", "method", "pairs", "norm", "median_norm_of_the_stream", "data_hash", "vector_hash"]
    rows = [_origin(vector) for vector in vectors]
    return table_of(pd.DataFrame(rows, columns=columns), "Vectors and where they come from")


def _origin(vector: SteeringVector) -> tuple[Any, ...]:
    card = vector.card
    origin = (vector.name, card.method, card.n_pairs, vector.norm, card.median_norm, card.data_hash)
    return (vector.hook_point.name, *origin, vector.hash)


def layer_dose_plots(frame: pd.DataFrame, name: str) -> list[Plot]:
    """A map of layers and doses; `frame` as in `Material.layer_doses`, `name` of the vector or empty."""
    of = f"{name}: " if name else ""
    caption = f"{of}Change of the metric from the unsteered model. The best of many tries looks better than it is."
    draw = partial(plots.plot_layer_dose, frame)
    return [picture("layer-dose", draw, of + plots.describe_layer_dose(frame), caption)]


def finding_blocks(finding: Finding) -> list[Block]:
    """A finding's judgement, sentences and table; long tables are folded."""
    blocks: list[Block] = []
    if finding.passed is not None:
        word, tone = ("passed", "good") if finding.passed else ("failed", "bad")
        blocks.append(Verdict(word, tone, finding.sentences))
    else:
        blocks += [Paragraph(sentence) for sentence in finding.sentences]
    if finding.frame is not None and len(finding.frame):
        table = table_of(finding.frame, finding.caption, place=finding.place, max_rows=finding.max_rows)
        blocks.append(table if len(table.rows) <= LONG_TABLE else Folded(finding.caption, [table]))
    return blocks


def numbered(title: str, parts: Sequence[Sequence[Block]], each: str = "") -> list[Section]:
    """One section of all parts; with several, each under a heading of its own, `each` (or the title) with a number."""
    if not parts:
        return []
    if len(parts) == 1:
        return [Section(title, parts[0])]
    return [Section(title, [Subsection(f"{each or title} {k}", part) for k, part in enumerate(parts, start=1)])]
