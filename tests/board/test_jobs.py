"""Stopping a run and starting its command again: a real run, and what a stranger's folder asks for."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_lite.errors import ConfigError
from automodel_lite.extras.board import jobs as board_jobs
from automodel_lite.extras.board.chat import EXPORT, Chat, choices
from automodel_lite.extras.board.jobs import Jobs, read_command
from automodel_lite.launched import this_process
from automodel_lite.run.folder import RunFolder
from automodel_lite.run.lock import RunLock
from automodel_lite.tools.load_generator import load_checkpoint, load_exported
from recipes.board import preview
from tests.forked import warm_python
from tests.runs import QUICK

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 300


def wait(is_so: Callable[[], bool], said: Callable[[], str]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end, said()
        time.sleep(0.2)


def recorded(path: Path, command: str, **started: str) -> RunFolder:
    """A run's folder with this command in it, as if it had been started in `path`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "logs").mkdir(exist_ok=True)
    (path / "config.yaml").write_text("name: a\n")
    place = {"folder": str(path), "host": socket.gethostname(), "slurm_job": "", **started}
    (path / "run.json").write_text(json.dumps({"command": command, "started": place}))
    return RunFolder(path)


OURS = "--config-name smoke name=a output_dir=."


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (f"automodel-lite train {OURS}", []),
        (f"/venv/bin/automodel-lite train --nproc 2 {OURS}", []),
        (f"python3.11 -m automodel_lite train {OURS}", []),
        (f"python {ROOT}/recipes/train_ft.py {OURS}", []),
        (
            f"torchrun --standalone --nproc-per-node=2 -m automodel_lite train {OURS}",
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        ),
        (
            f"python -m torch.distributed.run --nproc-per-node 2 {ROOT}/recipes/train_ft.py {OURS}",
            ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
        ),
    ],
    ids=str,
)
def test_our_own_trainings_are_started_with_this_python(
    tmp_path: Path, command: str, argv: list[str]
) -> None:
    found = read_command(recorded(tmp_path / "a", command))
    assert found.refusal == ""
    words = shlex.split(OURS)
    if "--nproc " in command:
        words = ["--nproc", "2", *words]
    assert list(found.argv) == [sys.executable, *argv, "-m", "automodel_lite", "train", *words]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("", "does not name a command"),
        ("'", "No closing quotation"),
        ("rm -rf /", "only trainings of this package"),
        ("python -c 'import os' train", "only trainings of this package"),
        ("python -X x -m automodel_lite train", "only trainings of this package"),
        ("python evil/recipes/train_ft.py name=a", "only trainings of this package"),
        ("automodel-lite run evil.module:main name=a", "only trainings of this package"),
        ("automodel-lite export runs/a --push me/a", "only trainings of this package"),
        (f"torchrun --no-python evil {OURS}", "torchrun --no-python is not known"),
        (f"torchrun --run-path=evil {OURS}", "torchrun --run-path is not known"),
        (f"automodel-lite train {OURS}; rm -rf /", "ignored explicit argument"),
        (f"automodel-lite train {OURS} --multirun seed=1,2", "the training of one run"),
        (f"automodel-lite train {OURS} --json /etc/x", "the training of one run"),
        (f"automodel-lite train {OURS} --config-path evil", "the training of one run"),
        (f"automodel-lite train {OURS} hydra.run.dir=/x", "sets Hydra itself"),
        (f"automodel-lite train {OURS} +hydra/launcher=joblib", "sets Hydra itself"),
        (f"automodel-lite train {OURS} hub.push=evil/a", "hub.push is a permission"),
        (f"automodel-lite train {OURS} hub={{push:evil/a}}", "hub.push is a permission"),
        (
            f"automodel-lite train {OURS} security.allow_targets=[evil]",
            "security.allow_targets is a permission",
        ),
        (
            f"automodel-lite train {OURS} model.trust_remote_code=true",
            "model.trust_remote_code is a permission",
        ),
        ("automodel-lite train --config-name smoke name=a output_dir=/x", "another folder"),
        ("automodel-lite train --config-name smoke name=b", "another folder"),
        ("automodel-lite train --config-name no_such name=a", "no_such"),
    ],
    ids=str,
)
def test_a_strangers_command_is_shown_and_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, why: str
) -> None:
    started = []
    monkeypatch.setattr(board_jobs, "_start", lambda *args: started.append(args))
    run = recorded(tmp_path / "a", command)
    found = read_command(run)
    assert why in found.refusal
    assert (found.typed, found.argv) == (command, ())
    with pytest.raises(ConfigError):
        Jobs().start_again(run, command)
    assert started == []


def test_a_job_of_a_model_and_its_data(tmp_path: Path) -> None:
    """Its words are places in the folder where it was typed."""
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "a" / "m").mkdir(parents=True)
    (tmp_path / "a" / "m" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "a" / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 40)
    found = read_command(
        recorded(tmp_path / "a", "automodel-lite train m chats.jsonl output_dir=.")
    )
    assert found.refusal == ""
    assert found.argv[-3:] == ("m", "chats.jsonl", "output_dir=.")


@pytest.mark.parametrize(
    ("started", "why"),
    [
        ({"host": "elsewhere"}, "was started on elsewhere, not on this machine"),
        ({"folder": "/no/such/folder"}, "a folder of this machine"),
        ({"slurm_job": "17"}, "continue it with sbatch"),
    ],
    ids=str,
)
def test_a_command_of_another_place(tmp_path: Path, started: dict[str, str], why: str) -> None:
    command = f"automodel-lite train {OURS}"
    assert why in read_command(recorded(tmp_path / "a", command, **started)).refusal


