"""docs/troubleshooting.md quotes messages; a quotation that the source does not say any more is stale."""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
QUOTED = re.findall(
    r"\*\*`(.+?)`\*\*", (ROOT / "docs/troubleshooting.md").read_text(), flags=re.MULTILINE
)


@lru_cache(maxsize=1)
def texts_of_the_source() -> list[str]:
    """Every string of the package; what is filled in is …."""
    found = []
    for path in (ROOT / "automodel_lite").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def pattern_of(quoted: str) -> str:
    """The quotation as a regular expression; … stands for anything."""
    return ".*".join(re.escape(piece.strip()) for piece in quoted.split("…") if piece.strip())


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_source_says_it(quoted: str):
    assert any(re.search(pattern_of(quoted), text) for text in texts_of_the_source())


def test_there_are_quotations():
    assert len(QUOTED) > 10
