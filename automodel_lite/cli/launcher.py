"""Several ranks from one command: `automodel-lite train --nproc 8 --config-name ...`, by torch's elastic launcher.

The same as `torchrun --nproc-per-node 8 -m automodel_lite train ...`, but for the end: the launcher's own summary is
left out, the last words are the sentence of the rank that failed first, and its exit code is the command's. Signals go
on to the ranks: 75 when they have saved and left, 130 when they were interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.cuda import device_count
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from automodel_lite.cli.exit_codes import SAVED
from automodel_lite.errors import MISTAKE_EXIT, ConfigError, DataError, RunStoppedError
from automodel_lite.run.exits import LAUNCHED_BY_US
from automodel_lite.run.stopping import INTERRUPTED_EXIT, PREEMPTED_EXIT, STOP_SIGNALS, StoppedEarly

_RANK = (  # Ctrl-C ends it without a traceback until our own handlers are there
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "import sys; from automodel_lite.cli import run_recipe; run_recipe(sys.argv.pop(1))"
)
_signals: list[int] = []  # that were forwarded
_NOTICED_WITHIN_S = 60.0
_SHUTDOWN_S = 240  # that ranks get to save after another one has left


def launch(main: str, given: Mapping[str, Any], argv: list[str]) -> int:
    """Starts the ranks of this machine and waits for them; the exit code.

    main    "recipes.train_ft:main"
    given   nproc, nnodes, rdzv, rdzv_id, max_restarts
    argv    of the command; its ranks ignore the launcher's flags
    Raises ConfigError; RunStoppedError with the words of the rank that failed first.
    """
    os.environ[LAUNCHED_BY_US] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    for room in ("elastic", "launcher"):
        logging.getLogger(f"torch.distributed.{room}").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="automodel_lite_ranks_") as logs, _forwarding():
        config = _config(given, logs)
        try:
            elastic_launch(config, sys.executable)("-c", _RANK, main, *argv)
        except ChildFailedError as error:
            return _report_first_failure(error)
        except (RendezvousError, DistError) as error:
            return _surviving_ranks_error(Path(logs), config.rdzv_endpoint, error)
    return 0


def _config(given: Mapping[str, Any], logs: str | None = None) -> LaunchConfig:
    """Raises ConfigError for numbers that cannot be."""
    if "RANK" in os.environ:
        raise ConfigError("--nproc starts ranks, but this process already is one: leave it out under torchrun or srun.")
    nproc, nnodes, rdzv = _processes(str(given.get("nproc", "auto"))), given.get("nnodes", 1), given.get("rdzv")
    if nnodes < 1:
        raise ConfigError(f"--nnodes {nnodes} must be at least 1.")
    if nnodes > 1 and not rdzv:
        raise ConfigError(
            f"--nnodes {nnodes} needs --rdzv HOST:PORT, the same on all machines: one of them and a port."
        )
    if given.get("max_restarts", 0) < 0:
        raise ConfigError(f"--max-restarts {given['max_restarts']} must be at least 0.")
    return LaunchConfig(
        min_nodes=nnodes,
        max_nodes=nnodes,
        nproc_per_node=nproc,
        run_id=given.get("rdzv_id", "automodel-lite" if rdzv else f"alone-{os.getpid()}"),
        rdzv_backend="c10d",
        rdzv_endpoint=rdzv or "localhost:0",
        max_restarts=given.get("max_restarts", 0),
        signals_to_handle="SIGQUIT",  # the others are forwarded here
        shutdown_timeout=_SHUTDOWN_S,
        logs_specs=DefaultLogsSpecs(log_dir=logs),
    )


def _processes(text: str) -> int:
    """`8`, `gpu` (one for each) or `auto` (the GPUs, or one process without any)."""
    if text in ("gpu", "auto"):
        if not device_count() and text == "gpu":
            raise ConfigError("--nproc gpu: this machine has no GPU: give a number of processes.")
        return device_count() or 1
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--nproc {text} must be a number of processes, gpu or auto.")
    cores = len(os.sched_getaffinity(0))
    if int(text) > (most := max(16, 4 * cores)):
        raise ConfigError(f"--nproc {text} must be at most {most}: this machine has {cores} cores.")
    return int(text)


@contextmanager
def _forwarding() -> Iterator[None]:
    """Signals go on to the ranks, which save and exit; before there are any, they end this process."""
    numbers = {*STOP_SIGNALS, *([signal.SIGUSR2] if "SUBMITIT_EXECUTOR" in os.environ else [])}
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGINT]
    before = {number: signal.signal(number, _forward) for number in heard}  # HUP is ignored under nohup
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _forward(number: int, frame: FrameType | None) -> None:
    _signals.append(number)
    tasks = Path("/proc/self/task").glob("*/children")
    ranks = [int(pid) for children in tasks for pid in children.read_text().split()]
    if not ranks and number == signal.SIGINT:
        raise KeyboardInterrupt
    if not ranks:
        raise StoppedEarly(number)
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _report_first_failure(error: ChildFailedError) -> int:
    """Returns the exit code of a run that was stopped; raises the error of the rank that failed first."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, float, int]:
        # A rank that was killed is noticed after those that failed because of it; those that the launcher has ended
        # come last.
        rank, failure = item
        was_killed = failure.exitcode < 0
        return failure.exitcode == -signal.SIGTERM, failure.timestamp - _NOTICED_WITHIN_S * was_killed, rank

    rank, first = min(error.failures.items(), key=order)
    told: Any = first.message if first.error_file != "<N/A>" else ""
    text = str(told["message"] if isinstance(told, dict) else told)
    if first.exitcode in (PREEMPTED_EXIT, INTERRUPTED_EXIT):
        if text and text != SAVED:
            print(f"\n{text}", file=sys.stderr)
        return first.exitcode
    if -first.exitcode in _signals:
        raise StoppedEarly(-first.exitcode)
    if first.exitcode == MISTAKE_EXIT and text:
        raise ConfigError(text) if rank == 0 else DataError(f"[rank {rank}] {text}")
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        hint = ": the kernel kills processes when memory runs out" if name == "SIGKILL" else ""
        raise RunStoppedError(f"rank {rank} was ended by {name}{hint}.")
    if text.startswith("Traceback "):
        raise RunStoppedError(f"rank {rank} failed, its traceback is above: {text.splitlines()[-1]}")
    raise RunStoppedError(text or f"rank {rank} ended with exit code {first.exitcode}.")


def _surviving_ranks_error(logs: Path, endpoint: str, error: Exception) -> int:
    """The same when the launcher of another machine has ended: the ranks here have said why, or were ended with it."""
    for path in sorted(logs.rglob("error.json")):
        told = json.loads(path.read_text())["message"]
        if told["errorCode"] == MISTAKE_EXIT or told["message"] == SAVED or _signals:
            print(f"\n{told['message']}", file=sys.stderr)
            return int(told["errorCode"])
    raise RunStoppedError(
        f"--rdzv {endpoint}: the connection to the other machines was lost or never established "
        f"({str(error).splitlines()[0].rstrip('.')}): check the output of the launchers there."
    )
