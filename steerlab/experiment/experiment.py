"""Experiment: one model, one question, everything measured and kept together."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import pandas as pd

from steerlab.core.engine import Engine
from steerlab.core.errors import InputError, PlanError, RunError, SteerlabError
from steerlab.core.pairs import ContrastPairs
from steerlab.core.policy import SamplingPolicy
from steerlab.core.results import Scores
from steerlab.core.seeds import check_seed
from steerlab.core.shipped import neutral_text
from steerlab.core.targets import Targets
from steerlab.core.text import PromptLike, as_prompts
from steerlab.experiment import storage
from steerlab.experiment.controls import Arm, Controls, control_arms
from steerlab.experiment.costs import entropy_change, perplexity_cost
from steerlab.experiment.effect import Effect, EffectSettings, outermost
from steerlab.experiment.metrics import Metric, find_metric
from steerlab.experiment.sweep import check_doses, sweep
from steerlab.steering.extract import extract, library_versions
from steerlab.steering.operators import Add
from steerlab.steering.plan import Plan
from steerlab.steering.vectors import VectorSet
from steerlab.steering.where import Where

DEFAULT_CONTROLS = Controls()
DEFAULT_POLICY = SamplingPolicy(temperature=0.7, top_p=0.9)


@dataclass
class Results:
    """What an experiment has produced so far, in order.

    Attributes:
        effects: effects, with the plan each was measured for.
        costs: results of `cost`.
        entropies: results of `entropy`.
        generations: results of `generate`.
        vectors: results of `extract`.
    """

    effects: list[tuple[Effect, Plan]] = field(default_factory=list)
    costs: list[pd.DataFrame] = field(default_factory=list)
    entropies: list[pd.DataFrame] = field(default_factory=list)
    generations: list[pd.DataFrame] = field(default_factory=list)
    vectors: list[VectorSet] = field(default_factory=list)


class Experiment:
    """Extracts vectors, steers, and measures what changed, against nulls and with its cost.

    The model loads at first use, so that a saved experiment opens without it.

    Args:
        name: names the run directory.
        model: what `steerlab.load` takes; or an engine, which is used as it is.
        backend: `lens`.
        seed: of controls, bootstrap and sampling.
        root: folder of the run directory `root/name`.
        **load_options: passed to `steerlab.load`, e.g. dtype.

    Examples:
        >>> exp = Experiment("sentiment", model="smollm2-135m")  # doctest: +SKIP
    """

    def __init__(
        self,
        name: str,
        model: Any = "smollm2-135m",
        *,
        backend: str = "lens",
        seed: int = 0,
        root: str | Path = "runs",
        **load_options: Any,
    ) -> None:
        if not name or Path(name).name != name or name in (".", ".."):
            raise InputError(f"name becomes a folder name; {name!r} cannot be one.")
        if backend != "lens":
            raise InputError(f"Unknown backend {backend!r}; this version has 'lens'.")
        if not isinstance(model, str | Path | Engine):
            raise InputError(f"model is a name, a directory or an engine, got {type(model).__name__}.")
        self.name = name
        self.backend = backend
        self.seed = int(cast("int", check_seed(seed, 1)))
        self.path = Path(root) / name
        self.results = Results()
        self._owns_directory = False
        self._model, self._load_options = model, load_options
        self._engine: Any = None if isinstance(model, str | Path) else model

    @property
    def engine(self) -> Engine:
        """The engine, loaded at first use."""
        if self._engine is None:
            from steerlab.engines.lens import load

            self._engine = load(self._model, **self._load_options)
        return self._engine

    @property
    def effects(self) -> list[Effect]:
        """Every effect measured so far."""
        return [effect for effect, _ in self.results.effects]

    def __repr__(self) -> str:
        return f"Experiment({self.name!r}, {len(self.results.effects)} effects, {str(self.path)!r})"

    def extract(
        self,
        pairs: ContrastPairs | Targets,
        *,
        method: str = "mean_diff",
        site: str = "resid_post",
        layers: Any = "all",
        read: Where | None = None,
        chat: bool = False,
        **options: Any,
    ) -> VectorSet:
        """Vectors from contrast pairs, or from targets by gradient; all of `steerlab.extract`'s options are taken."""
        options = {"name": self.name, "seed": self.seed} | options
        vectors = extract(self.engine, pairs, method, site, layers, read, chat=chat, **options)
        self.results.vectors.append(vectors)
        return vectors

    def effect(
        self,
        plan: Plan,
        targets: Targets,
        doses: Sequence[float],
        *,
        controls: Controls = DEFAULT_CONTROLS,
        metric: "str | Metric" = "log_prob_margin",
        pairs: ContrastPairs | None = None,
        max_ppl_ratio: float = 1.5,
        neutral: Sequence[PromptLike] | None = None,
    ) -> Effect:
        """How the metric changes with the dose, against control arms, on items of `targets`.

        The real vector runs at every dose, the controls at the two outermost ones that the perplexity bound allows; a
        rank compares like with like. Each arm runs `plan.scaled(dose)`, so with `add(v, dose=1.0)` the axis is the dose
        itself, and otherwise a scale.

        Args:
            plan: the plan at scale 1.
            targets: items to measure on, not those the plan was chosen on.
            doses: at least two; include 0 for a baseline.
            controls: which control arms to run.
            metric: `log_prob_margin` (nats), `choice_prob`, or a function of an item's positive and negative log-probs.
            pairs: the pairs the vectors were extracted from; shuffled controls need them.
            max_ppl_ratio: doses that raise the perplexity of neutral text beyond this factor enter no fit.
            neutral: texts for that; shipped neutral prose by default.

        Returns:
            An `Effect`, also kept in `effects`.

        Raises:
            InputError: for unusable doses or an unknown metric.
            DataError: for shuffled controls without pairs.
        """
        run_doses = check_doses(doses)
        metric_name, measure = find_metric(metric)
        if not max_ppl_ratio >= 1:
            raise InputError(f"max_ppl_ratio is a factor of at least 1, got {max_ppl_ratio!r}.")
        resolved = self._resolved(plan)
        cost = perplexity_cost(self.engine, resolved, self._neutral(neutral), run_doses)
        real = Arm("vector", 0, resolved)
        rows = sweep(self.engine, [(real, dose) for dose in run_doses], targets, measure, description="doses")
        allowed = [float(d) for d in cost[cost.ppl_ratio <= max_ppl_ratio].dose]
        if len(allowed) >= 2:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="About SteeringVector")
                arms = control_arms(self.engine, resolved, controls, pairs=pairs, seed=self.seed)
                cells = [(arm, dose) for arm in arms for dose in outermost(allowed) if dose != 0]
                if cells:
                    rows = pd.concat([rows, sweep(self.engine, cells, targets, measure, description="controls")])
        settings = EffectSettings(metric=metric_name, axis=_axis(plan), max_ppl_ratio=max_ppl_ratio, seed=self.seed)
        provenance = asdict(self.engine.info) | {
            "engine": self.backend,
            "targets_hash": targets.hash,
            "pairs_hash": None if pairs is None else pairs.hash,
            "versions": library_versions(),
        }
        effect = Effect(rows.reset_index(drop=True), cost, plan.hash, str(plan), settings, provenance)
        self.results.effects.append((effect, resolved))
        return effect

    def cost(
        self, plan: Plan, texts: Sequence[PromptLike] | None = None, *, doses: Sequence[float] = (0.0, 1.0)
    ) -> pd.DataFrame:
        """Perplexity of ordinary text under the plan, per dose, and its ratio to the unsteered model's.

        Args:
            plan: the plan at scale 1.
            texts: texts to score; shipped neutral prose by default.
            doses: factors the plan is scaled by.

        Returns:
            A row per dose: `dose`, `nll`, `perplexity`, `ppl_ratio`, `num_tokens`, `plan_hash`.
        """
        resolved = self._resolved(plan)
        frame = perplexity_cost(self.engine, resolved, self._neutral(texts), sorted(float(d) for d in doses))
        frame["plan_hash"] = plan.hash
        self.results.costs.append(frame)
        return frame

    def entropy(
        self,
        plan: Plan,
        texts: Sequence[PromptLike] | None = None,
        *,
        policy: SamplingPolicy = DEFAULT_POLICY,
    ) -> pd.DataFrame:
        """Entropy of the policy's next-token distribution on the same texts, unsteered and steered.

        Args:
            plan: the plan.
            texts: texts to force; shipped neutral prose by default.
            policy: the policy whose distribution is measured.

        Returns:
            A row per text and token: `text`, `position`, `token_id`, `base`, `steered` (nats); and, the same in every
            row, `plan`, `plan_hash`, `policy`.
        """
        frame = entropy_change(self.engine, plan, self._neutral(texts), policy)
        frame = frame.assign(plan=str(plan), plan_hash=plan.hash, policy=str(policy))
        self.results.entropies.append(frame)
        return frame

    def generate(
        self,
        plan: Plan,
        prompts: Sequence[PromptLike],
        *,
        policy: SamplingPolicy = DEFAULT_POLICY,
        max_new_tokens: int = 40,
        n: int = 1,
        doses: Sequence[float] = (0.0, 1.0),
        chat: bool = False,
    ) -> pd.DataFrame:
        """Completions side by side, each prompt with the same draws at every dose.

        Returns:
            A row per prompt, sample and dose: `prompt_index`, `sample_index`, `prompt`, `dose`, `text`, `num_tokens`,
            `finish_reason`, `log_prob`, `log_q`, `plan_hash`, `policy`.
        """
        prompts = as_prompts(prompts)
        run_doses = sorted(float(d) for d in doses)
        if not run_doses:
            raise InputError("There are no doses to generate at; pass at least one.")
        frames = []
        for dose in run_doses:
            made = self.engine.generate(
                prompts,
                plan=None if dose == 0 else plan.scaled(dose),
                policy=policy,
                max_new_tokens=max_new_tokens,
                n=n,
                seed=self.seed,
                chat=chat,
            ).to_frame()
            made.insert(2, "prompt", [str(prompts[i]) for i in made.prompt_index])
            made.insert(3, "dose", dose)
            frames.append(made)
        frame = (
            pd.concat(frames)
            .assign(plan_hash=plan.hash, policy=str(policy))
            .sort_values(["prompt_index", "sample_index", "dose"])
            .reset_index(drop=True)
        )
        self.results.generations.append(frame)
        return frame

    def score(self, plan: Plan | None, targets: Targets) -> Scores:
        """Exact scores of every target, positives before negatives, per item."""
        return self.engine.score(targets.prompts, [item.targets for item in targets], plan=plan)

    def save(self, *, overwrite: bool = False) -> Path:
        """Writes everything to the run directory, each file atomically.

        Args:
            overwrite: replace what another experiment of this name saved there.

        Returns:
            The run directory.

        Raises:
            RunError: if the directory holds another experiment's run and `overwrite` is false.
        """
        if not self._owns_directory and (self.path / storage.RUN_FILE).exists():
            if not overwrite:
                raise RunError(
                    f"{self.path} already holds a run. Choose another name or root, open it with Experiment.load, or "
                    "replace it with save(overwrite=True)."
                )
            storage.clear(self.path)
        self._owns_directory = True
        for index, (effect, plan) in enumerate(self.results.effects):
            storage.write_effect(self.path / "effects" / f"{index:03d}", effect, plan.to_json())
        for kind in ("cost", "entropy", "generations"):
            for index, frame in enumerate(self._frames(kind)):
                storage.write_frame(self.path / "frames" / f"{kind}-{index:03d}.parquet", frame)
        for index, vectors in enumerate(self.results.vectors):
            vectors.save(self.path / "vectors" / f"{index:03d}.safetensors")
        storage.write_json(self.path / storage.RUN_FILE, self._run_entries())
        return self.path

    @classmethod
    def load(cls, path: str | Path) -> "Experiment":
        """Opens a run directory; the model itself loads only if it is used.

        Raises:
            RunError: if the directory holds no run, or a file is missing or damaged.
        """
        path = Path(path)
        if not (path / storage.RUN_FILE).is_file():
            raise RunError(f"{path} is not a run directory: it has no {storage.RUN_FILE}. Experiment.save writes one.")
        try:
            return cls._opened(path, storage.read_json(path / storage.RUN_FILE))
        except RunError:
            raise
        except (SteerlabError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"The run in {path} is damaged: {type(error).__name__}: {error}.") from error

    @classmethod
    def _opened(cls, path: Path, run: dict[str, Any]) -> "Experiment":
        """The experiment that a run directory states."""
        if run.get("format") != storage.FORMAT:
            raise RunError(f"{path} has run format {run.get('format')!r}; this version reads {storage.FORMAT}.")
        options = run["load_options"]
        found = cls(run["name"], run["model"], backend=run["backend"], seed=run["seed"], root=path.parent, **options)
        found.path, found._owns_directory = path, True
        for index in range(run["effects"]):
            folder = path / "effects" / f"{index:03d}"
            plan = Plan.from_json((folder / "plan.json").read_text(encoding="utf-8"))
            found.results.effects.append((storage.read_effect(folder), plan))
        for kind in ("cost", "entropy", "generations"):
            for index in range(run[kind]):
                found._frames(kind).append(storage.read_frame(path / "frames" / f"{kind}-{index:03d}.parquet"))
        for index in range(run["vectors"]):
            found.results.vectors.append(VectorSet.load(path / "vectors" / f"{index:03d}.safetensors"))
        return found

    def report(self, path: str | Path | None = None) -> Path:
        """Writes one self-contained HTML page: verdict, figures, tables, receipts, provenance.

        Args:
            path: where to; `report.html` in the run directory by default.

        Returns:
            The path written.

        Raises:
            RunError: if no effect has been measured yet.
        """
        from steerlab.experiment.report import write_report

        if not self.results.effects:
            raise RunError("There is nothing to report yet; measure an effect first.")
        return write_report(self, self.path / "report.html" if path is None else Path(path))

    def _resolved(self, plan: Plan) -> Plan:
        if not isinstance(plan, Plan):
            raise PlanError(f"This takes a Plan, got {type(plan).__name__}; wrap edits in Plan().")
        return plan.check(self.engine.info).resolved(self.engine.median_norm, self.engine.info.weights_hash)

    def _frames(self, kind: str) -> list[pd.DataFrame]:
        results = self.results
        return {"cost": results.costs, "entropy": results.entropies, "generations": results.generations}[kind]

    def _run_entries(self) -> dict[str, Any]:
        name = self._model if isinstance(self._model, str | Path) else self.engine.info.name
        return {
            "format": storage.FORMAT,
            "name": self.name,
            "model": str(name),
            "backend": self.backend,
            "seed": self.seed,
            "load_options": {key: str(value) for key, value in self._load_options.items()},
            "versions": library_versions(),
            "effects": len(self.results.effects),
            "cost": len(self.results.costs),
            "entropy": len(self.results.entropies),
            "generations": len(self.results.generations),
            "vectors": len(self.results.vectors),
        }

    def _neutral(self, texts: Sequence[PromptLike] | None) -> list[PromptLike]:
        if texts is None:
            return [paragraph for paragraph in neutral_text().split("\n\n") if paragraph.strip()]
        return as_prompts(texts)


def _axis(plan: Plan) -> str:
    """`dose` if scaling the plan by d adds at dose d, else `scale`."""
    unit = [isinstance(e.operator, Add) and e.operator.unit == "dose" and e.operator.amount == 1 for e in plan]
    return "dose" if unit and all(unit) and all(edit.scale == 1 for edit in plan) else "scale"
