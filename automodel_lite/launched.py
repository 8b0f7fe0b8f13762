"""The processes of this job, as a launcher (torchrun, srun, `--nproc`) describes them in the
environment, and which process of which host is meant, for locks and for the ranks of a job. No
torch.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from automodel_lite.errors import ConfigError, listed

_VARIABLES = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")


def world_size() -> int:
    """Processes of this job, as torchrun or srun started them; 1 without a launcher."""
    return launch_variable("WORLD_SIZE", 1)


def rank() -> int:
    """This process' number in the job."""
    return launch_variable("RANK", 0)


def is_first_here() -> bool:
    """Returns whether this process speaks for its node; of several that meet the same mistake, one
    prints it.
    """
    return os.environ.get("LOCAL_RANK", "0") == "0"


def named_ranks(ranks: Sequence[int]) -> str:
    """Returns `rank 3`, `ranks 3, 5`, at most eight of them."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def launch_variable(name: str, default: int) -> int:
    """Returns a number that the launcher sets; raises ConfigError."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch(r"\d{1,9}", text, flags=re.ASCII) or (
        name.endswith("SIZE") and int(text) == 0
    ):
        raise ConfigError(
            f"the environment has {name}={text}, which must be a whole "
            f"number{' over 0' if default else ''}: torchrun and srun set it; without them, unset "
            f"{name}."
        )
    return int(text)


def check_launched() -> None:
    """Raises ConfigError for launcher variables that are invalid or inconsistent, before a rank
    waits for others.
    """
    launch_variable("LOCAL_WORLD_SIZE", 1)
    for name in ("RANK", "LOCAL_RANK"):
        if launch_variable(name, 0) >= world_size():
            raise ConfigError(
                f"the environment has {name}={os.environ[name]} of WORLD_SIZE={world_size()} "
                "processes, which count from 0: torchrun and srun set both; without them, unset "
                f"{name} and WORLD_SIZE."
            )
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing and (world_size() > 1 or "RANK" in os.environ):
        given = " ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ)
        raise ConfigError(
            f"the environment has {given} and no {' and no '.join(missing)}: start with torchrun "
            "or automodel-lite train --nproc, which set them; for one process, unset "
            f"{'WORLD_SIZE' if 'RANK' not in os.environ else 'RANK'}."
        )
    if "RANK" in os.environ and not 0 < launch_variable("MASTER_PORT", 0) < 1 << 16:
        raise ConfigError(
            f"the environment has MASTER_PORT={os.environ['MASTER_PORT']}: ports are 1 to 65535."
        )


def check_alone() -> None:
    """Raises ConfigError in one of several processes, for work that is not shared out
    among them.
    """
    if world_size() > 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size()} processes would each do all of this work: start it with "
            "python, in one process."
        )


@dataclass(frozen=True)
class ProcessId:
    """A process number means something on one host, until that host starts again, and is used
    again.
    """

    host: str
    boot: str  # of the host, and the namespace of process numbers (a container has its own)
    pid: int
    started: str  # in ticks since the boot

    def is_here(self) -> bool:
        """Returns whether the process is, or was, one of this host's."""
        return (self.host, self.boot) == (socket.gethostname(), boot_id())

    def is_gone(self) -> bool:
        """Returns whether the process has ended; False for one of another host, which nobody here
        can know.
        """
        return self.is_here() and start_ticks(self.pid) != self.started


def this_process() -> ProcessId:
    """Returns the identity of the calling process."""
    return ProcessId(socket.gethostname(), boot_id(), os.getpid(), start_ticks(os.getpid()) or "")


def boot_id() -> str:
    """Returns what changes when the host is started again, or a container has its own process
    numbers.
    """
    try:
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} "
            f"{os.readlink('/proc/self/ns/pid')}"
        )
    except OSError:
        return ""


def start_ticks(pid: int) -> str | None:
    """Returns when a process of this host started; None when there is none, or it is dead and not
    yet reaped.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in "ZX" else after_name[19]