def test_the_command_must_be_the_one_that_was_shown(tmp_path: Path) -> None:
    run = recorded(tmp_path / "a", f"automodel-lite train {OURS}")
    with pytest.raises(ConfigError, match="another command by now"):
        Jobs().start_again(run, "automodel-lite train name=a")


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    command = f"automodel-lite train {OURS}"
    run = recorded(tmp_path / "a", command)
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (run.logs / "board.log").symlink_to(precious)
    with pytest.raises(OSError, match="Too many levels"):
        Jobs().start_again(run, command)
    run.logs.rename(tmp_path / "logs")
    run.logs.symlink_to(tmp_path / "logs")
    (tmp_path / "logs" / "board.log").unlink()
    with pytest.raises(ConfigError, match="is a link"):
        Jobs().start_again(run, command)
    assert precious.read_text() == "kept"


def test_a_process_that_does_not_hold_the_lock_gets_no_signal(tmp_path: Path) -> None:
    """A stranger's lock may name any process of ours."""
    run = recorded(tmp_path / "a", "")
    victim = subprocess.Popen(
        [sys.executable, "-c", "print(); import time; time.sleep(600)"], stdout=subprocess.PIPE
    )
    assert victim.stdout
    victim.stdout.readline()
    stat = Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()
    mine = this_process()
    holder: dict[str, Any] = {"host": mine.host, "boot": mine.boot, "pid": victim.pid}
    holder |= {"started": stat[19], "token": "t", "job": "", "pulse": 0}
    run.lock.write_text(json.dumps(holder))
    with pytest.raises(ConfigError, match="does not hold its lock"):
        Jobs().stop(run)
    assert victim.poll() is None
    victim.kill()
    victim.wait()
    for field, value, why in [
        ("pid", victim.pid, "is gone|does not hold"),
        ("host", "elsewhere", "which only that host can stop"),
    ]:
        run.lock.write_text(json.dumps(holder | {field: value}))
        with pytest.raises(ConfigError, match=why):
            Jobs().stop(run)
    run.lock.unlink()
    with pytest.raises(ConfigError, match="is not running"):
        Jobs().stop(run)


def test_a_run_whose_process_is_gone_was_killed(tmp_path: Path) -> None:
    run = recorded(tmp_path / "a", "")
    run.status.write_text('{"state": "running", "step": 3}')
    assert Jobs().state_of(run) == "killed"
    lock = RunLock(run.lock)
    lock.acquire()
    assert Jobs().state_of(run) == "running"
    lock.release()
    run.status.write_text('{"state": "finished", "step": 3}')
    assert Jobs().state_of(run) == "finished"


def test_a_run_is_stopped_continued_asked_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One real run, from its start in a terminal to its end."""
    monkeypatch.setattr(sys, "executable", warm_python())
    folder = tmp_path / "runs" / "a"
    settings = [text for text in QUICK if "max_steps" not in text and "export" not in text]
    settings += [
        "training.max_steps=100",
        "checkpoint.every_steps=25",
        "training.log_every_steps=1",
        f"cache_dir={tmp_path}/cache",
    ]
    words = [sys.executable, "-m", "automodel_lite", "train", "--config-name", "smoke", "name=a"]
    first = subprocess.Popen(
        [*words, *settings],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = RunFolder(folder)
    wait(lambda: len(run.rows()) > 2 or first.poll() is not None, lambda: str(first.poll()))
    jobs = Jobs()
    assert jobs.state_of(run) == "running"
    command = jobs.command_of(run)
    assert command.refusal == ""
    with pytest.raises(ConfigError, match="in use already"):
        jobs.start_again(run, command.typed)

    jobs.stop(run)
    screen, _ = first.communicate(timeout=WAIT_S)
    assert first.returncode == 75, screen
    assert run.read_status()["reason"] == signal.SIGTERM.name
    assert jobs.state_of(run) == "preempted"
    stopped_at = run.read_status()["step"]
    assert 0 < stopped_at < 100

    names = choices(run)
    assert names == [f"step_{stopped_at:08d}", *names[1:]]  # saved, and not exported
    torch.manual_seed(0)
    pieces: list[str] = []
    chat = Chat(
        lambda path, name: load_exported(str(path)) if name is None else load_checkpoint(path, name)
    )
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = {"messages": question, "max_new_tokens": 8}
    chat.answer(run, {**asked, "checkpoint": names[0]}, pieces.append)
    assert "".join(pieces).strip()

    jobs.start_again(run, command.typed)
    assert jobs.state_of(run) in ("starting", "running")
    wait(lambda: jobs.state_of(run) == "finished", lambda: jobs.screen_of(run))
    assert [row["step"] for row in run.rows() if "loss" in row] == [*range(1, 101)]
    assert "generate runs/a" in jobs.screen_of(run)  # what to do next, of the run's own end

    assert choices(run)[0] == EXPORT
    answers: list[str] = []
    for name in choices(run)[:2]:
        answers.append("")
        pieces.clear()
        chat.answer(run, {**asked, "checkpoint": name}, pieces.append)
        answers[-1] = "".join(pieces)
    assert answers[0] == answers[1] != ""  # the export is of the newest checkpoint

    shown = preview(folder)
    assert "<mark>" in shown["sections"]
    assert sum(shown["data"]["runs"][0]["lengths"]["documents"]) == 200
