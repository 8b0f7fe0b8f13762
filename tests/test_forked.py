"""`make test FILES=...`: what was named and is not there is told, and nothing else is run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["tests/nothing.py", "tests/test_seed.py::nothing"])
def test_a_test_that_is_not_there_is_named(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.forked", "1", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert name in done.stderr
    assert "no tests ran" not in done.stdout
