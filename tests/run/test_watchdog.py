"""The stacks of a rank without progress, and the record of one that was killed."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from automodel_lite.run import watchdog as watchdog_module
from automodel_lite.run.watchdog import Watchdog
from tests.ranks import fork_server, in_a_process
from tests.run.jobs import finish, launch, status_of
from tests.runs import train_quick, wait_until


@pytest.mark.system
def test_a_silent_rank_ends_the_job_and_leaves_stacks(tmp_path: Path) -> None:
    mark = tmp_path / "silent"
    hook = f"if rank == 1 and recipe.num_steps == 3: open({str(mark)!r}, 'w'); time.sleep(600)"
    process = launch(tmp_path, hook, "mesh.timeout_s=20", "training.hang_timeout_s=5")
    screen = finish(process)
    took_s = time.time() - mark.stat().st_mtime
    assert process.returncode != 0
    assert took_s < 20 + 60  # it would sleep for ten minutes
    assert "did not answer within mesh.timeout_s" in screen
    stacks = (tmp_path / "run/logs/rank_00001.log").read_text()
    assert "Timeout (5 s)!" in stacks
    assert "hooked.py" in stacks  # where the rank slept


@pytest.mark.system
@pytest.mark.parametrize(
    "cause", ["signal.SIGKILL", pytest.param("signal.SIGSEGV", marks=pytest.mark.slow)]
)
def test_a_killed_process_does_not_leave_a_running_run(tmp_path: Path, cause: str) -> None:
    hook = f"recipe.num_steps == 2 and os.kill(os.getpid(), {cause})"
    process = launch(tmp_path, hook, world_size=1)
    screen = finish(process)
    assert process.returncode < 0, screen
    wait_until(lambda: status_of(tmp_path / "run")["state"] != "running", 100)
    status = status_of(tmp_path / "run")
    assert (status["state"], status["checkpoint"]) == ("failed", "step_00000002")
    assert (
        "ended without a message (killed, out of memory, or a crash), in step 3" in status["reason"]
    )
    assert train_quick(tmp_path / "run")[0] == 0
    assert status_of(tmp_path / "run")["state"] == "finished"


def test_a_rank_that_was_killed_before_it_was_watched_is_seen(tmp_path: Path) -> None:
    """Whoever inherits the watchdog then is not its rank: no signal to it, no waiting for its end; what the rank said
    last is read.
    """
    (tmp_path / "STATUS.json").write_text('{"state": "running"}')
    (tmp_path / "run.lock").write_text('{"token": "t"}')
    gone = subprocess.Popen(["true"])
    gone.wait()
    facts = json.dumps([str(tmp_path), 0, "t", 0.01, gone.pid])
    command = [sys.executable, "-I", "-S", watchdog_module.__file__, facts]
    subprocess.run(command, input=b"in step 2\nin step 3\n", timeout=200, check=True)
    status = status_of(tmp_path)
    assert status["state"] == "failed"
    assert status["reason"].endswith("or a crash), in step 3")


def _busy(folder: Path, after_s: float, num_dumps: int) -> None:
    """A rank that computes, allocates and calls in two threads while its stacks are written."""
    watchdog = Watchdog(folder, 0, after_s)
    watchdog.start("token")
    is_over = threading.Event()

    def work(depth: int) -> int:
        rows = [{"a": [number] * 5} for number in range(20)]
        return work(depth - 1) + len(rows) if depth else sum(len(row["a"]) for row in rows)

    def work_on() -> None:
        while not is_over.is_set():
            work(30)

    threading.Thread(target=work_on).start()
    while watchdog.log.read_bytes().count(b"Timeout (") < num_dumps:
        for _ in range(50):
            work(30)
    is_over.set()
    watchdog.stop()


def dump(folder: Path, num_dumps: int) -> None:
    process = fork_server().Process(target=_busy, args=(folder, 0.0005, num_dumps))
    process.start()
    process.join(500)
    assert process.exitcode == 0
    assert (folder / "logs/rank_00000.log").read_bytes().count(b"work") > num_dumps


@pytest.mark.system
def test_the_stacks_of_a_busy_rank_do_not_hurt_it(tmp_path: Path) -> None:
    dump(tmp_path, 200)


@pytest.mark.slow
def test_10000_dumps_of_a_busy_rank(tmp_path: Path) -> None:
    dump(tmp_path, 10_000)


def _hold_the_interpreters_lock(folder: Path) -> None:
    watchdog = Watchdog(folder, 0, 0.5)
    watchdog.start("token")
    ctypes.PyDLL(None).sleep(60)  # a call that keeps the lock; the signal cuts it short
    watchdog.stop()


def test_a_rank_holding_the_interpreters_lock_is_recorded(tmp_path: Path) -> None:
    """No thread of Python's can run: the guard's signal makes the main thread write where it is."""
    assert in_a_process(_hold_the_interpreters_lock, tmp_path, tmp_path)[0] == 0
    log = (tmp_path / "logs/rank_00000.log").read_text()
    assert re.search(r'File ".*", line \d+ in _hold_the_interpreters_lock', log)


def test_the_watchdog_writes_stacks_and_what_they_were_of(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path, 0, after_s=0.5)
    watchdog.start("token")
    watchdog.enter("in step 1")
    wait_until(
        lambda: (
            re.search(r"^Timeout .* in step 1$", watchdog.log.read_text(), re.MULTILINE) is not None
        ),
        60,
    )
    watchdog.enter("in step 2")
    watchdog.stop()
    text = watchdog.log.read_text()
    assert "test_the_watchdog_writes_stacks" in text
    assert "the stacks above are of: in step 1" in text
