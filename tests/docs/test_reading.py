"""docs/reading.md names files that exist, and functions and classes that these files define; long pages say where one can stop."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
ROW = re.compile(r"^\| `([\w/]+\.py)` \|([^|]*)\|", re.M)


def test_the_page_names_what_exists():
    rows = ROW.findall((ROOT / "docs" / "reading.md").read_text())
    assert len(rows) > 15
    for path, names in rows:
        defined = {
            node.name
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        missing = set(re.findall(r"`(\w+)`", names)) - defined
        assert not missing, f"{path}: {missing}"


@pytest.mark.parametrize("page", ["data.md", "images.md", "parallelism.md"])
def test_a_long_page_says_where_one_can_stop(page: str):
    """Behind about a third of it, with what the rest is for."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.startswith("You can stop here")]
    assert 0.2 <= place / len(lines) <= 0.45
    assert " The rest is for " in " ".join(lines[place : place + 3])
