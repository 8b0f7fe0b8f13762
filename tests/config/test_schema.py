"""Every number of the schema and of the parts has its range."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from automodel_lite.config.check import known_keys
from automodel_lite.config.components import own_targets
from automodel_lite.config.rules import Seed
from automodel_lite.config.schema import Config
from automodel_lite.config.signatures import arguments_of
from docs.write_config import rules_of


def numbers_without_a_range(hints: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, hint in hints.items():
        if is_dataclass(hint):
            yield from numbers_without_a_range(
                typing.get_type_hints(hint, include_extras=True), f"{prefix}{name}."
            )
        elif any(kind in (int, float) for kind in kinds(hint)) and not list(rules_of(hint)):
            yield f"{prefix}{name}"


def kinds(hint: Any) -> Iterator[Any]:
    """The plain types inside an annotation: `Annotated[int, …] | None` -> int, NoneType."""
    if typing.get_origin(hint) is typing.Annotated:
        yield from kinds(typing.get_args(hint)[0])
    elif typing.get_origin(hint) in (typing.Union, types.UnionType, list, tuple):
        for arg in typing.get_args(hint):
            yield from kinds(arg)
    else:
        yield hint


# handed over by the program, never by a configuration
RUNTIME = {"max_steps", "cp_size", "run.first_step"}


def counts_without_a_bound(hint: Any, rules: tuple[Any, ...] = ()) -> bool:
    """Whether a whole number may be as large as a machine word holds; seeds may."""
    if typing.get_args(hint)[:2] == typing.get_args(Seed):
        return False
    if typing.get_origin(hint) is typing.Annotated:
        return counts_without_a_bound(typing.get_args(hint)[0], typing.get_args(hint)[1:])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(counts_without_a_bound(arg, rules) for arg in typing.get_args(hint))
    return hint is int and not any(rule.problem(10**18) for rule in rules)


def test_every_count_has_a_bound() -> None:
    for key in known_keys():
        kind, _, name = key.rpartition(".")
        group = typing.get_type_hints(Config)[kind] if kind else Config
        hint = typing.get_type_hints(group, include_extras=True)[name]
        assert not counts_without_a_bound(hint) or key == "training.max_time", key
    for target in sorted(own_targets()):
        for key, argument in arguments_of(target).items():
            assert key in RUNTIME or not counts_without_a_bound(argument.hint), f"{target} {key}"


def test_every_number_has_a_range() -> None:
    assert (
        list(numbers_without_a_range(typing.get_type_hints(Config, include_extras=True), "")) == []
    )
    for target in sorted(own_targets()):
        hints = {key: argument.hint for key, argument in arguments_of(target).items()}
        assert set(numbers_without_a_range(hints, "")) <= RUNTIME, target
