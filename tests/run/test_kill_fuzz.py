"""SIGKILL at random moments: nothing complete is lost, nothing incomplete is taken, no loss changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.run.small_run import DROPOUT

ROOT = Path(__file__).resolve().parents[2]


def fuzz(folder: Path, kills: int, worlds: str, seed: int, *overrides: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.run.kill_fuzz", str(folder), str(kills), worlds, str(seed), *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20 * kills + 300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["kills"] == kills
    assert found["lost"] == 0
    assert found["losses"] > kills
    return found


DROPOUT_64 = [option.replace("n_positions=128", "n_positions=64") for option in DROPOUT]
CASES = [
    pytest.param("2", DROPOUT_64, 0.0, 0.5, id="sync"),
    pytest.param("2", [*DROPOUT_64, "checkpoint.mode=async"], 0.0, 0.3, id="async"),
    pytest.param("2,1,4", [], 1e-6, 0.2, id="worlds-1-2-4", marks=pytest.mark.slow),
]


@pytest.mark.system
@pytest.mark.parametrize("kills", [20, *(pytest.param(many, marks=pytest.mark.slow) for many in (100, 1000))])
@pytest.mark.parametrize(("worlds", "overrides", "tolerance", "share"), CASES)
def test_kills(tmp_path: Path, worlds: str, overrides: list[str], tolerance: float, share: float, kills: int) -> None:
    found = fuzz(tmp_path, round(kills * share), worlds, kills, *overrides)
    assert found["worst_rel"] <= tolerance
    assert found["not_equal"] == 0 or tolerance
