"""docs/architecture.md says how many files and functions a line of a file enters until its loss."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_page_has_the_traced_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "docs/trace_trip.py"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    page = (ROOT / "docs" / "architecture.md").read_text()
    for in_script, on_page in [
        (r"together: (\d+) files, (\d+) functions", r"enters (\d+) files and (\d+) functions"),
        (
            r"of these hold the line: (\d+) files, (\d+) functions",
            r"these, (\d+) files and (\d+) functions hold the line",
        ),
    ]:
        (traced,) = re.findall(in_script, done.stdout)
        (written,) = re.findall(on_page, page)
        assert int(traced[0]) <= int(written[0])
        assert int(traced[1]) <= int(written[1])
        assert int(traced[1]) > int(written[1]) - 20  # a number that is out of date is too high
