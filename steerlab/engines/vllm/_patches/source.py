"""Reads what names of vLLM are, from its source and without importing it.

A place is written `module:Name` or `module:Class.name`. What is found there is a line: the parameters of a function or
method, `(request, request_wave=0)`, without `self`; `class`; `property`; `attribute: TYPE`, which a class states or one
of its methods sets (without the type where none is written); `imported from MODULE`; or `value`, of a module.
"""

import ast
import importlib.util
from functools import cache, cached_property
from pathlib import Path


class Source:
    """The source of a vLLM.

    Attributes:
        root: the folder that holds the package `vllm`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._module = cache(self._read)

    @classmethod
    def installed(cls) -> "Source | None":
        """That of the installed vLLM; None if there is none."""
        found = importlib.util.find_spec("vllm")
        where = None if found is None else found.submodule_search_locations
        return cls(Path(next(iter(where))).parent) if where else None

    def __call__(self, place: str) -> str | None:
        """What is at a place; None if nothing is."""
        module, _, name = place.partition(":")
        found = self._module(module)
        return None if found is None else self._in(found, name.split("."))

    def _read(self, module: str) -> "_Module | None":
        path = self.root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return _Module(ast.parse(file.read_text(encoding="utf-8")))
        return None

    def _in(self, module: "_Module", names: list[str]) -> str | None:
        node = module.named.get(names[0])
        if len(names) == 1:
            return None if node is None else _described(node, names[0])
        return self._member(module, node, names[1]) if isinstance(node, ast.ClassDef) else None

    def _member(self, module: "_Module", node: ast.ClassDef, name: str) -> str | None:
        """What a class calls by a name, or a class that it inherits from."""
        for part in node.body:
            if name in _names(part):
                return _described(part, name, is_member=True)
        if name in _attributes(node):
            return _attributes(node)[name]
        for base in node.bases:
            owner, inherited = self._class(module, base)
            found = None if owner is None or inherited is None else self._member(owner, inherited, name)
            if found is not None:
                return found
        return None

    def _class(self, module: "_Module | None", base: ast.expr) -> tuple["_Module | None", ast.ClassDef | None]:
        """The class that a base names, followed through imports."""
        name = base.value if isinstance(base, ast.Subscript) else base
        node = module.named.get(name.id) if module is not None and isinstance(name, ast.Name) else None
        if isinstance(node, ast.ImportFrom) and isinstance(name, ast.Name) and node.module:
            return self._class(self._module(node.module) if node.level == 0 else None, name)
        return module, node if isinstance(node, ast.ClassDef) else None


class _Module:
    """A parsed module."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree

    @cached_property
    def named(self) -> dict[str, ast.stmt]:
        """The statements that give names, those under a condition included."""
        found: dict[str, ast.stmt] = {}
        waiting: list[ast.stmt] = list(self._tree.body)
        while waiting:
            node = waiting.pop(0)
            if isinstance(node, ast.If | ast.Try):
                waiting += [*node.body, *node.orelse]
            for name in _names(node):
                found.setdefault(name, node)
        return found


def _names(node: ast.stmt) -> list[str]:
    """What a statement names."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return [target.id for target in _targets(node) if isinstance(target, ast.Name)]


def _described(node: ast.stmt, name: str, *, is_member: bool = False) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = {part.id for part in node.decorator_list if isinstance(part, ast.Name)}
        if decorators & {"property", "cached_property"}:
            return "property"
        return _parameters(node.args, drops_first=is_member and "staticmethod" not in decorators)
    if isinstance(node, ast.ClassDef):
        return "class"
    if isinstance(node, ast.ImportFrom):
        return f"imported from {'.' * node.level}{node.module or ''}"
    return _kind(node) if is_member else "value"


def _parameters(arguments: ast.arguments, *, drops_first: bool) -> str:
    """As they are written, without annotations."""
    bare = ast.parse(f"def f({ast.unparse(arguments)}): ...").body[0]
    assert isinstance(bare, ast.FunctionDef)
    for part in ast.walk(bare.args):
        if isinstance(part, ast.arg):
            part.annotation = None
    first = bare.args.posonlyargs or bare.args.args
    if drops_first and first:
        del first[0]
    return f"({ast.unparse(bare.args)})"


@cache
def _attributes(node: ast.ClassDef) -> dict[str, str]:
    """What the methods of a class set of `self`, with its type if one of them writes it."""
    methods = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
    found: dict[str, str] = {}
    for statement in (inner for method in methods for inner in ast.walk(method)):
        for target in _targets(statement):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                found[target.attr] = max(found.get(target.attr, ""), _kind(statement), key=len)
    return found


def _kind(node: ast.AST) -> str:
    return f"attribute: {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else "attribute"


def _targets(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to."""
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    whole = node.targets if isinstance(node, ast.Assign) else []
    return [part for target in whole for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
