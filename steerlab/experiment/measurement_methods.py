"""Measurements of an experiment, as its methods: they check, ask for cells, and keep what comes of them."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from steerlab.core.arguments import explains_arguments
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.numbers import check_flag, check_integer, check_number
from steerlab.core.policy import SamplingPolicy
from steerlab.core.results import Scores
from steerlab.core.stopping import stop_strings
from steerlab.core.targets import Targets
from steerlab.core.text import PromptLike, as_prompts
from steerlab.experiment import measuring, recorded
from steerlab.experiment.cell_engine import CellEngine
from steerlab.experiment.cells import Tally
from steerlab.experiment.controls import Controls
from steerlab.experiment.effect import Effect
from steerlab.experiment.kept import Kept
from steerlab.experiment.metrics import Metric, metric_identity
from steerlab.experiment.results import keep
from steerlab.experiment.selfcheck import SelfCheck, selfcheck
from steerlab.experiment.session import plain_option
from steerlab.experiment.sweep import check_doses
from steerlab.experiment.texts import Judge, judged, text_statistics
from steerlab.steering.plan import Plan
from steerlab.steering.positions.where import WhereLike, as_where, last_prompt
from steerlab.steering.positions.where import default as default_where
from steerlab.steering.vectors import VectorSet

DEFAULT_CONTROLS = Controls()
DEFAULT_POLICY = SamplingPolicy(temperature=0.7, top_p=0.9)


class Measurements(Kept):
    """Vectors, effects, and what a plan does to text."""

    def selfcheck(self, *, allow_failure: bool = False, **options: Any) -> SelfCheck:
        """Checks that steering on this model and engine does what it says.

        A run that goes on takes the check that an earlier process passed with the same engine; asked again, it runs.
        Dose 0 equals the baseline, a batch its rows alone, cached uncached, receipts what a plan implies.

        Args:
            allow_failure: go on after a failure, which is recorded either way.
            **options: further arguments of `steerlab.experiment.selfcheck.selfcheck`: layers, plan, tolerance.

        Returns:
            A `SelfCheck`; printed, it is a short table.

        Raises:
            RunError: for a check that fails, unless `allow_failure`.

        Examples:
            >>> exp.selfcheck(layers=[1]).passed
            True
        """
        self._session.open()
        plan = options.get("plan")
        asked = options | {"plan": plan.hash if isinstance(plan, Plan) else None}
        what = [{name: plain_option(option) for name, option in asked.items()}]
        key = self._key("selfcheck", what)
        known = None if key in self._checked else self._find("selfcheck", what)
        self._checked.add(key)
        if known is not None and known.passed:
            return known
        found = self._keep_finding("selfcheck", selfcheck(self.engine, seed=self.seed, **options), what)
        return found if allow_failure else found.raise_if_failed()

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
        read, chat = None if read is None else as_where(read, last_prompt(), argument="read"), check_flag(chat, "chat")
        options = {"name": self.name, "seed": self.seed} | options
        if "where" in options:
            options["where"] = as_where(options["where"], default_where())
        self._session.open()
        cell = recorded.vector_cell(pairs, method, site, layers, read, chat, options)
        key = cell.key(self._session.engine_hash)
        found = self.results.find("vectors", key)
        if found is None:
            arguments = (pairs, method, site, layers, read, chat, options)
            with self._look("extract", lambda: ([pairs if isinstance(pairs, Targets) else None], key)):
                found = recorded.extracted(self._session, *arguments)
            keep(self._session, self.results, "vectors", key, found)
        elif found.origin is None and isinstance(pairs, ContrastPairs):
            found = recorded.with_origin(self._session, found, read, chat, options)
            self.results.put("vectors", key, found)
        return found

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
                call. By default an arm a call, and 200,000 tokens on vLLM.

        Returns:
            An `Effect`, also kept in `effects`. When further plans are tested on the same items, `effects` tells each
            of its plans how many; an effect you hold does not change.

        Raises:
            InputError: for unusable doses or an unknown metric.
            DataError: for shuffled controls without pairs.
            PlanError: for a layer that vLLM was not started with.

        Examples:
            >>> plan = sl.Plan(sl.add(vectors[1], dose=1.0))
            >>> effect = exp.effect(plan, targets, doses=[-0.2, 0, 0.2], controls=sl.Controls(random=19))
            >>> effect.fitted_doses
            [-0.2, 0.0, 0.2]
            >>> effect.by_dose().columns.tolist()[:2]
            ['dose', 'value']
        """
        run_doses, texts = check_doses(doses), self._neutral(neutral)
        own = None if neutral is None else texts
        bound = check_number(max_ppl_ratio, "max_ppl_ratio", least=1, infinite=True)
        with self._look(
            "effect",
            lambda: (
                [targets, own],
                [plan.hash, run_doses, asdict(controls), metric_identity(metric), pairs and pairs.hash, bound],
            ),
        ):
            effect, ready = measuring.measure_effect(
                self._session,
                plan,
                targets,
                run_doses,
                controls=controls,
                metric=metric,
                pairs=pairs,
                max_ppl_ratio=bound,
                neutral=texts,
                tokens_per_call=tokens_per_call,
            )
        key = measuring.effect_key(self._session, effect, ready, controls)
        keep(self._session, self.results, "effect", key, (effect, ready))
        return self.results.find("effect", key)[0]

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
            `num_texts`, `plan_hash`; with prompts also the columns of `steerlab.experiment.texts.text_statistics`.

        Examples:
            >>> cost = exp.cost(plan, texts, doses=[0, 0.2])
            >>> float(cost.ppl_ratio[0])
            1.0
        """
        run_doses = check_doses(doses, at_least=1)
        max_new_tokens, n = check_integer(max_new_tokens, "max_new_tokens", least=0), check_integer(n, "n", least=1)
        given = None if prompts is None else as_prompts(prompts)
        self._session.open()
        ready, neutral = measuring.resolved(self._session, plan), self._neutral(texts)
        what = [run_doses, str(policy), max_new_tokens, n]
        looked = [None if texts is None else neutral, given]
        with self._look("cost", lambda: (looked, [plan.hash, *what])), Tally(self._session.cells, "cost"):
            frame = measuring.perplexities(self._session, ready, neutral, run_doses).assign(plan_hash=plan.hash)
            if given is not None:
                options = {"policy": policy, "max_new_tokens": max_new_tokens, "n": n, "stop": [], "chat": False}
                made = recorded.generations(self._session, plan, given, run_doses, options)
                frame = frame.merge(text_statistics(made), on="dose")
        return self._keep_frame("cost", frame, [ready.hash, run_doses, neutral, given, str(policy), max_new_tokens, n])

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
            A row per text and token, with the columns of `steerlab.experiment.entropies.entropy_change` (nats) and the
            token's text as `token`; and, the same in every row, `plan`, `plan_hash`, `policy`.

        Examples:
            >>> rows = exp.entropy(plan.scaled(0.2), texts)
            >>> bool((rows.kl >= -1e-6).all())
            True
        """
        self._session.open()
        neutral = self._neutral(texts)
        own = None if texts is None else neutral
        with self._look("entropy", lambda: ([own], [plan.hash, str(policy)])), Tally(self._session.cells, "entropy"):
            frame = recorded.entropies(self._session, plan, neutral, policy)
        frame = frame.assign(plan=str(plan), plan_hash=plan.hash, policy=str(policy))
        return self._keep_frame("entropy", frame, [plan.hash, neutral, str(policy)])

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
            judge: a function of (prompt, text) that gives a number, or several by name; asked on every call.

        Returns:
            A row per prompt, sample and dose: `prompt_index`, `sample_index`, `prompt`, `dose`, `text`, `num_tokens`,
            `finish_reason`, `log_prob`, `log_q`, `token_ids`, `edited_tokens`, `plan_hash`, `policy`; with a judge
            `judge`, or `judge_<name>` per name.

        Examples:
            >>> rows = exp.generate(plan, prompts, doses=[0, 0.2], max_new_tokens=4, judge=lambda p, t: len(t))
            >>> rows.dose.tolist()[:2]
            [0.0, 0.2]
        """
        run_doses, found = check_doses(doses, at_least=1), as_prompts(prompts)
        max_new_tokens, n = check_integer(max_new_tokens, "max_new_tokens", least=0), check_integer(n, "n", least=1)
        self._session.open()
        strings = list(stop_strings(stop))
        as_chat = check_flag(chat, "chat")
        options = {"policy": policy, "max_new_tokens": max_new_tokens, "n": n, "stop": strings, "chat": as_chat}
        stated = options | {"policy": str(policy)}
        with (
            self._look("generate", lambda: ([found], [plan.hash, run_doses, stated])),
            Tally(self._session.cells, "generate"),
        ):
            frame = recorded.generations(self._session, plan, found, run_doses, options)
        frame = frame if judge is None else judged(frame, judge)
        judged_by = None if judge is None else sorted(set(frame.columns))
        return self._keep_frame("generations", frame, [plan.hash, found, run_doses, stated, judged_by])

    @explains_arguments
    def score(self, plan: Plan | None, targets: Targets) -> Scores:
        """Exact scores of every target, positives before negatives, per item.

        Examples:
            >>> scores = exp.score(plan.scaled(0.2), targets)
            >>> len(scores) == sum(len(item.targets) for item in targets)
            True
        """
        self._session.open()
        with (
            self._look("score", lambda: ([targets], None if plan is None else plan.hash)),
            Tally(self._session.cells, "score"),
        ):
            ready = None if plan is None else measuring.resolved(self._session, plan)
            engine = CellEngine(self._session)
            return engine.score(targets.prompts, [item.targets for item in targets], plan=ready)
