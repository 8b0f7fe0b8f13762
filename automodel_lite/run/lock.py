"""One job at a time works in a run's folder, and a job that lost the folder stops.

The lock is a file with the host, process and SLURM job of its holder, linked into place whole; it
works on network file systems, where flock does not. One rule says whether a holder is dead: on this
host its process is gone; of this very SLURM job it was an earlier start; anywhere else the pulse, a
counter in the file, stands still for a while. No clock of another host is read.

    run.lock            the holder
    run.lock.<token>    who succeeds the holder with this token: linked, so one alone; it becomes
                        run.lock

A job may be stopped for longer than that (a laptop that sleeps, a disk that hangs) and go on. Every
save compares the token in the lock with its own (`check_held`), so of two jobs that both think they
hold the folder one writes.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from automodel_lite.errors import ConfigError, RunStoppedError, explained
from automodel_lite.launched import ProcessId, this_process

PULSE_S = 5.0
_TORN = "torn"
_WATCH_PULSES = 4  # so many without a change, and the holder is taken for dead


@dataclass(frozen=True)
class Holder(ProcessId):
    """Who holds a lock."""

    token: str  # of this very lock
    job: str  # of SLURM, with the number of its restart; "" outside
    pulse: int = 0  # the last field: written over in place, the text only grows

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (
            f", SLURM job {self.job.split('.')[0]}" if self.job else ""
        )


class RunLock:
    """Held by rank 0 from `acquire` to `release`, or until the process ends in whatever way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # of the holder of this run, once it is held: by rank 0, for all
        self.token: str | None = None
        self.is_lost = False  # noticed by the pulse
        self._stop = threading.Event()
        slurm = os.environ.get("SLURM_JOB_ID")
        job = f"{slurm}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if slurm else ""
        self._mine = Holder(**asdict(this_process()), token=uuid.uuid4().hex, job=job)
        self._file = -1  # descriptor of the lock's own file, wherever its name has gone

    def check(self) -> Holder | None:
        """Returns the dead holder of a lock that may be taken over, None for a free one; watches
        for some 20 s when that is not clear. Raises ConfigError when another live job holds it.
        Makes nothing: a run that is refused for another reason leaves no folder.
        """
        holder = self.holder()
        if holder is None or self._is_dead(holder):
            return holder
        raise ConfigError(
            f"output_dir={self.path.parent} is in use by {holder}: wait for it, stop it, or start "
            f"another run with name=... ; if you are sure that it is dead, delete {self.path}."
        )

    def _is_dead(self, holder: Holder) -> bool:
        if holder.token == _TORN or holder.is_here():
            return holder.token == _TORN or holder.is_gone()
        if (
            holder.job
            and holder.job.split(".")[0] == self._mine.job.split(".")[0]
            and holder.job != self._mine.job
        ):
            return True
        for _ in range(_WATCH_PULSES):
            time.sleep(PULSE_S)
            if (now := self.holder()) != holder:
                return now is None
        return True

    def acquire(self) -> str:
        """Takes the lock and returns its token; raises ConfigError: it is another's, or cannot be
        written.
        """

        # into the lock's own file: when another job's has taken its name, nobody reads ours
        def beat() -> None:
            while not self._stop.wait(PULSE_S):
                self._mine = replace(self._mine, pulse=self._mine.pulse + 1)
                # a disk that is full or away: the next pulse may get through
                with suppress(OSError):
                    os.pwrite(self._file, json.dumps(asdict(self._mine)).encode(), 0)
                    os.fsync(self._file)
                    self.is_lost = not self.is_held()

        with explained(f"output_dir={self.path.parent} cannot be written"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                dead = self.check()
                if self._create(self.path) if dead is None else self._take_over(dead):
                    break
        self.token = self._mine.token
        threading.Thread(target=beat, daemon=True).start()
        return self.token

    def is_held(self) -> bool:
        """Returns whether the lock is still this run's. Any rank that knows the token
        may call it.
        """
        holder = self.holder()
        return holder is not None and holder.token == self.token

    def check_held(self) -> None:
        """The fence before everything that is written: raises RunStoppedError when the lock is
        another job's.
        """
        if self.is_held():
            return
        folder = self.path.parent
        holder = self.holder()
        if not folder.is_dir():
            raise RunStoppedError(
                f"output_dir={folder} is gone: it was removed or renamed during the run, so "
                "nothing more can be saved. Restore it under its name and run the same command "
                "again to continue from the newest checkpoint."
            )
        raise RunStoppedError(
            f"output_dir={folder} no longer belongs to this job: {self.path.name} "
            f"{f'names {holder}' if holder else 'was deleted'}. This job was suspended or cut off "
            "from its disk for so long that it was considered dead; it exits without writing "
            "anything more."
        )

    def release(self) -> None:
        """Gives the lock back, if it is still ours: of the ranks, which all know the token, the one
        that took it.
        """
        self._stop.set()
        # the folder is gone or cannot be written: a dead process holds no lock
        with suppress(OSError):
            if self.token == self._mine.token and self.is_held():
                self.path.unlink()

    def holder(self) -> Holder | None:
        """Returns the last in the chain of successors; None without a lock."""
        return next(reversed(self._chain()), None)

    def _chain(self) -> list[Holder]:
        """The holder in the lock, who claims to succeed it, and so on: a claimer may die before it
        is in the lock.
        """
        chain = list[Holder]()
        path = self.path
        with suppress(FileNotFoundError, NotADirectoryError):
            while True:
                try:
                    chain.append(Holder(**json.loads(path.read_bytes())))
                except (ValueError, TypeError, RecursionError):
                    # a disk fault has torn it: its holder is dead
                    chain.append(Holder("", "", 0, "", token=_TORN, job=""))
                path = self._claim_path(chain[-1])
        return chain

    def _claim_path(self, holder: Holder) -> Path:
        return self.path.with_name(f"{self.path.name}.{holder.token}")

    def _take_over(self, dead: Holder) -> bool:
        """Takes the place of a dead holder; False when another one has."""
        claim = self._claim_path(dead)
        if not self._create(claim):  # of all who try, one can link it
            return False
        # of who comes late, when the claim has become the lock, it ends otherwise
        chain = self._chain()
        if [holder.token for holder in chain[-2:]] != [dead.token, self._mine.token]:
            claim.unlink(missing_ok=True)
            return False
        os.replace(claim, self.path)
        for holder in chain[:-2]:
            self._claim_path(holder).unlink(missing_ok=True)
        return True

    def _create(self, path: Path) -> bool:
        """Links a file with this holder under a name, whole from its first moment; False when there
        is one already.
        """
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
            # A lock that is taken stays taken: nobody reads what is left here.
            with suppress(OSError):
                os.unlink(aside)
        self._file = descriptor
        return True
