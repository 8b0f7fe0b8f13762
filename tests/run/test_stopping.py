"""Stop signals, deadlines, and what the ranks tell each other in a step: one message, which nobody waits for."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from automodel_lite.run.stopping import (
    STARTED,
    STOP_SIGNALS,
    StoppedEarly,
    StopSignals,
    deadline_of,
    seconds_of,
)
from recipes.train_ft import TrainFinetuneRecipe
from tests.ranks import run_ranks
from tests.run.jobs import finish, launch, status_of
from tests.runs import QUICK, losses_by_step, train_quick, wait_until

OPTIONS = [
    "training.max_steps=4",
    "training.log_every_steps=100",
    "checkpoint.every_steps=0",
    "training.val_every_steps=0",
]


def _messages(rank: int, world_size: int, folder: str) -> list[str]:
    """The collectives of host values from the start of step 2 to the end of step 3."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    found: list[str] = []
    is_on = False
    real_step = TrainFinetuneRecipe.step

    def step(recipe: TrainFinetuneRecipe, ready: Any) -> Any:
        nonlocal is_on
        is_on = 1 <= recipe.num_steps < 3
        return real_step(recipe, ready)

    def watched(name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            is_of_device = (
                bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float32
            )
            if is_on and not is_of_device:
                found.append(f"{name} {'started' if options.get('async_op') else 'waited for'}")
            return real(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainFinetuneRecipe, "step", step)
        for name in ("all_reduce", "broadcast_object_list", "all_gather_object", "barrier"):
            patch.setattr(dist, name, watched(name, getattr(dist, name)))
        assert train_quick(Path(folder), *OPTIONS)[0] == 0
    return found


def test_a_step_has_one_message_that_is_not_waited_for(tmp_path: Path) -> None:
    """Two blocking reductions a step, of counts and of signals, took 40 to 80 ms each at a thousand ranks."""
    assert run_ranks(_messages, 2, str(tmp_path / "run")) == [["all_reduce started"] * 2] * 2


ROOT = Path(__file__).resolve().parents[2]


def test_durations() -> None:
    assert seconds_of("1:30:00") == 5400
    assert seconds_of("2-01:00:00") == 176400
    assert seconds_of(90) == 90


def test_a_jump_of_the_clock_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            "automodel_lite.run.stopping.time",
            SimpleNamespace(time=lambda: 5e9, monotonic=lambda: 700.0),
        )
        patch.setenv("SLURM_JOB_END_TIME", "5000001000")
        assert deadline_of("9-00:00:00", 60) == 700 + 1000 - 60
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.setattr(time, "time", lambda: 9e9)
    assert deadline_of("0:20:00", 60) == STARTED + 1140
    assert deadline_of(None, 60) == math.inf


def test_a_jump_of_the_clock_changes_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = "training.max_steps=4"
    assert train_quick(tmp_path / "a", short)[0] == 0
    real = time.time
    jumps = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** next(jumps) * 1e6)
    assert train_quick(tmp_path / "b", short, stop_at=2)[0] == 75
    assert train_quick(tmp_path / "b", short)[0] == 0
    assert losses_by_step(tmp_path / "a") == losses_by_step(tmp_path / "b")


def test_ctrl_c_saves_and_leaves_with_130_and_the_run_goes_on(tmp_path: Path) -> None:
    options = ["checkpoint.mode=async", "training.max_steps=4"]
    code, screen = train_quick(tmp_path, *options, stop_at=3, stop_by=signal.SIGINT)
    assert code == 130
    assert (
        "stopped after step 3 of 4 (SIGINT); run the same command again to continue from step_00000003"
        in screen
    )
    want = {"state": "interrupted", "step": 3, "reason": "SIGINT", "checkpoint": "step_00000003"}
    assert status_of(tmp_path) == want
    assert train_quick(tmp_path, "training.max_steps=4")[0] == 0
    assert status_of(tmp_path)["state"] == "finished"


@pytest.mark.system
def test_a_second_ctrl_c_ends_the_process_wherever_it_is(tmp_path: Path) -> None:
    mark, heard = tmp_path / "in_step", tmp_path / "heard"
    hook = (
        f"recipe.num_steps == 2 and (open({str(mark)!r}, 'w'), [(time.sleep(0.1), SIGNALS.received and open({str(heard)!r},"
        " 'w')) for _ in range(3000)])"
    )
    process = launch(tmp_path, hook, world_size=1)
    wait_until(mark.exists, 120)
    process.send_signal(signal.SIGINT)
    wait_until(heard.exists, 60)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:  # one that was held up for a second takes both for the first
        process.send_signal(signal.SIGINT)
    screen = finish(process, 60)
    assert process.returncode == 130, screen
    assert "a second Ctrl-C: exited without a save" in screen
    status = status_of(tmp_path / "run")
    assert (status["state"], status["checkpoint"]) == ("interrupted", "step_00000002")


def test_a_closed_terminal_is_a_stop_with_a_save(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    try:
        assert train_quick(tmp_path, stop_at=1, stop_by=signal.SIGHUP)[0] == 75
    finally:
        signal.signal(signal.SIGHUP, before)
    status = json.loads((tmp_path / "STATUS.json").read_text())
    assert (status["state"], status["reason"], status["checkpoint"]) == (
        "preempted",
        "SIGHUP",
        "step_00000001",
    )


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        StopSignals().install()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_signals_reach_a_run_that_sets_up(tmp_path: Path) -> None:
    """Before the first step there is nothing to save: it leaves at once, with 75."""
    command = [
        sys.executable,
        "recipes/train_ft.py",
        "--config-name",
        "smoke",
        f"output_dir={tmp_path}/run",
        *QUICK,
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": "."}
    )
    wait_until(lambda: _catches(process.pid, signal.SIGTERM), 100)
    time.sleep(0.5)  # it imports torch
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 75, errors
    assert "stopped by SIGTERM before the first step: nothing to save" in errors
    assert not (tmp_path / "run").exists()  # it has not waited for the imports


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for this signal."""
    facts = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return bool(int(facts["SigCgt"], 16) >> (number - 1) & 1)


def test_an_error_after_a_signal_is_the_signal() -> None:
    """Libraries wrap what is raised inside an import of theirs, whatever it is."""
    signals, wrapped = StopSignals(), ImportError("Could not import module")
    assert signals.cause_of(wrapped) is wrapped
    signals.received = signal.SIGTERM
    assert isinstance(signals.cause_of(wrapped), StoppedEarly)
    signals._is_deferred = True  # a run that saves itself has errors of its own
    assert signals.cause_of(wrapped) is wrapped
