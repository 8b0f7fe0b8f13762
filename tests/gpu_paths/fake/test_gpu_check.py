"""gpu_check's whole plan on cards of both sizes, each group of parts in a process, as on a card."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.plan import full_plan
from benchmarks.gpu_check import FILE
from tests.gpu_paths.fake.jobs import only_on_fake_gpu
from tests.gpu_paths.fake.run import ROOT, environment

pytestmark = only_on_fake_gpu
CARDS = {"H100": ("84.9", "NVIDIA H100 80GB HBM3"), "H200": ("150.1", "NVIDIA H200")}
GROUPS = list(dict.fromkeys(part.group for part in full_plan()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all groups of a card, which share what the compilers made."""
    return tmp_path_factory.mktemp("gpu_check")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("card", CARDS)
def test_the_plan_runs_to_where_numbers_are_compared(card: str, group: str, folder: Path) -> None:
    gb, name = CARDS[card]
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_paths.fake.whole_plan", str(folder / card), group],
        env=environment(FAKE_GPU_GB=gb, FAKE_GPU_NAME=name),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    wanted = {part.name for part in full_plan() if part.group == group}
    rows = map(json.loads, (folder / card / FILE).read_text().splitlines())
    found = {row["part"]: row for row in rows if row["part"] in wanted}
    assert found.keys() == wanted
    for row in found.values():
        if row.get("attention") == "packed":
            assert row["graphs_after_warmup"] == 0
            assert row["reserved_gib"] == row["reserved_gib_warm"]  # nothing grows either
