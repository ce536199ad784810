"""What an experiment file may say: the keys, their types and their defaults."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    Strict,
    WrapValidator,
    field_validator,
    model_validator,
)

import steerlab as sl
from steerlab._cli.options import DEFAULT_MODEL, Position
from steerlab.experiment.measurements.baselines.arms import PromptArm
from steerlab.scoring.judging.rubric import RATED, check_places, rubrics_of, scale_of
from steerlab.steering.positions.where import Where, from_json


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


def _read_place(value: Any, read_word: Any) -> Any:
    """A word, or the mapping of a set of positions, which stays as it is written."""
    if not isinstance(value, dict):
        return read_word(value)
    positions_of(value)
    return value


if TYPE_CHECKING:
    AnyPlace = Position | dict[str, Any]
else:
    AnyPlace = Annotated[Position, Strict(False), WrapValidator(_read_place), PlainSerializer(lambda place: place)]


def positions_of(place: Position | dict[str, Any]) -> Where:
    """The positions that a word names, or a mapping describes as `Where.to_json` does.

    Raises:
        PlanError: for a mapping that describes none.
    """
    return from_json(place) if isinstance(place, dict) else place.where()


class Section(BaseModel):
    """A mapping of known keys; any other key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PairsSpec(Section):
    """The contrast pairs; see `ContrastPairs.from_jsonl`.

    Attributes:
        path: a JSON Lines file.
        positive: its key of the prompt that shows the property.
        negative: its key of the counterpart.
        group: its key of the group; without it each pair is a group of its own.
        split: take rows with this `split`; without it all.
    """

    path: FilePath
    positive: str = "positive"
    negative: str = "negative"
    group: str | None = None
    split: str | None = None


class VectorSpec(Section):
    """Where a vector comes from: extracted, see `steerlab.extract`, or read from a file.

    Attributes:
        layer: the layer; or
        layers: several layers, or `all`: each is a vector of its own.
        method: how it is extracted.
        site: where in the layer it is read and added.
        read: positions it is read at.
        pairs: contrast pairs of its own; by default the experiment's.
        file: a vector file as `SteeringVector.save` writes it, in place of method, site, read and pairs; without a
            layer, every vector in it.
    """

    layer: int | None = None
    layers: list[int] | Literal["all"] | None = None
    method: str = "mean_diff"
    site: str = "resid_post"
    read: Place = Position.LAST_PROMPT
    pairs: PairsSpec | None = None
    file: FilePath | None = None

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        extracted = sorted(self.model_fields_set & {"method", "site", "read", "pairs"})
        if self.file is not None and extracted:
            raise ValueError(f"a vector from a file takes no {extracted[0]!r}")
        if self.layer is not None and self.layers is not None:
            raise ValueError("takes 'layer' or 'layers', not both")
        return self

    @property
    def asked_layers(self) -> "list[int] | Literal['all']":
        """The layers as `steerlab.extract` takes them."""
        return self.layers if self.layers is not None else [] if self.layer is None else [self.layer]


class PlanSpec(Section):
    """The edit at scale 1.

    `add` takes dose or coef, by default dose 1; `set` takes dose or coef; `clamp` takes lo, hi and unit; `ablate`
    takes no strength.

    Attributes:
        operator: what is done with the direction.
        where: positions that are edited; `default` is the last prompt token and everything generated. Or a mapping, as
            `to_json` of `steerlab.where` writes it.
        dose: strength in median norms of the stream.
        coef: or as a raw coefficient.
        lo: lower bound of `clamp`.
        hi: upper bound of `clamp`.
        unit: of the bounds.
        norm: `keep` lets the edited stream keep its norm.
    """

    operator: Literal["add", "ablate", "clamp", "set"] = "add"
    where: AnyPlace = Position.DEFAULT
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
        where, norm = positions_of(self.where), self.norm
        if self.operator == "ablate":
            return sl.Plan(sl.ablate(vector, where=where, norm=norm))
        if self.operator == "clamp":
            return sl.Plan(sl.clamp(vector, self.lo, self.hi, unit=self.unit, where=where, norm=norm))
        if self.operator == "set":
            return sl.Plan(sl.set(vector, dose=self.dose, coef=self.coef, where=where, norm=norm))
        dose = 1.0 if self.dose is None and self.coef is None else self.dose
        return sl.Plan(sl.add(vector, dose=dose, coef=self.coef, where=where, norm=norm))


class TargetsSpec(Section):
    """Items: prompts with the targets that are scored after them; see `Targets.from_jsonl`.

    Attributes:
        path: a JSON Lines file.
        split: take rows with this `split`; without it all.
    """

    path: FilePath
    split: str | None = None


