"""Running an experiment step by step, saying what happens."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import steerlab as sl
from steerlab._cli.console import say
from steerlab._cli.display import show_effect, show_entropy, show_samples
from steerlab._cli.inputs import Blame, Inputs, NamedVector, read_inputs
from steerlab._cli.loading import quiet_transformers
from steerlab._cli.spec import ControlsSpec, ExperimentSpec
from steerlab.core._hook_points import resolve_layers
from steerlab.experiment.measurements.baselines import BaselineComparison
from steerlab.experiment.measurements.confirmation import Confirmation
from steerlab.experiment.measurements.selection import Selection
from steerlab.models._resolver import layer_count
from steerlab.scoring.judging import RubricJudge


@dataclass(frozen=True)
class Candidate:
    """A vector that is measured.

    Attributes:
        name: of the vector, whatever its layer.
        title: what to call it.
        vector: the vector.
        pairs: what it was extracted from, for label flips.
        plan: the plan at scale 1.
    """

    name: str
    title: str
    vector: sl.SteeringVector
    pairs: sl.ContrastPairs | None
    plan: sl.Plan


@dataclass(frozen=True)
class Found:
    """What was measured of one candidate."""

    candidate: Candidate
    effect: sl.Effect
    cost: pd.DataFrame | None
    entropy: pd.DataFrame | None
    samples: pd.DataFrame | None
    baselines: BaselineComparison | None


def run_experiment(spec: ExperimentSpec, *, source: Path | None = None, overwrite: bool = False) -> None:
    """Runs an experiment from extraction to report and prints its results.

    Whatever of it lies in the run directory already is read, not measured again.

    Args:
        spec: the experiment.
        source: the file it was read from, to be named in errors.
        overwrite: start anew: remove the run that lies there.

    Raises:
        SteerlabError: for whatever in it cannot be used.
    """
    started = time.perf_counter()
    blame = Blame(source)
    inputs = read_inputs(spec, blame)
    with blame("name"):
        options = {"backend": spec.backend, "seed": spec.seed, "root": spec.root, "overwrite": overwrite}
        experiment = sl.Experiment(spec.name, spec.model, **options, **inputs.load_options)
    with quiet_transformers(), experiment:
        run = _Run(spec, inputs, experiment, blame)
        run.prepare()
        candidates = run.candidates()
        run.preregister(candidates)
        selection, confirmation = run.select(candidates)
        chosen = candidates if selection is None else [run.winner(selection, candidates)]
        found = [run.measure(candidate) for candidate in chosen]
        places = run.write()
    _show(spec, found, experiment.effects, selection, confirmation)
    say()
    say(f"{time.perf_counter() - started:.0f} seconds")
    for name, place in places.items():
        say(f"{name:<14} {place}", style="bold")


class _Run:
    """The steps of an experiment, each said before it is done."""

    def __init__(self, spec: ExperimentSpec, inputs: Inputs, experiment: sl.Experiment, blame: Blame) -> None:
        self.spec, self.inputs, self.experiment, self.blame = spec, inputs, experiment, blame
        self._loaded_judge: RubricJudge | None = None

    def prepare(self) -> None:
        """Loads the model and checks that steering does on it what it says."""
        self._check_layers(layer_count(self.spec.model, revision=self.spec.engine.get("revision")))
        say(f"Loading {self.spec.model}")
        with _wrong_options(self.spec, self.blame), self.blame("model"):
            info = self.experiment.engine.info
        say(f"  {info.n_layers} layers, width {info.d_model}, {info.dtype}")
        self._check_layers(info.n_layers)
        wanted = self.spec.selfcheck
        if not wanted.run:
            return
        with self.blame("selfcheck"):
            found = self.experiment.selfcheck(allow_failure=wanted.allow_failure, tolerance=wanted.tolerance)
        say(f"  selfcheck {'passed' if found.passed else 'FAILED'}: {len(found.checks)} checks")
        if not found.passed:
            say(str(found), style="bold red")

    def _check_layers(self, n_layers: int | None) -> None:
        """Refuses layers that the model lacks, before anything is loaded or measured; None is not known yet."""
        for named in self.inputs.vectors:
            if named.vectors is None and n_layers is not None:
                with self.blame(named.key):
                    resolve_layers(named.spec.asked_layers, n_layers)

    def candidates(self) -> list[Candidate]:
        """Every vector at every layer that the file asks for."""
        return [one for named in self.inputs.vectors for one in self._vectors(named)]

    def _vectors(self, named: NamedVector) -> list[Candidate]:
        vectors = self._extracted(named) if named.vectors is None else named.vectors
        found = []
        for layer, vector in vectors.items():
            say(f"  layer {layer}: norm {vector.norm:.2f}; {_dose_unit(vector)}")
            title = named.name if len(vectors) == 1 else f"{named.name}, layer {layer}"
            with self.blame("plan"):
                found.append(Candidate(named.name, title, vector, named.pairs, self.spec.plan.plan(vector)))
        return found

    def _extracted(self, named: NamedVector) -> sl.VectorSet:
        spec, pairs, layers = named.spec, named.pairs, named.spec.asked_layers
        assert pairs is not None  # the file was checked
        shown = "all layers" if layers == "all" else ", ".join(f"layer {layer}" for layer in layers)
        say(f"Extracting {named.name} at {shown} from {len(pairs)} pairs")
        options = {"method": spec.method, "site": spec.site, "read": spec.read.where(), "name": named.name}
        with self.blame(named.key):
            return self.experiment.extract(pairs, layers=layers, **options)

    def preregister(self, candidates: list[Candidate]) -> None:
        """Writes the plan of analysis, if the file states its question: of every vector, or of the one to be chosen."""
        spec, question = self.spec, self.spec.question
        if question is None:
            return
        with self.blame("question"):
            for candidate in candidates if spec.select is None else candidates[:1]:
                planned = self.experiment.preregister(
                    question,
                    candidate.plan if spec.select is None else None,
                    self.inputs.targets,
                    spec.doses,
                    **self._of_effect(candidate),
                )
                say(str(planned))

    def _of_effect(self, candidate: Candidate) -> dict[str, Any]:
        """How an effect is measured, as `effect` and `preregister` take it."""
        spec, inputs = self.spec, self.inputs
        stated = {name: getattr(spec, name) for name in ("metric", "max_ppl_ratio", "smallest", "adjust")}
        return stated | {"controls": inputs.controls, "pairs": candidate.pairs, "neutral": inputs.neutral}

    def select(self, candidates: list[Candidate]) -> tuple[Selection | None, Confirmation | None]:
        """The best vector, layer and dose on development items, and how it does on held-out ones."""
        wanted, dev, held_out = self.spec.select, self.inputs.dev, self.inputs.held_out
        if wanted is None or dev is None:
            return None, None
        say(f"Selecting among {len(candidates)} vectors × {len(wanted.doses)} doses on {len(dev)} prompts")
        with self.blame("select"):
            selection = self.experiment.select(
                _by_name(candidates),
                wanted.doses,
                dev,
                subject_to=wanted.subject_to,
                metric=self.spec.metric,
                texts=self.inputs.neutral,
                policy=self.inputs.policy,
                make=self.spec.plan.plan,
            )
        say(f"  {selection}")
        if self.spec.confirm is None or held_out is None:
            return selection, None
        say(f"Confirming it on {len(held_out)} held-out prompts")
        with self.blame("confirm"):
            confirmation = self.experiment.confirm(
                selection,
                held_out,
                controls=self.inputs.confirm_controls,
                pairs=self.winner(selection, candidates).pairs,
                allow_overlap=self.spec.confirm.allow_overlap,
            )
        return selection, confirmation

    def winner(self, selection: Selection, candidates: list[Candidate]) -> Candidate:
        chosen = selection.vector_name, selection.layer
        return next(one for one in candidates if (one.name, one.vector.layer) == chosen)

    def measure(self, candidate: Candidate) -> Found:
        """The effect of a candidate and whatever else the file asks for."""
        effect = self._effect(candidate)
        return Found(
            candidate,
            effect,
            self._cost(candidate),
            self._entropy(candidate),
            self._generations(candidate),
            self._baselines(effect),
        )

    def _effect(self, candidate: Candidate) -> sl.Effect:
        spec, targets = self.spec, self.inputs.targets
        arms = f"{len(spec.doses)} doses, and {_arms(spec.controls)} at two"
        say(f"Scoring {len(targets)} prompts under {candidate.title} at {arms}")
        with self.blame("effect"):
            return self.experiment.effect(candidate.plan, targets, spec.doses, **self._of_effect(candidate))

    def _cost(self, candidate: Candidate) -> pd.DataFrame | None:
        if not self.spec.cost:
            return None
        say("Measuring what it costs")
        wanted = self.spec.generations
        options = {} if wanted is None else {"max_new_tokens": wanted.max_new_tokens, "n": wanted.n}
        with self.blame("cost"):
            return self.experiment.cost(
                candidate.plan,
                self.inputs.neutral,
                doses=sorted(self.spec.doses) if wanted is None else self._generated_doses(),
                prompts=self.inputs.prompts or None,
                policy=self.inputs.policy,
                **options,
            )

    def _entropy(self, candidate: Candidate) -> pd.DataFrame | None:
        if not self.spec.entropy:
            return None
        dose = max(self.spec.doses)
        say(f"Measuring entropy of neutral text at {dose:+g}")
        with self.blame("entropy"):
            return self.experiment.entropy(candidate.plan.scaled(dose), self.inputs.neutral, policy=self.inputs.policy)

    def _generations(self, candidate: Candidate) -> pd.DataFrame | None:
        wanted = self.spec.generations
        if wanted is None:
            return None
        doses, judge = self._generated_doses(), self._judge()
        say(f"Generating from {len(self.inputs.prompts)} prompts at {', '.join(f'{dose:+g}' for dose in doses)}")
        with self.blame("generations"):
            return self.experiment.generate(
                candidate.plan,
                self.inputs.prompts,
                policy=self.inputs.policy,
                max_new_tokens=wanted.max_new_tokens,
                n=wanted.n,
                doses=doses,
                stop=wanted.stop,
                chat=wanted.chat,
                judge=judge,
            )

    def _baselines(self, effect: sl.Effect) -> BaselineComparison | None:
        wanted = self.spec.baselines
        if wanted is None:
            return None
        arms = wanted.arms()
        say(f"Measuring {' and '.join(arm.name for arm in arms)} on the same prompts")
        with self.blame("baselines"):
            return self.experiment.baselines(effect, arms, ratios=wanted.ratios)

    def _judge(self) -> RubricJudge | None:
        """The judge of completions, on the experiment's own engine or one of its own; loaded once."""
        wanted = None if self.spec.generations is None else self.spec.generations.judge
        if wanted is not None and self._loaded_judge is None:
            options = {"aggregate": wanted.aggregate, "chat": wanted.chat, "lead": wanted.lead}
            with self.blame("generations.judge"):
                engine = self.experiment.engine
                if wanted.model is not None:
                    say(f"Loading {wanted.model} as the judge")
                    engine = sl.load(wanted.model, dtype=self.spec.dtype)
                self._loaded_judge = sl.judge(engine, wanted.rubric, wanted.scale, **options)
        return self._loaded_judge

    def _generated_doses(self) -> list[float]:
        spec = self.spec
        given = None if spec.generations is None else spec.generations.doses
        return sorted({min(spec.doses), 0.0, max(spec.doses)}) if given is None else sorted(given)

    def write(self) -> dict[str, Path]:
        """Saves the run and its report; returns what lies where."""
        places = {"run directory": self.experiment.save()}
        if not self.spec.report:
            return places
        with self.blame("report"):
            return places | {
                "report": self.experiment.report(self.spec.report if isinstance(self.spec.report, Path) else None)
            }


