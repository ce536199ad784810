"""Reading an experiment file: every complaint names the file and the key."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

import steerlab as sl
from steerlab.cli.loading import read_text
from steerlab.cli.spec import ExperimentSpec


def read_spec(path: Path) -> ExperimentSpec:
    """The experiment that a YAML file describes; its paths count from the file's folder.

    Raises:
        DataError: if the file cannot be read, is not YAML, or has a key that is unknown, missing or of the wrong kind.
    """
    data = _read_mapping(path)
    try:
        spec = ExperimentSpec.model_validate(data)
    except ValidationError as error:
        raise sl.DataError(f"{path}: {_explain(error)}") from error
    return _relative_to(path.parent, spec)


# --- YAML ---------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML in which a key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if isinstance(key, str) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} stands twice", problem_mark=key_node.start_mark)
            seen.add(key) if isinstance(key, str) else None
        return super().construct_mapping(node, deep)


def _read_mapping(path: Path) -> dict[Any, Any]:
    try:
        data = yaml.load(read_text(path), Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise sl.DataError(f"{path}: {line}{error.problem or 'this is not valid YAML'}.") from error
    except yaml.YAMLError as error:
        raise sl.DataError(f"{path} is not valid YAML: {error}.") from error
    if not isinstance(data, dict):
        raise sl.DataError(f"{path} must hold keys such as {', '.join(list(ExperimentSpec.model_fields)[:5])}.")
    return data


# --- paths --------------------------------------------------------------------------------------------------------


def _relative_to(folder: Path, spec: ExperimentSpec) -> ExperimentSpec:
    def moved(section: Any, key: str) -> Any:
        value = getattr(section, key)
        return section.model_copy(update={key: folder / value}) if isinstance(value, Path) else section

    changes = {"pairs": moved(spec.pairs, "path"), "targets": moved(spec.targets, "path"), "root": folder / spec.root}
    if spec.neutral is not None:
        changes["neutral"] = folder / spec.neutral
    if spec.generations is not None:
        changes["generations"] = moved(spec.generations, "prompts")
    if (folder / spec.model).is_dir():
        changes["model"] = str(folder / spec.model)
    return spec.model_copy(update=changes)


# --- complaints ---------------------------------------------------------------------------------------------------


def _explain(error: ValidationError) -> str:
    """The first problem as a sentence, and how many more there are."""
    problems = error.errors()
    first, more = problems[0], len({_key(p["loc"]) for p in problems}) - 1
    rest = f" ({more} more {'problem' if more == 1 else 'problems'} in this file.)" if more else ""
    return _sentence(first) + rest


def _sentence(problem: Any) -> str:
    kind, loc, value = problem["type"], problem["loc"], problem["input"]
    key = _key(loc)
    if kind == "extra_forbidden":
        return f"unknown key {key!r}; {_suggestion(loc)}"
    if kind == "missing":
        return f"the key {key!r} is missing."
    if kind == "model_type":
        known = ", ".join(_section(loc).model_fields)
        return f"{key}: must hold keys ({known}), got {value!r:.60}."
    if kind == "value_error":
        return f"{key}: {problem['ctx']['error']}."
    return f"{key}: {problem['msg'][0].lower()}{problem['msg'][1:]}, got {value!r:.60}."


def _suggestion(loc: Sequence[Any]) -> str:
    wanted, folder = str(loc[-1]), [str(part) for part in loc[:-1]]
    here = list(_section(folder).model_fields)
    near = difflib.get_close_matches(wanted, here, n=1)
    if near:
        return f"did you mean {'.'.join([*folder, near[0]])!r}?"
    for section in ("", *_sections()):
        names = list(_section([section] if section else []).model_fields)
        near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.8)
        if near:
            return f"did you mean {f'{section}.{near[0]}' if section else near[0]!r}?"
    return f"the keys {'of ' + '.'.join(folder) if folder else 'here'} are {', '.join(here)}."


def _key(loc: Sequence[Any]) -> str:
    """A dotted key; alternatives of a union, which pydantic adds to a location, are left out."""
    depth = 2 if loc and loc[0] in _sections() else 1
    indices = [part for part in loc[depth:] if isinstance(part, int)]
    return ".".join(str(part) for part in [*loc[:depth], *indices])


def _sections() -> dict[str, type[BaseModel]]:
    found = {}
    for name, field in ExperimentSpec.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[name] = kind
    return found


def _section(loc: Sequence[Any]) -> type[BaseModel]:
    return _sections()[str(loc[0])] if loc else ExperimentSpec
