"""What an experiment file may say: the keys, their types and their defaults."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Strict, model_validator

import steerlab as sl
from steerlab.cli.options import DEFAULT_MODEL, Position


def _as_number(value: Any) -> Any:
    """YAML reads `1e-3` as text; a number in quotes or not is a number here, true and false are not."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


Number = Annotated[float, BeforeValidator(_as_number)]
FilePath = Annotated[Path, Strict(False)]
Place = Annotated[Position, Strict(False)]


class Section(BaseModel):
    """A mapping of known keys; any other key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PairsSpec(Section):
    """The contrast pairs; see `ContrastPairs.from_jsonl`."""

    path: FilePath
    positive: str = "positive"
    negative: str = "negative"
    group: str | None = None
    split: str | None = None


class VectorSpec(Section):
    """How the vector is extracted; see `steerlab.extract`."""

    layer: int
    method: str = "mean_diff"
    site: str = "resid_post"
    read: Place = Position.LAST_PROMPT


class PlanSpec(Section):
    """The edit at scale 1.

    `add` takes dose or coef, by default dose 1; `set` takes dose or coef; `clamp` takes lo, hi and unit; `ablate`
    takes no strength. Each takes `norm: keep`.
    """

    operator: Literal["add", "ablate", "clamp", "set"] = "add"
    where: Place = Position.DEFAULT
    dose: Number | None = None
    coef: Number | None = None
    lo: Number | None = None
    hi: Number | None = None
    unit: Literal["coef", "dose"] = "coef"
    norm: Literal["keep"] | None = None

    @model_validator(mode="after")
    def _check_strengths(self) -> Self:
        strengths = {"dose", "coef"}
        takes = {"add": strengths, "set": strengths, "ablate": set(), "clamp": {"lo", "hi", "unit"}}[self.operator]
        extra = sorted(self.model_fields_set - takes - {"operator", "where", "norm"})
        if extra:
            raise ValueError(f"{self.operator} takes no {extra[0]!r}")
        return self

    def plan(self, vector: sl.SteeringVector) -> sl.Plan:
        """The plan along a vector."""
        where, norm = self.where.where(), self.norm
        if self.operator == "ablate":
            return sl.Plan(sl.ablate(vector, where=where, norm=norm))
        if self.operator == "clamp":
            return sl.Plan(sl.clamp(vector, self.lo, self.hi, unit=self.unit, where=where, norm=norm))
        if self.operator == "set":
            return sl.Plan(sl.set(vector, dose=self.dose, coef=self.coef, where=where, norm=norm))
        dose = 1.0 if self.dose is None and self.coef is None else self.dose
        return sl.Plan(sl.add(vector, dose=dose, coef=self.coef, where=where, norm=norm))


class TargetsSpec(Section):
    """The targets the effect is measured on; see `Targets.from_jsonl`."""

    path: FilePath
    split: str | None = None


class ControlsSpec(Section):
    """The control arms; see `Controls`."""

    random: int = 20
    shuffled: int = 0
    wrong_layer: bool = False


class PolicySpec(Section):
    """The sampling policy of generations and entropy; see `SamplingPolicy`."""

    temperature: Number = 0.7
    top_p: Number = 0.9
    top_k: int = 0
    min_p: Number = 0.0


class GenerationsSpec(Section):
    """Completions side by side.

    Prompts are a list, or the path of a text file with one a line; doses are by default 0 and the outermost two.
    """

    prompts: list[str] | FilePath
    doses: list[Number] | None = None
    max_new_tokens: int = 40


class ExperimentSpec(Section):
    """A whole experiment."""

    name: str
    pairs: PairsSpec
    vector: VectorSpec
    targets: TargetsSpec
    doses: list[Number]
    model: str = DEFAULT_MODEL
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    seed: int = 0
    root: FilePath = Path("runs")
    plan: PlanSpec = PlanSpec()
    controls: ControlsSpec = ControlsSpec()
    metric: str = "log_prob_margin"
    max_ppl_ratio: Number = 1.5
    neutral: FilePath | None = None
    policy: PolicySpec = PolicySpec()
    entropy: bool = False
    generations: GenerationsSpec | None = None
    report: bool = True
