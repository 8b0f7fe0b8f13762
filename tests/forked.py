"""`python -m tests.forked N ARGUMENTS`: pytest with N workers of xdist, for which imports and tests are collected once.

This process collects what each worker would, and hands out copies of itself: xdist and multiprocessing start theirs with
an interpreter named `python` that is a client of this process. A copy has its client's files, environment and folder.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout, suppress
from pathlib import Path
from select import select
from types import ModuleType

import pytest

INTERPRETER = "INTERPRETER_OF_TESTS"  # in the environment: the path of that interpreter
# the order is that of tests/conftest.py; a test that kills its worker would be given to the next one for ever
ORDER = ["--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "3"]
MAX_FILES = 200
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the copy has its own
files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [fd for fd in files if os.path.exists(f"/proc/self/fd/{{fd}}")]  # all but the listing's own
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"."], files)
    server.sendall(json.dumps([sys.argv[1:], files, os.getcwd(), dict(os.environ)]).encode())
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(8) or 1))
"""


def main(num_workers: str, *arguments: str) -> int:
    with redirect_stdout(io.StringIO()):  # what cannot be collected is told by the session below
        code = pytest.main([*arguments, "--collect-only"])
    if (
        code == pytest.ExitCode.USAGE_ERROR
    ):  # a file that is not there was named: its workers would say "no tests ran"
        return code
    if "tests.ranks" in sys.modules:
        importlib.import_module("tests.warm")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # a path that a socket may have
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        python = folder / "python"
        python.write_text(CLIENT.format(python=sys.executable, address=listener.getsockname()))
        python.chmod(0o700)
        workers = ["--tx", f"{num_workers}*popen//python={python}"]
        session = subprocess.Popen(
            [sys.executable, "-m", "pytest", *arguments, *workers, *ORDER],
            env={**os.environ, INTERPRETER: str(python)},
        )
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session ends, and then this process
        is_over = os.pidfd_open(session.pid)
        while is_over not in select([listener, is_over], [], [])[0]:
            client, _ = listener.accept()
            if not os.fork():
                listener.detach()
                become_copy(client)
                return 0  # through the interpreter's own end, as the program that was started would
            client.close()
    shutil.rmtree(folder)
    return session.wait()


def become_copy(client: socket.socket) -> None:
    """Runs what the client was told to run, in one more fork: this process waits for that one's end, to report it."""
    _, files, _, _ = socket.recv_fds(client, 1, MAX_FILES)
    with client.makefile("rb") as request:
        argv, names, folder, environment = json.load(request)
    copy = os.fork()
    if copy:
        code = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
        with suppress(BrokenPipeError):  # the client was killed
            client.sendall(str(code).encode())
        os._exit(0)
    client.detach()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _take_files(files, names)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    program = argv.index("-c") + 1
    sys.argv = ["-c", *argv[program + 1 :]]
    sys.modules["__main__"] = ModuleType("__main__")
    exec(argv[program], sys.modules["__main__"].__dict__)


def _take_files(files: list[int], names: list[int]) -> None:
    """Gives each file the number that it has in the client; no other stays open."""
    high = max([*files, *names]) + 1
    for place, fd in enumerate(files):
        os.dup2(fd, high + place)
    os.closerange(0, high)
    for place, name in enumerate(names):
        os.dup2(high + place, name)
    os.closerange(high, high + len(files))
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
