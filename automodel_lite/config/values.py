"""Does a value fit the type of its key, and the rules that stand in it?"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from automodel_lite.errors import format_value

_LISTS = (list, tuple, Sequence)
_GROUPS = (dict, Mapping)
_UNIONS = (typing.Union, types.UnionType)
_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}


def value_problems(path: str, value: Any, hint: Any) -> Iterator[str]:
    """Yields what is wrong with a value: its type, or a rule that stands in the type."""
    if not matches(value, hint):
        yield f"{path}={format_value(value)} must be {describe(hint)}."
        return
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        texts = [rule.problem(value) for rule in args[1:]]
        yield from (f"{path}={format_value(value)} must be {text}" for text in texts if text)
        yield from value_problems(path, value, args[0])
    elif origin in _UNIONS:
        yield from value_problems(path, value, next(arg for arg in args if matches(value, arg)))
    elif isinstance(value, list) and args:
        for index, item in enumerate(value):
            yield from value_problems(f"{path}.{index}", item, args[0])
    elif isinstance(value, dict) and len(args) == 2:
        for key, item in value.items():
            yield from value_problems(f"{path}.{key}", item, args[1])


def matches(value: Any, hint: Any) -> bool:
    """Returns whether a YAML value fits a type annotation: an int serves as a float, a block as an object."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        return any(matches(value, arg) for arg in args)
    if origin is typing.Literal:
        return value in args
    if origin is Annotated:
        return matches(value, args[0])
    if hint in _NAMES:
        kind = (int, float) if hint is float else hint
        return isinstance(value, kind) and (hint is bool or not isinstance(value, bool))
    if (origin or hint) in _LISTS:
        return isinstance(value, (list, tuple)) and all(matches(item, args[0] if args else Any) for item in value)
    if (origin or hint) in _GROUPS:
        return isinstance(value, dict) and all(matches(item, args[1] if args else Any) for item in value.values())
    is_object = inspect.isclass(hint) and hint not in (object, Any)
    return not (is_object and isinstance(value, dict)) or "_target_" in value


def describe(hint: Any) -> str:
    """Returns a type annotation in words, without its rules: `int | None` -> `a whole number or null`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return describe(args[0])
    if origin in _UNIONS:
        return " or ".join(describe(arg) for arg in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    if (origin or hint) in _LISTS:
        item: Any = args[0] if args else None
        item = typing.get_args(item)[0] if typing.get_origin(item) is Annotated else item
        of: dict[Any, str] = {int: " of whole numbers", float: " of numbers", str: " of texts"}
        return f"a list{of.get(item, '')}"
    if (origin or hint) in _GROUPS:
        return "a group of keys"
    return _NAMES.get(hint, "a block with a _target_")
