"""One job at a time works in a run's folder, and a job that lost the folder stops.

The lock is a file with the host, process and SLURM job of its holder, linked into place whole; it works on network file
systems, where flock does not. One rule says whether a holder is dead: on this host its process is gone; of this very
SLURM job it was an earlier start; anywhere else the pulse, a counter in the file, stands still for a while. No clock of
another host is read.

    run.lock            the holder
    run.lock.<token>    who succeeds the holder with this token: linked, so one alone; it becomes run.lock

A job may be stopped for longer than that (a laptop that sleeps, a disk that hangs) and go on. Every save compares the
token in the lock with its own (`check_held`), so of two jobs that both think they hold the folder one writes.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from automodel_lite.errors import ConfigError, RunStoppedError
from automodel_lite.parallel.processes import ProcessId, this_process

PULSE_S = 5.0
_WATCH_PULSES = 4  # so many without a change, and the holder is taken for dead
_PULSE_DIGITS = 12


@dataclass(frozen=True)
class Holder(ProcessId):
    """Who holds a lock."""

    token: str  # of this very lock
    job: str  # of SLURM, with the number of its restart; "" outside
    pulse: str = "0" * _PULSE_DIGITS  # the last field, of one width: it is written over in place

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f", SLURM job {self.job.split('.')[0]}" if self.job else "")


class RunLock:
    """Held by rank 0 from `acquire` to the end of the `with` block, or until the process ends in whatever way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.token: str | None = None  # of the holder of this run, once it is held: by rank 0, for all
        self.is_lost = False  # noticed by the pulse
        self._is_holder = self._has_made_folder = False
        self._stop = threading.Event()
        slurm = os.environ.get("SLURM_JOB_ID")
        job = f"{slurm}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if slurm else ""
        self._mine = Holder(**asdict(this_process()), token=uuid.uuid4().hex, job=job)
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
        if holder is None or self._is_dead(holder, pulse_s):
            return holder
        raise ConfigError(
            f"output_dir={self.path.parent} is in use by {holder}: wait for it, stop it, or start another run with "
            f"name=... ; if you are sure that it is dead, delete {self.path}."
        )

    def _is_dead(self, holder: Holder, pulse_s: float) -> bool:
        if holder.pid == 0 or holder.is_here():
            return holder.pid == 0 or holder.is_gone()  # process 0: the lock is torn
        if holder.job and holder.job.split(".")[0] == self._mine.job.split(".")[0] and holder.job != self._mine.job:
            return True
        for _ in range(_WATCH_PULSES):
            time.sleep(pulse_s)
            if (now := self._holder()) != holder:
                return now is None
        return True

    def acquire(self, pulse_s: float = PULSE_S) -> str:
        """Takes the lock and returns its token; raises ConfigError when another live job holds it, or the folder cannot
        be written.
        """
        try:
            self._has_made_folder = not self.path.parent.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                dead = self.check(pulse_s)
                if self._create(self.path) if dead is None else self._take_over(dead):
                    break
        except OSError as error:
            raise ConfigError(f"output_dir={self.path.parent} cannot be written: {error.strerror}.") from None
        self.token, self._is_holder = self._mine.token, True
        threading.Thread(target=self._heartbeat, args=(pulse_s,), daemon=True).start()
        return self.token

    def is_held(self) -> bool:
        """Returns whether the lock is still this run's. Any rank that knows the token may call it."""
        holder = self._holder()
        return holder is not None and holder.token == self.token

    def is_taken(self) -> bool:
        """Returns whether the lock was this run's, and is no longer."""
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
            f"{f'names {holder}' if holder else 'was deleted'}. This job was suspended or cut off from its disk for so "
            "long that it was considered dead; it exits without writing anything more."
        )

    def release(self) -> None:
        """Gives the lock back, if it is still ours."""
        self._stop.set()
        if not self._is_holder:
            return
        self._is_holder, held = False, self._mine
        self._mine = replace(held, token=uuid.uuid4().hex)  # we succeed ourselves, so that no other job does
        try:
            if self._create(self._claim_path(held)):
                if (current := _read(self.path)) is not None and current.token == held.token:
                    self.path.unlink(missing_ok=True)
                self._claim_path(held).unlink(missing_ok=True)
            if self._has_made_folder:
                self.path.parent.rmdir()  # it was made for the lock alone, unless something is in it
        except OSError:
            return  # the folder is gone or cannot be written: a dead process holds no lock

    def _holder(self) -> Holder | None:
        """The last in the chain of successors; None without a lock."""
        return next(reversed(self._chain()), None)

    def _chain(self) -> list[Holder]:
        """The holder in the lock, who claims to succeed it, and so on: a claimer may die before it is in the lock."""
        chain, holder = [], _read(self.path)
        while holder is not None:
            chain.append(holder)
            holder = _read(self._claim_path(holder))
        return chain

    def _claim_path(self, holder: Holder) -> Path:
        return self.path.with_name(f"{self.path.name}.{holder.token}")

    def _take_over(self, dead: Holder) -> bool:
        """Takes the place of a dead holder. Of all who try, one can link the claim; who comes late, when the claim has
        become the lock, finds that the chain does not end with the dead one and itself.
        """
        claim = self._claim_path(dead)
        if not self._create(claim):
            return False
        chain = self._chain()
        if [holder.token for holder in chain[-2:]] != [dead.token, self._mine.token]:
            claim.unlink(missing_ok=True)
            return False
        os.replace(claim, self.path)
        for holder in chain[:-2]:
            self._claim_path(holder).unlink(missing_ok=True)
        return True

    def _create(self, path: Path) -> bool:
        """Links a file with this holder under a name, whole from its first moment; False when there is one already."""
        aside = self.path.with_name(f"{self.path.name}.{self._mine.token}.new")
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            os.write(descriptor, json.dumps(asdict(self._mine)).encode())
            os.fsync(descriptor)
            os.link(aside, path)
        except FileExistsError:
            os.close(descriptor)
            return False
        finally:
            os.unlink(aside)
        self._file = descriptor
        return True

    def _heartbeat(self, pulse_s: float) -> None:
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


def _read(path: Path) -> Holder | None:
    """None for no lock; what is no lock any more (a disk fault) has a holder without a process."""
    try:
        return Holder(**json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = f"{path} cannot be read ({error.strerror}): it names the job that uses the folder."
        raise ConfigError(reason) from None
    except (ValueError, TypeError, RecursionError):
        return Holder("", "", 0, "", token="torn", job="")
