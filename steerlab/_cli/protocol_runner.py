"""Running a published protocol from its file, saying what happens."""

import time
from pathlib import Path
from typing import Any

import steerlab as sl
from steerlab._cli.console import say
from steerlab._cli.inputs import Blame, prompt_lines
from steerlab._cli.loading import check_writable, quiet_transformers
from steerlab._cli.protocol_spec import (
    PROTOCOLS,
    AxbenchSpec,
    CaaSpec,
    CastSpec,
    ItiSpec,
    ProtocolSpec,
    RefusalSpec,
    SteerabilitySpec,
)
from steerlab._cli.yaml_file import checked, relative_to
from steerlab.protocols import (
    ChoiceItems,
    ProtocolResult,
    TruthQuestions,
    axbench,
    caa,
    cast,
    iti,
    read_concepts,
    read_instructions,
    refusal,
    steerability,
)


def protocol_of(data: dict[Any, Any], path: Path) -> ProtocolSpec:
    """The protocol that keys and values of a file describe; its paths count from the file's folder.

    Raises:
        DataError: for an unknown protocol, or a key that is unknown, missing or of the wrong kind.
    """
    name = data["protocol"]
    if name not in PROTOCOLS:
        raise sl.DataError(f"{path}: protocol is one of {', '.join(PROTOCOLS)}, got {name!r:.60}.")
    return relative_to(path.parent, checked(PROTOCOLS[name], data, str(path)))


def run_protocol(spec: ProtocolSpec, *, source: Path, overwrite: bool = False) -> None:
    """Runs a protocol and prints its table; whatever of it lies in the run directory is read, not measured again.

    Raises:
        SteerlabError: for whatever in it cannot be used.
    """
    started, blame = time.perf_counter(), Blame(source)
    with blame("root"):
        check_writable(spec.root, folder=True)
    arguments = _arguments(spec, blame)
    with blame("name"):
        wired = spec.wired() if spec.backend == "vllm" else {}
        options = {"backend": spec.backend, "seed": spec.seed, "root": spec.root, "overwrite": overwrite}
        experiment = sl.Experiment(spec.name, spec.model, **options, **{"dtype": spec.dtype, **wired, **spec.engine})
    say(f"Running {spec.protocol} on {spec.model}")
    with quiet_transformers(), experiment, blame(spec.protocol):
        found = _FUNCTIONS[spec.protocol](experiment, **arguments)
        report = experiment.report(spec.report if isinstance(spec.report, Path) else None) if spec.report else None
        place = experiment.path
    _show(found)
    say()
    say(f"{time.perf_counter() - started:.0f} seconds")
    say(f"{'run directory':<14} {place}", style="bold")
    if report is not None:
        say(f"{'report':<14} {report}", style="bold")


_FUNCTIONS: dict[str, Any] = {
    "axbench": axbench,
    "caa": caa,
    "cast": cast,
    "iti": iti,
    "refusal": refusal,
    "steerability": steerability,
}


def _arguments(spec: ProtocolSpec, blame: Blame) -> dict[str, Any]:
    """A protocol's arguments, its files read."""
    if isinstance(spec, RefusalSpec):
        names = ("refusal_tokens", "positions", "layers", "max_kl", "least_induced", "late", "sites", "chat")
        read = {}
        for name in ("harmful", "harmless"):
            with blame(name):
                read[name] = prompt_lines(getattr(spec, name))
        return read | {name: getattr(spec, name) for name in names}
    if isinstance(spec, AxbenchSpec):
        return _axbench_arguments(spec, blame)
    if isinstance(spec, CastSpec):
        return _cast_arguments(spec, blame)
    if isinstance(spec, ItiSpec):
        return _iti_arguments(spec, blame)
    assert isinstance(spec, SteerabilitySpec | CaaSpec)
    behaviours = {}
    for name, path in spec.behaviours.items():
        with blame(f"behaviours.{name}"):
            behaviours[name] = ChoiceItems.from_jsonl(path)
    found: dict[str, Any] = {"behaviours": behaviours, "layers": spec.layers, "chat": spec.chat}
    if spec.multipliers is not None:
        found["multipliers"] = spec.multipliers
    return found | ({"prompts": spec.prompts} if isinstance(spec, SteerabilitySpec) else {"held_out": spec.held_out})


def _axbench_arguments(spec: AxbenchSpec, blame: Blame) -> dict[str, Any]:
    """AxBench's arguments: concepts and instructions read, further models loaded."""
    with blame("concepts"):
        concepts = read_concepts(spec.concepts, limit=spec.limit, texts=spec.texts)
    with blame("instructions"):
        if spec.instructions is None:
            asked = read_instructions(spec.concepts, limit=spec.n_instructions)
        else:
            asked = prompt_lines(spec.instructions)
    found: dict[str, Any] = {"concepts": concepts, "instructions": asked}
    found |= {name: getattr(spec, name) for name in ("layer", "max_new_tokens", "chat", "training")}
    found |= {name: getattr(spec, name) for name in ("methods", "factors") if getattr(spec, name) is not None}
    if spec.judge is not None:
        with blame("judge"):
            found["judge"] = sl.load(spec.judge, dtype=spec.dtype)
    if spec.backend == "vllm" and "reft_r1" in (spec.methods or ["reft_r1"]):
        with blame("model"):
            found["trainer"] = sl.load(spec.model, dtype=spec.dtype)
    return found


def _cast_arguments(spec: CastSpec, blame: Blame) -> dict[str, Any]:
    """Conditional steering's arguments, its files read."""
    names = ("layers", "condition_layers", "strength", "refusal_tokens", "method", "chat")
    found: dict[str, Any] = {name: getattr(spec, name) for name in names}
    for name in ("target", "other"):
        with blame(name):
            found[name] = prompt_lines(getattr(spec, name))
    with blame("behaviour"):
        found["behaviour"] = sl.ContrastPairs.from_jsonl(spec.behaviour)
    return found


def _iti_arguments(spec: ItiSpec, blame: Blame) -> dict[str, Any]:
    """The intervention's arguments: questions and texts read, the model whose heads are read loaded."""
    found: dict[str, Any] = {name: getattr(spec, name) for name in ("layers", "folds", "before", "chat")}
    found |= {name: getattr(spec, name) for name in ("heads", "alphas") if getattr(spec, name) is not None}
    with blame("questions"):
        found["questions"] = TruthQuestions.from_jsonl(spec.questions)
    if spec.texts is not None:
        with blame("texts"):
            found["texts"] = prompt_lines(spec.texts)
    if spec.backend == "vllm":
        with blame("model"):
            found["reader"] = sl.load(spec.model, dtype=spec.dtype)
    return found


def _show(found: ProtocolResult) -> None:
    say()
    for line in str(found).splitlines():
        say(line)
    say("Different from what was published:")
    for one in found.differs:
        say(f"  · {one}")
