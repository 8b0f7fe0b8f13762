"""Several ranks from one command: `automodel-lite train --nproc 8 --config-name ...`, by torch's
elastic launcher.

The same as `torchrun --nproc-per-node 8 -m automodel_lite train ...` (which also joins several
machines), but for the end: the launcher's own summary is left out, the last line is the sentence of
the rank that failed first, and its exit code is the command's. Signals go on to the ranks: 75 when
they have saved and left, 130 when they were interrupted.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from torch.cuda import device_count
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from automodel_lite.cli.exit_codes import SAVED
from automodel_lite.errors import MISTAKE_EXIT, ConfigError, DataError, RunStoppedError
from automodel_lite.launched import check_alone
from automodel_lite.run.ending import LAUNCHED_BY_US
from automodel_lite.run.stopping import INTERRUPTED_EXIT, PREEMPTED_EXIT, STOP_SIGNALS, StoppedEarly

_RANK = (  # Ctrl-C ends it without a traceback until our own handlers are there
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "import sys; from automodel_lite.cli import run_recipe; run_recipe(sys.argv.pop(1))"
)
# of a torchrun with one process
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# 30 s after the first failure torch kills ranks that do not end, as one that is stopped (SIGSTOP)
_NOTICED_WITHIN_S = 25.0
_SHUTDOWN_S = 240  # that ranks get to save after another one has left


def launch(main: str, nproc: str, argv: list[str]) -> int:
    """Starts the ranks of this machine and waits for them; returns the exit code.

    nproc   `8`, `gpu` (one for each) or `auto` (the GPUs, or one process without any)
    Raises ConfigError; RunStoppedError with the sentence of the rank that failed first.
    """
    check_alone()
    for name in _OF_A_RANK:
        os.environ.pop(name, None)
    os.environ[LAUNCHED_BY_US] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    for room in ("elastic", "launcher"):
        logging.getLogger(f"torch.distributed.{room}").setLevel(logging.CRITICAL)
    with (
        tempfile.TemporaryDirectory(prefix="automodel_lite_ranks_") as logs,
        _forwarding() as forwarded,
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes(nproc),
            run_id=f"alone-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            signals_to_handle="SIGQUIT",  # the others are forwarded here
            shutdown_timeout=_SHUTDOWN_S,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, sys.executable)("-c", _RANK, main, *argv)
        except ChildFailedError as error:
            return _report_first_failure(error, forwarded)
    return 0


def num_processes(text: str) -> int:
    """Returns how many ranks `--nproc` asks for; raises ConfigError."""
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
def _forwarding() -> Iterator[list[int]]:
    """Forwards signals to the ranks, which save and exit, and lists them; before there are any,
    ends this process.
    """
    forwarded = []

    def forward(number: int, frame: FrameType | None) -> None:
        forwarded.append(number)
        tasks = Path("/proc/self/task").glob("*/children")
        ranks = [int(pid) for children in tasks for pid in children.read_text().split()]
        if not ranks and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not ranks:
            raise StoppedEarly(number)
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    numbers = {*STOP_SIGNALS}
    if "SUBMITIT_EXECUTOR" in os.environ:
        numbers.add(signal.SIGUSR2)
    heard = [
        number
        for number in numbers
        if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGINT
    ]
    # HUP is ignored under nohup
    before = {number: signal.signal(number, forward) for number in heard}
    try:
        yield forwarded
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report_first_failure(error: ChildFailedError, forwarded: Sequence[int]) -> int:
    """Returns the exit code of a run that was stopped; raises the error of the rank that failed
    first.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, float, int]:
        # A rank that was killed is noticed after those that failed because of it; those that the
        # launcher has ended come last.
        rank, failure = item
        was_killed = failure.exitcode < 0
        return (
            failure.exitcode == -signal.SIGTERM,
            failure.timestamp - _NOTICED_WITHIN_S * was_killed,
            rank,
        )

    rank, first = min(error.failures.items(), key=order)
    message = first.message if first.error_file != "<N/A>" else ""
    text = str(message["message"] if isinstance(message, dict) else message)
    if first.exitcode in (PREEMPTED_EXIT, INTERRUPTED_EXIT):
        if text and text != SAVED:
            print(f"\n{text}", file=sys.stderr)
        return first.exitcode
    if -first.exitcode in forwarded:
        raise StoppedEarly(-first.exitcode)
    if first.exitcode == MISTAKE_EXIT and text:
        raise ConfigError(text) if rank == 0 else DataError(f"[rank {rank}] {text}")
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        hint = ": the kernel kills processes when memory runs out" if name == "SIGKILL" else ""
        raise RunStoppedError(f"rank {rank} was ended by {name}{hint}.")
    if text.startswith("Traceback "):
        raise RunStoppedError(
            f"rank {rank} failed, its traceback is above: {text.splitlines()[-1]}"
        )
    raise RunStoppedError(text or f"rank {rank} ended with exit code {first.exitcode}.")
