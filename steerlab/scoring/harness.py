r"""A steerlab engine as a model of lm-evaluation-harness, so that any of its tasks can be run steered.

From Python::

    import lm_eval
    from steerlab.scoring.harness import HarnessModel

    results = lm_eval.simple_evaluate(HarnessModel(engine, plan=plan), tasks=["arc_easy"])

From the command line, with the harness's own options::

    python -m steerlab.scoring.harness --model steerlab \
        --model_args pretrained=smollm2-135m,vector=joy.safetensors,dose=0.2 --tasks arc_easy
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from steerlab.core._characters import check_whole
from steerlab.core._numbers import check_integer
from steerlab.core._spelling import Continuation
from steerlab.core._text import continued_chat
from steerlab.core.engine import Engine
from steerlab.core.errors import BackendMissingError, InputError, PromptError
from steerlab.core.policy import SamplingPolicy
from steerlab.measures.quantities import PolicyLogQ, TokenLogProb
from steerlab.scoring._model_arguments import engine_of, take_plan
from steerlab.steering.plan import Plan

try:
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
        get_rolling_token_windows,
        make_disjoint_window,
    )
except ImportError as error:
    raise BackendMissingError(
        'The harness adapter needs lm-evaluation-harness: pip install "steerlab[harness]".'
    ) from error

MAX_GEN_TOKS = 256
_POLICY = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OWN = ("max_length", "prefix_token_id", "seed", "add_bos_token")
_QUANTITIES = {"log_prob": TokenLogProb(), "greedy": PolicyLogQ(SamplingPolicy.greedy())}
_LOG = logging.getLogger(__name__)

_Request = tuple[Any, list[int], list[int]]


@register_model("steerlab")
class HarnessModel(TemplateLM):
    """An engine under a plan, with the interface of the harness's models.

    Tokenisation, empty contexts, rolling windows, truncation from the left (with a warning) and stop sequences are the
    harness's own for Hugging Face models. Targets that share a context share its computation.

    Attributes:
        engine: the engine.
        plan: the plan, or None.

    Args:
        engine: the engine.
        plan: what steers every request; None leaves the model as it is.
        max_length: tokens that a request may be conditioned on. By default one less than the engine's context, since
            an engine's context holds the token that is predicted last, too.
        prefix_token_id: what an empty context is; BOS, else EOS, by default.
        seed: of sampling, for tasks that sample.
        add_bos_token: whether texts are encoded with the tokenizer's special tokens, as lm-eval's argument of that
            name. None lets the tokenizer decide for contexts, as lm-eval's None does, and adds none to a text that is
            scored whole (`loglikelihood_rolling`): it stands after the prefix token already. Such scores compare with
            lm-eval under `add_bos_token=False`; under None or True, lm-eval scores the BOS that a tokenizer such as
            Gemma's adds, after the prefix token, and so does this adapter under True.

    Raises:
        InputError: for a `max_length` that the engine has no room for.

    Source:
        Gao et al. 2021, A framework for few-shot language model evaluation.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan | None = None,
        *,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
        seed: int = 0,
        add_bos_token: bool | None = None,
    ) -> None:
        super().__init__()
        if add_bos_token is not None and not isinstance(add_bos_token, bool):
            raise InputError(f"add_bos_token is True, False or None, got {add_bos_token!r}.")
        longest = engine.info.context_length - 1
        if max_length is not None:
            max_length = check_integer(max_length, "max_length on this engine", least=1, most=longest)
        self.engine = engine
        self.plan = plan
        self.tokenizer = engine.tokenizer
        self.max_length = longest if max_length is None else max_length
        self.seed = seed
        self.add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id

    # --- as the harness asks for it -----------------------------------------------------------------------------

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> "HarnessModel":
        """The model that `--model_args` describe.

        `pretrained` names the model and `engine` is `lens` (default) or `vllm`; `pretrained` may also be the address of
        a `steerlab serve`, http://…, with its `api_key`. `plan`, a file with what `Plan.to_json` gives, is the plan,
        times `scale`; or `vector`, `layer`, `dose` or `coef`, and `where` make it. `max_length`, `prefix_token_id`,
        `seed` and `add_bos_token` are as above. What is left goes to the engine. The harness's own `device` goes to the
        lens engine, but for its default of a GPU where there is none; batches are the engine's affair.
        """
        arguments = dict(arg_dict)
        plan = take_plan(arguments)
        own = {name: arguments.pop(name) for name in _OWN if name in arguments}
        return cls(_engine(arguments, plan, _device(additional_config or {})), plan, **own)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> "HarnessModel":
        """As `create_from_arg_obj`, from `name=value,name=value`."""
        from lm_eval.utils import simple_parse_args_string  # pyright: ignore[reportMissingImports]

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes with its results: weights and plan, by hash."""
        info = self.engine.info
        return {
            "model_name": info.name,
            "model_dtype": info.dtype,
            "model_revision": info.revision,
            "weights_hash": info.weights_hash,
            "engine": type(self.engine).__name__,
            "plan_hash": None if self.plan is None else self.plan.hash,
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """A text's ids; special tokens as `add_bos_token` or else the tokenizer says, but no second BOS."""
        check_whole(string, "A text", PromptError)
        if add_special_tokens is None:
            twice = has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
            add_special_tokens = False if twice else self.add_bos_token
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **options)

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the text that the model sees."""
        if not add_generation_prompt:
            return continued_chat(self.tokenizer, chat_history)
        return self.tokenizer.apply_chat_template(
            [dict(message) for message in chat_history], tokenize=False, add_generation_prompt=True
        )

    # --- the three requests ---------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[_Request], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding would produce it."""
        rows = [self._fitting(context, continuation) for _, context, continuation in requests]
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(rows)
        for place, values in zip(*self._measured(rows), strict=True):
            answers[place] = (float(np.sum(values["log_prob"])), bool((values["greedy"] == 0).all()))
            text = requests[place][0]
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answers[place])
        return answers

    def _measured(self, rows: Sequence[tuple[list[int], list[int]]]) -> tuple[list[int], list[dict[str, np.ndarray]]]:
        """Places of the rows in the order in which they ran, and their values; equal contexts run once."""
        by_context: dict[tuple[int, ...], list[int]] = {}
        for place, (context, _) in enumerate(rows):
            by_context.setdefault(tuple(context), []).append(place)
        targets = [[rows[place][1] for place in places] for places in by_context.values()]
        engine: Any = self.engine
        values = engine.measure([list(context) for context in by_context], targets, _QUANTITIES, plan=self.plan)
        return [place for places in by_context.values() for place in places], values

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The pair, its context cut from the left to what the model can be conditioned on."""
        if not context or not continuation or len(continuation) > self.max_length:
            raise InputError(
                f"A request has a context of {len(context)} and a continuation of {len(continuation)} tokens; both "
                f"need at least one, and the continuation at most {self.max_length}."
            )
        surplus = len(context) + len(continuation) - (self.max_length + 1)
        if surplus > 0:
            _LOG.warning(
                "Context (%d) and continuation (%d) exceed the maximum length (%d): %d tokens cut from the left.",
                len(context),
                len(continuation),
                self.max_length,
                surplus,
            )
        return context[max(0, surplus) :], continuation

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text, in the harness's windows; each text starts after the prefix token.

        A window's first token is its prompt and the rest counts as generated, so that a plan with the default
        positions edits every token of a text.
        """
        totals = []
        for (text,) in tqdm([request.args for request in requests], desc="loglikelihood_rolling", disable=disable_tqdm):
            windows = [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(text, add_special_tokens=bool(self.add_bos_token)),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            totals.append(self._sum_of(windows))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def _sum_of(self, windows: Sequence[tuple[list[int], list[int]]]) -> float:
        if not windows:
            return 0.0
        rows = [[*context, *continuation] for context, continuation in windows]
        scores = self.engine.score([row[:1] for row in rows], [[row[1:]] for row in rows], plan=self.plan)
        return sum(
            float(np.sum(score.token_log_probs[-len(continuation) :]))
            for score, (_, continuation) in zip(scores, windows, strict=True)
        )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """A continuation of each context, cut before the first stop sequence."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        texts = [""] * len(requests)
        for members in groups.values():
            contexts = [requests[index].args[0] for index in members]
            given = requests[members[0]].args[1]
            for index, text in zip(members, self._continuations(contexts, given), strict=True):
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return texts

    def _continuations(self, contexts: Sequence[str], given: dict[str, Any]) -> list[str]:
        options = dict(normalize_gen_kwargs(given, MAX_GEN_TOKS))
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(options.pop("until", None), eos=eos)
        max_new_tokens = options.pop("max_gen_toks")
        room = self.max_length - max_new_tokens
        if room < 1:
            raise InputError(
                f"{max_new_tokens} new tokens leave no room for a context within the maximum length of "
                f"{self.max_length}; set max_gen_toks lower."
            )
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        made = self.engine.generate(
            prompts,
            plan=self.plan,
            policy=_policy(options),
            max_new_tokens=max_new_tokens,
            seed=self.seed,
            stop=[term for term in until if term],
        )
        texts = [
            Continuation(self.tokenizer, prompt).text(completion.token_ids)
            for prompt, completion in zip(prompts, made, strict=True)
        ]
        return [postprocess_generated_text(text, stop=until, think_end_token=None) for text in texts]


def _policy(options: dict[str, Any]) -> SamplingPolicy:
    """The sampling policy of a request; greedy unless it asks to sample.

    Raises:
        InputError: for an option of generation that engines do not have.
    """
    sample = options.pop("do_sample", False)
    stated = {name: options.pop(name) for name in _POLICY if name in options}
    unknown = [name for name in options if name != "use_cache"]
    if unknown:
        raise InputError(f"generate_until: {', '.join(sorted(unknown))} has no counterpart in a SamplingPolicy.")
    if not sample:
        return SamplingPolicy(temperature=0.0, repetition_penalty=stated.get("repetition_penalty", 1.0))
    return SamplingPolicy(**{"temperature": 1.0, **stated})


def _device(config: Mapping[str, Any]) -> str | None:
    device = config.get("device")
    if device is not None and str(device).startswith("cuda") and not torch.cuda.is_available():
        _LOG.warning("There is no GPU for device=%s; the engine chooses.", device)
        return None
    return device


def _engine(arguments: dict[str, Any], plan: Plan | None, device: str | None) -> Engine:
    model = arguments.pop("pretrained", None) or arguments.pop("model", None)
    if model is None:
        raise InputError("--model_args need pretrained=MODEL.")
    is_lens = arguments.get("engine", "lens") == "lens" and not str(model).startswith(("http://", "https://"))
    return engine_of(str(model), plan, {**({"device": device} if device and is_lens else {}), **arguments})


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    cli_evaluate()
