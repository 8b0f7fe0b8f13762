"""A metrics.jsonl that grows: what is read again is what was added."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel_lite.run.folder import rows_in

_TAIL_BYTES = 256  # of what was read: they tell a file that was written anew


@dataclass
class GrowingRows:
    """The rows of a file so far. A run that continues writes the file anew, without the rows that
    come again; it is then read from its start.
    """

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    _end: int = 0  # of the last whole line that was read, in bytes
    _tail: bytes = b""  # before that

    def read(self) -> list[dict[str, Any]]:
        """Returns all rows; a line that is being written waits for its end."""
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, self._end - len(self._tail)))
                if size < self._end or file.read(len(self._tail)) != self._tail:
                    self._restart()
                    file.seek(0)
                added = file.read(max(0, size - self._end))
        except FileNotFoundError:
            self._restart()
            return self.rows
        whole = added[: added.rfind(b"\n") + 1]
        # a new list: who draws the old one goes on with it
        self.rows = [*self.rows, *rows_in(whole.decode(errors="replace"))]
        self._end += len(whole)
        self._tail = (self._tail + whole)[-_TAIL_BYTES:]
        return self.rows

    def _restart(self) -> None:
        self.rows = []
        self._end = 0
        self._tail = b""
