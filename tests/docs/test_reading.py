"""docs/reading.md names files that exist, and functions and classes that these files define."""

import ast
import re
from pathlib import Path

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
