"""A rank that fails or dies ends the job with the first cause, and the same command goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.run.jobs import finish, launch


@pytest.mark.system
def test_a_killed_rank_takes_the_job_down_within_15_s(tmp_path: Path) -> None:
    mark, began = tmp_path / "killed", time.time()
    hook = f"if rank == 1 and recipe.num_steps == 3: open({str(mark)!r}, 'w'); os.kill(os.getpid(), signal.SIGKILL)"
    process = launch(tmp_path, hook)
    screen = finish(process)
    started_s, took_s = mark.stat().st_mtime - began, time.time() - mark.stat().st_mtime
    assert process.returncode != 0, screen
    assert took_s < 15 + started_s  # the start tells how slow the machine is
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
    mark = tmp_path / "killed"
    killed = "os.kill(__import__('multiprocessing').active_children()[0].pid, signal.SIGKILL), time.sleep(600)"
    hook = f"if rank == 1 and recipe.num_steps == 5: open({str(mark)!r}, 'w'), {killed}"
    workers = ["dataloader.num_workers=2", "checkpoint.every_steps=2"]
    screen = finish(launch(tmp_path, hook, *workers))
    assert time.time() - mark.stat().st_mtime < 100
    assert "a data worker of rank 1 on" in screen
    assert ", in step 6, is gone: DataLoader worker (pid" in screen
    assert "lower dataloader.num_workers." in screen
    again = launch(
        tmp_path, "pass", *workers, "checkpoint.accept_changes=true", "training.max_steps=8"
    )
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
