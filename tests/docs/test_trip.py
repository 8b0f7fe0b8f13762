"""docs/architecture.md prints how many files and functions a run enters: no fewer than are traced."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.system
def test_the_page_has_the_traced_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "docs/trace_trip.py"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    traced = re.findall(r"^(set-up|data|a step): (\d+) files, (\d+) functions", done.stdout, re.M)
    page = (ROOT / "docs" / "architecture.md").read_text()
    printed = re.findall(r"^\| (set-up|data|a step) \| [^|]* \| (\d+) \| (\d+) \|", page, re.M)
    assert [name for name, *_ in traced] == [name for name, *_ in printed]
    for (name, *now), (_, *then) in zip(traced, printed):
        num_files, num_functions = map(int, now)
        most_files, most_functions = map(int, then)
        assert num_files <= most_files, name
        assert num_functions <= most_functions, name
        assert num_functions > most_functions - 25, f"{name}: the page is out of date"
