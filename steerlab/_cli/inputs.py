"""What an experiment file names, read and checked before a model loads; every complaint names the file and the key."""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import steerlab as sl
from steerlab._cli.loading import check_writable
from steerlab._cli.spec import ControlsSpec, ExperimentSpec, PairsSpec, TargetsSpec, VectorSpec
from steerlab.core._files import read_text

LENS_OPTIONS: Final = ("device", "n_devices", "device_map", "revision", "batch_tokens")
REPORT_SUFFIXES: Final = (".html", ".htm", ".md", ".markdown")


@dataclass(frozen=True)
class Blame:
    """Names the file and key behind an error.

    Attributes:
        source: the experiment file; None if there is none.
    """

    source: Path | None

    @contextmanager
    def __call__(self, key: str) -> Iterator[None]:
        """Puts the file and this key before the message of an error raised inside."""
        try:
            yield
        except sl.SteerlabError as error:
            if self.source is None:
                raise
            raise sl.DataError(f"{self.source}: {key}: {error}") from error


@dataclass(frozen=True)
class NamedVector:
    """A vector of an experiment file, with the data it comes from.

    Attributes:
        name: its name.
        key: the key that describes it.
        spec: what the file says.
        pairs: its contrast pairs; None for a vector from a file without any.
        vectors: those of its file; None if it is extracted.
    """

    name: str
    key: str
    spec: VectorSpec
    pairs: sl.ContrastPairs | None
    vectors: sl.VectorSet | None


@dataclass(frozen=True)
class Inputs:
    """What an experiment works on.

    Attributes:
        vectors: its vectors.
        targets: items of the effect.
        dev: development items of `select`.
        held_out: items of `confirm`.
        controls: control arms of the effect.
        confirm_controls: control arms of the confirmation.
        policy: the sampling policy.
        prompts: prompts of generations.
        neutral: neutral texts; None for the shipped ones.
        load_options: how the model is loaded.
    """

    vectors: list[NamedVector]
    targets: sl.Targets
    dev: sl.Targets | None
    held_out: sl.Targets | None
    controls: sl.Controls
    confirm_controls: sl.Controls | None
    policy: sl.SamplingPolicy
    prompts: list[str]
    neutral: list[str] | None
    load_options: dict[str, Any]


def read_inputs(spec: ExperimentSpec, blame: Blame) -> Inputs:
    """Reads and checks everything an experiment names.

    Args:
        spec: the experiment.
        blame: names its file in errors.

    Raises:
        DataError: for what cannot be read or used.
    """
    from steerlab.experiment.measurements._checks import check_doses
    from steerlab.experiment.measurements.metrics import find_metric
    from steerlab.experiment.measurements.selection import check_constraints

    vectors = read_vectors(spec, blame)
    targets = _targets(spec.targets, "targets", blame)
    with blame("doses"):
        check_doses(spec.doses)
    with blame("controls"):
        controls = sl.Controls(**spec.controls.model_dump())
    with blame("metric"):
        find_metric(spec.metric)
    with blame("policy"):
        policy = sl.SamplingPolicy(**spec.policy.model_dump())
    with blame("generations.prompts"):
        prompts = _prompts(spec)
    with blame("neutral"):
        neutral = None if spec.neutral is None else _paragraphs(read_text(spec.neutral))
    dev = held_out = confirm_controls = None
    if spec.select is not None:
        dev = _targets(spec.select.targets, "select.targets", blame)
        with blame("select.subject_to"):
            check_constraints(spec.select.subject_to, ["a text"])
    if spec.confirm is not None:
        held_out = targets if spec.confirm.targets is None else _targets(spec.confirm.targets, "confirm.targets", blame)
        with blame("confirm.controls"):
            confirm_controls = sl.Controls(**spec.confirm_controls.model_dump())
    with blame("root"):
        check_writable(spec.root, folder=True)
    with blame("report"):
        _check_report(spec.report)
    with blame("engine"):
        options = load_options(spec)
    return Inputs(vectors, targets, dev, held_out, controls, confirm_controls, policy, prompts, neutral, dict(options))