@contextmanager
def _wrong_options(spec: ExperimentSpec, blame: Blame) -> Iterator[None]:
    """An engine option that vLLM does not know, as an error of the file's key `engine`."""
    try:
        yield
    except TypeError as error:
        wrong = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if wrong is None or wrong[1] not in spec.engine:
            raise
        with blame("engine"):
            value = spec.engine[wrong[1]]
            raise sl.InputError(f"vLLM has no option {wrong[1]!r} (its value is {value!r:.60}).") from error


def _by_name(candidates: list[Candidate]) -> dict[str, sl.VectorSet]:
    names = dict.fromkeys(one.name for one in candidates)
    return {name: sl.VectorSet(tuple(one.vector for one in candidates if one.name == name)) for name in names}


def _dose_unit(vector: sl.SteeringVector) -> str:
    if vector.card.median_norm is None:
        return "its file states no median norm of the stream"
    return f"a dose of 1 is {vector.card.median_norm:.2f}, the stream's median norm there"


def _arms(controls: ControlsSpec) -> str:
    counts = {"random directions": controls.random, "label flips": controls.shuffled}
    named = [f"{count} {name}" for name, count in counts.items() if count]
    return ", ".join([*named, *["a wrong layer"] * controls.wrong_layer]) or "no controls"


def _show(
    spec: ExperimentSpec,
    found: list[Found],
    effects: list[sl.Effect],
    selection: Selection | None,
    confirmation: Confirmation | None,
) -> None:
    """Prints what was measured; effects as they stand when all are known, which counts how many were tested."""
    if selection is not None:
        say()
        say(f"selected          {selection}")
    if confirmation is not None:
        for line in str(confirmation).splitlines():
            say(f"confirmed         {line}")
    latest = {effect.plan_hash: effect for effect in effects}
    for one in found:
        effect = latest.get(one.effect.plan_hash, one.effect)
        if len(found) > 1:
            say()
            say(one.candidate.title, style="bold")
        show_effect(effect)
        if one.cost is not None:
            _show_cost(one.cost)
        if one.entropy is not None:
            show_entropy(one.entropy, dose=max(spec.doses), axis=effect.settings.axis)
        if one.samples is not None:
            show_samples(one.samples)
            if "judge" in one.samples.columns:
                _show_ratings(one.samples)
        if one.baselines is not None:
            for sentence in one.baselines.sentences():
                say(f"{'baselines':<17} {sentence}")


def _show_ratings(frame: pd.DataFrame) -> None:
    for dose, rating in frame.groupby("dose", sort=True).judge.mean().items():
        say(f"{f'rating at {dose:+g}':<17} {rating:.3f} (the judge's mean over completions)")


def _show_cost(frame: pd.DataFrame) -> None:
    columns = ["dose", "ppl_ratio", "ppl_ratio_low", "ppl_ratio_high"]
    for dose, ratio, low, high in frame.loc[frame.dose != 0, columns].itertuples(index=False):
        head = f"cost at {dose:+g}"
        say(f"{head:<17} perplexity × {ratio:.3f} ({low:.3f} to {high:.3f}, Student's t over texts)")
