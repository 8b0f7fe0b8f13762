"""Recomputed layers under FSDP give the losses and gradient norms of one process that keeps everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.runs import losses, train


@pytest.mark.parametrize("how", ["full", "selective"])
def test_recomputing_under_fsdp(tmp_path: Path, how: str) -> None:
    few = ["training.max_steps=2", "training.val_every_steps=0", "checkpoint.export_hf=false"]
    alone = losses(train("smoke", tmp_path / "alone", *few))
    options = [f"training.activation_checkpointing={how}", "training.recompute_every_layers=2"]
    sharded = losses(train("smoke", tmp_path / "sharded", *few, *options, world_size=2))
    assert len(alone) == 2
    for got, expected in zip(sharded, alone):
        assert got == pytest.approx(expected, rel=1e-4)
