"""Stopping before the last step: because of a signal, or because the job's time is nearly over.

TERM and USR1 are what schedulers send, INT is Ctrl-C, HUP comes when the terminal is closed (not
under nohup). Before the first step there is nothing to save: the process exits at once. From then
on a signal is a request; the ranks agree on it at a step boundary, save, and exit with code 75,
after Ctrl-C with 130. A second Ctrl-C exits at once, without a save. (A rank whose peers are gone
never reaches that boundary: `Peers` ends it.)
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from automodel_lite.config.rules import seconds_of

if TYPE_CHECKING:  # the command line needs no torch
    from automodel_lite.parallel.control import Control
    from automodel_lite.run.checkpoint import Checkpointer
    from automodel_lite.run.lock import RunLock

# "try again later" (EX_TEMPFAIL): the run goes on when the same command is started again
PREEMPTED_EXIT = 75
STARTED = time.monotonic()
INTERRUPTED_EXIT = 130  # as a shell reports Ctrl-C
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_STOPPING = (*STOP_SIGNALS, signal.SIGUSR2)
# torchrun forwards Ctrl-C to ranks that the terminal has signaled already: that is no second one
_SECOND_AFTER_S = 1.0
_TIME_IS_UP = 100  # no signal
_REASONS = (*_STOPPING, _TIME_IS_UP)


class StoppedEarly(BaseException):
    """A signal before the first step. Not an Exception: nothing on the way may take it for an error
    of its own.
    """

    def __init__(self, number: int) -> None:
        super().__init__(reason_of(number))
        self.state, self.exit_code = outcome_of(reason_of(number))


class StopSignals:
    """Stop signals of this process: one object per process, as there is one handler per signal."""

    def __init__(self) -> None:
        self.received = 0  # the number of the last signal
        self._is_deferred = False

    def install(self) -> None:
        """From now on TERM, USR1, INT and HUP are handled here."""

        def handle(number: int, frame: FrameType | None) -> None:
            self.received = number
            if not self._is_deferred:
                raise StoppedEarly(number)

        # submitit's name for preemption is USR2
        for number in _STOPPING if "SUBMITIT_EXECUTOR" in os.environ else STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup, tmux
                signal.signal(number, handle)

    def cause_of(self, error: BaseException) -> BaseException:
        """Returns the signal, where one has come: libraries that were importing or composing then
        turn any exception into one of their own, which reads as a mistake in the settings.
        """
        if self.received and not self._is_deferred:
            return StoppedEarly(self.received)
        return error

    def defer(self, record: Callable[[str, str], None]) -> None:
        """From now on signals do not end the process: `received` is checked at every step boundary.
        A second Ctrl-C ends it wherever it is, after `record(state, reason)`. In a thread: where
        the main thread waits in a collective, no Python handler runs.
        """
        self._is_deferred = True
        if self.received:
            raise StoppedEarly(self.received)
        ours, theirs = os.pipe()
        os.set_blocking(theirs, False)
        signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)

        def wait() -> None:
            first_at: float | None = None
            while True:
                if signal.SIGINT not in os.read(ours, 64):
                    continue
                first_at = first_at or time.monotonic()
                if time.monotonic() - first_at > _SECOND_AFTER_S:
                    reason = "a second Ctrl-C: exited without a save"
                    record("interrupted", reason)
                    print(reason, file=sys.stderr, flush=True)
                    os._exit(INTERRUPTED_EXIT)

        threading.Thread(target=wait, daemon=True).start()


SIGNALS = StopSignals()


def reason_of(number: int) -> str:
    """`SIGTERM`, or `the time is up`."""
    return "the time is nearly up" if number == _TIME_IS_UP else signal.Signals(number).name


def outcome_of(reason: str) -> tuple[str, int]:
    """Returns the state in STATUS.json and the exit code of a run that was stopped for
    this reason.
    """
    return (
        ("interrupted", INTERRUPTED_EXIT) if reason == "SIGINT" else ("preempted", PREEMPTED_EXIT)
    )


def deadline_of(max_time: str | int | None, margin_s: float) -> float:
    """Returns when the last save must be on the disk, on the monotonic clock: a margin before the
    end of max_time (from the start of the process) or of the SLURM job, whichever is earlier;
    infinity without either.
    """
    ends = [math.inf]
    if max_time is not None:
        ends.append(STARTED + seconds_of(max_time))
    if job_end := os.environ.get("SLURM_JOB_END_TIME"):
        ends.append(time.monotonic() + float(job_end) - time.time())
    return min(ends) - margin_s


@dataclass
class StepBoundary:
    """The one message that the ranks exchange in every step, and in every batch of validation: has
    any rank received a stop signal, is any still writing, and what do all of them read in the next
    step?

    It is started in the middle of a step and read at its end, so that neither the host nor the
    device waits for it.
    """

    ranks: Control
    deadline: float  # see deadline_of
    saves: Checkpointer
    lock: RunLock  # of the run's folder
    stop_reason: str | None = None
    longest_s: float = 0.0  # between two messages
    _last: float | None = None
    _receive: Callable[[], list[float]] | None = None

    def send(self, counts: Sequence[float] = ()) -> None:
        """Starts the message; `counts` are summed over the ranks, which all send as many."""
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - (self._last or now))
        self._last = now
        wish = SIGNALS.received
        if not wish and now + 2 * self.longest_s + 2 * self.saves.longest_s >= self.deadline:
            wish = _TIME_IS_UP
        wishes = [wish == number for number in _REASONS]
        self._receive = self.ranks.start_sum(
            [*wishes, self.saves.is_busy(), self.lock.is_lost, *counts]
        )

    def receive(self) -> list[float]:
        """Returns the sums; sets `stop_reason`, closes a save that all have written. Raises
        RunStoppedError.
        """
        assert self._receive is not None
        *wishes, any_busy, any_lost = (sums := self._receive())[: len(_REASONS) + 2]
        self._receive = None
        if any_lost:
            self.lock.check_held()
        wished = [number for number, count in zip(_REASONS, wishes) if count]
        if wished and self.stop_reason is None:
            self.stop_reason = reason_of(max(wished))
        if not any_busy:
            self.saves.finish()
        return sums[len(_REASONS) + 2 :]

    def must_stop(self) -> bool:
        """Agrees between steps: has any rank received a stop signal?"""
        self.send()
        self.receive()
        return self.stop_reason is not None
