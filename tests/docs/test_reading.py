"""docs/reading.md: an afternoon is 2,000 lines, and its rows say how many lines they really are."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
AFTERNOON = 2000
ROW = re.compile(r"^\| `([\w/]+\.py)` \|([^|]*)\| (\d+) \|", re.M)


def lines_of(path: str, names: list[str]) -> int:
    """Counts the lines of the named functions and classes, or of the file."""
    text = (ROOT / path).read_text()
    if not names:
        return len(text.splitlines())
    found = {
        node.name: node.end_lineno - min(x.lineno for x in (node, *node.decorator_list)) + 1
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    return sum(found[name] for name in names)


def afternoons() -> dict[str, list[tuple[str, list[str], int]]]:
    page = (ROOT / "docs" / "reading.md").read_text()
    found = {}
    for section in page.split("\n## ")[1:]:
        rows = [
            (path, re.findall(r"`(\w+)`", names), int(printed))
            for path, names, printed in ROW.findall(section)
        ]
        found[section.split(":")[0]] = rows
    return found


def test_a_file_is_counted_whole_and_by_its_names():
    whole = lines_of("automodel_lite/training/engine.py", [])
    of_one = lines_of("automodel_lite/training/engine.py", ["TrainingEngine"])
    assert (
        0
        < of_one
        < whole
        == len((ROOT / "automodel_lite/training/engine.py").read_text().splitlines())
    )


@pytest.mark.parametrize("afternoon", ["First afternoon", "Second afternoon", "Third afternoon"])
def test_an_afternoon_is_as_long_as_it_says(afternoon: str):
    rows = afternoons()[afternoon]
    assert rows
    counts = [lines_of(path, names) for path, names, _ in rows]
    assert sum(counts) <= AFTERNOON
    for (path, _, printed), count in zip(rows, counts, strict=True):
        assert abs(count - printed) <= max(10, count // 10), f"{path}: {count} lines"


def test_the_page_counts_what_it_names():
    page = (ROOT / "docs" / "reading.md").read_text()
    (printed,) = re.findall(r"([\d,]+) of the core's", page)
    total = sum(lines_of(path, names) for rows in afternoons().values() for path, names, _ in rows)
    assert abs(total - int(printed.replace(",", ""))) <= 300
