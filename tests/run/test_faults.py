"""Bad numbers, dead ranks, silent ranks, two jobs in one folder: what happens, and what is said."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser

from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError, RunStoppedError
from automodel_lite.parallel.peers import Peers
from automodel_lite.redact import ScrubbedStream
from automodel_lite.run import checkpoint_folder, durable
from automodel_lite.run.failures import recorded
from automodel_lite.run.folder import RunFolder
from automodel_lite.run.lock import Holder, RunLock
from automodel_lite.run.stopping import STARTED, STOP_SIGNALS, StopSignals, deadline_of, seconds_of
from automodel_lite.run.watchdog import Watchdog
from tests.ranks import fork_server, in_a_process, run_ranks
from tests.run.test_checkpoint import Faults
from tests.runs import QUICK, losses_by_step, quick_config, train_quick, wait_until

ROOT = Path(__file__).resolve().parents[2]


# -------------------------------------------------------------------------------------------------------- bad numbers
def _train_with_bad_steps(rank: int, world_size: int, folder: str, bad: dict[int, int], overrides: list[str]) -> Any:
    """`bad`: step -> the rank whose loss is NaN in it."""
    from recipes import train_ft

    real = train_ft.TrainFinetuneRecipe.step

    def step(recipe: Any, *args: Any) -> Any:
        is_bad = bad.get(recipe.num_steps + 1) == rank
        embeddings = recipe.model.loss_model.lm.get_input_embeddings()
        hook = embeddings.register_forward_hook(lambda m, args, out: out * float("nan") if is_bad else out)
        result = real(recipe, *args)
        hook.remove()
        finite = all(torch.isfinite(getattr(p, "_local_tensor", p)).all() for p in recipe.model.parameters())
        assert finite, "the optimizer moved on bad numbers"
        return result

    train_ft.TrainFinetuneRecipe.step = step  # type: ignore[method-assign]
    try:
        return train_quick(Path(folder), *overrides)
    except RunStoppedError as error:
        return 1, str(error)


def test_a_bad_step_on_one_rank_is_skipped_on_all(tmp_path: Path) -> None:
    options = ["training.max_nonfinite_steps=2", "training.max_steps=7", "checkpoint.every_steps=2"]
    results = run_ranks(_train_with_bad_steps, 2, str(tmp_path), {3: 1, 4: 0}, options)
    assert [code for code, _ in results] == [0, 0]
    screen = results[0][1]
    assert screen.count("WARNING: step") == 2
    assert "step 3: the loss or the gradient is not finite" in screen
    dumped = json.loads((tmp_path / "bad_steps/step_00000003/rank_00001.json").read_text())
    assert dumped["step"] == 3
    assert len(dumped["pack_ids"]) == 4
    assert (tmp_path / "bad_steps/step_00000003/rank_00001.safetensors").is_file()
    # no checkpoint of step 4, whose numbers were bad: it is made up for at step 5
    steps = [line.split("saved ")[1].split()[0] for line in screen.splitlines() if "saved step" in line]
    assert steps == ["step_00000002", "step_00000005", "step_00000006", "step_00000007"]


def test_too_many_bad_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    options = ["training.max_nonfinite_steps=1", "checkpoint.every_steps=1"]
    results = run_ranks(_train_with_bad_steps, 2, str(tmp_path), {3: 0, 4: 0}, options)
    for code, text in results:
        assert code == 1
        assert "step 4: the loss or the gradient is not finite (gradient norm nan), 2 times in a row" in text
        assert "training.max_nonfinite_steps=1" in text
    complete, _ = checkpoint_folder.survey(tmp_path / "checkpoints")
    assert complete[0].name == "step_00000002"
    assert json.loads((tmp_path / "STATUS.json").read_text())["state"] == "failed"
    assert train_quick(tmp_path, *options)[0] == 0  # the same command, without the fault


# -------------------------------------------------------------------------------------------------- dead, silent ranks
def launch(folder: Path, hook: str, *overrides: str, world_size: int = 2) -> subprocess.Popen[str]:
    """The recipe under torchrun, or in a process of its own without a launcher; `hook` is Python that runs at the start
    of every step, with `recipe` and `rank`.
    """
    script = folder / "hooked.py"
    script.write_text(
        "import os, signal, sys, time, torch\n"
        "from recipes import train_ft\n"
        "from automodel_lite.cli import run_recipe\n"
        "real = train_ft.TrainFinetuneRecipe.step\n"
        "def step(recipe, *args):\n"
        "    rank = int(os.environ.get('RANK', '0'))\n"
        f"    {hook}\n"
        "    return real(recipe, *args)\n"
        "train_ft.TrainFinetuneRecipe.step = step\n"
        "run_recipe('recipes.train_ft:main')\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    if "--shutdown-timeout" in get_args_parser().format_help():  # torch 2.11 has none, and waits for half a minute
        torchrun.append("--shutdown-timeout=2")
    settings = ["--config-name", "smoke", f"output_dir={folder}/run", *QUICK]
    settings += ["training.max_steps=100000", "training.log_every_steps=1"] if world_size > 1 else []
    return subprocess.Popen(
        [sys.executable, *(torchrun if world_size > 1 else []), str(script), *settings, *overrides],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 240) -> str:
    screen, _ = process.communicate(timeout=timeout_s)
    return screen


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
def test_a_silent_rank_ends_the_job_within_the_timeout_and_leaves_stacks(tmp_path: Path) -> None:
    mark = tmp_path / "silent"
    hook = f"if rank == 1 and recipe.num_steps == 3: open({str(mark)!r}, 'w'); time.sleep(600)"
    process = launch(tmp_path, hook, "mesh.timeout_s=20", "training.hang_timeout_s=5")
    screen = finish(process)
    took_s = time.time() - mark.stat().st_mtime
    assert process.returncode != 0
    assert took_s < 20 + 15
    assert "did not answer within mesh.timeout_s" in screen
    stacks = (tmp_path / "run/logs/rank_00001.log").read_text()
    assert "Timeout (5 s)!" in stacks
    assert "hooked.py" in stacks  # where the rank slept


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
def test_a_killed_data_worker_ends_the_job_with_a_sentence_and_it_goes_on(tmp_path: Path) -> None:
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


# ------------------------------------------------------------------------------------------------------- one job a run
def _hold(path: str, ready: Any, pulse_s: float) -> None:
    lock = RunLock(Path(path))
    lock.acquire(pulse_s)
    ready.set()
    time.sleep(600)


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    context = fork_server()
    ready = context.Event()
    process = context.Process(target=_hold, args=(str(tmp_path / "run.lock"), ready, 0.1), daemon=True)
    process.start()
    assert ready.wait(120)
    yield process
    process.kill()
    process.join()


def test_a_second_job_is_refused_until_the_first_is_dead(tmp_path: Path, holder: Any) -> None:
    lock = RunLock(tmp_path / "run.lock")
    with pytest.raises(ConfigError, match=rf"is in use by process {holder.pid} on .*start another run with name="):
        lock.acquire(0.1)
    holder.kill()
    holder.join()
    lock.acquire(0.1)
    lock.release()
    assert not (tmp_path / "run.lock").exists()


def _foreign(path: Path, **facts: Any) -> None:
    mine = vars(RunLock(Path("run.lock"))._mine)
    path.write_text(json.dumps({**mine, "host": "elsewhere", "token": "theirs", **facts}))


def test_a_lock_of_another_host_is_watched_for_a_pulse(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    _foreign(path)
    lock = RunLock(path)
    lock.acquire(0.05)  # no pulse: dead
    lock.release()
    _foreign(path)
    beating = multiprocessing.get_context("fork").Process(target=_beat_for, args=(path, 3.0))
    beating.start()
    with pytest.raises(ConfigError, match=r"is in use by process .* on elsewhere"):
        RunLock(path).acquire(0.3)
    beating.join()


def _beat_for(path: Path, seconds: float) -> None:
    end, pulse = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        pulse += 1
        temporary = path.with_suffix(".new")
        _foreign(temporary, pulse=pulse)
        os.replace(temporary, path)
        time.sleep(0.1)


def test_the_requeued_job_takes_over_from_itself_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.lock"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    _foreign(path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    began = time.monotonic()
    RunLock(path).acquire(60)
    assert time.monotonic() - began < 5


def test_a_reused_process_number_is_not_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    mine = vars(RunLock(Path("run.lock"))._mine)
    path.write_text(json.dumps({**mine, "token": "theirs", "started": "1"}))  # our pid, another start
    lock = RunLock(path)
    lock.acquire(60)
    assert Holder(**json.loads(path.read_text())).token != "theirs"
    lock.release()


def test_a_file_system_without_hard_links_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*paths: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(ConfigError, match=r"output_dir=.* cannot be written: Operation not permitted\."):
        RunLock(tmp_path / "run.lock").acquire()
    assert list(tmp_path.iterdir()) == []


def test_logs_behind_a_link_are_refused(tmp_path: Path) -> None:
    """A run's folder may come from a stranger: its logs once were appended to files of the user's own."""
    (tmp_path / "own").mkdir()
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.logs.symlink_to(tmp_path / "own")
    with pytest.raises(ConfigError, match=r"run/logs is a link: remove it"):
        train_quick(run.path)
    assert list((tmp_path / "own").iterdir()) == []


def test_a_torn_lock_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text('{"token": "a')
    RunLock(tmp_path / "run.lock").acquire(60)


def _race(path: Path, start: Any, results: Any, rounds: int) -> None:
    """Tries to get each lock at the same moment as the others; writes down whether it did."""
    for number in range(rounds):
        lock = RunLock(path.with_name(f"lock{number}"))
        start.wait()
        try:
            lock.acquire(1000)
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
        (folder / f"lock{number}").write_text(json.dumps({**mine, "token": f"dead{number}", "started": "1"}))
    processes = [
        context.Process(target=_race, args=(folder / "lock", start, results, rounds)) for _ in range(contenders)
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


def test_a_job_that_was_stopped_for_long_finds_the_lock_lost(tmp_path: Path) -> None:
    """Its pulse goes into its own file, which is nobody's lock any more; nothing of the new holder's is touched."""
    path = tmp_path / "run.lock"
    old = RunLock(path)
    old.acquire(0.05)
    mine = json.loads(path.read_text())
    _foreign(tmp_path / "new", token="theirs")
    os.replace(tmp_path / "new", path)
    time.sleep(0.3)
    assert json.loads(path.read_text())["token"] == "theirs"
    assert old.is_lost
    run = RunFolder(tmp_path)
    with (
        pytest.raises(RunStoppedError, match=r"no longer belongs to this job: run.lock names process .* on elsewhere"),
        recorded(run, Watchdog(run.path, 0, after_s=0), old, Peers(None), str),
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
def test_a_job_that_is_stopped_for_66_s_leaves_the_run_to_the_one_that_took_over(tmp_path: Path, mode: str) -> None:
    """Two jobs on two hosts; the first is stopped, the second takes the folder over, the first goes on: one writer."""
    run = tmp_path / "run"
    options = [*QUICK, f"output_dir={run}", f"cache_dir={tmp_path}/cache", f"checkpoint.mode={mode}", "report=false"]
    options += ["training.max_steps=1000000", "training.log_every_steps=1", "checkpoint.every_steps=20"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def job(host: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ELSEWHERE, host, "--config-name", "smoke", *options]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip

    def last_step() -> int:
        rows = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").is_file() else []
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
    assert re.search(r"no longer belongs to this job: run.lock names process \d+ on two", said.splitlines()[-1]), said
    after = last_step()
    wait_until(lambda: last_step() > after + 30, 300)  # the second one is not disturbed
    assert json.loads((run / "STATUS.json").read_text())["state"] == "running"
    second.send_signal(signal.SIGTERM)
    told, _ = second.communicate(timeout=300)
    assert second.returncode == 75, told
    steps = [row["step"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    assert steps == list(range(1, len(steps) + 1)), "two jobs wrote"
    assert json.loads((run / "STATUS.json").read_text())["state"] == "preempted"
    assert not list((run / "logs").glob("failure_*"))


def test_a_lock_that_is_given_back_is_gone(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run.lock")
    lock.acquire(0.05)
    time.sleep(0.2)
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_in_the_same_folder(tmp_path: Path, holder: Any) -> None:
    """The recipe itself, in a folder whose lock is held."""
    with pytest.raises(ConfigError, match=r"is in use by process"):
        train_quick(tmp_path)


# -------------------------------------------------------------------------------------------------------------- clocks
def test_durations() -> None:
    assert seconds_of("1:30:00") == 5400
    assert seconds_of("2-01:00:00") == 176400
    assert seconds_of(90) == 90
    with pytest.raises(ConfigError, match=r"training.max_time=soon must be hours:minutes:seconds"):
        seconds_of("soon")


def test_a_jump_of_the_clock_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = deadline_of("9-00:00:00", 60, {"SLURM_JOB_END_TIME": str(time.time() + 1000)})
    assert deadline - time.monotonic() == pytest.approx(940, abs=5)
    monkeypatch.setattr(time, "time", lambda: 9e9)
    assert deadline_of("0:20:00", 60, {}) == STARTED + 1140
    assert deadline_of(None, 60, {}) == math.inf


def test_a_jump_of_the_clock_changes_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train_quick(tmp_path / "a")[0] == 0
    real = time.time
    jumps = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** next(jumps) * 1e6)
    assert train_quick(tmp_path / "b", stop_at=3)[0] == 75
    assert train_quick(tmp_path / "b")[0] == 0
    assert losses_by_step(tmp_path / "a") == losses_by_step(tmp_path / "b")


# ------------------------------------------------------------------------------------------- how a run ends is written
def status_of(folder: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((folder / "STATUS.json").read_text())
    return status


def test_ctrl_c_saves_and_leaves_with_130_and_the_run_goes_on(tmp_path: Path) -> None:
    code, screen = train_quick(tmp_path, "checkpoint.mode=async", stop_at=3, stop_by=signal.SIGINT)
    assert code == 130
    assert "stopped after step 3 of 6 (SIGINT); run the same command again to continue from step_00000003" in screen
    want = {"state": "interrupted", "step": 3, "reason": "SIGINT", "checkpoint": "step_00000003"}
    assert status_of(tmp_path) == want
    assert train_quick(tmp_path)[0] == 0
    assert status_of(tmp_path)["state"] == "finished"


@pytest.mark.system
def test_a_second_ctrl_c_leaves_at_once_wherever_the_process_is(tmp_path: Path) -> None:
    hook = "recipe.num_steps == 2 and (open('in_step', 'w').close(), time.sleep(300))".replace(
        "in_step", str(tmp_path / "in_step")
    )
    process = launch(tmp_path, hook, world_size=1)
    wait_until((tmp_path / "in_step").exists, 120)
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    screen = finish(process, 20)
    assert process.returncode == 130, screen
    assert "a second Ctrl-C: exited without a save" in screen
    status = status_of(tmp_path / "run")
    assert (status["state"], status["checkpoint"]) == ("interrupted", "step_00000002")


@pytest.mark.system
@pytest.mark.parametrize("cause", ["signal.SIGKILL", pytest.param("signal.SIGSEGV", marks=pytest.mark.slow)])
def test_a_killed_process_does_not_leave_a_running_run(tmp_path: Path, cause: str) -> None:
    hook = f"recipe.num_steps == 2 and os.kill(os.getpid(), {cause})"
    process = launch(tmp_path, hook, world_size=1)
    screen = finish(process)
    assert process.returncode < 0, screen
    wait_until(lambda: status_of(tmp_path / "run")["state"] != "running", 20)
    status = status_of(tmp_path / "run")
    assert (status["state"], status["checkpoint"]) == ("failed", "step_00000002")
    assert "ended without a message (killed, out of memory, or a crash), in step 3" in status["reason"]
    assert train_quick(tmp_path / "run")[0] == 0
    assert status_of(tmp_path / "run")["state"] == "finished"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optimizer.lr=1e38", "training.max_steps=3"], "step 3 is the last one, and .* not finite: "),
        (
            ["optimizer.lr=1e39", "training.max_steps=1"],
            "step 1 is the last one, and the trained weights are not finite",
        ),
    ],
)
def test_numbers_that_are_not_finite_are_not_finished(tmp_path: Path, overrides: list[str], said: str) -> None:
    """NaN once was `finished`, exit 0, with nothing saved."""
    more = [
        "checkpoint.every_steps=0",
        "lr_scheduler=constant",
        "training.max_grad_norm=0",
        "training.max_nonfinite_steps=9",
    ]
    with pytest.raises(RunStoppedError, match=said):
        train_quick(tmp_path, *overrides, *more)
    assert status_of(tmp_path)["state"] == "failed"
    assert not list(tmp_path.glob("checkpoints/step_*"))


def test_a_disk_that_is_full_at_the_end_is_a_failure_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("what", ["removed", "renamed"])
def test_a_run_folder_that_vanishes_is_a_failure(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipes import train_ft

    real, run = train_ft.TrainFinetuneRecipe.step, tmp_path / "run"

    def step(recipe: Any, *args: Any) -> Any:
        if recipe.num_steps == 2:
            run.rename(tmp_path / "elsewhere") if what == "renamed" else shutil.rmtree(run)
        return real(recipe, *args)

    with monkeypatch.context() as patch:
        patch.setattr(train_ft.TrainFinetuneRecipe, "step", step)
        with pytest.raises(RunStoppedError, match=r"output_dir=.*run is gone: it was removed or renamed"):
            train_quick(run)
    assert not (run / "checkpoints").exists()


def test_a_closed_terminal_is_a_stop_with_a_save(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    try:
        assert train_quick(tmp_path, stop_at=3, stop_by=signal.SIGHUP)[0] == 75
    finally:
        signal.signal(signal.SIGHUP, before)
    status = json.loads((tmp_path / "STATUS.json").read_text())
    assert (status["state"], status["reason"], status["checkpoint"]) == ("preempted", "SIGHUP", "step_00000003")


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        StopSignals().install()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_screen_that_takes_nothing_more_ends_no_run() -> None:
    screen = ScrubbedStream(open("/dev/full", "w"))  # noqa: SIM115
    for _ in range(3):
        print("x" * 100_000, file=screen, flush=True)


def _no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("at", [1, 2, 3])
def test_the_status_is_true_where_no_other_file_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    folder = RunFolder(tmp_path)
    folder.write_status("running", 123456, "", "step_00123456")
    Faults(monkeypatch, tmp_path, at, _no_space).is_on = True
    folder.end("failed", "no room")
    assert folder.read_status() == {
        "state": "failed",
        "step": 123456,
        "reason": "no room",
        "checkpoint": "step_00123456",
    }


@pytest.mark.parametrize("at", [1, 5, 8, 11])
def test_a_disk_that_is_full_at_the_start_is_a_sentence(tmp_path: Path, at: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, tmp_path / "run", at, _no_space).is_on = True
        with pytest.raises((ConfigError, RunStoppedError), match=r"No space left|no space"):
            train_quick(tmp_path / "run", "training.max_steps=1")


@pytest.mark.parametrize("content", ["5", "[]", '{"state"', ""])
def test_small_files_that_are_damaged(tmp_path: Path, content: str) -> None:
    """A damaged STATUS.json or metrics line is written again; a damaged config.yaml is a sentence."""
    assert train_quick(tmp_path, stop_at=3)[0] == 75
    (tmp_path / "STATUS.json").write_text(content)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(content + "\n")
    whole = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(content or "a: [")
    with pytest.raises(ConfigError, match=r"config.yaml cannot be read .*restore it"):
        train_quick(tmp_path)
    (tmp_path / "config.yaml").write_text(whole)
    assert train_quick(tmp_path)[0] == 0
    assert sorted(losses_by_step(tmp_path)) == [1, 2, 3, 4, 5, 6]


# ------------------------------------------------------------------------------------------------------------ watchdog
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
    process = multiprocessing.get_context("spawn").Process(target=_busy, args=(folder, 0.0005, num_dumps))
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
    ctypes.PyDLL(None).sleep(6)  # a call that keeps the lock; the signal cuts it short
    watchdog.stop()


def test_a_rank_that_holds_the_interpreters_lock_writes_its_own_stack(tmp_path: Path) -> None:
    """No thread of Python's can run: the guard's signal makes the main thread write where it is."""
    assert in_a_process(_hold_the_interpreters_lock, tmp_path, tmp_path)[0] == 0
    log = (tmp_path / "logs/rank_00000.log").read_text()
    assert re.search(r'File ".*", line \d+ in _hold_the_interpreters_lock', log)


def test_the_watchdog_writes_stacks_and_what_they_were_of(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path, 0, after_s=0.5)
    watchdog.start("token")
    watchdog.enter("in step 1")
    time.sleep(1.5)
    watchdog.enter("in step 2")
    watchdog.stop()
    text = watchdog.log.read_text()
    assert "test_the_watchdog_writes_stacks" in text
    assert "the stacks above are of: in step 1" in text


def test_signals_reach_a_run_that_sets_up(tmp_path: Path) -> None:
    """Before the first step there is nothing to save: it leaves at once, with 75."""
    command = [sys.executable, "recipes/train_ft.py", "--config-name", "smoke", f"output_dir={tmp_path}/run", *QUICK]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": "."}
    )
    time.sleep(2.5)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (75, -signal.SIGTERM), errors  # -TERM: before Python had read its first line
    assert "stopped by SIGTERM" in errors or process.returncode == -signal.SIGTERM


def _begin_a_run(folder: RunFolder, config: Config) -> None:
    """What a run does in its folder before its first step."""
    config = folder.with_saved_layout(config)
    lock = RunLock(folder.lock)
    lock.check()
    folder.check(config)
    lock.acquire()
    folder.open(config, global_batch_size=4, slot_multiple=1)
    folder.write_status("running", 0)
    lock.release()


@pytest.mark.system
def test_a_kill_at_any_moment_of_the_start_leaves_a_folder_to_start_in(tmp_path: Path) -> None:
    at, is_killed = 0, True
    while is_killed:
        at += 1
        folder = RunFolder(tmp_path / f"at{at}")
        config = quick_config(folder.path)
        pid = os.fork()
        if pid == 0:
            try:
                Faults(pytest.MonkeyPatch(), folder.path, at, lambda: os._exit(9)).is_on = True
                _begin_a_run(folder, config)
            finally:  # never back into the test run that this is a copy of
                os._exit(0)
        is_killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        _begin_a_run(folder, config)
        assert folder.config.is_file()
        assert not folder.lock.exists()
    assert at > 10
