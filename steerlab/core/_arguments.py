"""Errors for arguments under the names of other libraries: they say what the argument is called here."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

from steerlab.core._numbers import shown

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_POLICY: Final = {"policy": "policy=sl.SamplingPolicy({name}={value})"}
_OF_PROCESSOR: Final = "the processor's config, sl.SequenceProcessor(…, config=sl.GenerationConfig({name}={value}))"
_LENGTH: Final = {
    "max_new_tokens": "max_new_tokens=",
    "max_tokens": "max_tokens=",
    "config": "max_new_tokens of its GenerationConfig",
}
_SAMPLES: Final = {"n": "n=", "G": "G=", "input_ids": "one row of input_ids per sample"}
_STRENGTH: Final = {
    "coef": "coef= (raw) or dose= (in median norms of the stream)",
    "alpha": "alpha=",
    "coefficient": "coefficient=",
    "plan": "plan=sl.Plan(sl.add(vector, coef=…))",
    "doses": "doses=, which scale the plan",
}
_PLAN: Final = {
    "plan": "plan=sl.Plan(sl.add(vector, coef=…)), with the layer in the vector",
    "hook_fn": "hook_fn=sl.create_steering_hook(vector, alpha)",
    "steering_vector": "steering_vector=",
    "vector": "vector, the first argument",
}
_STOP: Final = {"stop": "stop=, strings; EOS ids end a row by themselves", "stop_token_ids": "stop_token_ids="}
_PROMPTS: Final = {
    "prompts": "prompts, the first argument",
    "input_ids": "input_ids=",
    "prompt": "prompt=",
    "neutral": "neutral=",
}
_LAYER: Final = {
    "layers": "layers=",
    "layer_name": "layer_name=, e.g. 'blocks.14.hook_resid_post'",
    "vector": "the layer in the vector: sl.SteeringVector.from_tensor(tensor, layer={value})",
    "plan": "the layer in the plan's vector: sl.SteeringVector.from_tensor(tensor, layer={value})",
}
_WHERE: Final = {
    "where": "where=, e.g. sl.where.last_prompt() | sl.where.generated()",
    "read": "read=, e.g. sl.where.last_prompt()",
    "plan": "where= of the plan's edits, e.g. sl.add(…, where=sl.where.all())",
}
_DEVICES: Final = {"n_devices": "n_devices=, or sl.VLLMEngine(…, tensor_parallel_size=…)"}

_HINTS: Final[tuple[tuple[str, dict[str, str]], ...]] = (
    ("temperature top_p", _POLICY | {"G": _OF_PROCESSOR}),
    ("top_k min_p repetition_penalty", _POLICY),
    ("policy", {"G": "the processor's config, sl.SequenceProcessor(…, config=sl.GenerationConfig(top_p=…))"}),
    ("do_sample", {"policy": "policy=sl.SamplingPolicy.greedy() for do_sample=False"}),
    ("greedy", {"policy": "policy=sl.SamplingPolicy.greedy()", "do_sample": "do_sample=False"}),
    ("sampling_params generation_config", {"policy": "policy=sl.SamplingPolicy(…) and max_new_tokens="}),
    ("max_tokens max_new_tokens max_completion_tokens num_tokens", _LENGTH),
    ("max_length", {name: f"{words}, which counts new tokens only" for name, words in _LENGTH.items()}),
    ("num_return_sequences num_samples n_samples best_of n", _SAMPLES),
    ("stop_token_ids eos_token_id stop_strings stop_sequences stop_words", _STOP),
    ("alpha coefficient coeff coef multiplier strength scale dose", _STRENGTH),
    ("vector vectors steering_vector activations direction hooks fwd_hooks", _PLAN),
    ("prompt inputs text texts input_ids messages prompt_token_ids", _PROMPTS),
    ("layer layer_idx layer_ids hidden_layers hook_point", _LAYER),
    ("token_pos positions position read_token_index min_token_index", _WHERE),
    ("target completions continuations target_sequences", {"targets": "targets="}),
    ("apply_chat_template use_chat_template", {"chat": "chat=True"}),
    (
        "batch_size",
        {"gen_batch_size": "gen_batch_size=", "tf_batch_size": "tf_batch_size=", "batch_tokens": "batch_tokens="},
    ),
    ("torch_dtype", {"dtype": "dtype="}),
    ("tensor_parallel_size num_gpus n_gpus", _DEVICES),
    ("model_name model_path model_id", {"model": "model, the first argument"}),
    ("neutral neutral_texts", {"texts": "texts=", "neutral": "neutral="}),
    ("n_random random", {"controls": "controls=sl.Controls(random={value})"}),
    ("reward reward_function", {"reward_fn": "reward_fn="}),
    ("shuffled", {"controls": "controls=sl.Controls(shuffled={value})"}),
)
INSTEAD: Final = {name: words for names, words in _HINTS for name in names.split()}
"""Name → what to use instead, by the argument that the function has for it; the first that it has counts."""


def explains_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function: for an argument it does not have, its TypeError says what to use instead.

    A function that passes further arguments on refuses those alone for which it has another name itself.

    Examples:
        >>> @explains_arguments
        ... def generate(prompts, *, policy=None, max_new_tokens=64): ...
        >>> generate("Hi", temperature=0.7)
        Traceback (most recent call last):
        TypeError: generate has no argument temperature: use policy=sl.SamplingPolicy(temperature=0.7).
    """
    parameters = inspect.signature(function).parameters
    collecting = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = [name for name, p in parameters.items() if name != "self" and p.kind not in collecting]
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    title = getattr(function, "__qualname__", "This function").removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = {name: value for name, value in kwargs.items() if name not in named}
        hints = {name: _hint(name, value, named) for name, value in unknown.items()}
        refused = [name for name, hint in hints.items() if hint or not passes_on]
        if refused:
            its_own = f"its arguments are {', '.join(named)}"
            sentences = [f"{title} has no argument {name}: {hints[name] or its_own}." for name in refused]
            raise TypeError(" ".join(sentences))
        return function(*args, **kwargs)

    return checked


def explains_fields(cls: type[T]) -> type[T]:
    """Decorates a dataclass: `explains_arguments` for its constructor."""
    made: Any = cls
    made.__init__ = explains_arguments(made.__init__)
    return cls


def _hint(name: str, value: Any, named: list[str]) -> str:
    """What to use instead, if there is something."""
    found = [words for own, words in INSTEAD.get(name, {}).items() if own in named]
    return "use " + found[0].format(name=name, value=shown(value, 40)) if found else ""
