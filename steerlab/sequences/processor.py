"""SequenceProcessor: sampling and exact re-scoring of a policy, with and without gradients."""

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steerlab._runtime.hooks import alone
from steerlab._runtime.model_parts import ModelParts, find_parts
from steerlab._runtime.shared_weights import HoldsModel
from steerlab.core._arguments import explains_arguments
from steerlab.core._stopping import stop_strings
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.core.receipts import Receipt, warn_if_idle
from steerlab.sequences._assembly import Assembly
from steerlab.sequences._functional import functional_logits
from steerlab.sequences._overrides import Overrides, state_override
from steerlab.sequences._plan_resolver import PlanResolver
from steerlab.sequences._precision import precise
from steerlab.sequences._sampling import Sampler, SamplingRequest, single_seed
from steerlab.sequences._scoring import Scorer, ScoringRequest
from steerlab.sequences._weights_match import check_same_weights, parameters_fingerprint
from steerlab.sequences.config import (
    SETTINGS,
    GenerationConfig,
    PrecisionConfig,
    ProcessorConfig,
    SettingsView,
    as_dtype,
    check_count,
    refuse_change,
)
from steerlab.sequences.datasets import PoolPrompts, draw_from_pool, sample_examples
from steerlab.sequences.diagnostics import EARLY_STEPS, DiagnosticsResults
from steerlab.sequences.importance import RatioHealth
from steerlab.sequences.rewards import Reward, rewards_of, tag_reward
from steerlab.sequences.types import BatchedSequences, LogprobResults, Support, as_array
from steerlab.steering._plan_assignment import PlanArgument

DEFAULT_STOP = ("</answer>",)
DEFAULT_DATASET = "arithmetic_r1"


