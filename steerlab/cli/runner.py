"""Running an experiment step by step, saying what happens."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

import steerlab as sl
from steerlab.cli.console import say
from steerlab.cli.display import show_effect, show_entropy, show_samples
from steerlab.cli.loading import check_writable, quiet_transformers, read_text
from steerlab.cli.spec import ControlsSpec, ExperimentSpec


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
class Inputs:
    """What an experiment works on, read and checked before the model loads."""

    pairs: sl.ContrastPairs
    targets: sl.Targets
    controls: sl.Controls
    policy: sl.SamplingPolicy
    prompts: list[str]
    neutral: list[str] | None
    experiment: sl.Experiment


def run_experiment(spec: ExperimentSpec, *, source: Path | None = None) -> None:
    """Runs an experiment from extraction to report and prints its results.

    Args:
        spec: the experiment.
        source: the file it was read from, to be named in errors.

    Raises:
        SteerlabError: for whatever in it cannot be used.
    """
    started = time.perf_counter()
    blame = Blame(source)
    inputs = _read_inputs(spec, blame)
    with quiet_transformers():
        vector = _extract(spec, inputs, blame)
        with blame("plan"):
            plan = spec.plan.plan(vector)
        effect = _measure(spec, inputs, plan, blame)
        entropy = _entropy(spec, inputs, plan, blame)
        samples = _generate(spec, inputs, plan, blame)
    places = _write(spec, inputs.experiment)
    show_effect(effect)
    if entropy is not None:
        show_entropy(entropy, dose=max(spec.doses), axis=effect.settings.axis)
    if samples is not None:
        show_samples(samples)
    say()
    say(f"{time.perf_counter() - started:.0f} seconds")
    for name, place in places.items():
        say(f"{name:<14} {place}", style="bold")


def _write(spec: ExperimentSpec, experiment: sl.Experiment) -> dict[str, Path]:
    """Saves the run and its report; returns what lies where."""
    places = {"run directory": experiment.save()}
    return places | ({"report": experiment.report()} if spec.report else {})


def _read_inputs(spec: ExperimentSpec, blame: Blame) -> Inputs:
    from steerlab.core.hook_points import check_site
    from steerlab.experiment.metrics import find_metric
    from steerlab.experiment.sweep import check_doses
    from steerlab.steering.estimators import estimator

    with blame("pairs"):
        p = spec.pairs
        pairs = sl.ContrastPairs.from_jsonl(
            p.path, positive=p.positive, negative=p.negative, group=p.group, split=p.split
        )
    with blame("targets"):
        targets = sl.Targets.from_jsonl(spec.targets.path, split=spec.targets.split)
    with blame("vector.method"):
        estimator(spec.vector.method)
    with blame("vector.site"):
        check_site(spec.vector.site)
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
    with blame("root"):
        check_writable(spec.root, folder=True)
    with blame("name"):
        exp = sl.Experiment(spec.name, spec.model, seed=spec.seed, root=spec.root, dtype=spec.dtype)
    return Inputs(pairs, targets, controls, policy, prompts, neutral, exp)


def _prompts(spec: ExperimentSpec) -> list[str]:
    if spec.generations is None:
        return []
    given = spec.generations.prompts
    found = [line for line in read_text(given).splitlines() if line.strip()] if isinstance(given, Path) else given
    if not found:
        raise sl.PromptError("There are no prompts; give at least one, or leave generations out.")
    return found


def _paragraphs(text: str) -> list[str]:
    found = [part.strip() for part in text.split("\n\n") if part.strip()]
    if not found:
        raise sl.DataError("The neutral text is empty.")
    return found


def _extract(spec: ExperimentSpec, inputs: Inputs, blame: Blame) -> sl.SteeringVector:
    exp = inputs.experiment
    say(f"Loading {spec.model}")
    with blame("model"):
        engine = exp.engine
    info = engine.info
    say(f"  {info.n_layers} layers, width {info.d_model}, {info.dtype}")
    say(f"Extracting {spec.name} at layer {spec.vector.layer} from {len(inputs.pairs)} pairs")
    with blame("vector"):
        vectors = exp.extract(
            inputs.pairs,
            method=spec.vector.method,
            site=spec.vector.site,
            layers=[spec.vector.layer],
            read=spec.vector.read.where(),
        )
    vector = vectors.by_layer[0]
    say(f"  norm {vector.norm:.2f}; a dose of 1 is {vector.card.median_norm:.2f}, the stream's median norm there")
    return vector


def _measure(spec: ExperimentSpec, inputs: Inputs, plan: sl.Plan, blame: Blame) -> sl.Effect:
    say(f"Scoring {len(inputs.targets)} prompts at {len(spec.doses)} doses, and {_arms(spec.controls)} at two")
    with blame("effect"):
        return inputs.experiment.effect(
            plan,
            inputs.targets,
            spec.doses,
            controls=inputs.controls,
            metric=spec.metric,
            pairs=inputs.pairs,
            max_ppl_ratio=spec.max_ppl_ratio,
            neutral=inputs.neutral,
        )


def _arms(controls: ControlsSpec) -> str:
    counts = {"random directions": controls.random, "label flips": controls.shuffled}
    named = [f"{count} {name}" for name, count in counts.items() if count]
    return ", ".join([*named, *["a wrong layer"] * controls.wrong_layer]) or "no controls"


def _entropy(spec: ExperimentSpec, inputs: Inputs, plan: sl.Plan, blame: Blame) -> pd.DataFrame | None:
    if not spec.entropy:
        return None
    say(f"Measuring entropy of neutral text at {max(spec.doses):+g}")
    with blame("entropy"):
        return inputs.experiment.entropy(plan.scaled(max(spec.doses)), inputs.neutral, policy=inputs.policy)


def _generate(spec: ExperimentSpec, inputs: Inputs, plan: sl.Plan, blame: Blame) -> pd.DataFrame | None:
    wanted = spec.generations
    if wanted is None:
        return None
    doses = sorted({min(spec.doses), 0.0, max(spec.doses)}) if wanted.doses is None else wanted.doses
    say(f"Generating from {len(inputs.prompts)} prompts at {', '.join(f'{dose:+g}' for dose in doses)}")
    with blame("generations"):
        return inputs.experiment.generate(
            plan, inputs.prompts, policy=inputs.policy, max_new_tokens=wanted.max_new_tokens, doses=doses
        )