def read_vectors(spec: ExperimentSpec, blame: Blame) -> list[NamedVector]:
    """The vectors of an experiment, with their pairs and files."""
    found = []
    for key, vector in spec.named_vectors().items():
        name = spec.name if key == "vector" else key.removeprefix("vectors.")
        found.append(_vector(name, key, vector, spec.pairs, blame))
    return found


def _vector(name: str, key: str, spec: VectorSpec, pairs: PairsSpec | None, blame: Blame) -> NamedVector:
    from steerlab.core._hook_points import check_site
    from steerlab.steering.extraction.estimators import estimator

    own, place = (pairs, "pairs") if spec.pairs is None else (spec.pairs, f"{key}.pairs")
    with blame(place):
        read = None if own is None else _pairs(own)
    if spec.file is not None:
        with blame(f"{key}.file"):
            stored = sl.VectorSet.load(spec.file)
            wanted = spec.asked_layers
            chosen = stored if wanted in ([], "all") else sl.VectorSet(tuple(stored[k] for k in wanted))
        return NamedVector(name, key, spec, read, chosen)
    with blame(f"{key}.method"):
        estimator(spec.method)
    with blame(f"{key}.site"):
        check_site(spec.site)
    return NamedVector(name, key, spec, read, None)


def _pairs(spec: PairsSpec) -> sl.ContrastPairs:
    keys = {"positive": spec.positive, "negative": spec.negative, "group": spec.group}
    return sl.ContrastPairs.from_jsonl(spec.path, split=spec.split, **keys)


def _targets(spec: TargetsSpec, key: str, blame: Blame) -> sl.Targets:
    with blame(key):
        return sl.Targets.from_jsonl(spec.path, split=spec.split)


def _prompts(spec: ExperimentSpec) -> list[str]:
    if spec.generations is None:
        return []
    given = spec.generations.prompts
    found = prompt_lines(given) if isinstance(given, Path) else given
    if not found:
        raise sl.PromptError("There are no prompts; give at least one, or leave generations out.")
    return found


def prompt_lines(path: Path) -> list[str]:
    """The lines of a text file that hold something, a prompt each."""
    return [line for line in _lines(read_text(path)) if line.strip()]


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").split("\n")


def _paragraphs(text: str) -> list[str]:
    found = [part.strip() for part in text.replace("\r\n", "\n").split("\n\n") if part.strip()]
    if not found:
        raise sl.DataError("The neutral text is empty.")
    return found


def _check_report(report: bool | Path) -> None:
    if isinstance(report, bool):
        return
    if report.suffix.lower() not in REPORT_SUFFIXES:
        raise sl.InputError(f"A report is written as .html or .md; {report.name!r} is neither.")
    check_writable(report)


# --- engines ------------------------------------------------------------------------------------------------------


def load_options(spec: ExperimentSpec, *, layers: "list[int] | str | None" = None) -> dict[str, Any]:
    """How the model of an experiment is loaded.

    Args:
        spec: the experiment.
        layers: those to wire on vLLM, unless the file says so itself; by default those of the vectors.

    Raises:
        InputError: for an option that the lens engine does not have.
    """
    options = {"dtype": spec.dtype, **spec.engine}
    if spec.backend == "vllm":
        options.setdefault("layers", _wired(spec) if layers is None else layers)
        return options
    for name, value in spec.engine.items():
        if name not in LENS_OPTIONS:
            near = difflib.get_close_matches(name, LENS_OPTIONS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(LENS_OPTIONS)}."
            raise sl.InputError(f"the lens engine has no option {name!r} (its value is {value!r:.60}); {hint}")
    return options


def _wired(spec: ExperimentSpec) -> "list[int] | str":
    wanted = [vector.asked_layers for vector in spec.named_vectors().values()]
    unknown = any(layers in ("all", []) for layers in wanted)
    if unknown or moves_layers(spec.controls) or (spec.confirm is not None and moves_layers(spec.confirm_controls)):
        return "all"
    return sorted({layer for layers in wanted for layer in layers if isinstance(layer, int)})


def moves_layers(controls: ControlsSpec) -> bool:
    """Whether control arms edit another layer than the vector's."""
    return controls.wrong_layer
