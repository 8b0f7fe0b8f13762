"""The exit code and the sentence of each way to end."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forked import warm_python
from tests.runs import wait_until

ROOT = Path(__file__).resolve().parents[2]


END = "from automodel_lite.cli.exit_codes import end\nimport errno, os, resource\n"


def ended(body: str, **environment: str) -> tuple[int, str]:
    """Exit code and stderr of a process whose work is `body`."""
    script = f"{END}def work():\n    {body}\nend(work)\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("resource.setrlimit(resource.RLIMIT_NOFILE, (5, 5)); return [open('/dev/null') for _ in range(9)]", "ulimit -n"),
        ("resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9)); return open('big', 'wb', 0).write(b'x' * 99)"
         " and open('big', 'ab', 0).write(b'x' * 99)", "ulimit -f"),
        ("os.symlink('loop', 'loop'); open('loop')", "this link leads to itself"),
        (f"raise OSError({errno.ENOSPC}, 'No space left on device', '/x/y')", "/x/y: No space left on device: make room"),
        ("raise MemoryError", "the host has no memory left"),
        ("import threading; used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
         "    resource.setrlimit(resource.RLIMIT_AS, (used + 2**21, -1)); threading.Thread(target=print).start()",
         "no further thread can be started: raise `ulimit -v`"),
    ],
    ids=["descriptors", "file-size", "link-loop", "disk", "memory", "threads"],
)  # fmt: skip
def test_limits_of_the_machine_are_sentences(
    body: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, screen = ended(body)
    assert code == 1
    assert sentence in screen
    assert "Traceback" not in screen


def test_an_unexpected_error_is_a_traceback() -> None:
    code, screen = ended("return 1 / 0")
    assert code == 1
    assert screen.startswith("Traceback ")
    assert screen.endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "0"}, "RANK=0 and no WORLD_SIZE and no MASTER_ADDR and no MASTER_PORT"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999"},
            "the environment has MASTER_PORT=99999: ports are 1 to 65535.",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 of WORLD_SIZE=2 processes"),
    ],
    ids=["half-set", "port", "rank"],
)
def test_variables_of_a_launcher_are_judged(variables: dict[str, str], sentence: str) -> None:
    """With one process, too: half of them were tracebacks, or \"out of memory\"."""
    code, screen = ended("return 0", **variables)
    assert code == 2
    assert sentence in screen


@pytest.mark.system
def test_a_port_that_is_taken_is_a_sentence() -> None:
    body = (
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); "
        "os.environ |= {'RANK': '0', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': "
        "str(s.getsockname()[1])}; from automodel_lite.parallel.peers import open_peers; open_peers()"
    )
    code, screen = ended(body)
    assert code == 2
    assert "is taken by another program, or two processes have RANK=0" in screen


SIGNALED = """
import os, signal
from automodel_lite.cli import exit_codes, hydra_app
from automodel_lite.run import stopping
install, exit_with = stopping.StopSignals.install, exit_codes.exit_with
def install_and_meet(signals):
    install(signals)
    os.kill(os.getpid(), signal.SIGTERM)
def exit_and_meet(*given, **more):
    os.kill(os.getpid(), signal.SIGTERM)
    exit_with(*given, **more)
stopping.StopSignals.install, exit_codes.exit_with = install_and_meet, exit_and_meet
hydra_app.run_recipe("recipes.train_ft:main", ["--config-name", "smoke", "output_dir=run"])
"""


def test_a_signal_in_the_first_moment_is_a_sentence(tmp_path: Path) -> None:
    """As soon as the handlers stand, and once more while the process ends."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [warm_python(), "-c", SIGNALED]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 75, done.stderr
    assert done.stderr.strip() == "stopped by SIGTERM before the first step: nothing to save"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nproc", [[], ["--nproc", "2"]], ids=["alone", "two ranks"])
@pytest.mark.parametrize("after_s", [0.02, 0.3])
def test_a_signal_before_the_handlers_leaves_nothing(
    nproc: list[str], after_s: float, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "automodel_lite",
        "train",
        *nproc,
        "--config-name",
        "smoke",
        "output_dir=run",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(after_s)
    process.terminate()
    _, screen = process.communicate(timeout=300)
    assert process.returncode in (-signal.SIGTERM, 75)
    assert "Traceback" not in screen
    assert list(tmp_path.iterdir()) == []  # no folder, and so no lock
    wait_until(lambda: not is_left(process.pid), 60)


def is_left(group: int) -> bool:
    """Is any process of this group still there? Who tidies up after Python ends a moment later than it."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.system
def test_a_reader_that_leaves_early_sees_no_traceback(tmp_path: Path) -> None:
    recipe = f"{warm_python()} recipes/inspect_data.py --config-name smoke cache_dir={tmp_path} | head -1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        recipe, shell=True, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )
    assert (done.stdout, done.stderr) == ("DATA\n", "")
