"""Experiment: one model, one question, everything measured and kept together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from steerlab.core._arguments import explains_arguments
from steerlab.core._numbers import shown
from steerlab.core._text import PromptLike
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.engine import Engine
from steerlab.core.errors import RunError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.results import Scores
from steerlab.core.targets import Targets
from steerlab.display import Facts, Piece, Shown, Table
from steerlab.experiment._store.looks import Look
from steerlab.experiment._store.results import Results
from steerlab.experiment._store.run import Run
from steerlab.experiment._store.session import Session, check_backend, session_of
from steerlab.experiment.measurements._registry import KINDS
from steerlab.experiment.measurements._scores import measure_scores
from steerlab.experiment.measurements._vectors import measure_vectors
from steerlab.experiment.measurements.baselines import BaselineComparison, PromptArm, measure_baselines
from steerlab.experiment.measurements.confirmation import Confirmation, all_looks, measure_confirmation
from steerlab.experiment.measurements.controls import Controls
from steerlab.experiment.measurements.cost import measure_cost
from steerlab.experiment.measurements.effect import Effect, measure_effect
from steerlab.experiment.measurements.entropy import measure_entropy
from steerlab.experiment.measurements.generations import measure_generations
from steerlab.experiment.measurements.interaction import Interaction, measure_interaction
from steerlab.experiment.measurements.metrics import Metric
from steerlab.experiment.measurements.parity import Parity, measure_parity
from steerlab.experiment.measurements.preregistration import Preregistration, measure_preregistration
from steerlab.experiment.measurements.selection import (
    DEFAULT_POLICY,
    Selection,
    VectorsLike,
    measure_selection,
    plain_addition,
)
from steerlab.experiment.measurements.selfcheck import SelfCheck, measure_selfcheck
from steerlab.experiment.measurements.texts import Judge
from steerlab.experiment.measurements.transfer import Transfer, measure_transfer
from steerlab.experiment.verify import Verification, verify
from steerlab.steering.plan import Plan
from steerlab.steering.positions.where import WhereLike
from steerlab.steering.vectors import SteeringVector, VectorSet

DEFAULT_CONTROLS = Controls()


class Experiment(Shown):
    """Extracts vectors, steers, and measures what changed, against nulls and with its cost.

    Whatever is measured goes to the run directory `root/name` as soon as it is finished. An experiment of the same
    name, model and seed continues where it stopped: what was measured is read, not measured again, even after a run was
    killed. The model loads when something must be measured.

    Args:
        name: names the run directory.
        model: what `steerlab.load` takes; or an engine, which is used as it is.
        backend: `lens`, or `vllm` (then give `layers=`, those that plans edit).
        seed: of controls and sampling.
        root: folder of the run directory; None keeps everything in memory.
        overwrite: start anew: at the first measurement, a run that lies there is removed.
        **load_options: passed to `steerlab.load` or `steerlab.VLLMEngine`, e.g. dtype; not with an engine.

    Raises:
        InputError: for a name that is no folder name, or an unknown backend.
        RunError: if the run directory holds a run of another configuration, or a damaged one.

    Examples:
        >>> exp = sl.Experiment("first", model=engine, root="runs")
        >>> exp
        Experiment('first', 0 effects, 'runs/first')
    """

    def __init__(
        self,
        name: str,
        model: Any = "smollm2-135m",
        *,
        backend: str = "lens",
        seed: int = 0,
        root: str | Path | None = "runs",
        overwrite: bool = False,
        **load_options: Any,
    ) -> None:
        path = None if root is None else Path(root) / str(name)
        options = {"backend": check_backend(backend), "seed": seed, "path": path, "overwrite": overwrite}
        self._run = Run(Session(name, model, load_options=load_options, **options), KINDS)

    def __enter__(self) -> "Experiment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finding(self) -> str:
        place = "in memory" if self._session.folder is None else repr(str(self.path))
        return f"{self.name!r}, {len(self.results.effects)} effects, {place}"

    def _pieces(self) -> Sequence[Piece]:
        facts = Facts([("backend", self.backend), ("seed", self.seed), ("looks at items", len(self.looks))])
        effects = [(e.verdict, e.slope, *e.ci, e.null_rank, e.plan_text) for e in self.effects]
        columns = ["verdict", "slope", "from", "to", "null rank", "plan"]
        table = [Table(columns, effects, caption="effects")] if effects else []
        return [facts, *table, *(self.results._pieces() if self.results else [])]

    @property
    def name(self) -> str:
        """Its name."""
        return self._session.name

    @property
    def backend(self) -> str:
        """What runs the model: `lens` or `vllm`."""
        return self._session.backend

    @property
    def seed(self) -> int:
        """Seed of controls and sampling."""
        return self._session.seed

    @property
    def path(self) -> Path:
        """The run directory.

        Raises:
            RunError: with `root=None`, if there is none.
        """
        return self._session.path

    @property
    def engine(self) -> Engine:
        """The engine, loaded at first use."""
        return self._session.engine

    @property
    def effects(self) -> list[Effect]:
        """Every effect measured so far, each with the number of plans that were tested on its items.

        Examples:
            >>> [effect.verdict for effect in exp.effects]
            ['no effect']
        """
        return [effect for effect, _ in self.results.effects]

    @property
    def looks(self) -> list[Look | Confirmation]:
        """Every look at items or texts so far, by whatever call, those of earlier runs of the folder included.

        A run of a version that recorded no looks counts its confirmations.
        """
        return all_looks(self._run)

    @property
    def results(self) -> Results:
        """Everything measured so far, by kind."""
        return self._run.results

    @property
    def _session(self) -> Session:
        return self._run.session

    def save(self, *, overwrite: bool = False) -> Path:
        """Makes sure that the run directory is there. Measurements write themselves; this is for one without any.

        Args:
            overwrite: replace a run of another configuration.

        Returns:
            The run directory.

        Raises:
            RunError: if the directory holds another configuration's run and `overwrite` is false, or another process
                is writing it.

        Examples:
            >>> exp.save() == exp.path
            True
        """
        return self._session.save(overwrite=overwrite)

    @classmethod
    def load(cls, path: str | Path) -> "Experiment":
        """Opens a run directory; the model itself loads only if it is used.

        Raises:
            RunError: if the directory holds no run, or a file is missing or damaged.

        Examples:
            >>> loaded = sl.Experiment.load(exp.path)
            >>> len(loaded.effects) == len(exp.effects)
            True
        """
        if not isinstance(path, str | Path):
            raise RunError(f"Experiment.load takes the path of a run directory, got {shown(path)}.")
        found = cls.__new__(cls)
        found._run = Run(session_of(Path(path)), KINDS)
        return found

    def selfcheck(self, *, allow_failure: bool = False, **options: Any) -> SelfCheck:
        """Checks that steering on this model and engine does what it says.

        A resumed run takes the check that an earlier process passed with the same engine; a second call runs it.
        Dose 0 equals the baseline, a batch its rows alone, cached uncached, receipts what a plan implies.

        Args:
            allow_failure: go on after a failure, which is recorded either way.
            **options: further arguments of `steerlab.experiment.measurements.selfcheck.selfcheck`: layers, plan,
                tolerance.

        Returns:
            A `SelfCheck`; printed, it is a short table.

        Raises:
            RunError: for a check that fails, unless `allow_failure`.

        Examples:
            >>> exp.selfcheck(layers=[1]).passed
            True
        """
        return measure_selfcheck(self._run, allow_failure=allow_failure, options=options)

    def extract(
        self,
        pairs: ContrastPairs | Targets,
        *,
        method: str = "mean_diff",
        site: str = "resid_post",
        layers: Any = "all",
        read: WhereLike = None,
        chat: bool = False,
        **options: Any,
    ) -> VectorSet:
        """Vectors from contrast pairs, or from targets by gradient; all of `steerlab.extract`'s options are taken.

        Examples:
            >>> vectors = exp.extract(pairs, layers=[1, 2])
            >>> list(vectors)
            [1, 2]
        """
        made = {"method": method, "site": site, "layers": layers, "read": read, "chat": chat, "options": options}
        return measure_vectors(self._run, pairs, **made)

    @explains_arguments
    def preregister(
        self,
        question: str,
        plan: Plan | None,
        targets: Targets,
        doses: Sequence[float],
        *,
        metric: "str | Metric" = "log_prob_margin",
        smallest: float | None = None,
        controls: Controls = DEFAULT_CONTROLS,
        pairs: ContrastPairs | None = None,
        max_ppl_ratio: float = 1.5,
        neutral: Sequence[PromptLike] | None = None,
        adjust: str = "holm",
    ) -> Preregistration:
        """Writes what will be measured and how it will be judged, with a hash and a time, before it is measured.

        The report shows it beside what was done and lists every departure. `confirm` on these items runs its controls
        and notes where it is not what was planned. It counts earlier looks at the items, and measures nothing.

        Args:
            question: what is asked, in words.
            plan: the plan at scale 1; None where `select` is to choose it.
            targets: the items.
            doses: as in `effect`, and so are the other arguments.
            metric: as in `effect`.
            smallest: the size of the smallest slope that matters.
            controls: which control arms will run.
            pairs: the pairs that label flips need.
            max_ppl_ratio: as in `effect`.
            neutral: as in `effect`.
            adjust: as in `effect`.

        Returns:
            A `Preregistration`; the same one asked for again is the one that was written, with its time.

        Raises:
            InputError: for unusable arguments.

        Examples:
            >>> planned = exp.preregister("Does it move the margin?", plan, targets, [-0.2, 0, 0.2], smallest=1.0)
            >>> planned.smallest, planned.metric
            (1.0, 'log_prob_margin')
        """
        return measure_preregistration(
            self._run,
            question,
            plan,
            targets,
            doses,
            metric=metric,
            smallest=smallest,
            controls=controls,
            pairs=pairs,
            max_ppl_ratio=max_ppl_ratio,
            neutral=neutral,
            adjust=adjust,
        )

    @explains_arguments
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
        tokens_per_call: int | None = None,
        smallest: float | None = None,
        adjust: str = "holm",
    ) -> Effect:
        """How the metric changes with the dose, against control arms, on items of `targets`.

        The real vector runs at every dose, the controls at the two outermost ones that the perplexity bound allows; a
        rank compares like with like. Each arm runs `plan.scaled(dose)`, so with `add(v, dose=1.0)` the axis is the dose
        itself, and otherwise a scale. Another metric on the same items measures nothing again.

        Args:
            plan: the plan at scale 1.
            targets: items to measure on, not those the plan was chosen on.
            doses: at least two; include 0 for a baseline.
            controls: which control arms to run.
            metric: `log_prob_margin` (nats), `choice_prob`, or a function of an item's positive and negative log-probs.
            pairs: the pairs the vectors were extracted from; shuffled controls need them.
            max_ppl_ratio: doses that raise the perplexity of neutral text beyond this factor enter no fit.
            neutral: texts for that; shipped neutral prose by default.
            tokens_per_call: how many tokens of several arms go to the engine at once; a killed run loses at most one
                call. By default eight arms a call, and 200,000 tokens on vLLM.
            smallest: the size of the smallest slope that matters, per unit of dose: a slope shown to be smaller is `no
                effect`. By default what 95 % of the run's random directions stay below.
            adjust: how ranks are adjusted when several plans are tested on the items: `holm` (any false claim) or `fdr`
                (Benjamini and Hochberg: the share of false claims among the claims).

        Returns:
            An `Effect`, also kept in `effects`. When further plans are tested on the same items, `effects` tells each
            of its plans how many; an effect you hold does not change.

        Raises:
            InputError: for unusable doses or an unknown metric.
            DataError: for shuffled controls without pairs.
            PlanError: for a layer that vLLM was not started with.

        Examples:
            >>> plan = sl.Plan(sl.add(vectors[1], dose=1.0))
            >>> effect = exp.effect(plan, targets, [-0.2, 0, 0.2], controls=sl.Controls(random=19), neutral=texts)
            >>> effect.fitted_doses
            [-0.2, 0.0, 0.2]
            >>> effect.by_dose().columns.tolist()[:2]
            ['dose', 'value']
        """
        return measure_effect(
            self._run,
            plan,
            targets,
            doses,
            controls=controls,
            metric=metric,
            pairs=pairs,
            max_ppl_ratio=max_ppl_ratio,
            neutral=neutral,
            tokens_per_call=tokens_per_call,
            smallest=smallest,
            adjust=adjust,
        )

    @explains_arguments
    def baselines(
        self,
        effect: Effect,
        arms: PromptArm | Sequence[PromptArm],
        *,
        ratios: float | Sequence[float] | None = None,
        metric: "str | Metric | None" = None,
    ) -> BaselineComparison:
        """What instructions or examples before the prompt do on the items of an effect, compared at equal cost.

        The cost of an arm is what it does to the perplexity of neutral text: of a plan against no plan, of words before
        it against neutral prose of as many tokens in their place. Of the vector the doses from 0 up are compared (from
        0 down if there are no others).

        Args:
            effect: an effect of this experiment, with dose 0; its items, neutral texts and doses are used.
            arms: made by `steerlab.prompting` and `steerlab.few_shot`.
            ratios: perplexity ratios to compare at; by default the largest that every arm reaches.
            metric: that of the effect; needed again if it is a function.

        Returns:
            A `BaselineComparison`: `.equal_cost`, `.points`, `.at(ratio)`, `.plot()`.

        Raises:
            InputError: for an effect of another experiment, without dose 0, or of another metric; prompts of token ids.

        Examples:
            >>> arms = [sl.prompting(["Say something nice.", "Say something very nice."])]
            >>> found = exp.baselines(effect, arms, ratios=1.02)
            >>> found.equal_cost.arm.tolist()
            ['vector', 'prompting']
        """
        return measure_baselines(self._run, effect, arms, ratios=ratios, metric=metric)

    @explains_arguments
    def cost(
        self,
        plan: Plan,
        texts: Sequence[PromptLike] | None = None,
        *,
        doses: Sequence[float] = (0.0, 1.0),
        prompts: Sequence[PromptLike] | None = None,
        policy: SamplingPolicy = DEFAULT_POLICY,
        max_new_tokens: int = 40,
        n: int = 1,
    ) -> pd.DataFrame:
        """What the plan costs, per dose: perplexity of ordinary text against the unsteered model's, with interval.

        With prompts also the form of what is generated from them: repetition, diversity and length.

        Args:
            plan: the plan at scale 1.
            texts: texts to score; shipped neutral prose by default.
            doses: factors the plan is scaled by.
            prompts: prompts to continue; without them nothing is generated.
            policy: the sampling policy of the completions.
            max_new_tokens: tokens at most per completion.
            n: completions per prompt.

        Returns:
            A row per dose: `dose`, `nll`, `perplexity`, `ppl_ratio`, `ppl_ratio_low`, `ppl_ratio_high`, `num_tokens`,
            `num_texts`, `interval` (the rule of the ends), `plan_hash`; with prompts also the columns of
            `steerlab.experiment.measurements.texts.text_statistics`.

        Examples:
            >>> cost = exp.cost(plan, texts, doses=[0, 0.2])
            >>> float(cost.ppl_ratio[0])
            1.0
        """
        form = {"prompts": prompts, "policy": policy, "max_new_tokens": max_new_tokens, "n": n}
        return measure_cost(self._run, plan, texts, doses=doses, **form)

    @explains_arguments
    def entropy(
        self, plan: Plan, texts: Sequence[PromptLike] | None = None, *, policy: SamplingPolicy = DEFAULT_POLICY
    ) -> pd.DataFrame:
        """Entropies and divergences of the next-token distributions of both arms, teacher-forced on the same texts.

        Args:
            plan: the plan.
            texts: texts to force; shipped neutral prose by default.
            policy: the policy whose distribution is measured beside the model's own.

        Returns:
            A row per text and token, with the columns of `steerlab.experiment.measurements.entropy.entropy_change`
            (nats) and the token's text as `token`; and, the same in every row, `plan`, `plan_hash`, `policy`.

        Examples:
            >>> rows = exp.entropy(plan.scaled(0.2), texts)
            >>> bool((rows.kl >= -1e-6).all())
            True
        """
        return measure_entropy(self._run, plan, texts, policy)

    @explains_arguments
    def generate(
        self,
        plan: Plan,
        prompts: Sequence[PromptLike] | PromptLike,
        *,
        policy: SamplingPolicy = DEFAULT_POLICY,
        max_new_tokens: int = 40,
        n: int = 1,
        doses: Sequence[float] = (0.0, 1.0),
        stop: Sequence[str] | str = (),
        chat: bool = False,
        judge: Judge | None = None,
    ) -> pd.DataFrame:
        """Completions side by side, each prompt with the same draws at every dose.

        Args:
            plan: the plan at scale 1.
            prompts: prompts to continue.
            policy: the sampling policy.
            max_new_tokens: tokens at most.
            n: samples per prompt.
            doses: factors the plan is scaled by.
            stop: strings that end a completion.
            chat: take strings as user turns of a chat.
            judge: a `steerlab.judge`, whose ratings are kept in the run with its model and rubrics; or a function of
                (prompt, text) that gives a number, or several by name, asked on every call.

        Returns:
            A row per prompt, sample and dose: `prompt_index`, `sample_index`, `prompt`, `dose`, `text`, `num_tokens`,
            `finish_reason`, `log_prob`, `log_q`, `token_ids`, `edited_tokens`, `plan_hash`, `policy`; with a judge
            `judge`, or `judge_<name>` per name; of a `steerlab.judge` also entropy (nats) and mass of the ratings.

        Examples:
            >>> rows = exp.generate(plan, prompts, doses=[0, 0.2], max_new_tokens=4, judge=lambda p, t: len(t))
            >>> rows.dose.tolist()[:2]
            [0.0, 0.2]
        """
        return measure_generations(
            self._run,
            plan,
            prompts,
            policy=policy,
            max_new_tokens=max_new_tokens,
            n=n,
            doses=doses,
            stop=stop,
            chat=chat,
            judge=judge,
        )

    @explains_arguments
    def score(self, plan: Plan | None, targets: Targets) -> Scores:
        """Exact scores of every target, positives before negatives, per item.

        Examples:
            >>> scores = exp.score(plan.scaled(0.2), targets)
            >>> len(scores) == sum(len(item.targets) for item in targets)
            True
        """
        return measure_scores(self._run, plan, targets)

    @explains_arguments
    def select(
        self,
        vectors: VectorsLike,
        doses: Sequence[float],
        on: Targets,
        *,
        layers: Iterable[int] | None = None,
        subject_to: Mapping[str, float] | None = None,
        metric: "str | Metric" = "log_prob_margin",
        texts: Sequence[PromptLike] | None = None,
        policy: SamplingPolicy = DEFAULT_POLICY,
        make: Callable[[SteeringVector], Plan] = plain_addition,
    ) -> Selection:
        """Searches vectors × layers × doses on development items for the largest gain within constraints.

        Args:
            vectors: a vector, several, a set with one per layer, or sets and vectors by name.
            doses: doses to try, other than 0.
            on: development items.
            layers: layers to try; all that the vectors have by default.
            subject_to: upper bounds on `ppl_ratio`, `entropy_change`, `anti_steerable`.
            metric: as in `effect`.
            texts: neutral texts for the first two; shipped neutral prose by default.
            policy: the policy of `entropy_change`.
            make: makes the plan at dose 1 from a vector; adds it by default.

        Returns:
            A `Selection`: the winning `.plan`, and every try in `.table`. Its gain is the best of many and too good;
            `confirm` measures it anew.

        Raises:
            InputError: for an unknown constraint, or if no try satisfies them; names the closest.

        Examples:
            >>> best = exp.select(vectors, doses=[0.1, 0.2], on=dev, subject_to={"ppl_ratio": 3.0}, texts=texts)
            >>> len(best.table)
            4
        """
        return measure_selection(
            self._run,
            vectors,
            doses,
            on,
            layers=layers,
            subject_to=subject_to,
            metric=metric,
            texts=texts,
            policy=policy,
            make=make,
        )

    @explains_arguments
    def confirm(
        self,
        best: Selection,
        on: Targets,
        *,
        metric: "str | Metric | None" = None,
        controls: Controls | None = None,
        pairs: ContrastPairs | None = None,
        allow_overlap: bool = False,
    ) -> Confirmation:
        """Measures a selected plan on held-out items, and says which look at them that is.

        Whatever was measured on any of these items before, by any call, is an earlier look; see `looks`.

        Args:
            best: what `select` found.
            on: items that the selection has not seen.
            metric: as in the selection by default; a function must be passed again.
            controls: null families to rank the gain against.
            pairs: the pairs the vectors were extracted from, for label-flip controls.
            allow_overlap: measure although items share prompts or groups with the development items.

        Returns:
            A `Confirmation`; the same confirmation asked for again is the one that is kept, and no further look.

        Raises:
            DataError: if held-out items share a prompt or a group with the development items.

        Examples:
            >>> exp.confirm(best, on=held_out).look
            1
        """
        options = {"metric": metric, "controls": controls, "pairs": pairs, "allow_overlap": allow_overlap}
        return measure_confirmation(self._run, best, on, **options)

    @explains_arguments
    def interaction(
        self,
        plan_a: Plan,
        plan_b: Plan,
        targets: Targets,
        doses_a: Sequence[float] = (0.0, 1.0),
        doses_b: Sequence[float] = (0.0, 1.0),
        *,
        metric: "str | Metric" = "log_prob_margin",
    ) -> Interaction:
        """What two plans do together beyond the sum of what each does alone, at every pair of doses.

        Args:
            plan_a: the first plan at scale 1; its edits apply first where both act at one hook point.
            plan_b: the second plan at scale 1.
            targets: items to measure on.
            doses_a: scales of the first, 0 among them.
            doses_b: scales of the second, 0 among them.
            metric: as in `effect`.

        Examples:
            >>> other = sl.Plan(sl.add(vectors[2], dose=1.0))
            >>> found = exp.interaction(plan, other, targets, doses_a=[0, 0.2], doses_b=[0, 0.2])
            >>> found.grid().shape
            (2, 2)
        """
        return measure_interaction(self._run, plan_a, plan_b, targets, doses_a, doses_b, metric=metric)

    @explains_arguments
    def transfer(
        self,
        plan: Plan,
        targets: Targets,
        doses: Sequence[float],
        *,
        engine: Engine | None = None,
        metric: "str | Metric" = "log_prob_margin",
    ) -> Transfer:
        """What a plan does where it was not made: on other items, on another model of the same width, or both.

        Args:
            plan: the plan at scale 1.
            targets: items to measure on.
            doses: at least two.
            engine: the engine of another model; this experiment's by default.
            metric: as in `effect`.

        Returns:
            A `Transfer`; its `notes` say how the model differs from the one the vectors were made on.

        Raises:
            VectorShapeError: for a model of another width.

        Examples:
            >>> exp.transfer(plan, held_out, doses=[0, 0.2]).rows.columns.tolist()
            ['dose', 'item', 'group', 'value']
        """
        return measure_transfer(self._run, plan, targets, doses, engine=engine, metric=metric)

    def parity(
        self,
        plan: Plan,
        prompts: Sequence[PromptLike] | PromptLike | None = None,
        *,
        against: "str | Engine" = "vllm",
        texts: Sequence[PromptLike] | PromptLike | None = None,
        max_new_tokens: int = 16,
        tolerance: float | None = None,
        **load_options: Any,
    ) -> Parity:
        """How far two engines agree on the same tokens under the same plan, token by token, receipts included.

        Args:
            plan: the plan, strong enough to move log-probabilities by more than the tolerance.
            prompts: prompts whose greedy steered continuation is scored; give these or `texts`.
            against: `vllm`, `lens`, or an engine that runs already; one that is named is started with this model and
                closed again.
            texts: whole texts to score.
            max_new_tokens: tokens of each continuation.
            tolerance: largest |Δ log p| allowed, in nats; by default from the same comparison without a plan.
            **load_options: for an engine that is named, e.g. max_model_len.

        Returns:
            A `Parity`: `.passed`, `.reasons`, `.rows`.

        Examples:
            >>> exp.parity(plan, prompts, against=engine, max_new_tokens=4).max_delta
            0.0
        """
        return measure_parity(
            self._run,
            plan,
            prompts,
            against=against,
            texts=texts,
            max_new_tokens=max_new_tokens,
            tolerance=tolerance,
            load_options=load_options,
        )

    def verify(
        self, *, n: int = 3, seed: int = 0, tolerance: float | None = None, strict: bool = False
    ) -> Verification:
        """Checks the run: every file against the manifest, inputs and cells against their names, n cells by rerun.

        Args:
            n: cells to measure again; 0 needs no model.
            seed: of the choice of cells.
            tolerance: the largest difference a repeated figure may show, in nats; 1e-3 in float32 if None.
            strict: raise if a check fails.

        Returns:
            A `Verification`: `.ok`, `.table` and `.failures`; printed, it says what failed.

        Raises:
            RunError: with `strict`, if a check fails.

        Examples:
            >>> exp.verify(n=1).ok
            True
        """
        found = verify(self._session, n=n, seed=seed, tolerance=tolerance)
        if strict and not found.ok:
            raise RunError(str(found))
        return found

    def configuration(self) -> dict[str, Any]:
        """What this experiment is measured with.

        Returns:
            `model`, `backend`, `seed`, `weights_hash`, `dtype`, `load_options`, `versions`, `engine_hash`.

        Examples:
            >>> exp.configuration()["backend"]
            'lens'
        """
        return self._session.stated()

    def report(self, path: str | Path | None = None) -> Path:
        """Writes one self-contained HTML page: verdict, figures, tables, receipts, provenance.

        Args:
            path: where to; `report.html` in the run directory by default.

        Returns:
            The path written; in a notebook it shows the page.

        Raises:
            RunError: if nothing has been measured yet.

        Examples:
            >>> exp.report().name
            'report.html'
        """
        from steerlab.experiment._report import material_of, write_material

        if not self.results:
            raise RunError("There is nothing to report yet; measure something first, e.g. an effect.")
        return write_material(material_of(self._run), self.path / "report.html" if path is None else Path(path))

    def close(self) -> None:
        """Gives the run directory to other processes, and frees the model if this experiment loaded it.

        Measuring on is possible; it takes both again.

        Examples:
            >>> exp.close()
        """
        self._session.close()
