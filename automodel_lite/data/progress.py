"""A line every few seconds of work that takes longer, on the standard error stream."""

from __future__ import annotations

import sys
import time

EVERY_S = 5.0


class Progress:
    """Says `tokenizing train: 41,472 of 100,000 documents (41 %), 12,310/s, 5 s left`; silent when quickly done.

    Only the process that does the work has one, so that no other rank repeats it.
    """

    def __init__(self, what: str, total: int, unit: str):
        self._what, self._total, self._unit = what, total, unit
        self._num_done = 0
        self._start = self._said = time.monotonic()

    def add(self, count: int) -> None:
        self._num_done += count
        now = time.monotonic()
        if now - self._said < EVERY_S:
            return
        self._said = now
        per_s = self._num_done / (now - self._start)
        print(
            f"{self._what}: {self._num_done:,} of {self._total:,} {self._unit} ({self._num_done / self._total:.0%}), "
            f"{per_s:,.0f}/s, {(self._total - self._num_done) / per_s:,.0f} s left",
            file=sys.stderr,
            flush=True,
        )
