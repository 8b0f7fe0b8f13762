"""The stacks of a rank that makes no progress, in its log; and a record when it is killed.

A call that holds the interpreter's lock stops every thread, so another process keeps the time, in a
session of its own that no Ctrl-C reaches. It reads what the rank is doing, a line at each `enter`,
and sends a signal and a line when the next is late: faulthandler writes the stack of the main
thread, which is safe because it is that thread's own. A thread writes all stacks when it gets the
lock. (faulthandler's own timer walks running threads: one healthy rank in 400 crashed.)
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_SIGNAL = signal.SIGRTMAX - 3  # unused elsewhere: USR1 is the scheduler's, USR2 submitit's
_LOOK_EVERY_S = 0.5  # for the death of the rank


class Watchdog:
    """`enter` at every step; when the next one does not come within `after_s`, stacks go to the
    log, repeatedly.
    """

    def __init__(self, run: Path, rank: int, after_s: float) -> None:
        self.run = run
        self.rank = rank
        self.after_s = after_s
        self.log = run / "logs" / f"rank_{rank:05d}.log"
        self.doing = "setting up"  # for error reports, too
        self._since = time.monotonic()
        self._file: TextIO | None = None
        self._timer: subprocess.Popen[bytes] | None = None

    def start(self, token: str) -> None:
        """From now on the rank is watched; `token` is the one in the run's lock."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.log, "a", buffering=1)  # noqa: SIM115 - open as long as the process
        faulthandler.register(_SIGNAL, self._file, all_threads=False)
        facts = json.dumps([str(self.run), self.rank, token, self.after_s, os.getpid()])
        command = [sys.executable, "-I", "-S", __file__, facts]
        pipe = subprocess.PIPE
        null = subprocess.DEVNULL
        self._timer = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True
        )
        assert self._timer.stdin
        # a timer that hangs must not hold up its rank
        os.set_blocking(self._timer.stdin.fileno(), False)
        threading.Thread(
            target=self._write_all_stacks, args=(self._timer, self._file), daemon=True
        ).start()
        self.enter(self.doing)

    def enter(self, doing: str) -> None:
        """The rank begins something new: `in step 4`."""
        now = time.monotonic()
        if self._file and self.after_s and now - self._since > self.after_s:
            self._file.write(
                f"the stacks above are of: {self.doing}; it took {now - self._since:.0f} s\n"
            )
        self.doing = doing
        self._since = now
        self._send(doing)

    def stop(self) -> None:
        """Stops watching: the rank ends normally, or has recorded why not."""
        if self._timer is None:
            return
        self._send("")
        timer = self._timer
        self._timer = None
        try:
            timer.wait(timeout=2)
        except subprocess.TimeoutExpired:
            timer.kill()  # its signal would end this process, once nobody handles it
        faulthandler.unregister(_SIGNAL)

    def _send(self, doing: str) -> None:
        if self._timer and self._timer.stdin:
            with suppress(OSError):  # it is gone, or hangs: the training goes on without it
                os.write(self._timer.stdin.fileno(), doing.encode() + b"\n")

    def _write_all_stacks(self, timer: subprocess.Popen[bytes], log: TextIO) -> None:
        """In a thread: writes the stacks of all others whenever the timer says that the rank is
        late.
        """
        # not in the other process, which has no packages
        from automodel_lite.redact import scrub
        from automodel_lite.run.collectives import write_collectives

        assert timer.stdout
        while timer.stdout.readline():
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            lines = [f"Timeout ({self.after_s:g} s)! {time.strftime('%F %T')} {self.doing}\n"]
            for number, frame in sys._current_frames().items():
                if number != threading.get_ident():
                    lines += [
                        f"Thread {names.get(number, number)}:\n",
                        *traceback.format_stack(frame),
                    ]
            with suppress(OSError, ValueError):  # the disk is full, or the process ends
                log.write(scrub("".join(lines)))
                write_collectives(self.log.with_name(f"collectives_{self.rank:05d}.json"))


def watch_rank(run: Path, rank: int, token: str, after_s: float, parent: int) -> None:
    """The other process: watches until the rank has sent an empty line, or is gone.

    parent  the rank's process, which may be gone before this one has begun
    """
    doing = _doing_at_death(after_s, parent)
    if doing is not None:
        _record_killed(run, token, f"rank {rank} on {socket.gethostname()}", doing)


def _doing_at_death(after_s: float, parent: int) -> str | None:
    """Reads from stdin what the rank does, and tells it when it is late with that; returns the
    last thing when the rank is gone, None when it ended normally.
    """
    doing = "setting up"
    text = b""
    due = time.monotonic() + after_s
    signaled = 0.0
    while True:
        is_alive = os.getppid() == parent  # asked first: the last line of one that is gone is read
        if select.select([0], [], [], min(_LOOK_EVERY_S, after_s / 2 or _LOOK_EVERY_S))[0]:
            *lines, text = (text + os.read(0, 1 << 16)).split(b"\n")
            if b"" in lines:
                return None
            if lines:
                doing = lines[-1].decode()
                due = time.monotonic() + after_s
            elif is_alive:
                time.sleep(_LOOK_EVERY_S / 10)  # a closed pipe is always ready
        if not is_alive:
            return doing
        if after_s and (now := time.monotonic()) >= due:
            due = now + after_s
            with suppress(OSError):  # it is gone
                # seldom: a signal may meet the interpreter while it makes a frame, which
                # faulthandler then reads
                if now - signaled >= _LOOK_EVERY_S:
                    os.kill(parent, _SIGNAL)
                    signaled = now
                os.write(1, b"late\n")


def _record_killed(run: Path, token: str, who: str, doing: str) -> None:
    """Writes to STATUS.json that a rank was killed, if the folder is still this run's."""
    status = run / "STATUS.json"
    facts = json.loads(status.read_text())
    if json.loads((run / "run.lock").read_text())["token"] == token and facts["state"] == "running":
        reason = f"{who} ended without a message (killed, out of memory, or a crash), {doing}"
        temporary = status.with_name(f".STATUS.json.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(facts | {"state": "failed", "reason": reason}) + "\n")
        os.replace(temporary, status)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    folder, *rest = json.loads(sys.argv[1])
    watch_rank(Path(folder), *rest)
