"""A rank that fails or dies ends the job with the first cause, and the same command goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from automodel_lite.errors import RunStoppedError
from automodel_lite.run import durable
from tests.run.jobs import finish, launch, status_of
from tests.runs import train_quick


@pytest.mark.system
def test_a_killed_rank_takes_the_job_down_within_15_s(tmp_path: Path) -> None:
    mark = tmp_path / "killed"
    hook = f"if rank == 1 and recipe.num_steps == 3: open({str(mark)!r}, 'w'); os.kill(os.getpid(), signal.SIGKILL)"
    process = launch(tmp_path, hook)
    screen = finish(process)
    took_s = time.time() - mark.stat().st_mtime
    assert process.returncode != 0, screen
    assert took_s < 15
    assert "SIGKILL" in screen or "another rank ended without a message" in screen


@pytest.mark.system
def test_the_first_cause_is_shown_with_its_rank(tmp_path: Path) -> None:
    hook = "if rank == 1 and recipe.num_steps == 3: raise ArithmeticError('the moon is in the wrong house')"
    screen = finish(launch(tmp_path, hook))
    assert "[rank 1] Traceback" in screen
    assert "ArithmeticError: the moon is in the wrong house" in screen
    first = screen.index("the moon is in the wrong house")
    for follower in ("gloo", "Connection closed"):
        assert follower not in screen[:first]
    status = json.loads((tmp_path / "run/STATUS.json").read_text())
    assert status["state"] == "failed"
    assert "rank 1, in step 4: ArithmeticError" in status["reason"]


@pytest.mark.system
def test_a_killed_data_worker_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    killed = "os.kill(__import__('multiprocessing').active_children()[0].pid, signal.SIGKILL), time.sleep(30)"
    hook = f"if rank == 1 and recipe.num_steps == 5: {killed}"
    began = time.time()
    workers = ["dataloader.num_workers=2", "checkpoint.every_steps=2"]
    screen = finish(launch(tmp_path, hook, *workers))
    assert time.time() - began < 60
    assert "a data worker of rank 1 on" in screen
    assert ", in step 6, is gone: DataLoader worker (pid" in screen
    assert "lower dataloader.num_workers." in screen
    again = launch(tmp_path, "pass", *workers, "checkpoint.accept_changes=true", "training.max_steps=8")
    screen = finish(again)
    assert again.returncode == 0, screen
    assert "continues from step_00000004" in screen


@pytest.mark.system
def test_out_of_memory_on_one_rank_ends_all_with_its_report(tmp_path: Path) -> None:
    hook = "if rank == 1 and recipe.num_steps == 3: raise torch.OutOfMemoryError('tried to allocate 2.00 GiB')"
    process = launch(tmp_path, hook)
    screen = finish(process)
    assert process.returncode != 0
    assert "out of memory" in screen
    assert "tried to allocate 2.00 GiB" in screen
    assert "Try, in this order:\n  1. " in screen


def test_a_disk_that_is_full_at_the_end_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = durable.free_bytes
    with monkeypatch.context() as patch:
        patch.setattr(durable, "free_bytes", lambda folder: 0 if list(folder.glob("step_00000004")) else real(folder))
        with pytest.raises(RunStoppedError, match=r"the last step, 6, could not be saved: .* step_00000004. Make room"):
            train_quick(tmp_path)
    status = status_of(tmp_path)
    assert (status["state"], status["checkpoint"]) == ("failed", "step_00000004")
    code, screen = train_quick(tmp_path)
    assert code == 0
    assert "continues from step_00000004" in screen


def test_a_last_step_that_is_only_exported_is_saved_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later starts said "nothing to do", and never wrote the checkpoint."""
    real, options = durable.free_bytes, ["checkpoint.export_hf=true"]
    with monkeypatch.context() as patch:
        patch.setattr(durable, "free_bytes", lambda folder: 0 if list(folder.glob("step_00000004")) else real(folder))
        code, screen = train_quick(tmp_path, *options)
    assert code == 0
    assert "the last step is exported, but not saved as a checkpoint" in screen
    assert status_of(tmp_path)["is_saved"] is False
    assert train_quick(tmp_path, *options)[0] == 0
    assert status_of(tmp_path)["checkpoint"] == "step_00000006"
    assert "nothing to do" in train_quick(tmp_path, *options)[1]
