"""Judgements: what a model as a judge says of generated texts at each dose, with the judge itself in the run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steerlab.core.errors import RunError
from steerlab.display import Facts, Fold, Piece, Shown, Table, figure, interval
from steerlab.experiment._blocks import Block, Paragraph, Section
from steerlab.experiment._blocks import Facts as FactsBlock
from steerlab.experiment._blocks.findings import numbered
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._blocks.tables import table_of
from steerlab.experiment._store.cell_engine import cell_engine_for
from steerlab.experiment._store.findings import read_finding
from steerlab.experiment._store.results import finding_kind
from steerlab.experiment._store.run import Run
from steerlab.experiment.measurements._interval_rule import rule_of, with_rule, without_rule
from steerlab.experiment.measurements._measurement import Measurement
from steerlab.experiment.measurements.pairing import KEY, paired_differences
from steerlab.scoring.judging import JudgeCard, Judgements, RubricJudge
from steerlab.scoring.judging.rating import judgements_from, label_columns, with_figures

LOW_MASS = 0.5
"""Below that share of probability on the labels, the report says that the judge hardly answers."""


@dataclass(frozen=True, repr=False)
class JudgedTexts(Shown):
    """What a judge says of completions, per dose.

    Attributes:
        rows: a row per completion and rubric, as in `Judgements.rows`: the distribution over the labels.
        texts: a row per completion: `text_index`, `prompt_index`, `sample_index`, `dose`, `rating`.
        doses: a row per dose: `dose`, `num_texts`, `rating` (mean), `difference` from dose 0 (or the smallest dose)
            over the same prompts and draws with `difference_low` and `difference_high`, by Student's t over prompts;
            `entropy` of the ratings (nats) and `mass`, means over texts and rubrics; `interval`, the rule of the ends.
        plan_hash: of the plan at scale 1.
        judge: model, rubrics and scale.
    """

    rows: pd.DataFrame = field(repr=False)
    texts: pd.DataFrame = field(repr=False)
    doses: pd.DataFrame = field(repr=False)
    plan_hash: str
    judge: JudgeCard

    def _finding(self) -> str:
        rows = self.doses.to_dict("records")
        means = ", ".join(f"{figure(r['rating'])} at {r['dose']:g}" for r in rows)
        return f"{len(self.texts)} texts, mean rating {means}, by {self.judge.model}, rubric {self.judge.rubric_hash}"

    def _pieces(self) -> Sequence[Piece]:
        doses: Any = self.doses
        rows = [
            (r.dose, r.rating, f"{figure(r.difference)} {interval(r.difference_low, r.difference_high)}", r.mass)
            for r in doses.itertuples(index=False)
        ]
        return [
            Table(["dose", "mean rating", "difference", "mass"], rows),
            Fold("every text", [Table.of_frame(self.rows, more=".rows")]),
            Facts(self.judge.facts()),
        ]


def rated(run: Run, frame: pd.DataFrame, judge: RubricJudge) -> pd.DataFrame:
    """Completions with a judge's ratings, which are kept in the run with the judge's model and rubrics.

    Args:
        run: the run; the judge's scores are cells of it, a dose each.
        frame: a row per completion with `prompt_index`, `sample_index`, `prompt`, `dose`, `text`, `plan_hash`.
        judge: the judge.

    Returns:
        The rows with `judge` (the rating), and the entropy of the rating (nats) and its mass: `judge_entropy`,
        `judge_mass`, or with several rubrics `judge_<rubric>`, `judge_<rubric>_entropy`, `judge_<rubric>_mass`.
    """
    session = run.session
    own = session.loaded and session.engine is judge.engine
    keeping = judge.on(cell_engine_for(session, None if own else judge.engine))
    parts = []
    for _, part in frame.groupby("dose", sort=True):
        found = keeping.rate(part.text.tolist(), prompts=part.prompt.tolist())
        parts.append(found.rows.assign(text_index=part.index.to_numpy()[found.rows.text_index]))
    rows = pd.concat(parts).sort_values("text_index", kind="stable", ignore_index=True)
    said = judgements_from(judge.card, rows)
    texts: Any = said.texts.assign(**{name: frame[name].to_numpy() for name in (*KEY, "dose")})
    texts = texts[["text_index", *KEY, "dose", "rating"]]
    plan_hash = str(frame.plan_hash.iloc[0])
    finding = JudgedTexts(rows, texts, _by_dose(rows, texts), plan_hash, judge.card)
    contents = frame[["prompt", "text", "dose", *KEY]].values.tolist()
    run.keep("judgement", [judge.card.hash, plan_hash, contents], finding)
    return frame.assign(**_columns(said))


def _columns(said: Judgements) -> dict[str, np.ndarray]:
    names = list(said.judge.rubrics)
    found = {"judge": said.ratings}
    for name in names:
        rows, prefix = said.of(name), "judge" if len(names) == 1 else f"judge_{name}"
        if len(names) > 1:
            found[prefix] = rows.expected.to_numpy()
        found |= {f"{prefix}_{figure}": rows[figure].to_numpy() for figure in ("entropy", "mass")}
    return found


def _by_dose(rows: pd.DataFrame, texts: pd.DataFrame) -> pd.DataFrame:
    doses = sorted(float(dose) for dose in texts.dose.unique())
    base = 0.0 if 0.0 in doses else doses[0]
    differences = {d.dose: d for d in paired_differences(texts, "rating", base_dose=base)}
    of_text: Any = rows.groupby("text_index")[["entropy", "mass"]].mean()
    found: list[Any] = []
    for dose in doses:
        part: Any = texts[texts.dose == dose]
        other = differences.get(dose)
        change = (math.nan,) * 3 if other is None else (other.difference, other.low, other.high)
        figures = of_text.loc[part.text_index].mean()
        found.append((dose, len(part), float(part.rating.mean()), *change, figures.entropy, figures.mass))
    columns = ["dose", "num_texts", "rating", "difference", "difference_low", "difference_high", "entropy", "mass"]
    return with_rule(pd.DataFrame(found, columns=columns))


def judgement_blocks(found: JudgedTexts) -> list[Block]:
    """Ratings per dose, and who gave them."""
    several = len(found.judge.rubrics) > 1
    what = f"{found.judge.aggregate.replace('_', ' ')} of {len(found.judge.rubrics)} ratings" if several else "rating"
    text = (
        f"{len(found.texts)} completions were rated by {found.judge.model}. A rating is the mean of the exact "
        f"distribution over the labels {', '.join(found.judge.labels)}; none was read out of written text. Shown is "
        f"the {what}; differences are over the same prompts and draws."
    )
    least = float(found.doses.mass.min())
    cautions = (
        []
        if least >= LOW_MASS
        else [
            f"The judge goes on with a label with probability {least:.2g} only: it hardly answers the rubric, and its "
            "ratings mean little."
        ]
    )
    return [
        Paragraph(text),
        *[Paragraph(caution) for caution in cautions],
        table_of(without_rule(found.doses), f"Ratings per dose; intervals are by {rule_of(found.doses)} over prompts"),
        FactsBlock([(name, str(value)) for name, value in found.judge.facts()]),
    ]


def _sections(m: Material) -> list[Section]:
    return numbered("Judged completions", [judgement_blocks(one) for one in m.of("judgements")])


def check_judgement(folder: Path) -> None:
    """Checks that ratings follow from the distributions, and means from ratings.

    Raises:
        RunError: if one does not: it was changed.
    """
    found: JudgedTexts = read_finding(folder, JudgedTexts, [JudgeCard])
    bare: Any = found.rows[["text_index", "rubric", *label_columns(found.judge), "mass"]]
    again = judgements_from(found.judge, with_figures(found.judge, bare))
    means = found.texts.groupby("dose").rating.mean().to_numpy()
    for name, stated, given in (
        ("expected ratings", found.rows.expected, again.rows.expected),
        ("ratings", found.texts.rating, again.texts.rating),
        ("means", found.doses.rating, means),
    ):
        if not np.allclose(np.asarray(stated), np.asarray(given), rtol=1e-9, atol=1e-12):
            raise RunError(f"its {name} do not follow from its rows")


JUDGEMENT = Measurement(
    finding_kind("judgement", "judgements", JudgedTexts, [JudgeCard]), _sections, check=check_judgement
)
