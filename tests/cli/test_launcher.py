"""`--nproc`: the sentence of the rank that failed first is all that is on the screen, and its exit code is ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from automodel_lite.errors import ConfigError, RunStoppedError
from automodel_lite.extras.cli.launcher import _report_first_failure, launch, num_processes
from tests.forked import warm_python
from tests.runs import QUICK, wait_for_rows, wait_until

ROOT = Path(__file__).resolve().parents[2]


CORES = len(os.sched_getaffinity(0))
WRONG = {
    "0": "--nproc 0 must be a number of processes, gpu or auto.",
    "two": "--nproc two must be a number of processes, gpu or auto.",
    "99999": f"--nproc 99999 must be at most {max(16, 4 * CORES)}: this machine has {CORES} cores.",
}


@pytest.mark.parametrize("given", WRONG)
def test_numbers_that_cannot_be(given: str) -> None:
    with pytest.raises(ConfigError) as error:
        num_processes(given)
    assert str(error.value) == WRONG[given]


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start it with python, in one process"):
        launch("recipes.train_ft:main", "2", [])


@pytest.mark.parametrize(
    ("seconds", "sentence"),
    [(3, "rank 1 was ended by SIGKILL"), (31, "rank 1 on x: no heartbeat for 60 s")],
    ids=["killed, then noticed", "silent, then ended by the launcher"],
)
def test_the_first_failure_is_told(seconds: int, sentence: str, tmp_path: Path) -> None:
    """A rank that was stopped for good was reported as killed for want of memory."""
    told = "rank 1 on x: no heartbeat for 60 s: its host may be down"
    extra = {"py_callstack": told, "timestamp": str(int(time.time()) - seconds)}
    error = {"message": {"message": told, "errorCode": 1, "extraInfo": extra}}
    (tmp_path / "error.json").write_text(json.dumps(error))
    failures = {
        0: ProcessFailure(0, 7, 1, str(tmp_path / "error.json")),
        1: ProcessFailure(1, 8, -signal.SIGKILL, "<N/A>"),
    }
    with pytest.raises(RunStoppedError, match=sentence):
        _report_first_failure(ChildFailedError("main", failures), [])


def start(*arguments: str, python: str = sys.executable) -> subprocess.Popen[str]:
    nproc = [] if "--nproc" in arguments else ["--nproc", "2"]
    command = [
        python,
        "-m",
        "automodel_lite",
        "train",
        *nproc,
        "--config-name",
        "smoke",
        *arguments,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.system
def test_a_mistake_is_the_only_sentence_on_the_screen(tmp_path: Path) -> None:
    process = start(
        f"output_dir={tmp_path}/run",
        "training.max_stepz=3",
        "optimizr.lr=1",
        python=warm_python(),
    )
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (2, "")
    assert err == (
        "\ntraining.max_stepz=3: unknown key; did you mean training.max_steps?\n"
        "optimizr.lr=1: unknown key; did you mean optimizer.lr?\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)],
)
def test_signals_reach_the_ranks_and_their_exit_code_is_ours(
    number: int, code: int, tmp_path: Path
) -> None:
    options = [
        *QUICK,
        "training.max_steps=100000",
        "training.log_every_steps=1",
        "training.num_epochs=null",
    ]
    process = start(f"output_dir={tmp_path}/run", *options)
    wait_for_rows(tmp_path / "run", more_than=5)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert "ChildFailedError" not in err
    assert "run the same command again to continue from step_" in out


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("after_s", [0.1, 0.4])
def test_signals_before_the_first_step_are_one_sentence(
    number: int, code: int, after_s: float, tmp_path: Path
) -> None:
    process = start(f"output_dir={tmp_path}/run", *QUICK)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: bool(children.read_text()), 60)
    time.sleep(after_s)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert f"stopped by {signal.Signals(number).name} before the first step: nothing to save" in err


@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    process = start(
        f"output_dir={tmp_path}/run",
        *QUICK,
        "training.max_steps=100000",
        "training.log_every_steps=1",
    )
    wait_for_rows(tmp_path / "run", more_than=5)
    children = Path(f"/proc/{process.pid}/task").glob("*/children")
    ranks = sorted(int(pid) for path in children for pid in path.read_text().split())
    os.kill(ranks[1], signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert (
        err.splitlines()[-1]
        == "rank 1 was ended by SIGKILL: the kernel kills processes when memory runs out."
    )
