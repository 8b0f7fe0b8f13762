"""`python -m tests.forked N ARGUMENTS`: pytest with N workers of xdist, for which imports and tests are collected once.

This process collects what each worker would, and hands out copies of itself: xdist and multiprocessing start theirs with
an interpreter named `python` that is a client of this process. A copy has its client's files, environment and folder.

`warm_python()` is such an interpreter for the programs that a test starts; ranks that they start are copies as well.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import io
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from select import POLLIN, poll, select
from types import ModuleType
from typing import NoReturn

import pytest

INTERPRETER = "INTERPRETER_OF_TESTS"  # in the environment: the path of that interpreter
# the order is that of tests/conftest.py; a test that kills its worker would be given to the next one for ever
ORDER = ["--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "3"]
MAX_FILES = 200
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
CLIENT = """#!{link} -IS
import json, os, select, signal, socket, sys
if "-I" in sys.argv:  # a small program that imports next to nothing
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the copy has its own
signal.pthread_sigmask(signal.SIG_BLOCK, {signals})  # until it is known whom they are for
files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [fd for fd in files if os.path.exists(f"/proc/self/fd/{{fd}}")]  # all but the listing's own
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"."], files)
    server.sendall(json.dumps([sys.argv, files, os.getcwd(), dict(os.environ)]).encode())
    server.shutdown(socket.SHUT_WR)
    answers = server.makefile()
    copy = int(answers.readline())
    for number in {signals}:
        signal.signal(number, lambda number, _: os.kill(copy, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signals})
    while not select.select([server], [], [], 1)[0]:
        pass  # a signal that comes just before a wait begins is handled when it ends
    code = int(answers.readline() or 1)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    sys.exit(code)
"""


def main(num_workers: str, *arguments: str) -> int:
    # interpreters that tests start read the compiled files of this process: each would compile all again
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    with redirect_stdout(io.StringIO()):  # what cannot be collected is told by the session below
        code = pytest.main([*arguments, "--collect-only"])
    if (
        code == pytest.ExitCode.USAGE_ERROR
    ):  # a file that is not there was named: its workers would say "no tests ran"
        return code
    if "tests.ranks" in sys.modules:
        importlib.import_module("tests.warm")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # a path that a socket may have
    with _listener(folder, []) as listener:
        workers = ["--tx", f"{num_workers}*popen//python={folder / 'python'}"]
        session = subprocess.Popen(
            [sys.executable, "-m", "pytest", *arguments, *workers, *ORDER],
            env={**os.environ, INTERPRETER: str(folder / "python")},
        )
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session ends, and then this process
        if _is_copy(listener, os.pidfd_open(session.pid), _run_code):
            return 0  # through the interpreter's own end, as the program that was started would
    shutil.rmtree(folder)
    return session.wait()


@cache
def warm_python() -> str:
    """The path of an interpreter for programs whose imports are not what is tested: each is forked from one process that has
    imported all, and costs a fiftieth of a CPU-second where a new interpreter costs three.

    A copy gets the signals that are sent to its client, and has its end; its process id, and its parent's, are others.
    """
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    root = str(Path(__file__).resolve().parents[1])
    code = "import sys; from tests.forked import serve_programs; serve_programs(sys.argv[1])"
    server = subprocess.Popen(
        [os.environ.get(INTERPRETER, sys.executable), "-c", code, str(folder)],
        env={**os.environ, "PYTHONPATH": root},
        stdin=subprocess.PIPE,  # when it closes, the server ends
        stdout=subprocess.PIPE,
    )
    assert server.stdout
    assert server.stdout.readline() == b"ready\n"
    _SERVERS.append(server)
    return str(folder / "python")


_SERVERS: list[subprocess.Popen[bytes]] = []  # one that is not referred to would be waited for


def serve_programs(name: str) -> None:
    """Hands out copies until stdin is closed."""
    importlib.import_module("tests.warm")
    for module in [module for module in sys.modules if module.split(".")[0] == "recipes"]:
        del sys.modules[
            module
        ]  # runpy warns of one that is there, and may have what a test has set
    folder = Path(name)
    command = [sys.executable, "-I", "-c", "import sys; print(*sys.path, sep='\\n')"]
    own_path = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    with _listener(folder, SIGNALS) as listener:
        os.write(1, b"ready\n")
        os.dup2(2, 1)
        sys.executable = str(folder / "python")  # of what a copy starts
        multiprocessing.set_executable(sys.executable)
        sys.path[:] = own_path
        _is_copy(listener, 0, _ended_by_itself)
    shutil.rmtree(folder)


@contextmanager
def _listener(folder: Path, signals: list[signal.Signals]) -> Iterator[socket.socket]:
    """A socket in the folder, and beside it the interpreter that asks there, which hands these signals on."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        python = folder / "python"
        link = folder / "interpreter"  # a script cannot name one whose path has a space
        link.symlink_to(sys.executable)
        given = {"link": link, "python": sys.executable, "address": listener.getsockname()}
        python.write_text(CLIENT.format(**given, signals=[int(number) for number in signals]))
        python.chmod(0o700)
        yield listener


