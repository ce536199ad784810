"""What a SequenceProcessor may be told: sampling, batch sizes, and precision. Every unknown key is an error."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, NoReturn, TypeVar, dataclass_transform

import torch

from steerlab.core._arguments import explains_fields
from steerlab.core._numbers import check_flag, check_integer
from steerlab.core.errors import InputError
from steerlab.core.policy import SamplingPolicy

T = TypeVar("T")
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_PRECISIONS = ("highest", "high", "medium")


@dataclass_transform(frozen_default=True)
def settings(cls: type[T]) -> type[T]:
    """A frozen dataclass whose error for a change in place says how to make one that every part sees."""
    made: Any = explains_fields(dataclass(frozen=True)(cls))
    made.__setattr__ = made.__delattr__ = refuse_change
    return made


def refuse_change(self: object, name: str, *value: object) -> NoReturn:
    """Says how a setting is changed instead.

    Raises:
        FrozenInstanceError: always.
    """
    raise FrozenInstanceError(
        f"{type(self).__name__}.{name} cannot be changed in place. Give the processor a whole configuration, which its "
        "sampler, scorer and overrides all take: processor.config = processor.config.changed(generation={…}, "
        "precision={…}) with the settings that differ."
    )


@settings
class GenerationConfig:
    """How sequences are drawn, and how many at a time.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_p: keep the most probable tokens up to this mass, the boundary token included.
        max_new_tokens: tokens generated per response at most.
        do_sample: False is greedy decoding whatever the temperature.
        num_return_sequences: responses per prompt, G, where a call does not say.
        gen_batch_size: rows generated at once.
        tf_batch_size: rows scored at once.
        rb_requires_grad: keep the graph through RB entropies in calls with gradients; False detaches them.

    Raises:
        InputError, PolicyError: for a value outside its range.

    Examples:
        >>> GenerationConfig(temperature=0.7, top_p=0.95).policy
        SamplingPolicy(temperature=0.7, top_p=0.95, top_k=0, min_p=0.0, repetition_penalty=1.0)
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 200
    do_sample: bool = True
    num_return_sequences: int = 8
    gen_batch_size: int = 32
    tf_batch_size: int = 8
    rb_requires_grad: bool = False

    def __post_init__(self) -> None:
        for name in ("num_return_sequences", "gen_batch_size", "tf_batch_size"):
            object.__setattr__(self, name, check_count(getattr(self, name), name))
        object.__setattr__(self, "max_new_tokens", check_count(self.max_new_tokens, "max_new_tokens", least=0))
        _check_flags(self, "do_sample", "rb_requires_grad")
        checked = SamplingPolicy(temperature=self.temperature, top_p=self.top_p)
        object.__setattr__(self, "temperature", checked.temperature)
        object.__setattr__(self, "top_p", checked.top_p)

    @cached_property
    def policy(self) -> SamplingPolicy:
        """The sampling policy these values make."""
        checked = SamplingPolicy(temperature=self.temperature, top_p=self.top_p)
        return checked if self.do_sample else SamplingPolicy.greedy()


@settings
class FunctionalPrecision:
    """Parameters of a functional call (`precision.func_override`).

    Attributes:
        autocast: run the call under autocast to `dtype`.
        dtype: of autocast, and the dtype that `cast_params` widens to.
        cast_params: widen parameters to `dtype`. Parameters that are wider stay as they are: nothing is ever narrowed.
    """

    autocast: bool = False
    dtype: torch.dtype | str = torch.float32
    cast_params: bool = True

    def __post_init__(self) -> None:
        _check_flags(self, "autocast", "cast_params")
        object.__setattr__(self, "dtype", as_dtype(self.dtype))


@settings
class ForcingPrecision:
    """A teacher-forced pass (`precision.tf_nograd`, `precision.tf_withgrad`).

    Attributes:
        autocast: run the pass under autocast to `dtype`; otherwise autocast is off inside, also where the caller has it
            on.
        dtype: of autocast.
        cast_logits_fp32: cast logits narrower than float32 as soon as they arise. Measures sum in float32 or wider in
            either case; False only delays the cast.
    """

    autocast: bool = False
    dtype: torch.dtype | str = torch.float32
    cast_logits_fp32: bool = True

    def __post_init__(self) -> None:
        _check_flags(self, "autocast", "cast_logits_fp32")
        object.__setattr__(self, "dtype", as_dtype(self.dtype))


@settings
class PrecisionConfig:
    """Precision of everything a SequenceProcessor runs. Global knobs are set inside its calls and restored after.

    Attributes:
        func_override: parameters of functional calls.
        tf_nograd: passes without gradients.
        tf_withgrad: passes with gradients.
        allow_tf32: whether GPUs may use TF32, in convolutions and, if `matmul_precision` says so too, in products.
        matmul_precision: of float32 matrix products: `highest`; `high` or `medium` need `allow_tf32`.
        entropy_fp64: compute log-probs, log q, entropies and every diagnostic in float64.
    """

    func_override: FunctionalPrecision = field(default_factory=FunctionalPrecision)
    tf_nograd: ForcingPrecision = field(default_factory=ForcingPrecision)
    tf_withgrad: ForcingPrecision = field(default_factory=ForcingPrecision)
    allow_tf32: bool = False
    matmul_precision: str = "highest"
    entropy_fp64: bool = False

    def __post_init__(self) -> None:
        _check_flags(self, "allow_tf32", "entropy_fp64")
        if self.matmul_precision not in _PRECISIONS:
            raise InputError(f"matmul_precision is one of {', '.join(_PRECISIONS)}, got {self.matmul_precision!r}.")
        if self.matmul_precision != "highest" and not self.allow_tf32:
            raise InputError(
                f"matmul_precision={self.matmul_precision!r} lets matrix products use TF32; set allow_tf32=True too."
            )

    @property
    def measure_dtype(self) -> torch.dtype | None:
        """The dtype of measures; None lets the logits decide (float32, or float64 if they are)."""
        return torch.float64 if self.entropy_fp64 else None


