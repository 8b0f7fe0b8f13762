"""What a part takes: the arguments of its `_target_`, with types, defaults and comments.

Those of our own parts are read from the source with `ast`, unimported: a typo is named after one
second of CPU time in place of eleven, since torch and transformers are not imported, and in an
environment that lacks the part's optional package.

What this reader knows: arguments of functions, of `__init__` and of dataclasses, with those of
their bases in this package; literal defaults; annotations of builtins, `typing`, our rules and
schema, and constants of the module. Annotations are evaluated in a namespace of these names, where
any other name is `AnObject`: an object that a block with a `_target_` describes. What it cannot
read: defaults that are computed, arguments that a decorator adds, and classes that a call makes; a
part has none of them.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import typing
from collections import abc
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

from automodel_lite.config import rules, schema
from automodel_lite.config.components import EXTRAS, PACKAGE, CodePath, locate, own_targets

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Argument:
    """An argument of a part; a configuration may leave out those that have a default
    and a comment.
    """

    hint: Any
    default: Any
    comment: str  # beside it in the source


Arguments = dict[str, Argument]  # by name


@cache
def arguments_of(target: str) -> Arguments:
    """Returns the arguments of a target, inherited ones first; `**` is among them when it takes
    any.

    >>> arguments_of("automodel_lite.parts.datasets.toy_chat.ToyChat")["seed"]
    Argument(hint=Annotated[int, Range(0)], default=0, comment='of the chats')

    Raises ConfigError: a target of somebody else's does not exist.
    """
    module, _, name = target.rpartition(".")
    if target in own_targets() or module.startswith("automodel_lite."):
        source = source_of(module)
        return source.arguments(name) if source else {}
    found = locate(target)
    annotated = found.__init__ if inspect.isclass(found) else found  # type: ignore[misc]
    try:
        hints = typing.get_type_hints(annotated, include_extras=True)
    except (NameError, TypeError):  # annotations that only exist for the library's type checker
        hints = {}
    return {
        "**" if item.kind is item.VAR_KEYWORD else key: Argument(
            hints.get(key, Any), item.default, ""
        )
        for key, item in inspect.signature(found).parameters.items()
    }


def options_of(target: str) -> Arguments:
    """Returns the arguments of one of our parts that a configuration may leave out."""
    if not target.startswith("automodel_lite."):
        return {}
    return {
        key: item
        for key, item in arguments_of(target).items()
        if item.comment and item.default is not REQUIRED
    }


def missing_extra(target: str) -> str | None:
    """Returns the optional package that one of our parts needs and that is not installed."""
    source = source_of(target.rpartition(".")[0])
    if source is None:
        return None
    tops = set()
    for node in source.body:
        if isinstance(node, ast.ImportFrom):
            tops.add(str(node.module).split(".")[0])
        elif isinstance(node, ast.Import):
            tops |= {alias.name.split(".")[0] for alias in node.names}
    return next(
        (package for package in EXTRAS if package in tops and find_spec(package) is None), None
    )


def with_options(node: Any) -> Any:
    """Returns a plain configuration whose parts have all of their options: those left out get their
    defaults.
    """
    if isinstance(node, list):
        return [with_options(item) for item in node]
    if not isinstance(node, dict):
        return node
    options = options_of(node["_target_"]) if isinstance(node.get("_target_"), str) else {}
    defaults = {key: option.default for key, option in options.items() if key not in node}
    return {key: with_options(value) for key, value in node.items()} | defaults


class _AnyType(type):
    """Answers for any class that is not imported (`torch.dtype`, `Optimizer`): its attributes and
    its subscripts are the class again, so that an annotation with it can be evaluated.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls


class AnObject(metaclass=_AnyType):
    """In annotations: an object that a configuration describes as a block with a `_target_`."""


class _Source(dict[str, Any]):
    """A module of this package, unimported; as a mapping it is the namespace of its annotations."""

    def __init__(self, module: str, text: str) -> None:
        names = {"CodePath": CodePath, "typing": typing}
        super().__init__(
            {**vars(builtins), **vars(typing), **vars(abc), **vars(rules), **vars(schema), **names}
        )
        self.module = module
        self.lines = text.splitlines()
        self.body = ast.parse(text).body

    def __missing__(self, name: str) -> Any:
        for node in self.body:
            if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
                return self.value(node.value)
            if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
                other = source_of(node.module or "")
                return other[name] if other else AnObject
        return AnObject

    def value(self, node: ast.expr) -> Any:
        # only source of this package comes here
        return eval(ast.unparse(node), {}, self)

    def arguments(self, name: str) -> Arguments:
        """Returns the arguments of a function, of an `__init__`, or the fields of a dataclass."""
        kinds = (ast.ClassDef, ast.FunctionDef)
        node = next(
            (node for node in self.body if isinstance(node, kinds) and node.name == name), None
        )
        if isinstance(node, ast.FunctionDef):
            return self._of_function(node.args, 0)
        if node is None:
            return {}
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                return self._of_function(method.args, 1)
        found = self._inherited(node)
        if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            return found
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        for item in fields:
            if not re.search(r"\bClassVar\b|init=False", ast.unparse(item)):
                key, argument = self._read(item.target, item.annotation, item.value)
                found[key] = argument
        return found

    def _inherited(self, node: ast.ClassDef) -> Arguments:
        """Returns the arguments of the bases that this package has: where the module imports them,
        or its own.
        """
        found: Arguments = {}
        for base in map(ast.unparse, reversed(node.bases)):
            origin = self.module
            for item in self.body:
                if isinstance(item, ast.ImportFrom) and base in {x.name for x in item.names}:
                    origin = str(item.module)
            if origin.startswith("automodel_lite."):
                found |= arguments_of(f"{origin}.{base}")
        return found

    def _of_function(self, takes: ast.arguments, first: int) -> Arguments:
        defaults = [
            *[None] * (len(takes.args) - len(takes.defaults)),
            *takes.defaults,
            *takes.kw_defaults,
        ]
        pairs = [*zip([*takes.args, *takes.kwonlyargs], defaults)][first:]
        found = dict(self._read(item, item.annotation, default) for item, default in pairs)
        return found | ({"**": Argument(Any, REQUIRED, "")} if takes.kwarg else {})

    def _read(
        self, name: Any, annotation: ast.expr | None, default: ast.expr | None
    ) -> tuple[str, Argument]:
        comment = self.comment_of(name, default)
        value = REQUIRED if default is None else None
        if default is not None and comment:
            value = ast.literal_eval(default)
        hint = self.value(annotation) if annotation is not None else Any
        key = name.arg if isinstance(name, ast.arg) else name.id
        return key, Argument(hint, list(value) if isinstance(value, tuple) else value, comment)

    def comment_of(self, node: Any, default: ast.expr | None = None) -> str:
        """Returns the comments of an argument or a field: behind its lines, or else above it."""
        last = default.end_lineno if default is not None else node.end_lineno
        lines = self.lines[node.lineno - 1 : last]
        behind = [line.partition("  # ")[2].strip() for line in lines if "  # " in line]
        above: list[str] = []
        for line in reversed(self.lines[: node.lineno - 1]):
            if not line.strip().startswith("# "):
                break
            above.insert(0, line.strip()[2:])
        return " ".join(behind or above)


@cache
def source_of(module: str) -> _Source | None:
    """Returns a module of this package, unimported; None for any other."""
    path = PACKAGE.parent / f"{module.replace('.', '/')}.py"
    return (
        _Source(module, path.read_text())
        if module.startswith("automodel_lite.") and path.is_file()
        else None
    )
