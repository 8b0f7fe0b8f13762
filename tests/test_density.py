"""One statement does one thing: four forms that squeeze several into one are in no file of the package or the recipes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STATEMENTS = (
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.Return,
    ast.Expr,
    ast.For,
    ast.YieldFrom,
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def dense_forms(text: str) -> list[str]:
    """`line: form` of each of the four."""
    tree = ast.parse(text)
    return [f"{node.lineno}: {form}" for node, form in _found(tree, {})]


def _found(tree: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Call, *COMPREHENSIONS)):
                parents[child] = node
        if isinstance(node, ast.Assign) and _is_packed(node):
            yield node, "two values in one assignment"
        if isinstance(node, COMPREHENSIONS) and node.end_lineno - node.lineno >= 2:
            above = parents[node]
            if isinstance(above, ast.Call) and above.args == [node]:
                above = parents[above]  # any(...), dict(...) of it
            if not isinstance(above, STATEMENTS):
                yield node, "a comprehension of three lines inside an expression"
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.IfExp):
            yield node, "a condition unpacked into a list"
        if isinstance(node, ast.Lambda):
            inner = (x for x in ast.walk(node.body) if isinstance(x, ast.Lambda))
            if next(inner, None):
                yield node, "a lambda in a lambda"


def _is_packed(node: ast.Assign) -> bool:
    """`a, b = x, y` could be two statements, unless `y` needs the `a` of before: a swap, a recurrence."""
    target, value = node.targets[0], node.value
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return False
    written: set[str] = set()
    for place, part in zip(target.elts, value.elts):
        if written & {ast.unparse(x) for x in ast.walk(part)}:
            return False
        written.add(ast.unparse(place))
    return True


@pytest.mark.parametrize("folder", ["automodel_lite", "recipes"])
def test_one_statement_does_one_thing(folder: str) -> None:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        found += [f"{path.relative_to(ROOT)}:{form}" for form in dense_forms(path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "is_dense"),
    [
        ("a, b = f(x), g(y)", True),
        ("a, b = b, a + b", False),
        ("a, b = f(x)", False),
        ("f([\n x\n for x in y])", False),
        ("f(1, [\n x\n for x in y])", True),
        ("z = 1 + sum(\n x\n for x in y\n)", True),
        ("z = sum(\n x\n for x in y\n)", False),
        ("f(1, *([a] if a else []))", True),
        ("f(lambda x: g(lambda y: x + y))", True),
        ("f(lambda x: x, lambda y: y)", False),
    ],
)
def test_the_forms(text: str, is_dense: bool) -> None:
    assert bool(dense_forms(text)) == is_dense
