"""Reading an experiment file: every complaint names the file and the key."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

import steerlab as sl
from steerlab._cli.spec import ExperimentSpec, Section
from steerlab.core._characters import half_character
from steerlab.core._files import read_text

_Spec = TypeVar("_Spec", bound=BaseModel)
_Placed = TypeVar("_Placed", bound=Section)


def read_spec(path: Path) -> ExperimentSpec:
    """The experiment that a YAML file describes; its paths count from the file's folder.

    Args:
        path: the file.

    Raises:
        DataError: if the file cannot be read, is not YAML, or has a key that is unknown, missing or of the wrong kind.
    """
    return experiment_of(read_mapping(path), path)


def experiment_of(data: dict[Any, Any], path: Path, *, key: str | None = None) -> ExperimentSpec:
    """The experiment that keys and values describe.

    Args:
        data: keys and values.
        path: the file they stand in, which their paths count from.
        key: the key of that file that holds them; None if they are the file.

    Raises:
        DataError: for a key that is unknown, missing or of the wrong kind.
    """
    place = f"{path}" if key is None else f"{path}: {key}"
    return relative_to(path.parent, checked(ExperimentSpec, data, place))


def checked(kind: type[_Spec], data: dict[Any, Any], place: str) -> _Spec:
    """Keys and values as a specification.

    Raises:
        DataError: for a key that is unknown, missing or of the wrong kind; begins with the place.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise sl.DataError(f"{place}: {_explain(error, kind)}") from error


# --- YAML ---------------------------------------------------------------------------------------------------------


# PyYAML also breaks lines at these; while it reads, codes that no text uses stand for them.
_BREAKS = {"\x85": "\U000f0085", "\u2028": "\U000f2028", "\u2029": "\U000f2029", "\r": "\U000f000d"}
_HIDDEN, _SHOWN = str.maketrans(_BREAKS), str.maketrans({code: sign for sign, code in _BREAKS.items()})