def _is_copy(listener: socket.socket, is_over: int, run: Callable[[list[str]], None]) -> bool:
    """Forks a copy for each client until `is_over` can be read; in a copy, True after its program has run."""
    while is_over not in select([listener, is_over], [], [])[0]:
        client, _ = listener.accept()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not os.fork():
            listener.detach()
            become_copy(client, run)
            return True
        client.close()
    return False


def become_copy(client: socket.socket, run: Callable[[list[str]], None]) -> None:
    """Runs what the client was told to run, in one more fork: this process waits for that one's end, to report it."""
    _, files, _, _ = socket.recv_fds(client, 1, MAX_FILES)
    with client.makefile("rb") as request:
        argv, names, folder, environment = json.load(request)
    copy = os.fork()
    if copy:
        _report(client, copy)
        os._exit(0)
    client.detach()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _take_files(files, names)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    # of no module, as in an interpreter's own `-c`: torchrun asks for the frames of all that it logs,
    # and each time all modules would be looked through
    inspect.modulesbyfile[os.path.abspath("<string>")] = ""
    run(argv)


def _report(client: socket.socket, copy: int) -> None:
    """Waits for the copy's end, and ends it when its client has been killed."""
    with suppress(BrokenPipeError):
        client.sendall(f"{copy}\n".encode())
    is_over = os.pidfd_open(copy)
    either = poll()
    either.register(is_over, POLLIN)
    either.register(client, 0)  # it is closed on both sides
    if is_over not in dict(either.poll()):
        os.kill(copy, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
    with suppress(BrokenPipeError):
        client.sendall(f"{code}\n".encode())


def _run_code(argv: list[str]) -> None:
    """Of a worker of xdist, and of a fork server: they find what was imported where this process did."""
    program = argv.index("-c") + 1
    sys.argv = ["-c", *argv[program + 1 :]]
    sys.modules["__main__"] = ModuleType("__main__")
    exec(argv[program], sys.modules["__main__"].__dict__)


def _ended_by_itself(argv: list[str]) -> NoReturn:
    """Runs a program to its end: its threads, what it has asked for at the exit, and its exit code are those of an
    interpreter. Its modules are not taken apart, which costs twenty times what the copy did.
    """
    code = 0
    is_interrupted = False
    try:
        _run_program(argv)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        code = 1
        is_interrupted = isinstance(error, KeyboardInterrupt)
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # closed, as the workers of joblib do
        code = 120
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _run_program(argv: list[str]) -> None:
    """Runs a command of `python` as the interpreter would: `-c code`, `-m module`, or a file."""
    os.setpgid(0, 0)  # a signal of the terminal comes from the client alone
    sys.orig_argv = [sys.executable, *argv[1:]]
    place = 1
    while argv[place].startswith("-") and argv[place] not in ("-c", "-m"):
        place += 2 if argv[place] in ("-X", "-W") else 1
    if "-u" in argv[:place]:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    is_file = not argv[place].startswith("-")
    what, rest = argv[place + (not is_file)], argv[place + 2 - is_file :]
    first = "" if argv[place] == "-c" else os.getcwd()
    if is_file:
        first = os.path.dirname(os.path.abspath(what))
    added = [] if os.environ.get("PYTHONSAFEPATH") else [first]
    added += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = added
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    if argv[place] == "-c":
        sys.argv = ["-c", *rest]
        exec(what, main.__dict__)
        return
    if is_file:
        code = compile(Path(what).read_bytes(), what, "exec")
        main.__file__ = what
    else:
        spec = find_spec(what)
        if spec and spec.submodule_search_locations:
            spec = find_spec(f"{what}.__main__")
        assert spec
        assert spec.origin
        # pytest's own loader, of modules of tests, has no get_code
        code = compile(Path(spec.origin).read_bytes(), spec.origin, "exec")
        main.__spec__, main.__package__, main.__file__ = spec, spec.parent, spec.origin
        what = spec.origin
    sys.argv = [what, *rest]
    exec(code, main.__dict__)


def _take_files(files: list[int], names: list[int]) -> None:
    """Gives each file the number that it has in the client; no other stays open."""
    high = max([*files, *names]) + 1
    for place, fd in enumerate(files):
        os.dup2(fd, high + place)
    os.closerange(0, high)
    for place, name in enumerate(names):
        os.dup2(high + place, name)
    os.closerange(high, high + len(files))
    # a copy of a copy drops these, which must not close the files that have taken their numbers
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
