"""The bytes that a step really moves are those that docs/planning.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scaling import CHECKPOINTED, Measured, measure
from tests.ranks import run_ranks


def _measure(rank: int, world_size: int, folder: str, overrides: list[str]) -> Measured:
    return measure(["model=llama_smoke", "training.max_steps=8", *overrides], folder)


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.global_batch_size=4"],
        pytest.param(["training.global_batch_size=1", "mesh.cp=2"], marks=pytest.mark.system),
        ["training.global_batch_size=1", "mesh.cp=2", CHECKPOINTED],
    ],
    ids=["fsdp, 2 micro-batches", "cp", "cp, checkpointed"],
)
def test_a_step_moves_the_bytes_of_the_formulas(tmp_path: Path, overrides: list[str]) -> None:
    for measured in run_ranks(_measure, 2, str(tmp_path), overrides):
        assert measured.gather_bytes == pytest.approx(measured.gather_formula, rel=0.01)
        assert measured.reduce_bytes == pytest.approx(measured.reduce_formula, rel=0.01)
        assert measured.exchange_bytes == measured.exchange_formula
        assert (measured.exchange_bytes > 0) == ("mesh.cp=2" in overrides)
        assert measured.other_bytes < 500
        assert measured.state_bytes <= measured.state_formula * 1.01
