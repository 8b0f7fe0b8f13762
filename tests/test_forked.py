"""`make test FILES=...`: what was named and is not there is told, and nothing else is run. Programs of tests as copies of a
process that has imported all.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import warm_python
from tests.runs import wait_until

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["tests/nothing.py", "tests/test_version.py::nothing"])
def test_a_test_that_is_not_there_is_named(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.forked", "1", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert name in done.stderr
    assert "no tests ran" not in done.stdout


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("import sys; print(sys.argv[1:]); sys.exit(7)", 7),
        ("import sys, os; print(sys.argv[1:], flush=True); os.kill(os.getpid(), 9)", -9),
    ],
)
def test_a_copy_ends_as_its_program_does(code: str, ending: int) -> None:
    done = subprocess.run([warm_python(), "-c", code, "a b"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (ending, "['a b']\n")


ENDINGS = [
    "pass",
    "import sys; sys.exit(-1)",
    "import sys; sys.exit('a reason')",
    "1 / 0",
    "raise KeyboardInterrupt",
    "import atexit; atexit.register(print, 'at the exit'); 1 / 0",
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
]


@pytest.mark.parametrize("code", ENDINGS)
def test_an_end_is_that_of_an_interpreter(code: str) -> None:
    copy, new = (
        subprocess.run([python, "-c", code], capture_output=True, text=True)
        for python in (warm_python(), sys.executable)
    )
    assert (copy.returncode, copy.stdout) == (new.returncode, new.stdout)
    assert copy.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]


def test_a_copy_finds_modules_where_its_program_would(tmp_path: Path) -> None:
    """Beside a file, in the folder of `-m`, and where PYTHONPATH leads."""
    (tmp_path / "beside.py").write_text("name = __name__")
    (tmp_path / "program.py").write_text("import beside; print(beside.name, __name__, __file__)")
    for command in (["program.py"], ["-m", "program"]):
        done = subprocess.run(
            [warm_python(), *command], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.stdout.split()[:2] == ["beside", "__main__"], done.stderr
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    command = [warm_python(), "-c", "import os, beside; print(beside.name, len(os.environ))"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.split()[0] == "beside", done.stderr
    assert int(done.stdout.split()[1]) <= 4  # the shell's own environment is not there


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_client_reaches_the_copy(number: signal.Signals) -> None:
    code = "import os, time; print(os.getpid(), flush=True)\nwhile True: time.sleep(1)"
    client = subprocess.Popen(
        [warm_python(), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert client.stdout
    copy = int(client.stdout.readline())
    client.send_signal(number)
    assert client.wait(60) == -number
    wait_until(lambda: not Path(f"/proc/{copy}").exists(), 60)
