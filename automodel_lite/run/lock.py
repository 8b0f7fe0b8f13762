"""One job at a time in a run's folder.

The lock is a file with the host, process and job of its holder, and a counter that the holder raises every few seconds.
It works on network file systems, where flock does not: a file that is made exclusively, and a pulse that one can watch.
A lock is left behind by a killed job. It is taken over when its process is gone from this host, when it is an earlier
run of this very SLURM job, or when its pulse has stopped; no clock of another host is read.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from automodel_lite.errors import ConfigError
from automodel_lite.run.durable import write_atomically

PULSE_S = 5.0
_WATCH_PULSES = 4  # so many without a change, and the holder is taken for dead


@dataclass(frozen=True)
class Holder:
    """Who holds a lock."""

    token: str  # of this very lock
    host: str
    boot: str  # of the host: process numbers mean nothing after a reboot
    pid: int
    started: str  # of the process, in ticks since the boot: process numbers are used again
    job: str  # of SLURM, with the number of its restart; "" outside
    pulse: int = 0


class RunLock:
    """Held by rank 0 from `acquire` to the end of the `with` block, or until the process ends in whatever way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_held = False
        self._stop = threading.Event()
        self._mine = _this_process()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def check(self, pulse_s: float = PULSE_S) -> Holder | None:
        """Raises ConfigError when another live job holds the lock; watches for some 20 s when that is not clear.

        Returns the dead holder of a lock that may be taken over. Makes nothing: a run that is refused for another
        reason leaves no folder.
        """
        holder = _read(self.path)
        if holder is not None and not _is_gone(holder, self._mine) and self._has_pulse(holder, pulse_s):
            job = f", SLURM job {holder.job.split('.')[0]}" if holder.job else ""
            raise ConfigError(
                f"output_dir={self.path.parent} is in use by process {holder.pid} on {holder.host}{job}: wait for "
                f"it, stop it, or start another run with name=... ; if it is surely dead, delete {self.path}."
            )
        return holder

    def acquire(self, pulse_s: float = PULSE_S) -> None:
        """Takes the lock; raises ConfigError when another live job holds it, or the folder cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while not self._create():
                self._remove(self.check(pulse_s))
        except OSError as error:
            raise ConfigError(f"output_dir={self.path.parent} cannot be written: {error.strerror}.") from None
        self._is_held = True
        threading.Thread(target=self._beat, args=(pulse_s,), daemon=True).start()

    def release(self) -> None:
        self._stop.set()
        if self._is_held:
            self._remove(self._mine)
            self._is_held = False

    def _create(self) -> bool:
        try:
            with open(self.path, "x", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self._mine)))
                return True
        except FileExistsError:
            return False

    def _remove(self, holder: Holder | None) -> None:
        """Removes the lock if it is still this holder's: renamed first, so that of two that try one succeeds."""
        grave = self.path.with_name(f"{self.path.name}.{self._mine.token}")
        try:
            os.rename(self.path, grave)
        except FileNotFoundError:
            return
        found = _read(grave)
        if found is not None and holder is not None and found.token != holder.token:
            os.rename(grave, self.path)  # somebody else's, made since we looked
            return
        grave.unlink(missing_ok=True)

    def _has_pulse(self, holder: Holder, pulse_s: float) -> bool:
        for _ in range(_WATCH_PULSES):
            if _same_host(holder, self._mine):
                return True  # its process is alive: nothing to watch for
            time.sleep(pulse_s)
            now = _read(self.path)
            if now is None or now != holder:
                return now is not None
        return False

    def _beat(self, pulse_s: float) -> None:
        pulse = 0
        while not self._stop.wait(pulse_s):
            now = _read(self.path)
            if now is not None and now.token != self._mine.token:
                return  # taken over: this process was thought dead
            pulse += 1
            try:
                write_atomically(self.path, json.dumps(asdict(self._mine) | {"pulse": pulse}))
            except OSError:
                continue  # a disk that is full or away: the next pulse may get through


def _this_process() -> Holder:
    job = ""
    if "SLURM_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    return Holder(uuid.uuid4().hex, socket.gethostname(), _boot_id(), os.getpid(), _start_ticks(os.getpid()) or "", job)


def _is_gone(holder: Holder, mine: Holder) -> bool:
    if _same_host(holder, mine):
        return _start_ticks(holder.pid) != holder.started
    same_job = bool(holder.job) and holder.job.split(".")[0] == mine.job.split(".")[0]
    return same_job and holder.job != mine.job


def _same_host(one: Holder, other: Holder) -> bool:
    return one.host == other.host and one.boot == other.boot


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_ticks(pid: int) -> str | None:
    """When a process of this host started, or None when there is none (or it is dead and not yet reaped)."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in "ZX" else after_name[19]


def _read(path: Path) -> Holder | None:
    """None for no lock, or one that was torn by a crash."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
