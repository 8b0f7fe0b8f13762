"""Long work made visible: a bar on a terminal, a line every ten seconds in a log; nothing for what
is quickly done.

Rank 0 alone shows anything; of several processes of a node, the one that does the work.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

LINE_EVERY_S = 10.0
BAR_AFTER_S = 0.5
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n:,}/{total:,}{unit} [{elapsed}<{remaining}{postfix}]"


def is_shown() -> bool:
    """Returns whether this process speaks for the job."""
    return os.environ.get("RANK", "0") == "0"


class Progress(AbstractContextManager["Progress"]):
    """One piece of long work, as a context manager.

        with Progress("tokenizing train", total=100_000, unit="documents") as progress:
            progress.add(512)

    On a terminal `tokenizing train:  41%|████▏     | 41,472/100,000 documents [00:03<00:05]`;
    in a log
    `tokenizing train: 41,472 of 100,000 documents (41 %), 12,310/s, 5 s left`. Both go to the
    standard error stream.
    """

    def __init__(
        self, what: str, total: int, unit: str = "", in_log: bool = True, num_done: int = 0
    ) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._in_log = in_log
        self._num_done = num_done
        self._start = self._printed = time.monotonic()
        self._bar: Any = None
        if is_shown() and total and sys.stderr.isatty():
            from tqdm import tqdm  # a log needs no bar

            self._bar = tqdm(
                desc=what,
                total=total,
                initial=num_done,
                unit=f" {unit}" if unit else "",
                bar_format=_BAR,
                leave=False,
                delay=BAR_AFTER_S,
                dynamic_ncols=True,
                file=sys.stderr,
            )
            self._bar.dynamic_ncols = _room_for_a_bar

    def note(self, text: str) -> None:
        """Shows `text` beside the bar, which is drawn at once."""
        if self._bar is not None:
            self._bar.delay = 0.0  # what was shown before BAR_AFTER_S is cleared at the end too
            self._bar.set_postfix_str(text)

    def add(self, count: int = 1, note: str = "") -> None:
        """`count` more are done; `note` replaces the one beside the bar when it is drawn next."""
        self._num_done += count
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
        elif self._in_log and is_shown() and time.monotonic() - self._printed >= LINE_EVERY_S:
            now = self._printed = time.monotonic()
            per_s = self._num_done / (now - self._start)
            left_s = (self._total - self._num_done) / per_s if per_s else float("inf")
            rate = f"{per_s:,.0f}/s" if per_s >= 10 else f"{per_s:.2g}/s"
            print(
                f"{self._what}: {self._num_done:,} of {self._total:,} {self._unit} "
                f"({self._num_done / self._total:.0%}), {rate}, {left_s:,.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def close(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    __exit__ = close


@contextmanager
def activity(what: str) -> Iterator[None]:
    """Work of unknown length: its name stands on the terminal until it is done; a log
    says nothing.
    """
    if not (is_shown() and sys.stderr.isatty()):
        yield
        return
    from tqdm import tqdm

    with tqdm(
        desc=f"{what} ...", bar_format="{desc}", leave=False, dynamic_ncols=True, file=sys.stderr
    ):
        yield


def _room_for_a_bar(_: TextIO) -> tuple[int, int]:
    """Columns and rows, without the columns where the terminal writes `^C`: a bar that it breaks in
    two stays.
    """
    columns, rows = shutil.get_terminal_size()
    return columns - 3, rows


def wrap_lines(text: str, indent: int, stream: TextIO | None = None) -> str:
    """Lines no wider than the terminal, broken at words, the later ones indented; as it is where
    there is none.
    """
    stream = stream or sys.stdout
    if not stream.isatty():
        return text
    width = max(40, shutil.get_terminal_size().columns)
    return textwrap.fill(
        text,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        tabsize=1,
    )


def duration(seconds: float) -> str:
    """Returns 1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def print_above_bars(text: str) -> None:
    """A line on the standard output stream that no bar runs through."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is not None and sys.stderr.isatty():
        tqdm.tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
    else:
        print(text, flush=True)
