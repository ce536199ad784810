"""Studies of several arms, as an experiment's methods: selection, confirmation, interaction, transfer, parity."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from steerlab.core.arguments import explains_arguments
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.engine import Engine
from steerlab.core.numbers import check_integer, check_number
from steerlab.core.policy import SamplingPolicy
from steerlab.core.targets import Targets
from steerlab.core.text import PromptLike, as_prompts
from steerlab.experiment import measuring, studies
from steerlab.experiment.cells import Tally
from steerlab.experiment.confirmation import Confirmation, confirm
from steerlab.experiment.controls import Controls
from steerlab.experiment.interaction import Interaction, check_scales, interaction
from steerlab.experiment.kept import Kept
from steerlab.experiment.looks import Look, Looks
from steerlab.experiment.metrics import Metric, metric_identity
from steerlab.experiment.parity import Parity, parity
from steerlab.experiment.selection import (
    DEFAULT_POLICY,
    Selection,
    VectorsLike,
    check_constraints,
    list_tries,
    plain_addition,
)
from steerlab.experiment.sweep import check_doses
from steerlab.experiment.transfer import Transfer, transfer
from steerlab.steering.plan import Plan
from steerlab.steering.vectors import SteeringVector


class Studies(Kept):
    """Comparisons of several plans, item sets, models or engines."""

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
        self._session.open()
        tries, neutral = list_tries(vectors, doses, layers=layers, make=make), self._neutral(texts)
        bounds, own = check_constraints(subject_to, neutral), None if texts is None else neutral
        named = [[one.plan.hash, one.name] for one in tries]
        options = {"bounds": bounds, "metric": metric, "policy": policy}
        with (
            self._look("select", lambda: ([on, own], [named, metric_identity(metric), bounds, str(policy)])),
            Tally(self._session.cells, "select"),
        ):
            found = studies.select(self._session, tries, on, texts=neutral, **options)
        what = [named, on.hash, metric_identity(metric), bounds, neutral, str(policy)]
        return self._keep_finding("selection", found, what)

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
        self._session.open()
        identity = (best.metric_identity or best.metric) if metric is None else metric_identity(metric)
        asked = None if controls is None else asdict(controls)
        what = [best.plan.hash, best.on_hash, on.hash, identity, asked, None if pairs is None else pairs.hash]
        known = self._find("confirmation", what)
        if known is not None:
            return known
        own = Looks.key("confirm", [on], what)  # of this call, if an interrupt ended it before
        earlier = [look for look in self.looks if not (isinstance(look, Look) and look.key == own)]
        with self._look("confirm", lambda: ([on], what)), Tally(self._session.cells, "confirm"):
            found = confirm(
                studies.elsewhere(self._session, None),
                best,
                on,
                metric=metric,
                earlier=earlier,
                allow_overlap=allow_overlap,
                controls=controls,
                pairs=pairs,
                seed=self.seed,
            )
        return self._keep_finding("confirmation", found, what)

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
        self._session.open()
        first, second = (measuring.resolved(self._session, plan) for plan in (plan_a, plan_b))
        engine = studies.elsewhere(self._session, None)
        scales: dict[str, Any] = {
            "scales_a": check_scales("doses_a", doses_a),
            "scales_b": check_scales("doses_b", doses_b),
        }
        with (
            self._look("interaction", lambda: ([targets], [plan_a.hash, plan_b.hash, metric_identity(metric), scales])),
            Tally(self._session.cells, "interaction"),
        ):
            found = interaction(engine, first, second, targets, metric=metric, seed=self.seed, **scales)
        what = [first.hash, second.hash, targets.hash, metric_identity(metric), scales]
        return self._keep_finding("interaction", found, what)

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
        self._session.open()
        used, doses = studies.elsewhere(self._session, engine), check_doses(doses)
        run_by = studies.other_engine_hash(self._session, engine)
        what = [plan.hash, targets.hash, doses, metric_identity(metric), run_by]
        with (
            self._look("transfer", lambda: ([targets], [plan.hash, doses, metric_identity(metric), run_by])),
            Tally(self._session.cells, "transfer"),
        ):
            found = transfer(used, plan, targets, doses, metric=metric, seed=self.seed)
        return self._keep_finding("transfer", found, what)

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
        self._session.open()
        max_new_tokens = check_integer(max_new_tokens, "max_new_tokens", least=1)
        tolerance = (
            None if tolerance is None else check_number(tolerance, "tolerance, in nats,", least=0, infinite=True)
        )
        ready = measuring.resolved(self._session, plan)
        given = None if prompts is None else as_prompts(prompts), None if texts is None else as_prompts(texts)
        run_by = studies.other_engine_hash(self._session, against)
        what = [ready.hash, *given, run_by, max_new_tokens, tolerance, {k: str(v) for k, v in load_options.items()}]
        known = self._find("parity", what)
        if known is not None:
            return known
        options = {"prompts": given[0], "texts": given[1], "max_new_tokens": max_new_tokens, "tolerance": tolerance}
        with (
            self._look("parity", lambda: (given, [plan.hash, run_by, max_new_tokens])),
            contextlib.ExitStack() as stack,
        ):
            other = against
            if isinstance(other, str):
                started = studies.start_other(self._session, other, ready, load_options)
                other = stack.enter_context(contextlib.closing(started))
            found = parity(self.engine, other, ready, **options)
        return self._keep_finding("parity", found, what)
