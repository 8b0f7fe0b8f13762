"""Long work is a bar on a terminal and a line now and then in a log."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from automodel_lite import progress
from automodel_lite.progress import Progress

WORK = """
import sys, time
from automodel_lite.progress import BAR_AFTER_S, Progress, print_above_bars
with Progress("counting", 4, "things") as work:
    for _ in range(4):
        time.sleep(BAR_AFTER_S / 2)
        work.note("validating")
        work.add(1, "loss 1.5")
        print_above_bars("a line")
"""


def on_a_terminal(code: str, columns: int = 80) -> str:
    """What a person sees of it: both streams on one pseudo-terminal."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = os.environ | {"COLUMNS": str(columns), "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    assert process.wait() == 0, shown.decode()
    return shown.decode()


def test_a_bar_on_a_terminal_with_lines_above_it() -> None:
    shown = on_a_terminal(WORK)
    assert "counting:  75%" in shown
    assert "validating" in shown
    # what is left is estimated at each draw
    assert re.search(r"3/4 things \[\d\d:\d\d<\d\d:\d\d, loss 1.5\]", shown)
    assert shown.count("a line") == 4
    # `^C` has room behind a bar of 80 columns
    assert max(len(line) for line in re.split(r"[\r\n]", shown)) == 77


def test_a_note_is_seen_before_the_first_is_done() -> None:
    code = """
from automodel_lite.progress import Progress
with Progress("training", 6, "steps") as work:
    work.note("first step")
    work.add(6)
print("done")
"""
    shown = on_a_terminal(code)
    assert "training:   0%" in shown
    assert "first step" in shown
    assert shown.strip().splitlines()[-1].split("\r")[-1] == "done"  # the bar is gone


def test_another_rank_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert on_a_terminal(WORK).replace("a line", "").strip() == ""


def test_a_line_now_and_then_in_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress("tokenizing train", 1000, "documents") as work:
        for _ in range(3):
            now[0] += 6
            work.add(100)
    assert (
        capsys.readouterr().err
        == "tokenizing train: 200 of 1,000 documents (20%), 17/s, 48 s left\n"
    )