@settings
class ProcessorConfig:
    """Sampling and precision together.

    Attributes:
        generation: sampling and batch sizes.
        precision: precision.
    """

    generation: GenerationConfig = field(default_factory=GenerationConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)

    @classmethod
    def of(cls, config: "ProcessorConfig | GenerationConfig | Mapping[str, Any] | None") -> "ProcessorConfig":
        """A configuration from any accepted form: one of the classes, a nested dictionary, or None for the defaults.

        Raises:
            InputError: for an unknown key, or another type.

        Examples:
            >>> config = ProcessorConfig.of({"generation": {"top_p": 0.9}, "precision": {"entropy_fp64": True}})
            >>> config.generation.top_p, config.precision.entropy_fp64
            (0.9, True)
        """
        if config is None:
            return cls()
        if isinstance(config, ProcessorConfig):
            return config
        if isinstance(config, GenerationConfig):
            return cls(generation=config)
        if not isinstance(config, Mapping):
            raise InputError(f"config is a GenerationConfig or a dictionary, got {type(config).__name__}.")
        _check_keys(config, cls, "config")
        return cls(
            generation=_section(config.get("generation"), GenerationConfig, "generation"),
            precision=_precision(config.get("precision")),
        )

    def changed(
        self, generation: Mapping[str, Any] | None = None, precision: Mapping[str, Any] | None = None
    ) -> "ProcessorConfig":
        """A configuration with some settings changed, those left out as they are.

        Raises:
            InputError: for an unknown key, or a value outside its range.

        Examples:
            >>> ProcessorConfig().changed(generation={"top_p": 0.9}).generation.top_p
            0.9
        """
        return ProcessorConfig(
            _changed(self.generation, generation or {}, "generation"),
            _changed(self.precision, precision or {}, "precision"),
        )


SETTINGS = frozenset(
    entry.name for kind in (ProcessorConfig, GenerationConfig, PrecisionConfig) for entry in fields(kind)
)
"""The names of all settings and sections."""


def _changed(section: Any, changes: Mapping[str, Any], path: str) -> Any:
    _check_keys(changes, type(section), path)
    inner = {name: getattr(section, name) for name in changes}
    return replace(
        section,
        **{
            name: _changed(inner[name], value, f"{path}.{name}")
            if is_dataclass(inner[name]) and isinstance(value, Mapping)
            else value
            for name, value in changes.items()
        },
    )


class SettingsView(Mapping[str, Any]):
    """A section of the configuration as it is when looked at, as a mapping; nested sections are views too.

    Args:
        read: gives the section.
        names: the settings to show; None shows all.

    Examples:
        >>> SettingsView(lambda: ForcingPrecision())["autocast"]
        False
    """

    def __init__(self, read: Callable[[], Any], names: tuple[str, ...] | None = None) -> None:
        self._read, self._names = read, names

    def __getitem__(self, name: str) -> Any:
        if name not in tuple(self):
            raise KeyError(name)
        value = getattr(self._read(), name)
        return SettingsView(lambda: getattr(self._read(), name)) if is_dataclass(value) else value

    def __setitem__(self, name: str, value: Any) -> NoReturn:
        refuse_change(self._read(), name, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names or [entry.name for entry in fields(self._read())])

    def __len__(self) -> int:
        return len(tuple(iter(self)))

    def __repr__(self) -> str:
        return repr(dict(self))


def _precision(section: Any) -> PrecisionConfig:
    if not isinstance(section, Mapping):
        return _section(section, PrecisionConfig, "precision")
    nested = {"func_override": FunctionalPrecision, "tf_nograd": ForcingPrecision, "tf_withgrad": ForcingPrecision}
    made = {
        key: _section(value, nested[key], f"precision.{key}") if key in nested else value
        for key, value in section.items()
    }
    return _section(made, PrecisionConfig, "precision")


def _section(section: Any, kind: type[T], path: str) -> T:
    if section is None:
        return kind()
    if isinstance(section, kind):
        return section
    if not isinstance(section, Mapping):
        raise InputError(f"config section {path!r} is a dictionary or a {kind.__name__}, got {section!r:.80}.")
    _check_keys(section, kind, path)
    return kind(**section)


def _check_keys(section: Mapping[str, Any], kind: type, path: str) -> None:
    known = [entry.name for entry in fields(kind)]
    unknown = [str(key) for key in section if key not in known]
    if unknown:
        raise InputError(f"{path} has no key {', '.join(map(repr, unknown))}; its keys are {', '.join(known)}.")


def as_dtype(value: Any) -> torch.dtype:
    """A floating-point dtype from itself or its name.

    Raises:
        InputError: for anything else.
    """
    found = _DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or found not in _DTYPES.values():
        raise InputError(f"A dtype is one of {', '.join(_DTYPES)}, got {value!r}.")
    return found


def check_count(value: Any, name: str, least: int = 1) -> int:
    """The value, if it is an integer of at least `least`.

    Raises:
        InputError: otherwise.
    """
    return check_integer(value, name, least=least)


def _check_flags(config: object, *names: str) -> None:
    for name in names:
        object.__setattr__(config, name, check_flag(getattr(config, name), name))
