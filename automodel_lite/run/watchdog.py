"""Stacks of a rank that does not get on, in its log, so that a hang has a place; and a witness of its death.

Another process keeps the time (`guard.py`). Stacks are written by a thread that holds the interpreter's lock, or, when
it cannot get that, by the main thread about itself. faulthandler's own timer walks the frames of threads that run on:
it crashed one healthy rank in 400 dumps.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from automodel_lite.redact import scrub

_SIGNAL = signal.SIGRTMAX - 3  # that nobody else uses: USR1 is the scheduler's, USR2 submitit's
_END_S = 2.0


class Watchdog:
    """`beat` at every step; when the next beat does not come in time, the stacks of all threads go to the log, again
    and again.
    """

    def __init__(self, log: Path, after_s: float) -> None:
        self.doing = "setting up"  # what the rank is at, for error reports
        self._after_s = after_s
        self._last = time.monotonic()
        self._log = log
        self._file: TextIO | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, rank: int, token: str) -> None:
        """From now on the rank is watched; `token` is the one in the run's lock. A run that never starts leaves no
        file.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._log, "a", buffering=1)  # noqa: SIM115 - open as long as the process
        faulthandler.register(_SIGNAL, self._file, all_threads=False)
        script = Path(__file__).with_name("guard.py")
        where = [str(self._log.parent.parent), str(rank), token, str(self._after_s), str(int(_SIGNAL))]
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), *where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._guard.stdin
        os.set_blocking(self._guard.stdin.fileno(), False)  # a guard that hangs must not hold up its rank
        threading.Thread(target=self._answer, daemon=True).start()
        self._tell({"doing": self.doing})

    def beat(self, doing: str) -> None:
        """The rank begins something new."""
        now = time.monotonic()
        if self._file and self._after_s and now - self._last > self._after_s:
            self._file.write(f"the stacks above are of: {self.doing}; it took {now - self._last:.0f} s\n")
        self.doing, self._last = doing, now
        self._tell({"doing": doing})

    @property
    def is_in_step(self) -> bool:
        return self.doing.startswith("in step")

    def stop(self) -> None:
        """Nothing is watched any more: the rank ends as it should, or has said why not."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        self._tell({"bye": True}, guard)
        with suppress(subprocess.TimeoutExpired):
            guard.wait(_END_S)
        faulthandler.unregister(_SIGNAL)

    def _tell(self, said: dict[str, object], guard: subprocess.Popen[bytes] | None = None) -> None:
        guard = guard or self._guard
        if guard is None:
            return
        assert guard.stdin
        with suppress(OSError):  # it is gone, or hangs: the training goes on without it
            os.write(guard.stdin.fileno(), json.dumps(said).encode() + b"\n")

    def _answer(self) -> None:
        """Writes the stacks whenever the guard asks for them."""
        guard = self._guard
        assert guard
        assert guard.stdout
        while guard.stdout.read(1):
            self.dump()
            self._tell({"has_dumped": True})

    def dump(self) -> None:
        """The stacks of all threads, to the log."""
        assert self._file
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"Timeout ({timedelta(seconds=self._after_s)})! {time.strftime('%F %T')} {self.doing}\n"]
        for number, frame in sys._current_frames().items():
            if number != threading.get_ident():
                lines += [f"Thread {names.get(number, number)}:\n", *traceback.format_stack(frame)]
        with suppress(OSError, ValueError):  # the disk is full, or the process ends
            self._file.write(scrub("".join(lines)))
