"""Leaving before the last step: because of a signal, or because the job's time is nearly over.

TERM and USR1 are what schedulers send. Before the first step there is nothing to save: the process leaves at once.
From then on a signal is a wish; the ranks agree on it at the edge of a step, save, and leave with code 75.

A rank whose peers are gone never reaches that edge: it waits in a collective, where no Python handler runs. A thread
notices, and ends it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from automodel_lite.config.rules import seconds_of

PREEMPTED_EXIT = 75  # "try again later" (EX_TEMPFAIL): the run goes on when the same command is started again
STARTED = time.monotonic()
_STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_UNTIL_KILLED_S = 300.0
_GIVE_UP_S = 10.0
_LOOK_EVERY_S = 0.5
_TIME_IS_UP = 1  # number of a signal that nobody sends us


class StoppedEarly(BaseException):
    """A signal before the first step. Not an Exception: nothing on the way may take it for an error of its own."""


class StopSignals:
    """What this process has been told. One object a process, as there is one handler a signal."""

    def __init__(self) -> None:
        self.received = 0  # the number of the last signal
        self.edge_reached = threading.Event()  # the ranks have agreed on the last signal
        self._is_deferred = False
        self._watching: int | None = None  # where the thread of `watch` is told of signals

    def install(self) -> None:
        """From now on TERM and USR1 are handled here."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def renew(self) -> Callable[[], None]:
        """For the next job of a sweep in this process. The answer puts a job that was told to stop back into its queue,
        where its launcher (submitit) offers that.
        """
        self.edge_reached.clear()
        self._is_deferred = False
        self._stop_watching()
        if self.received:
            raise StoppedEarly(reason_of(self.received))
        self.install()
        if "SUBMITIT_EXECUTOR" not in os.environ:
            return lambda: None
        requeue = signal.signal(signal.SIGUSR2, self._handle)  # submitit saves its job and requeues it in this handler

        def put_back() -> None:
            if callable(requeue):
                requeue(signal.SIGUSR2, None)
            time.sleep(_UNTIL_KILLED_S)  # not the first rank: the scheduler ends it

        return put_back

    def defer(self) -> None:
        """Signals no longer end the process: somebody looks at `received` at the edge of every step."""
        self._is_deferred = True
        if self.received:
            raise StoppedEarly(reason_of(self.received))

    def watch(
        self, in_step: Callable[[], bool], are_peers_lost: Callable[[], bool], step_s: Callable[[], float]
    ) -> None:
        """Starts the thread that ends this process when it was told to stop and hangs: at once when another rank has
        failed, else when its step (`in_step`) goes on for 10 s or three of the longest steps (`step_s`) more.
        """
        self._stop_watching()
        ours, theirs = os.pipe()
        self._watching = theirs
        os.set_blocking(theirs, False)
        signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)

        def wait() -> None:
            while (told := os.read(ours, 1)) and told[0] not in _STOPPING:
                pass
            os.close(ours)
            if not told:  # the job is over
                return
            waited_s = 0.0
            while not self.edge_reached.wait(_LOOK_EVERY_S):
                waited_s = waited_s + _LOOK_EVERY_S if in_step() else 0.0
                if are_peers_lost() or waited_s > max(_GIVE_UP_S, 3 * step_s()):
                    print("told to stop, but the other ranks are gone: leaving without a save", file=sys.stderr)
                    sys.stderr.flush()
                    os._exit(1)

        threading.Thread(target=wait, daemon=True).start()

    def _stop_watching(self) -> None:
        if self._watching is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._watching)
            self._watching = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if not self._is_deferred:
            raise StoppedEarly(reason_of(number))


SIGNALS = StopSignals()


def reason_of(number: int) -> str:
    """`SIGTERM`, or `the time is up`."""
    return "the time is nearly up" if number == _TIME_IS_UP else signal.Signals(number).name


@dataclass(frozen=True)
class Deadline:
    """When the run has to be gone, on the monotonic clock (a jump of the wall clock does not move it); None = never."""

    at: float | None
    margin_s: float

    def is_near(self, reserve_s: float) -> bool:
        """Is there less time left than the margin and `reserve_s`, which the last step and save will take?"""
        return self.at is not None and time.monotonic() + self.margin_s + reserve_s >= self.at


def deadline_of(max_time: str | int | None, margin_s: float, environment: Mapping[str, str] = os.environ) -> Deadline:
    """The earlier of training.max_time, counted from the start of the process, and the end of the SLURM job."""
    ends = []
    if max_time is not None:
        ends.append(STARTED + seconds_of(max_time))
    if job_end := environment.get("SLURM_JOB_END_TIME"):
        ends.append(time.monotonic() + float(job_end) - time.time())
    return Deadline(min(ends, default=None), margin_s)


class Ranks(Protocol):
    """What `StepEdge` needs of the control group."""

    def max(self, values: list[int]) -> list[int]: ...


class Saves(Protocol):
    """What `StepEdge` needs of the checkpointer."""

    longest_s: float

    def is_busy(self) -> bool: ...

    def finish(self) -> None: ...


@dataclass
class StepEdge:
    """The one message that the ranks exchange in every step, and in every batch of validation.

    Has anybody been told to stop? Is somebody still writing?
    """

    ranks: Ranks
    deadline: Deadline
    saves: Saves
    signals: StopSignals
    stop_reason: str | None = None
    longest_s: float = 0.0  # between two messages
    _last: float | None = None

    def agree(self) -> None:
        """Sets `stop_reason`; closes a save that all ranks have written."""
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - (self._last or now))
        self._last = now
        wish = self.signals.received
        if not wish and self.deadline.is_near(2 * self.longest_s + 2 * self.saves.longest_s):
            wish = _TIME_IS_UP
        number, any_busy = self.ranks.max([wish, int(self.saves.is_busy())])
        if number and self.stop_reason is None:
            self.stop_reason = reason_of(number)
            self.signals.edge_reached.set()
        if not any_busy:
            self.saves.finish()

    def must_stop(self) -> bool:
        """`agree` between steps: has any rank been told to stop?"""
        self.agree()
        return self.stop_reason is not None
