"""One job at a time in the folder of a run: 0 double holders, and dead ones give way."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from automodel_lite.errors import ConfigError, RunStoppedError
from automodel_lite.parallel.peers import Peers
from automodel_lite.run import lock as run_lock
from automodel_lite.run.failures import record_failures
from automodel_lite.run.folder import RunFolder
from automodel_lite.run.lock import Holder, RunLock
from automodel_lite.run.watchdog import Watchdog
from tests.ranks import fork_server
from tests.runs import QUICK, train_quick, wait_until

ROOT = Path(__file__).resolve().parents[2]


def _hold(path: str, ready: Any, pulse_s: float) -> None:
    run_lock.PULSE_S = pulse_s
    lock = RunLock(Path(path))
    lock.acquire()
    ready.set()
    time.sleep(600)


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    context = fork_server()
    ready = context.Event()
    process = context.Process(
        target=_hold, args=(str(tmp_path / "run.lock"), ready, 0.1), daemon=True
    )
    process.start()
    assert ready.wait(120)
    yield process
    process.kill()
    process.join()


def test_a_second_job_is_refused_until_the_first_is_dead(
    tmp_path: Path, holder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "PULSE_S", 0.1)
    lock = RunLock(tmp_path / "run.lock")
    with pytest.raises(
        ConfigError, match=rf"is in use by process {holder.pid} on .*start another run with name="
    ):
        lock.acquire()
    holder.kill()
    holder.join()
    lock.acquire()
    lock.release()
    assert not (tmp_path / "run.lock").exists()


def _foreign(path: Path, **facts: Any) -> None:
    mine = vars(RunLock(Path("run.lock"))._mine)
    path.write_text(json.dumps({**mine, "host": "elsewhere", "token": "theirs", **facts}))


@pytest.mark.parametrize(
    ("beats_at", "is_dead"), [(1, False), (4, False), (5, True)], ids=["soon", "last", "never"]
)
def test_a_lock_of_another_host_is_watched_for_a_pulse(
    beats_at: int, is_dead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times the pulse passes, in no time; in one of them the other job beats."""
    path, slept = tmp_path / "run.lock", list[float]()
    _foreign(path)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        _foreign(path, pulse=int(len(slept) >= beats_at))

    monkeypatch.setattr(run_lock, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(run_lock, "PULSE_S", 60.0)
    lock = RunLock(path)
    if is_dead:
        lock.acquire()
        lock.release()
    else:
        with pytest.raises(ConfigError, match=r"is in use by process .* on elsewhere"):
            lock.acquire()
    assert slept == [60] * min(beats_at, 4)


def test_the_requeued_job_takes_over_from_itself_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.lock"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    _foreign(path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(run_lock, "PULSE_S", 1000.0)
    RunLock(path).acquire()


def test_a_reused_process_number_is_not_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    mine = vars(RunLock(Path("run.lock"))._mine)
    # our pid, another start
    path.write_text(json.dumps({**mine, "token": "theirs", "started": "1"}))
    lock = RunLock(path)
    lock.acquire()
    assert Holder(**json.loads(path.read_text())).token != "theirs"
    lock.release()


def test_a_file_system_without_hard_links_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*paths: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(
        ConfigError, match=r"output_dir=.* cannot be written \(Operation not permitted\)\."
    ):
        RunLock(tmp_path / "run.lock").acquire()
    assert list(tmp_path.iterdir()) == []


def test_a_torn_lock_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text('{"token": "a')
    RunLock(tmp_path / "run.lock").acquire()


def _race(path: Path, start: Any, results: Any, rounds: int) -> None:
    """Tries to get each lock at the same moment as the others; writes down whether it did."""
    for number in range(rounds):
        lock = RunLock(path.with_name(f"lock{number}"))
        start.wait()
        try:
            lock.acquire()
            got = 1
        except ConfigError:
            got = 0
        with results.get_lock():
            results[number] += got
        start.wait()


def race(folder: Path, rounds: int, contenders: int, dead: bool) -> tuple[int, int]:
    """(locks that two got, locks that nobody got) of so many tries, over locks of dead holders or over none."""
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(contenders), context.Array("i", rounds)
    for number in range(rounds if dead else 0):
        mine = vars(RunLock(Path("run.lock"))._mine)
        (folder / f"lock{number}").write_text(
            json.dumps({**mine, "token": f"dead{number}", "started": "1"})
        )
    processes = [
        context.Process(target=_race, args=(folder / "lock", start, results, rounds))
        for _ in range(contenders)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
        assert process.exitcode == 0
    got = list(results)
    return sum(count > 1 for count in got), sum(count == 0 for count in got)


@pytest.mark.parametrize("dead", [False, True], ids=["fresh", "taken-over"])
def test_of_all_who_try_at_once_one_gets_the_lock(tmp_path: Path, dead: bool) -> None:
    assert race(tmp_path / "locks", 150, 4, dead) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dead", [False, True], ids=["fresh", "taken-over"])
def test_no_double_holder_in_10000_tries(tmp_path: Path, dead: bool) -> None:
    assert race(tmp_path / "locks", 5000, 4, dead) == (0, 0)


def test_a_job_that_was_stopped_for_long_finds_the_lock_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pulse goes into its own file, which is nobody's lock any more; nothing of the new holder's is touched."""
    monkeypatch.setattr(run_lock, "PULSE_S", 0.05)
    path = tmp_path / "run.lock"
    old = RunLock(path)
    old.acquire()
    mine = json.loads(path.read_text())
    _foreign(tmp_path / "new", token="theirs")
    os.replace(tmp_path / "new", path)
    wait_until(lambda: old.is_lost, 60)
    assert json.loads(path.read_text())["token"] == "theirs"
    run = RunFolder(tmp_path)
    with (
        pytest.raises(
            RunStoppedError,
            match=r"no longer belongs to this job: run.lock names process .* on elsewhere",
        ),
        record_failures(run, Watchdog(run.path, 0, after_s=0), old, Peers(None), str),
    ):
        old.check_held()
    assert not run.logs.exists()  # the other job would take a record for one of its own ranks'
    old.release()
    assert json.loads(path.read_text())["token"] == "theirs"
    path.write_text(json.dumps(mine))
    old.check_held()
    path.unlink()
    with pytest.raises(RunStoppedError, match=r"run.lock was deleted"):
        old.check_held()


ELSEWHERE = """
import socket, sys
host = sys.argv.pop(1)
socket.gethostname = lambda: host
from automodel_lite.cli import run_recipe
run_recipe("recipes.train_ft:main")
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_job_stopped_for_66_s_leaves_the_run_to_its_heir(tmp_path: Path, mode: str) -> None:
    """Two jobs on two hosts; the first is stopped, the second takes the folder over, the first goes on: one writer."""
    run = tmp_path / "run"
    options = [
        *QUICK,
        f"output_dir={run}",
        f"cache_dir={tmp_path}/cache",
        f"checkpoint.mode={mode}",
        "report=false",
    ]
    options += [
        "training.max_steps=1000000",
        "training.log_every_steps=1",
        "checkpoint.every_steps=20",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def job(host: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ELSEWHERE, host, "--config-name", "smoke", *options]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip

    def last_step() -> int:
        rows = (
            (run / "metrics.jsonl").read_text().splitlines()
            if (run / "metrics.jsonl").is_file()
            else []
        )
        return int(json.loads(rows[-2])["step"]) if len(rows) > 2 else 0

    first = job("one")
    wait_until(lambda: last_step() > 30, 300)
    first.send_signal(signal.SIGSTOP)
    stopped_at, stopped = last_step(), time.monotonic()
    second = job("two")
    wait_until(lambda: "two" in (run / "run.lock").read_text(), 300)
    wait_until(lambda: last_step() > stopped_at + 30, 300)
    time.sleep(max(0.0, 66 - (time.monotonic() - stopped)))
    first.send_signal(signal.SIGCONT)
    said, _ = first.communicate(timeout=300)
    assert first.returncode == 1, said
    assert re.search(
        r"no longer belongs to this job: run.lock names process \d+ on two", said.splitlines()[-1]
    ), said
    after = last_step()
    wait_until(lambda: last_step() > after + 30, 300)  # the second one is not disturbed
    assert json.loads((run / "STATUS.json").read_text())["state"] == "running"
    second.send_signal(signal.SIGTERM)
    told, _ = second.communicate(timeout=300)
    assert second.returncode == 75, told
    steps = [
        row["step"]
        for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if "loss" in row
    ]
    assert steps == list(range(1, len(steps) + 1)), "two jobs wrote"
    assert json.loads((run / "STATUS.json").read_text())["state"] == "preempted"
    assert not list((run / "logs").glob("failure_*"))


def test_a_lock_that_is_given_back_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "PULSE_S", 0.05)
    lock = RunLock(tmp_path / "run.lock")
    lock.acquire()
    time.sleep(0.2)
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_in_the_same_folder(tmp_path: Path, holder: Any) -> None:
    """The recipe itself, in a folder whose lock is held."""
    with pytest.raises(ConfigError, match=r"is in use by process"):
        train_quick(tmp_path)