class SequenceProcessor:
    """Samples responses from a causal language model and scores them exactly under the policy that drew them.

    Works on the user's own Hugging Face model and leaves it as it is: plans go in through forward hooks and come out
    again with the call, parameters moved by an override exist for one call only, nothing is wrapped or edited.

    Attributes:
        parts: the model's parts.
        tokenizer: the model's own tokenizer.
        config: the configuration; frozen, and replaced as a whole: `processor.config = GenerationConfig(top_p=0.9)`.
        scorer: what runs the scoring.
        receipts: what the last call's plan edited, one per row, in order b·G + g.
        early_steps: length of the early window of the diagnostics.

    Args:
        model: a causal language model of Hugging Face transformers, also inside DistributedDataParallel or with
            LoRA-like adapters; or an engine of `sl.load`, whose weights are then shared and not copied.
        tokenizer: its tokenizer; by default the engine's. None will do for scoring given ids without a dose.
        logger: gets one line of information per call; None for the package's logger.
        config: a GenerationConfig, a `ProcessorConfig`, or a dictionary `{"generation": {...}, "precision": {...}}`.

    Raises:
        InputError: for an unknown configuration key, or a model whose logits cannot be made from its parts.

    Examples:
        >>> processor = SequenceProcessor(model, tokenizer, config=GenerationConfig(top_p=0.95))  # doctest: +SKIP
        >>> sequences, logprobs, diagnostics = processor.generate_with_logprobs(  # doctest: +SKIP
        ...     ["Two plus two equals"], G=4, seed=0, compute_rb=True
        ... )
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        logger: logging.Logger | None = None,
        config: ProcessorConfig | GenerationConfig | Mapping[str, Any] | None = None,
    ) -> None:
        checked = ProcessorConfig.of(config)
        self.logger = logger or logging.getLogger(__name__)
        if isinstance(model, HoldsModel):
            model, tokenizer = model.plain_model(), model.tokenizer if tokenizer is None else tokenizer
        elif isinstance(model, Engine):
            raise InputError(
                f"The weights of this {type(model).__name__} are in another process, so nothing here can score "
                "with them. Make the SequenceProcessor of the Hugging Face model, and draw through the engine: "
                "processor.generate_batched(prompts, engine=engine)."
            )
        self._tokenizer = tokenizer
        with precise(checked.precision):
            self._parts = find_parts(model)
        self.receipts: list[Receipt] = []
        self.head_chunk_rows = None
        self.early_steps = EARLY_STEPS
        self._resolver = PlanResolver(self._parts, tokenizer)
        self._compared: tuple[weakref.ref[Any] | None, Any] = (None, None)
        self.config = checked

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS:  # it would be stored here, and nothing would look at it
            refuse_change(self, name)
        object.__setattr__(self, name, value)

    @property
    def parts(self) -> ModelParts:
        """The model's parts."""
        return self._parts

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer."""
        return self._tokenizer

    def plain_model(self) -> Any:
        """The Hugging Face causal language model that this works on."""
        return self.parts.causal

    @property
    def config(self) -> ProcessorConfig:
        """The configuration. A new one, in any form that the constructor takes, holds for every later call."""
        return self._config

    @config.setter
    def config(self, config: ProcessorConfig | GenerationConfig | Mapping[str, Any] | None) -> None:
        self._config = ProcessorConfig.of(config)
        self._overrides = Overrides(self.parts.root, self._config.precision.func_override)
        self.scorer = Scorer(self.parts, self._resolver, self._overrides, self.tokenizer, self._config)

    @property
    def head_chunk_rows(self) -> int | None:
        """Rows of logits that exist at once; None takes what fits a fixed number of bytes."""
        return self._chunk_rows

    @head_chunk_rows.setter
    def head_chunk_rows(self, rows: int | None) -> None:
        self._chunk_rows = None if rows is None else check_count(rows, "head_chunk_rows")

    # --- prompts --------------------------------------------------------------------------------------------------

    @explains_arguments
    def sample_prompts(
        self, dataset_name: str | None, split: str = "train", num_prompts: int = 8, seed: int | None = None
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Prompts drawn from a data set without replacement, with their rows.

        Args:
            dataset_name: a registered name (see `register_dataset`), a `.jsonl` file, or a name of the Hugging Face
                `datasets` library; None is the shipped arithmetic in its R1-style template.
            split: the split.
            num_prompts: how many.
            seed: of the draw; None draws one from torch's global generator.

        Raises:
            DataError: for an unknown data set, or one with fewer rows.
        """
        examples = sample_examples(dataset_name or DEFAULT_DATASET, split, num_prompts, single_seed(seed))
        return [example["prompt"] for example in examples], examples

    # --- generation -----------------------------------------------------------------------------------------------

    @explains_arguments
    def generate_batched(
        self,
        prompts: Any,
        G: int | None = None,
        gen_batch_size: int | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        stop: Sequence[str] | str = DEFAULT_STOP,
        plan: PlanArgument = None,
        engine: Engine | None = None,
        chat: bool = False,
        with_support: bool | None = None,
    ) -> BatchedSequences:
        """Draws G responses to every prompt.

        Args:
            prompts: strings, chat messages or token ids.
            G: responses per prompt; None takes `num_return_sequences`.
            gen_batch_size: rows at a time; None takes the configuration's. Results depend on it by rounding only.
            seed: draws are keyed by (seed, prompt index, response index); a list holds one seed per prompt; None draws
                a seed from torch's global generator.
            stop: strings that end a response; the text keeps them.
            plan: a plan, None, or a list with one per prompt.
            engine: draw through this engine instead of the model itself, e.g. a vLLM engine for throughput. Its weights
                must be the model's: its scores of a probe text are compared once, and again after a change of the
                model's parameters.
            chat: take strings as user turns of a chat.
            with_support: keep the set of tokens that each token was drawn from, for scores on replayed supports. None
                does unless the engine cannot say. A policy that keeps every token needs no memory for it; others need
                two to four bytes for each token of a set, and never more than a bit per token of the vocabulary.

        Raises:
            ContextLengthError: if a prompt and its new tokens exceed the context.
            InputError: for an engine with other weights, or without a tokenizer.
        """
        if self.tokenizer is None:
            raise InputError(
                "Generation needs the model's tokenizer, for prompts, stop strings and texts, and this "
                "SequenceProcessor has none; make one with it. Scoring of given ids goes without."
            )
        generation = self.config.generation
        request = SamplingRequest(
            n=check_count(generation.num_return_sequences if G is None else G, "G"),
            rows_at_once=check_count(
                generation.gen_batch_size if gen_batch_size is None else gen_batch_size, "gen_batch_size"
            ),
            seed=single_seed(None) if seed is None else seed,
            stop=stop_strings(stop),
            plan=plan,
            chat=chat,
            with_support=with_support,
        )
        if engine is not None:
            self._check_weights(engine)
        started = time.perf_counter()
        sampler = Sampler(self.parts, self._resolver, self.tokenizer, generation)
        with alone(self.parts.causal), precise(self.config.precision):
            sequences, self.receipts = sampler.run(prompts, request, engine)
        sequences = replace(sequences, receipts=tuple(self.receipts))
        tokens, took = sum(map(sum, sequences.gen_lens)), time.perf_counter() - started
        self.logger.info("generated %d tokens for %d prompts in %.2f s", tokens, sequences.n_prompts, took)
        if engine is None:
            warn_if_idle(self.receipts)
        return sequences

    def _check_weights(self, engine: Engine) -> None:
        """Compares an engine's weights with the model's, unless that was done and the model's are the same still."""
        fingerprint = parameters_fingerprint(self.parts.root)
        known, then = self._compared
        if known is None or known() is not engine or then != fingerprint:
            check_same_weights(self.parts, self.tokenizer, engine, self._log_probs_of_probe)
            self._compared = weakref.ref(engine), fingerprint

    def _log_probs_of_probe(self, probe: BatchedSequences) -> np.ndarray:
        # exactly, whatever precision scores have: rounding must not look like other weights
        own = self.config.precision
        exact = PrecisionConfig(func_override=replace(own.func_override, autocast=False))
        scorer = replace(self.scorer, config=replace(self.config, precision=exact))
        assembly, _ = scorer.run(probe, ScoringRequest(with_grad=False, rows_at_once=1))
        return as_array(assembly.logprobs(False, False).logprobs[0][0])

    @explains_arguments
    def generate_with_replacement_sampling(
        self,
        total_sequences: int,
        dataset_name: str | None,
        split: str = "train",
        max_prompts_pool: int | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> tuple[BatchedSequences, LogprobResults, DiagnosticsResults]:
        """Independent draws of (prompt, response), scored: prompts with replacement from a pool, one response each.

        Prompts are chosen uniformly by a generator of their own; no global one moves. Memory grows by what is returned
        and no further: rows are drawn and scored `gen_batch_size` and `tf_batch_size` at a time.

        Args:
            total_sequences: how many responses, G to a drawn prompt.
            dataset_name: as in `sample_prompts`.
            split: the split.
            max_prompts_pool: prompts in the pool at most, those of `sample_prompts(dataset_name, split,
                max_prompts_pool, seed)`; None makes the whole split the pool, in its own order.
            seed: of pool, choice and responses; None draws one from torch's global generator.
            **kwargs: of `generate_with_logprobs`, such as `compute_rb`, `with_grad`, `reward_fn`; G is 1 unless given.

        Returns:
            As of `generate_with_logprobs`, with B = total_sequences / G; which row of the pool each prompt is says
            `sequences.pool_indices`, int64 [B].

        Raises:
            InputError: if total_sequences is not a multiple of G.
        """
        check_count(total_sequences, "total_sequences")
        n_samples, base = check_count(kwargs.pop("G", 1), "G"), single_seed(seed)
        if total_sequences % n_samples:
            raise InputError(f"total_sequences={total_sequences} is not a multiple of G={n_samples}.")
        drawn = draw_from_pool(
            dataset_name or DEFAULT_DATASET, split, total_sequences // n_samples, max_prompts_pool, base
        )
        return self.generate_with_logprobs(drawn, n_samples, seed=base, **kwargs)

    # --- scoring --------------------------------------------------------------------------------------------------

    @explains_arguments
    def teacher_force_logprobs(
        self,
        sequences: BatchedSequences,
        with_grad: bool = False,
        tf_batch_size: int | None = None,
        compute_rb: bool = False,
        return_baseline_features: bool = False,
        params_override: Mapping[str, Tensor] | None = None,
        buffers_override: Mapping[str, Tensor] | None = None,
        plan: PlanArgument = None,
        *,
        support: Support = "recomputed",
    ) -> LogprobResults:
        """Log p, log q and, if asked, RB entropies of every generated token.

        Without gradients the model runs as a function of a parameter mapping (the override, or its own parameters
        widened as configured) in evaluation mode, and results are on the CPU. With gradients the live model runs, in
        the mode it is in, and log-probs carry a graph; with an override too, differentiable by what made the override.

        Args:
            sequences: what to score.
            with_grad: keep the graph.
            tf_batch_size: rows at a time; None takes the configuration's. Results depend on it by rounding only.
            compute_rb: also give RB entropies.
            return_baseline_features: also give the features of `FEATURE_NAMES`.
            params_override: parameters by name, e.g. of `params_override`; those left out stay.
            buffers_override: buffers by name.
            plan: a plan, None, or a list with one per prompt. It edits the positions it would edit while generating.
            support: the sets that q, its entropy and diagnostics are taken on. `recomputed`: the nuclei of this pass,
                under these parameters. `replayed`: those that the sampler drew each token from, which the sequences
                carry; no token then lies outside, and rounding moves no boundary.

        Raises:
            ContextLengthError: if a row exceeds the context.
            InputError: for an unknown or mis-shaped override, what gradients cannot be had of, or supports to replay
                that the sequences do not carry.
        """
        overrides = {"params": params_override, "buffers": buffers_override}
        asked = {"with_grad": with_grad, "plan": plan, "with_shape": return_baseline_features, "support": support}
        assembly = self._force(sequences, tf_batch_size, **overrides, **asked)
        return assembly.logprobs(compute_rb, return_baseline_features)

    @explains_arguments
    def teacher_force_logprobs_with_diagnostics(
        self,
        sequences: BatchedSequences,
        with_grad: bool = False,
        tf_batch_size: int | None = None,
        compute_rb: bool = True,
        return_baseline_features: bool = False,
        params_override: Mapping[str, Tensor] | None = None,
        buffers_override: Mapping[str, Tensor] | None = None,
        plan: PlanArgument = None,
        *,
        support: Support = "recomputed",
    ) -> tuple[LogprobResults, DiagnosticsResults]:
        """As `teacher_force_logprobs`, with the diagnostics of every response from the same pass and sets."""
        overrides = {"params": params_override, "buffers": buffers_override}
        asked = {"with_grad": with_grad, "plan": plan, "with_shape": True, "support": support}
        assembly = self._force(sequences, tf_batch_size, **overrides, **asked)
        return assembly.logprobs(compute_rb, return_baseline_features), assembly.diagnostics(self.early_steps)

    @explains_arguments
    def generate_with_logprobs(
        self,
        prompts: Any = None,
        G: int | None = None,
        dataset_name: str | None = None,
        split: str = "train",
        num_prompts: int | None = None,
        seed: int | Sequence[int] | None = None,
        with_grad: bool = False,
        gen_batch_size: int | None = None,
        tf_batch_size: int | None = None,
        compute_rb: bool = False,
        *,
        plan: PlanArgument = None,
        stop: Sequence[str] | str = DEFAULT_STOP,
        engine: Engine | None = None,
        reward_fn: Reward | None = tag_reward,
        support: Support = "recomputed",
        with_support: bool | None = None,
    ) -> tuple[BatchedSequences, LogprobResults, DiagnosticsResults]:
        """Draws responses and scores them.

        Args:
            prompts: prompts; None draws them from a data set.
            G: responses per prompt; None takes `num_return_sequences`.
            dataset_name: the data set, if there are no prompts.
            split: its split.
            num_prompts: how many prompts to draw, 8 if None.
            seed: of prompts and responses; None draws one from torch's global generator. Given prompts may have a list,
                as in `generate_batched`.
            with_grad: as in `teacher_force_logprobs`.
            gen_batch_size: rows generated at a time.
            tf_batch_size: rows scored at a time.
            compute_rb: also give RB entropies.
            plan: acts in generation and in scoring.
            stop: as in `generate_batched`.
            engine: as in `generate_batched`.
            reward_fn: from (prompt, response, example) to a number; NaN where an example has no gold answer. Without a
                data set there are no examples and rewards are NaN, unless the function can do without. The sequences
                carry the rewards too, so that scoring them again does not lose them.
            support: as in `teacher_force_logprobs`.
            with_support: as in `generate_batched`.

        Raises:
            InputError: if both prompts and a data set are given.
        """
        if prompts is not None and (dataset_name is not None or num_prompts is not None):
            raise InputError("Pass prompts, or dataset_name and num_prompts, not both.")
        examples = prompts.examples if isinstance(prompts, PoolPrompts) else None
        indices = prompts.indices if isinstance(prompts, PoolPrompts) else None
        if prompts is None:
            seed, count = single_seed(seed), 8 if num_prompts is None else num_prompts
            prompts, examples = self.sample_prompts(dataset_name, split, count, seed)
        drawn = self.generate_batched(
            prompts,
            G,
            gen_batch_size,
            seed=seed,
            stop=stop,
            plan=plan,
            engine=engine,
            with_support=with_support,
        )
        drawn = replace(drawn, examples=examples, pool_indices=indices)
        sequences = replace(drawn, rewards=rewards_of(drawn, reward_fn))
        logprobs, diagnostics = self.teacher_force_logprobs_with_diagnostics(
            sequences, with_grad, tf_batch_size, compute_rb, plan=plan, support=support
        )
        return sequences, logprobs, diagnostics

    @explains_arguments
    def ratio_health(
        self,
        sequences: BatchedSequences,
        tf_batch_size: int | None = None,
        params_override: Mapping[str, Tensor] | None = None,
        plan: PlanArgument = None,
    ) -> RatioHealth:
        """How far a pass's log q is from the sampler's own, token by token: on recomputed and on replayed supports.

        Args:
            sequences: draws with the sampler's log q and supports.
            tf_batch_size: rows scored at a time.
            params_override: as in `teacher_force_logprobs`; without one, all that differs is rounding.
            plan: the plan under which they were drawn.

        Raises:
            InputError: if the sequences carry no log q or no supports.
        """

        def scored(support: Support) -> LogprobResults:
            asked = {"plan": plan, "support": support, "with_flips": support == "replayed"}
            assembly = self._force(sequences, tf_batch_size, with_grad=False, params=params_override, **asked)
            return assembly.logprobs(False, False)

        return RatioHealth.of(scored("recomputed"), scored("replayed"), sequences)

    def _force(self, sequences: BatchedSequences, tf_batch_size: int | None, **asked: Any) -> Assembly:
        """Scores as a `ScoringRequest` of these fields asks."""
        if not isinstance(sequences, BatchedSequences):
            raise InputError(f"sequences is a BatchedSequences, got {type(sequences).__name__}; see its from_ids.")
        size = self.config.generation.tf_batch_size if tf_batch_size is None else tf_batch_size
        rows = check_count(size, "tf_batch_size")
        request = ScoringRequest(rows_at_once=rows, chunk_rows=self.head_chunk_rows, **asked)
        started = time.perf_counter()
        with alone(self.parts.causal):
            assembly, receipts = self.scorer.run(sequences, request)
        self._keep(receipts)
        tokens, took = sum(map(sum, sequences.gen_lens)), time.perf_counter() - started
        self.logger.info("scored %d tokens of %d responses in %.2f s", tokens, len(receipts), took)
        return assembly

    # --- overrides ------------------------------------------------------------------------------------------------

    def params_override(self, v_named: Mapping[str, Tensor], eta: float | Tensor) -> dict[str, Tensor]:
        """Parameters θ + η·v by name, for `teacher_force_logprobs`; the live model is not touched.

        Differentiable in η, v and θ. Parameters are widened first as `precision.func_override` says, so that a small
        step is not lost in a narrow dtype.

        Args:
            v_named: a direction for any of the parameters, by name; a tied weight may go by any of its names.
            eta: the step.

        Raises:
            InputError: for an unknown or mis-shaped name.
        """
        return self._overrides.moved(v_named, eta)

    _build_params_override = params_override

    @explains_arguments
    def functional_logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        params_override: Mapping[str, Tensor] | None = None,
        buffers_override: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The model's raw logits of whole rows, under an override or as it is, for a loss of your own.

        They carry a graph, to what made the override or to the live parameters, unless torch's grad mode is off. The
        model runs in evaluation mode, with parameters and autocast as `precision.func_override` says.

        Args:
            input_ids: [batch, pos].
            attention_mask: 1 for tokens, 0 for padding on either side, [batch, pos]; None means no padding.
            params_override: parameters by name, e.g. of `params_override`; those left out stay.
            buffers_override: buffers by name.

        Returns:
            Logits [batch, pos, d_vocab], before any temperature, after the model's own scaling and soft cap; float32,
            or float64 if the model is.

        Raises:
            InputError: for an unknown or mis-shaped override, or a mask of another shape.
        """
        with alone(self.parts.causal), precise(self.config.precision):
            return functional_logits(
                self.parts,
                self._overrides,
                self.config.precision.func_override,
                input_ids,
                attention_mask,
                params_override or {},
                buffers_override or {},
            )

    _fc_logits = functional_logits

    @property
    def _fo_cfg(self) -> SettingsView:
        """The settings of functional calls as they are now, also after a change of `config`."""
        return SettingsView(lambda: self.config.precision.func_override)

    @property
    def _tf_cfg(self) -> SettingsView:
        """The settings of teacher-forced passes, `tf_nograd` and `tf_withgrad`, as they are now."""
        return SettingsView(lambda: self.config.precision, ("tf_nograd", "tf_withgrad"))

    def build_state_override(
        self,
        v_named: Mapping[str, Tensor],
        eta: float | Tensor,
        *,
        param_dtype: torch.dtype | str | None,
        include_buffers: bool,
        buffer_dtype: torch.dtype | str | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters θ + η·v in a stated dtype, and copies of the buffers.

        Args:
            v_named: as in `params_override`.
            eta: the step.
            param_dtype: of every parameter; None keeps their own.
            include_buffers: also give the buffers; otherwise their mapping is empty.
            buffer_dtype: of floating-point buffers; None keeps their own.

        Returns:
            Mappings for `params_override=` and `buffers_override=` of `teacher_force_logprobs`.
        """
        return state_override(
            self.parts.root,
            v_named,
            eta,
            param_dtype=None if param_dtype is None else as_dtype(param_dtype),
            include_buffers=include_buffers,
            buffer_dtype=None if buffer_dtype is None else as_dtype(buffer_dtype),
        )

    def _keep(self, receipts: list[Receipt]) -> None:
        self.receipts = receipts
        warn_if_idle(receipts)
