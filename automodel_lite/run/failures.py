"""How a run that fails is recorded: the traceback in logs/rank_00003.log, the reason in
STATUS.json, a sentence on the screen.

When one rank fails, the others fail a moment later in a collective: their errors are consequences.
Who failed first is in the launcher's store (`Peers`), where a rank whose error is a consequence
looks up the cause, to report that instead.
"""

from __future__ import annotations

import re
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from automodel_lite.errors import (
    CPU_MEMORY,
    LOST,
    SENTENCES,
    PeerError,
    RunStoppedError,
    is_lost_peer,
    is_out_of_memory,
    one_line,
)
from automodel_lite.parallel.peers import Peers
from automodel_lite.redact import scrub
from automodel_lite.run.folder import RunFolder
from automodel_lite.run.lock import RunLock
from automodel_lite.run.stopping import StoppedEarly
from automodel_lite.run.watchdog import Watchdog

# raised in the middle of whatever the rank is doing
_LOST_WORKER = re.compile(r"DataLoader worker \(pid")

Place = tuple[int | None, str | None]
"""The step that a run has done, and the name of its newest checkpoint."""


@contextmanager
def record_failures(
    run: RunFolder,
    watchdog: Watchdog,
    lock: RunLock,
    peers: Peers,
    memory: Callable[[], str],
    place: Callable[[], Place] = lambda: (None, None),
) -> Iterator[None]:
    """Records an error that passes, in no folder that is another job's or that a mistake has kept
    from being made; replaces a consequence by its cause, and errors with a known cure by a
    sentence.

    memory   what a full memory held, and what to change: see memory.out_of_memory_text
    """
    rank = watchdog.rank
    host = socket.gethostname()
    try:
        yield
    except StoppedEarly as stopped:
        if rank == 0 and lock.is_held():
            run.end(stopped.state, str(stopped), *place())
        raise
    except Exception as error:
        at = f"rank {rank} on {host}, {watchdog.doing}"
        raised = error
        if is_out_of_memory(error):
            raised = RunStoppedError(_out_of_memory(error, at, memory()))
        elif is_lost_peer(error):
            raised = peers.first_failure() or RunStoppedError(f"{at}: {LOST}: {one_line(error)}")
        elif _LOST_WORKER.match(str(error)):
            raised = RunStoppedError(
                f"a data worker of {at}, is gone: {one_line(error)} Most often the host ran out of "
                "memory: lower dataloader.num_workers. Run the same command again to continue "
                "from the newest checkpoint."
            )
        reason = f"rank {rank}, {watchdog.doing}: {type(error).__name__}: {error}"
        if isinstance(raised, SENTENCES):
            reason = str(raised)
        if not isinstance(raised, PeerError):
            peers.report(raised, watchdog.doing)
        if lock.is_held():
            with suppress(OSError), open(watchdog.log, "a") as log:
                log.write(
                    scrub(f"{time.strftime('%F %T')} {watchdog.doing}\n{traceback.format_exc()}\n")
                )
            run.end("failed", reason, *place())
        if raised is error:
            raise
        raise raised from error


def _out_of_memory(error: BaseException, at: str, memory: str) -> str:
    """Returns what was tried, what the memory held, and what to change."""
    text = one_line(error, 400)
    if cpu := CPU_MEMORY.search(text):
        text = f"tried to allocate {int(cpu[1]) / 2**30:.2f} GiB."
    lines = [f"out of memory on {at}: {text}"]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        peak = torch.cuda.max_memory_allocated() / 2**30
        now = torch.cuda.memory_allocated() / 2**30
        lines.append(f"The GPU held at most {peak:.1f} GiB of tensors, {now:.1f} GiB at the end.")
    return "\n".join([*lines, memory])