class _Loader(yaml.SafeLoader):
    """YAML in which a key stands once, a text holds whole characters, and only line feeds end a line."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if not isinstance(value, str):
            return value
        value = value.translate(_SHOWN)
        if half_character(value) is None:
            return value
        try:  # both halves of a character, as JSON writes them
            return value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError as error:
            problem = f"the text {value!r:.60} holds half a character"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if isinstance(key, str) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} stands twice", problem_mark=key_node.start_mark)
            seen.add(key) if isinstance(key, str) else None
        return super().construct_mapping(node, deep)


def read_mapping(path: Path) -> dict[Any, Any]:
    """The keys and values of a YAML file.

    Raises:
        DataError: if it cannot be read, is not YAML, holds something else, or a key twice.
    """
    text = read_text(path).replace("\r\n", "\n")
    try:
        data = yaml.load(text.translate(_HIDDEN), Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise sl.DataError(f"{path}: {line}{error.problem or 'this is not valid YAML'}.") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise sl.DataError(f"{path}: line {line}: the character {text[error.position]!r} is not allowed.") from error
    except RecursionError as error:
        raise sl.DataError(f"{path} is not valid YAML: it is nested too deeply.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise sl.DataError(f"{path} is not valid YAML: {error}.") from error
    if not isinstance(data, dict):
        raise sl.DataError(f"{path} must hold keys such as {', '.join(list(ExperimentSpec.model_fields)[:5])}.")
    return data


# --- paths --------------------------------------------------------------------------------------------------------


def relative_to(folder: Path, spec: _Placed) -> _Placed:
    """A specification with every path in it, and a model that is a folder, counted from a folder."""
    moved: Any = _moved(spec, folder)
    return moved.model_copy(update={"model": model_from(folder, moved.model)})


def model_from(folder: Path, model: str) -> str:
    """The model of that name; a folder there goes before an alias or a hub id."""
    return str(folder / model) if (folder / model).is_dir() else model


def _moved(value: Any, folder: Path) -> Any:
    """The value with every path in it counted from a folder."""
    if isinstance(value, Path):
        return folder / value
    if isinstance(value, Section):
        changes = {name: _moved(getattr(value, name), folder) for name in type(value).model_fields}
        changed = {name: new for name, new in changes.items() if new is not getattr(value, name)}
        return value.model_copy(update=changed) if changed else value
    if isinstance(value, dict) and any(isinstance(part, Section | Path) for part in value.values()):
        return {name: _moved(part, folder) for name, part in value.items()}
    return value


# --- complaints ---------------------------------------------------------------------------------------------------


def _explain(error: ValidationError, root: type[BaseModel]) -> str:
    """The first problem as a sentence, and how many more there are."""
    # An unknown key goes first: it may well be the one that is missing, misspelt.
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first, more = problems[0], len({_key(p["loc"], root) for p in problems}) - 1
    rest = f" ({more} more {'problem' if more == 1 else 'problems'} in this file.)" if more else ""
    return _sentence(first, root) + rest


def _sentence(problem: Any, root: type[BaseModel]) -> str:
    kind, loc, value = problem["type"], problem["loc"], problem["input"]
    key = _key(loc, root)
    if kind == "extra_forbidden":
        return f"unknown key {key!r}; {_suggestion(loc, root)} Its value is {value!r:.60}."
    if kind == "missing":
        return f"the key {key!r} is missing."
    if kind == "model_type":
        known = ", ".join(_section(loc, root).model_fields)
        return f"{key}: must hold keys ({known}), got {value!r:.60}."
    if kind == "value_error":
        told = str(problem["ctx"]["error"]).rstrip(".")
        return f"{key}: {told}." if key else f"{told}."
    return f"{key}: {problem['msg'][0].lower()}{problem['msg'][1:]}, got {value!r:.60}."


def _suggestion(loc: Sequence[Any], root: type[BaseModel]) -> str:
    wanted, folder = str(loc[-1]), _key(loc[:-1], root)
    here = list(_section(loc[:-1], root).model_fields)
    near = difflib.get_close_matches(wanted, here, n=1)
    if near:
        return f"did you mean {f'{folder}.{near[0]}' if folder else near[0]!r}?"
    for section, kind in {"": root, **_sections(root)}.items():
        near = difflib.get_close_matches(wanted, list(kind.model_fields), n=1, cutoff=0.8)
        if near:
            return f"did you mean {f'{section}.{near[0]}' if section else near[0]!r}?"
    return f"the keys {f'of {folder}' if folder else 'here'} are {', '.join(here)}."


def _key(loc: Sequence[Any], root: type[BaseModel]) -> str:
    """A dotted key; alternatives of a union, which pydantic adds to a location, are left out."""
    return ".".join(_walk(loc, root)[0])


def _section(loc: Sequence[Any], root: type[BaseModel]) -> type[BaseModel]:
    """The section that a location lies in."""
    return _walk(loc, root)[1]


def _walk(loc: Sequence[Any], root: type[BaseModel]) -> tuple[list[str], type[BaseModel]]:
    """The keys along a location, and the section that the last of them names or stands in."""
    keys, section, entries = [], root, None
    for position, part in enumerate(loc):
        known = entries is not None or isinstance(part, int) or part in section.model_fields
        if not known and (position < len(loc) - 1 or _is_alternative(part)):
            continue
        keys.append(str(part))
        if entries is not None:
            section, entries = entries, None
        elif part in section.model_fields:
            inner, entries = _holds(section.model_fields[part].annotation)
            section = inner or section
    return keys, section


def _is_alternative(part: Any) -> bool:
    """Whether a part of a location is pydantic's name for one alternative of a union, which no key looks like."""
    return part in _ALTERNATIVES or any(sign in str(part) for sign in "[](")


_ALTERNATIVES = frozenset("bool int float str path dict list none literal".split())


def _holds(annotation: Any) -> tuple[type[BaseModel] | None, type[BaseModel] | None]:
    """The section that a field of this type is, and the section that each entry of it is."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, None
    if get_origin(annotation) is dict:
        return None, _holds(get_args(annotation)[1])[0]
    for kind in get_args(annotation):
        found = _holds(kind)
        if any(found):
            return found
    return None, None


def _sections(root: type[BaseModel] = ExperimentSpec) -> dict[str, type[BaseModel]]:
    """The sections of a specification by their key; of a mapping, its entries'."""
    held = {name: _holds(field.annotation) for name, field in root.model_fields.items()}
    return {name: section or entries for name, (section, entries) in held.items() if section or entries}  # pyright: ignore[reportReturnType]
