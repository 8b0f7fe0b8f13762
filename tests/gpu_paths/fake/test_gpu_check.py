"""Parts of gpu_check on cards of both sizes; those that compare numbers have none to compare here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_paths.fake.jobs import only_on_fake_gpu
from tests.gpu_paths.fake.run import ROOT, environment

pytestmark = only_on_fake_gpu
PARTS = ("header", "ceilings", "step-packed", "step-moe")
CARDS = {"H100": ("84.9", "NVIDIA H100 80GB HBM3"), "H200": ("150.1", "NVIDIA H200")}


@pytest.mark.parametrize("card", CARDS)
def test_parts_run_on_the_card(card: str, tmp_path: Path) -> None:
    gb, name = CARDS[card]
    command = [sys.executable, "benchmarks/gpu_check.py", "--parts", *PARTS]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "gpu_check.jsonl")],
        env=environment(FAKE_GPU_GB=gb, FAKE_GPU_NAME=name),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    assert [part["verdict"] for part in found] == ["pass"] * len(PARTS), done.stderr[-3000:]
    step = found[2]
    assert step["reserved_gib"] == step["reserved_gib_warm"]  # nothing grows after the warm-up
    assert step["graphs_after_warmup"] == 0
