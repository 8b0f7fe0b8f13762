"""Which process is meant, on which host, and whether it is gone: for locks and for the ranks of a job. No torch."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """A process number means something on one host, until that host starts again, and is used again."""

    host: str
    boot: str  # of the host, and the namespace of process numbers (a container has its own)
    pid: int
    started: str  # in ticks since the boot

    def is_here(self) -> bool:
        """Returns whether the process is, or was, one of this host's."""
        return (self.host, self.boot) == (socket.gethostname(), boot_id())

    def is_gone(self) -> bool:
        """Returns whether the process has ended; False for one of another host, which nobody here can know."""
        return self.is_here() and start_ticks(self.pid) != self.started


def this_process() -> ProcessId:
    """Returns the identity of the calling process."""
    return ProcessId(socket.gethostname(), boot_id(), os.getpid(), start_ticks(os.getpid()) or "")


def boot_id() -> str:
    """Returns what changes when the host is started again, or a container has its own process numbers."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_ticks(pid: int) -> str | None:
    """Returns when a process of this host started; None when there is none, or it is dead and not yet reaped."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in "ZX" else after_name[19]