class ControlsSpec(Section):
    """The control arms; see `Controls`.

    Attributes:
        random: random directions of the same norm; a verdict needs at least 19.
        shuffled: vectors extracted again with half the labels flipped.
        wrong_layer: also the same vector at another layer.
    """

    random: int = 20
    shuffled: int = 0
    wrong_layer: bool = False


class PolicySpec(Section):
    """The sampling policy of generations, cost and entropy; see `SamplingPolicy`.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_p: mass of the nucleus; 1 cuts nothing.
        top_k: tokens at most; 0 cuts nothing.
        min_p: share of the highest probability that a token needs; 0 cuts nothing.
        repetition_penalty: 1 is off.
    """

    temperature: Number = 0.7
    top_p: Number = 0.9
    top_k: int = 0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0


class JudgeSpec(Section):
    """A model that rates the completions; see `steerlab.judge`.

    Attributes:
        rubric: the question with a place `{text}`, or several by name.
        scale: the labels; or by label what it counts.
        model: alias, directory or hub id of the judge; by default the experiment's own model.
        aggregate: how several ratings become one.
        chat: ask in a turn of a chat.
        lead: text between rubric and label.
    """

    rubric: str | dict[str, str]
    scale: list[str] | dict[str, Number] = ["0", "1", "2"]
    model: str | None = None
    aggregate: Literal["harmonic_mean", "mean"] = "harmonic_mean"
    chat: bool = False
    lead: str | None = None

    @model_validator(mode="after")
    def _check_rubric(self) -> Self:
        try:
            scale_of(self.scale)
            check_places(rubrics_of(self.rubric), RATED, "given")
        except sl.InputError as error:
            raise ValueError(str(error).rstrip(".")) from error
        return self


class GenerationsSpec(Section):
    """Completions side by side.

    Attributes:
        prompts: a list, or a text file with a prompt a line.
        doses: doses to generate at; by default 0 and the outermost two.
        max_new_tokens: tokens at most per completion.
        n: completions per prompt and dose.
        stop: strings that end a completion.
        chat: each prompt is a user's turn.
        judge: a model that rates every completion.
    """

    prompts: list[str] | FilePath
    doses: list[Number] | None = None
    max_new_tokens: int = 40
    n: int = 1
    stop: list[str] = []
    chat: bool = False
    judge: JudgeSpec | None = None


class BaselinesSpec(Section):
    """Arms that change the prompt; see `Experiment.baselines`.

    Attributes:
        prompting: instructions before every prompt, from the mildest to the strongest.
        few_shot: examples before every prompt.
        numbers: how many examples, per strength; by default 1, 2, 4, … and all.
        ratios: perplexity ratios to compare at; by default the largest that every arm reaches.
    """

    prompting: list[str] | None = None
    few_shot: list[str] | None = None
    numbers: list[int] | None = None
    ratios: list[Number] | None = None

    @model_validator(mode="after")
    def _check_arms(self) -> Self:
        if self.few_shot is None and (self.prompting is None or self.numbers is not None):
            raise ValueError("needs 'prompting' or 'few_shot', and for 'numbers' the latter")
        try:
            self.arms()
        except sl.InputError as error:
            raise ValueError(str(error).rstrip(".")) from error
        return self

    def arms(self) -> list[PromptArm]:
        told = [] if self.prompting is None else [sl.prompting(self.prompting)]
        return told if self.few_shot is None else [*told, sl.few_shot(self.few_shot, self.numbers)]


class SelfcheckSpec(Section):
    """The selfcheck before anything is measured; `selfcheck: false` leaves it out.

    Attributes:
        run: whether it runs.
        allow_failure: go on after a failure, which is recorded.
        tolerance: the largest deviation in nats; by default that of engine and dtype.
    """

    run: bool = True
    allow_failure: bool = False
    tolerance: Number | None = None


class SelectSpec(Section):
    """The search for vector, layer and dose on development items; `targets` then stay held out.

    Attributes:
        targets: the development items.
        doses: doses to try, other than 0.
        subject_to: upper bounds on `ppl_ratio`, `entropy_change`, `anti_steerable`.
    """

    targets: TargetsSpec
    doses: list[Number]
    subject_to: dict[str, Number] = {}


class ConfirmSpec(Section):
    """The measurement of what was selected on held-out items; `confirm: true` takes the defaults.

    Attributes:
        targets: the held-out items; by default those of the experiment.
        controls: null families to rank the gain against; by default those of the experiment.
        allow_overlap: measure although items share prompts or groups with the development items, which is noted.
    """

    targets: TargetsSpec | None = None
    controls: ControlsSpec | None = None
    allow_overlap: bool = False


def _as_selfcheck(value: Any) -> Any:
    return {"run": value} if isinstance(value, bool) else value


