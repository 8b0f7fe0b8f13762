"""One job at a time works in a run's folder, and a job that lost the folder stops.

The lock is a file with the host, process and job of its holder, and a counter that the holder raises every few seconds.
It works on network file systems, where flock does not: a file that is linked into place whole, and a pulse that one can
watch. A lock is left behind by a killed job. It is taken over when its process is gone from this host, when it is an
earlier run of this very SLURM job, or when its pulse has stopped; no clock of another host is read.

    run.lock            the holder
    run.lock.<token>    who succeeds the holder with this token: linked, so one alone; it becomes run.lock

A job may be stopped for longer than that (a laptop that sleeps, a disk that hangs) and go on. Every save compares the
token in the lock with its own (`check_held`), so of two jobs that both think they hold the folder one writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from automodel_lite.errors import ConfigError, RunStoppedError

PULSE_S = 5.0
_WATCH_PULSES = 4  # so many without a change, and the holder is taken for dead
_PULSE_DIGITS = 12
_TORN_S = 0.5  # a lock that cannot be read yet may be one that is being written, where files cannot be linked


@dataclass(frozen=True)
class Holder:
    """Who holds a lock."""

    token: str  # of this very lock
    host: str
    boot: str  # of the host: process numbers mean nothing after a reboot
    pid: int
    started: str  # of the process, in ticks since the boot: process numbers are used again
    job: str  # of SLURM, with the number of its restart; "" outside
    pulse: str = "0" * _PULSE_DIGITS  # the last field, of one width: it is written over in place


class RunLock:
    """Held by rank 0 from `acquire` to the end of the `with` block, or until the process ends in whatever way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.token: str | None = None  # of the holder of this run, once it is held: by rank 0, for all
        self.is_lost = False  # noticed by the pulse
        self._is_holder = self._has_made_folder = False
        self._stop = threading.Event()
        self._mine = _this_process()
        self._file: int | None = None  # descriptor of the lock's own file, wherever its name has gone

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def check(self, pulse_s: float = PULSE_S) -> Holder | None:
        """Raises ConfigError when another live job holds the lock; watches for some 20 s when that is not clear.

        Returns the dead holder of a lock that may be taken over. Makes nothing: a run that is refused for another
        reason leaves no folder.
        """
        holder = self._holder()
        if holder is not None and not _is_gone(holder, self._mine) and self._has_pulse(holder, pulse_s):
            raise ConfigError(
                f"output_dir={self.path.parent} is in use by {_describe(holder)}: wait for it, stop it, or start "
                f"another run with name=... ; if you are sure that it is dead, delete {self.path}."
            )
        return holder

    def acquire(self, pulse_s: float = PULSE_S) -> str:
        """Takes the lock and returns its token; raises ConfigError when another live job holds it, or the folder cannot
        be written.
        """
        try:
            self._has_made_folder = not self.path.parent.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                dead = self.check(pulse_s)
                if self._create(self.path) if dead is None else self._succeed(dead):
                    break
        except OSError as error:
            raise ConfigError(f"output_dir={self.path.parent} cannot be written: {error.strerror}.") from None
        self.token, self._is_holder = self._mine.token, True
        threading.Thread(target=self._beat, args=(pulse_s,), daemon=True).start()
        return self.token

    def is_held(self) -> bool:
        """Is the lock still this run's? Any rank that knows the token may call it."""
        holder = self._holder()
        return holder is not None and holder.token == self.token

    def is_taken(self) -> bool:
        """Was the lock this run's, and is it no longer?"""
        return self.token is not None and not self.is_held()

    def check_held(self) -> None:
        """The fence before everything that is written: raises RunStoppedError when the lock is another job's."""
        if self.is_held():
            return
        folder, holder = self.path.parent, self._holder()
        if not folder.is_dir():
            raise RunStoppedError(
                f"output_dir={folder} is gone: it was removed or renamed during the run, so nothing more can be "
                "saved. Restore it under its name and run the same command again to continue from the newest "
                "checkpoint."
            )
        raise RunStoppedError(
            f"output_dir={folder} no longer belongs to this job: {self.path.name} "
            f"{f'names {_describe(holder)}' if holder else 'was deleted'}. This job was suspended or cut off from "
            "its disk for so long that it was considered dead; it exits without writing anything more."
        )

    def release(self) -> None:
        """Gives the lock back, if it is still ours."""
        self._stop.set()
        if not self._is_holder:
            return
        self._is_holder = False
        claim = self._claim(self._mine)
        self._mine = replace(self._mine, token=uuid.uuid4().hex)  # we succeed ourselves, so that no other job does
        try:
            if self._create(claim):
                current = _read(self.path)
                if current is not None and current.token == self.token:
                    self.path.unlink(missing_ok=True)
                claim.unlink(missing_ok=True)
            if self._has_made_folder:
                self.path.parent.rmdir()  # it was made for the lock alone, unless something is in it
        except OSError:
            return  # the folder is gone or cannot be written: a dead process holds no lock

    def _holder(self) -> Holder | None:
        """The last in the chain of successors; None without a lock."""
        return next(reversed(self._chain()), None)

    def _claim(self, holder: Holder) -> Path:
        return self.path.with_name(f"{self.path.name}.{holder.token}")

    def _succeed(self, dead: Holder) -> bool:
        """Takes the place of a dead holder. Of all who try one can link the claim; who comes late, when the claim is
        gone because its work is done, finds another holder in the lock.
        """
        claim = self._claim(dead)
        if not self._create(claim):
            return False
        chain = self._chain()
        if [holder.token for holder in chain[-2:]] != [dead.token, self._mine.token]:
            claim.unlink(missing_ok=True)
            return False
        moved = self.path.with_name(f"{self.path.name}.{self._mine.token}.new")
        try:
            os.link(claim, moved)
        except OSError:  # no links on this file system
            moved.write_text(claim.read_text())
        os.replace(moved, self.path)
        for holder in chain[:-1]:
            self._claim(holder).unlink(missing_ok=True)
        return True

    def _chain(self) -> list[Holder]:
        chain, holder = [], _read(self.path)
        while holder is not None:
            chain.append(holder)
            holder = _read(self._claim(holder))
        return chain

    def _create(self, path: Path) -> bool:
        """A lock file under this name, whole from its first moment; False when there is one already."""
        aside = self.path.with_name(f"{self.path.name}.{self._mine.token}.new")
        descriptor = self._write(aside, os.O_TRUNC)
        try:
            try:
                os.link(aside, path)
            except FileExistsError:
                raise
            except OSError:  # a file system without links: exclusive, but seen before it is whole
                exclusive = self._write(path, os.O_EXCL)
                os.close(descriptor)
                descriptor = exclusive
        except FileExistsError:
            os.close(descriptor)
            return False
        finally:
            os.unlink(aside)
        if self._file is not None:
            os.close(self._file)
        self._file = descriptor
        return True

    def _write(self, path: Path, how: int) -> int:
        """The descriptor of a file with this holder in it."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o666)
        os.write(descriptor, json.dumps(asdict(self._mine)).encode())
        os.fsync(descriptor)
        return descriptor

    def _has_pulse(self, holder: Holder, pulse_s: float) -> bool:
        for _ in range(_WATCH_PULSES):
            if _same_host(holder, self._mine):
                return True  # its process is alive: nothing to watch for
            time.sleep(pulse_s)
            now = self._holder()
            if now is None or now != holder:
                return now is not None
        return False

    def _beat(self, pulse_s: float) -> None:
        """Writes the pulse into the lock's own file: when another job's has taken its name, nobody reads ours."""
        pulse = 0
        while not self._stop.wait(pulse_s):
            pulse += 1
            text = json.dumps(asdict(replace(self._mine, pulse=f"{pulse:0{_PULSE_DIGITS}d}"))).encode()
            try:
                assert self._file is not None
                os.pwrite(self._file, text, 0)
                os.fsync(self._file)
                self.is_lost = not self.is_held()
            except (OSError, ConfigError):
                continue  # a disk that is full or away: the next pulse may get through


def _describe(holder: Holder) -> str:
    job = f", SLURM job {holder.job.split('.')[0]}" if holder.job else ""
    return f"process {holder.pid} on {holder.host}{job}"


def _this_process() -> Holder:
    job = ""
    if "SLURM_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    return Holder(uuid.uuid4().hex, socket.gethostname(), _boot_id(), os.getpid(), _start_ticks(os.getpid()) or "", job)


def _is_gone(holder: Holder, mine: Holder) -> bool:
    if holder.pid == 0:
        return True  # torn
    if _same_host(holder, mine):
        return _start_ticks(holder.pid) != holder.started
    same_job = bool(holder.job) and holder.job.split(".")[0] == mine.job.split(".")[0]
    return same_job and holder.job != mine.job


def _same_host(one: Holder, other: Holder) -> bool:
    return one.host == other.host and one.boot == other.boot


def _boot_id() -> str:
    """Also of the container, whose process numbers are its own."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
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
    """None for no lock; a lock that was torn by a crash, and stays torn, has a holder without a process."""
    for wait_s in (0.0, _TORN_S):
        time.sleep(wait_s)
        try:
            text = path.read_bytes().decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}): it names the job that uses the folder."
            ) from None
        try:
            return Holder(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            continue
    return Holder(f"torn-{hashlib.sha256(text.encode()).hexdigest()[:12]}", "", "", 0, "", "")
