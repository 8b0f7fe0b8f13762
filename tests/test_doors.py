"""The rooms of the package know each other by imports, by arguments and by `_target_`: by no other name in a string."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "automodel_lite"
ROOMS = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
# a name, and the beginning of one in an f-string; a sentence may speak of a class
NAME = re.compile(r"automodel_lite\.(\w+)(\.\w+)*[.:]?(\w+)?")
ALLOWED = {
    "automodel_lite/cli/commands.yaml": "--help lists commands without importing them",
}


def names(texts: Iterator[str]) -> list[str]:
    """Those of the texts that name a module of ours, or what is in one."""
    found = [(text, NAME.fullmatch(text)) for text in texts]
    return [text for text, match in found if match and match[1] in ROOMS]


def strings_of(source: str) -> Iterator[str]:
    """The strings of a Python file that are no docstring."""
    tree = ast.parse(source)
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    prose = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def values_of(value: Any) -> Iterator[str]:
    """The strings of a YAML file, but what its `_target_` keys name."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key != "_target_":
                yield from values_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from values_of(item)
    elif isinstance(value, str):
        yield value


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('locate("automodel_lite.parts.ema.average")', ["automodel_lite.parts.ema.average"]),
        ('import_module(f"automodel_lite.extras.{name}")', ["automodel_lite.extras."]),
        ('main = "automodel_lite.cli.line:read"', ["automodel_lite.cli.line:read"]),
        ('"""automodel_lite.parts"""\nMARK = "automodel_lite.json"', []),
        ('raise ConfigError("it must be a subclass of automodel_lite.models.loss.Loss.")', []),
    ],
    ids=["name", "beginning", "function", "docstring_and_file", "sentence"],
)
def test_names_are_told_from_sentences(source: str, expected: list[str]) -> None:
    assert names(strings_of(source)) == expected


def test_no_module_is_named_in_a_string() -> None:
    """An editor, grep and mypy follow imports and arguments, and no names."""
    found = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]):
        found[str(path.relative_to(ROOT))] = names(strings_of(path.read_text()))
    for path in sorted(PACKAGE.rglob("*.yaml")):
        found[str(path.relative_to(ROOT))] = names(values_of(yaml.safe_load(path.read_text())))
    assert {path for path, named in found.items() if named} == ALLOWED.keys(), found