def _as_confirm(value: Any) -> Any:
    return ({} if value else None) if isinstance(value, bool) else value


class ExperimentSpec(Section):
    """A whole experiment.

    Attributes:
        name: names the run directory.
        question: what is asked. With it the plan of analysis is written before anything is measured on `targets`.
        pairs: contrast pairs of the vectors.
        vector: the vector; or
        vectors: several, by name; each is measured, and the report says how many were.
        targets: items the effect is measured on.
        doses: factors the plan is scaled by.
        model: alias, directory or hub id.
        backend: `lens` or `vllm`.
        dtype: of weights and activations.
        engine: further options of `steerlab.load` or `steerlab.VLLMEngine`. On vLLM, `layers` are by default those of
            the vectors, and all if a control needs another one.
        seed: of controls and sampling.
        root: folder of run directories.
        selfcheck: whether steering does on this model what it says, before anything is measured.
        plan: the edit at scale 1.
        select: choose vector, layer and dose on development items first; the chosen vector is then measured.
        confirm: measure what was selected on held-out items, before its effect is.
        controls: control arms of the effect.
        metric: `log_prob_margin` or `choice_prob`.
        max_ppl_ratio: doses that cost more enter no fit.
        smallest: the size of the smallest slope that matters, per unit of dose.
        adjust: how ranks of several vectors are adjusted, `holm` or `fdr`.
        neutral: text for cost and entropy, paragraphs apart by a blank line; shipped prose by default.
        policy: sampling policy of generations, cost and entropy.
        cost: perplexity of neutral text with its interval at every dose; with generations, at theirs, and repetition,
            diversity and length of the completions.
        entropy: entropies of neutral text in both arms at the largest dose.
        generations: completions side by side.
        baselines: instructions or examples before the prompts, compared with each vector at equal cost.
        report: write `report.html` into the run directory; or a path that ends in .html or .md.
    """

    name: str
    question: str | None = None
    pairs: PairsSpec | None = None
    vector: VectorSpec | None = None
    vectors: dict[str, VectorSpec] | None = None
    targets: TargetsSpec
    doses: list[Number]
    model: str = DEFAULT_MODEL
    backend: Literal["lens", "vllm"] = "lens"
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    engine: dict[str, Any] = {}
    seed: int = 0
    root: FilePath = Path("runs")
    selfcheck: Annotated[SelfcheckSpec, BeforeValidator(_as_selfcheck)] = SelfcheckSpec()
    plan: PlanSpec = PlanSpec()
    select: SelectSpec | None = None
    confirm: Annotated[ConfirmSpec | None, BeforeValidator(_as_confirm)] = None
    controls: ControlsSpec = ControlsSpec()
    metric: str = "log_prob_margin"
    max_ppl_ratio: Number = 1.5
    smallest: Number | None = None
    adjust: Literal["holm", "fdr"] = "holm"
    neutral: FilePath | None = None
    policy: PolicySpec = PolicySpec()
    cost: bool = False
    entropy: bool = False
    generations: GenerationsSpec | None = None
    baselines: BaselinesSpec | None = None
    report: bool | FilePath = True

    @field_validator("question")
    @classmethod
    def _check_question(cls, question: str | None) -> str | None:
        if question is not None and not question.strip():
            raise ValueError(f"says in words what is asked, got {question!r}")
        return question

    @model_validator(mode="after")
    def _check_vectors(self) -> Self:
        if (self.vector is None) == (self.vectors is None):
            raise ValueError("an experiment has 'vector', or 'vectors' by name; exactly one of them")
        if self.vectors == {}:
            raise ValueError("'vectors' holds no vector")
        flips = self.confirm_controls.shuffled
        for key, vector in self.named_vectors().items():
            if not vector.asked_layers and vector.file is None:
                raise ValueError(f"the key '{key}.layer' is missing")
            if vector.file is None and vector.pairs is None and self.pairs is None:
                raise ValueError(f"the key 'pairs' is missing; {key} is extracted from contrast pairs")
            if vector.file is not None and self.pairs is None and (self.controls.shuffled or flips):
                raise ValueError(f"the key 'pairs' is missing; label flips (shuffled) extract {key} from them again")
        if self.confirm is not None and self.select is None:
            raise ValueError("'confirm' measures what 'select' chose; there is no 'select'")
        return self

    @property
    def confirm_controls(self) -> ControlsSpec:
        """The control arms of the confirmation."""
        own = None if self.confirm is None else self.confirm.controls
        return self.controls if own is None else own

    def named_vectors(self) -> dict[str, VectorSpec]:
        """The vectors by the key that describes each: `vector`, or `vectors.NAME`."""
        if self.vector is not None:
            return {"vector": self.vector}
        return {f"vectors.{name}": vector for name, vector in (self.vectors or {}).items()}
