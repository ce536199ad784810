"""The identity of a user's own operator: its code, and the values beside its description.

A plan identifies an operator by the description that it gives of itself, which stays when only the code is changed.
"""

import functools
import inspect
import sys
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, Final

from steerlab.core._hashing import bytes_hash, content_hash
from steerlab.experiment._store.function_code import bytecode, source_text
from steerlab.steering.operators._base import Operator
from steerlab.steering.operators.registry import SHIPPED_OPERATORS
from steerlab.steering.vectors import SteeringVector

_NOT_THEIRS: Final = (object, ABC, Operator, *SHIPPED_OPERATORS.values())
# What a description says already, or what changes no Δ; of the other special methods these two make the operator.
_TOLD: Final = ("to_json", "_abc_impl")
_MAKING: Final = ("__init__", "__post_init__")


def operator_identity(operator: Operator) -> dict[str, Any]:
    """What identifies the code of an operator that is not shipped; JSON-serialisable.

    It covers the methods of its class and of the classes it derives from with their defaults and what they close over,
    and plain values of class and instance; not the globals its methods use, and no tensors.
    """
    return {
        "class": type(operator).__name__,
        "python": sys.implementation.cache_tag,
        "parts": dict([*_class_parts(type(operator)), *_instance_parts(operator)]),
    }


def changed_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the parts that differ between two identities, or are in one of them only.

    Under one version of Python what the code compiles to decides, so that comments may change; else its source does.
    """
    column = 1 if before["python"] == now["python"] else 0
    old, new = before["parts"], now["parts"]
    return [
        name
        for name in sorted({*old, *new})
        if name not in old or name not in new or not old[name][column] or old[name][column] != new[name][column]
    ]


def _class_parts(kind: type) -> Iterator[tuple[str, list[str]]]:
    for owner in kind.__mro__:
        for name, value in vars(owner).items() if owner not in _NOT_THEIRS else ():
            special = name.startswith("__") and name.endswith("__") and name not in _MAKING
            default = name in getattr(owner, "__dataclass_fields__", {})  # the instance has the value that counts
            part = None if special or default or name in _TOLD else _part(value)
            if part is not None:
                yield f"{owner.__name__}.{name}", part


def _instance_parts(operator: Operator) -> Iterator[tuple[str, list[str]]]:
    """Values that were given; what begins with an underscore, or is computed once and kept, is none."""
    fields = {name: getattr(operator, name) for name in getattr(operator, "__dataclass_fields__", {})}
    for name, value in (fields | getattr(operator, "__dict__", {})).items():
        kept = isinstance(inspect.getattr_static(type(operator), name, None), functools.cached_property)
        part = None if kept or name.startswith("_") else _part(value)
        if part is not None:
            yield f"self.{name}", part


def _part(value: object) -> list[str] | None:
    """By source and by bytecode; None for what has no identity."""
    function = _function_of(value)
    if function is None:
        plain = _plain(value)
        return None if plain is None else [plain, plain]
    code = function.__code__
    if code.co_filename == "<string>" and code.co_name == "__init__":  # written by @dataclass, out of the fields
        return None
    around = [*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items()), *_closed(function)]
    parts = [_around(item) for item in around]
    text = source_text(code)
    return [
        content_hash([text, [by_source for by_source, _ in parts]]) if text else "",
        content_hash([_compiled(function), [by_bytecode for _, by_bytecode in parts]]),
    ]


def _function_of(value: object) -> FunctionType | None:
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    elif isinstance(value, staticmethod | classmethod):
        value = value.__func__
    found = inspect.unwrap(value) if callable(value) and not isinstance(value, type) else None
    return found if isinstance(found, FunctionType) else None


def _closed(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            yield None


def _around(value: Any) -> tuple[str, str]:
    """A default or a closed-over value, by source and by bytecode; a function in it without what it closes over."""
    function = _function_of(value)
    if function is not None:
        return source_text(function.__code__), _compiled(function)
    plain = _plain(value) or type(value).__name__
    return plain, plain


def _compiled(function: FunctionType) -> str:
    code: CodeType = function.__code__
    without_docstring = tuple(None if c == function.__doc__ else c for c in code.co_consts)
    return bytes_hash(bytecode(code.replace(co_consts=without_docstring)))


def _plain(value: object) -> str | None:
    """Numbers, texts and vectors, and sequences and mappings of them; None for anything else."""
    if value is None or isinstance(value, str | bytes | int | float | complex):
        return repr(value)
    if isinstance(value, SteeringVector):
        return value.hash
    if isinstance(value, Mapping):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, Sequence):
        plain = [_plain(item) for item in value]
        return None if None in plain else repr(plain)
    return None
