"""The end of a run: what fails then can be made up for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from automodel_lite.errors import RunStoppedError
from automodel_lite.run import durable
from recipes import export_hf
from tests.run.jobs import status_of
from tests.run.test_export import FEW, _no_space
from tests.runs import train, train_quick


def test_an_export_that_fails_can_be_made_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", lambda *args, **more: _no_space())
        with pytest.raises(
            RunStoppedError,
            match=r"the export failed \(.*No space left.*\): .*step_00000003.*export_hf.py",
        ):
            train("smoke", run, *FEW)
    assert not [path for path in run.iterdir() if path.name.startswith(".tmp")]
    assert json.loads((run / "STATUS.json").read_text())["state"] == "failed"
    assert export_hf.main([str(run)]) == 0
    shutil.rmtree(run / "hf")
    train("smoke", run, *FEW)  # the same command exports it too
    assert (run / "hf/model.safetensors").is_file()


def test_a_disk_that_is_full_at_the_end_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = durable.free_bytes
    with monkeypatch.context() as patch:
        patch.setattr(
            durable,
            "free_bytes",
            lambda folder: 0 if list(folder.glob("step_00000004")) else real(folder),
        )
        with pytest.raises(
            RunStoppedError,
            match=r"the last step, 6, could not be saved: .* step_00000004. Make room",
        ):
            train_quick(tmp_path)
    status = status_of(tmp_path)
    assert (status["state"], status["checkpoint"]) == ("failed", "step_00000004")
    code, screen = train_quick(tmp_path)
    assert code == 0
    assert "continues from step_00000004" in screen


def test_a_last_step_that_is_only_exported_is_saved_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later starts said "nothing to do", and never wrote the checkpoint."""
    real, options = durable.free_bytes, ["checkpoint.export_hf=true"]
    with monkeypatch.context() as patch:
        patch.setattr(
            durable,
            "free_bytes",
            lambda folder: 0 if list(folder.glob("step_00000004")) else real(folder),
        )
        code, screen = train_quick(tmp_path, *options)
    assert code == 0
    assert "the last step is exported, but not saved as a checkpoint" in screen
    assert status_of(tmp_path)["is_saved"] is False
    assert train_quick(tmp_path, *options)[0] == 0
    assert status_of(tmp_path)["checkpoint"] == "step_00000006"
    assert "nothing to do" in train_quick(tmp_path, *options)[1]
