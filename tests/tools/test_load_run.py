"""The checkpoint that a tool takes of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from automodel_lite.errors import ConfigError
from recipes import average, export_hf
from tests.run.test_export import FEW
from tests.runs import train, train_quick


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path):
    run = tmp_path / "run"
    train("smoke", run, *FEW, "checkpoint.export_hf=false", "checkpoint.every_steps=1")
    with open(run / "checkpoints/step_00000003/tensors/rank_00000.safetensors", "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(bytes([file.read(1)[0] ^ 0x40]))
    with pytest.raises(
        ConfigError,
        match=r"rank_00000.safetensors does not match its checksum.*--checkpoint step_00000002",
    ):
        export_hf.main([str(run)])
    assert not (run / "hf").exists()
    assert export_hf.main([str(run), "--checkpoint", "step_00000002"]) == 0


def test_no_tool_takes_an_older_checkpoint_by_itself(tmp_path: Path) -> None:
    """Of a truncated newest one, 32 of 32 exports once took the one before without a word."""
    run = tmp_path / "run"
    assert train_quick(run, "checkpoint.every_steps=2")[0] == 0
    newest = run / "checkpoints/step_00000006/tensors/rank_00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(
        ConfigError, match=r"step_00000006 is skipped: .*\n.*choose --checkpoint step_00000004"
    ):
        export_hf.main([str(run)])
    with pytest.raises(
        ConfigError, match=r"step_00000006 is skipped: .*\n.*choose --checkpoints step_00000004"
    ):
        average.main([str(run)])
    assert export_hf.main([str(run), "--checkpoint", "step_00000004"]) == 0
