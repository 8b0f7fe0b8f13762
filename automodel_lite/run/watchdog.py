"""Writes the stacks of a rank that does not get on to its log, so that a hang has a place."""

from __future__ import annotations

import faulthandler
import time
from pathlib import Path
from typing import TextIO


class Watchdog:
    """`beat` at every step; when the next beat does not come in time, faulthandler writes all threads' stacks to the
    log, again and again. Its thread needs no Python lock, so a hang inside of a kernel is seen too.
    """

    def __init__(self, log: Path, after_s: float) -> None:
        self.doing = "setting up"  # what the rank is at, for error reports
        self._after_s = after_s
        self._last = time.monotonic()
        self._log = log
        self._file: TextIO | None = None  # opened by the first beat: a run that never starts leaves no file

    def beat(self, doing: str) -> None:
        """The rank begins something new."""
        now = time.monotonic()
        if self._after_s:
            if self._file is None:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self._log, "a", buffering=1)  # noqa: SIM115 - open as long as the process
            faulthandler.cancel_dump_traceback_later()
            if now - self._last > self._after_s:
                self._file.write(f"the stacks above are of: {self.doing}; it took {now - self._last:.0f} s\n")
            faulthandler.dump_traceback_later(self._after_s, repeat=True, file=self._file)
        self.doing, self._last = doing, now

    @property
    def is_in_step(self) -> bool:
        return self.doing.startswith("in step")

    def stop(self) -> None:
        if self._after_s:
            faulthandler.cancel_dump_traceback_later()
