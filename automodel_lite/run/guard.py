"""A small process beside a rank: requests stacks when the rank makes no progress, and records that it was killed.

A script that needs nothing but the standard library, 10 MB and no processor time. It lives in a session of its own, so
that neither Ctrl-C nor a signal to the rank's group ends it; it ends with its rank.

    stdin    JSON lines: {"doing": "in step 4"} at each beat, {"has_dumped": true}, {"bye": true} before a proper end
    stdout   a byte: write your stacks. A rank that does not within 2 s holds the interpreter's lock: a signal then
             makes faulthandler write the main thread's stack, which is safe because it is that thread's own.

    python -I -S guard.py RUN_FOLDER RANK TOKEN_OF_THE_LOCK STUCK_AFTER_S SIGNAL
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

_LOOK_EVERY_S = 0.5  # for the death of the rank
_ANSWER_S = 2.0


class Guard:
    def __init__(self, run: Path, rank: int, token: str, stuck_after_s: float, number: int) -> None:
        self.run, self.rank, self.token = run, rank, token
        self.stuck_after_s, self.number = stuck_after_s, number
        self.parent = os.getppid()
        self.doing = "setting up"
        self.due = self._next()  # when the rank is stuck; None = never
        self.signal_at: float | None = None  # when the rank has not answered
        self.is_open, self.text = True, b""

    def watch(self) -> None:
        while True:
            ready, _, _ = select.select([0] if self.is_open else [], [], [], self._pause())
            if ready and self._read():
                return
            if os.getppid() != self.parent:
                self.report_death()
                return
            now = time.monotonic()
            if self.due is not None and now >= self.due:
                self.due, self.signal_at = self._next(), self.signal_at or now + _ANSWER_S
                os.write(1, b".")
            if self.signal_at is not None and now >= self.signal_at:
                self.signal_at = None
                os.kill(self.parent, self.number)

    def report_death(self) -> None:
        """A record for the other ranks, and STATUS.json, if the run is still this one."""
        try:
            holder = json.loads((self.run / "run.lock").read_text())["token"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        if holder != self.token:
            return
        host = socket.gethostname()
        what = "ended without a message (killed, out of memory, or a crash)"
        record = {"time": time.time(), "rank": self.rank, "host": host, "doing": self.doing}
        failure = self.run / "logs" / f"failure_rank_{self.rank:05d}.json"
        if not failure.exists():
            _write(failure, record | {"is_consequence": False, "error": what})
        status = self.run / "STATUS.json"
        facts = json.loads(status.read_text())
        if facts["state"] == "running":
            reason = f"rank {self.rank} on {host} {what}, {self.doing}"
            _write(status, facts | {"state": "failed", "reason": reason})

    def _pause(self) -> float:
        ends = [end for end in (self.due, self.signal_at) if end is not None]
        return max(0.0, min([_LOOK_EVERY_S, *(end - time.monotonic() for end in ends)]))

    def _next(self) -> float | None:
        return time.monotonic() + self.stuck_after_s if self.stuck_after_s else None

    def _read(self) -> bool:
        """True when the rank has announced its end."""
        new = os.read(0, 1 << 16)
        self.is_open = bool(new)
        *lines, self.text = (self.text + new).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "bye" in said:
                return True
            if "doing" in said:
                self.doing, self.due = said["doing"], self._next()
            self.signal_at = None
        return False


def _write(path: Path, facts: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(facts) + "\n")
    os.replace(temporary, path)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    folder, rank_text, lock_token, stuck_text, signal_text = sys.argv[1:]
    Guard(Path(folder), int(rank_text), lock_token, float(stuck_text), int(signal_text)).watch()
