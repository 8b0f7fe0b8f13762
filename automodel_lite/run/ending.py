"""How a process ends: a message on the screen, the file that the launcher quotes, the exit code.

    raised                     on the screen               exit code   shown by
    PeerError                  the other rank's sentence   its own     one process of the host
    ConfigError, DataError     the sentence                2           one process of the host
    RunStoppedError            the sentence                1           this process
    StoppedEarly               by which signal             75 or 130   this process
    KeyboardInterrupt          interrupted                 130         this process
    a full memory or disk,     the limit and its cure      1           this process
      no further thread or file
    a rank that is gone        that it is                  1           this process
    SystemExit                 nothing                     its own     who raised it
    the screen's reader left   nothing                     141         nobody
    anything else              the traceback               1           this process

What a rank that fails leaves for the others is in `parallel/peers.py`, for the next run in
`failures.py`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple, NoReturn

import yaml

from automodel_lite.errors import (
    CPU_MEMORY,
    LOST,
    MISTAKE_EXIT,
    ConfigError,
    DataError,
    PeerError,
    RunStoppedError,
    is_lost_peer,
    is_out_of_files,
    is_out_of_memory,
    is_out_of_threads,
    one_line,
)
from automodel_lite.launched import is_first_here
from automodel_lite.progress import wrap_lines
from automodel_lite.redact import scrub
from automodel_lite.run.stopping import INTERRUPTED_EXIT, StoppedEarly

LAUNCHED_BY_US = "AUTOMODEL_LITE_LAUNCHER"  # set in ranks whose launcher prints the final message
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # from which a launcher quotes the root cause

_SIGPIPE_EXIT = 141  # as a shell reports a command whose reader left
_LIMITS: dict[str, str] = yaml.safe_load(
    Path(__file__).with_name("limits.yaml").read_text(encoding="utf-8")
)
"""Of the machine: nothing in the program is wrong, and a traceback would only hide the number."""


class Ending(NamedTuple):
    """A row of the table above."""

    text: str
    code: int
    is_shown: bool = True  # by this process


def ending_of(error: BaseException) -> Ending:
    """Looks an error up in the table; called where it is handled, for its traceback."""
    if isinstance(error, PeerError):
        is_shown = is_first_here() or not error.is_printed
        return Ending(str(error), error.exit_code, is_shown)
    if isinstance(error, (ConfigError, DataError)):
        return Ending(str(error), MISTAKE_EXIT, is_first_here())
    if isinstance(error, RunStoppedError):
        return Ending(str(error), 1)
    if isinstance(error, StoppedEarly):
        text = f"stopped by {error} before the first step: nothing to save"
        return Ending(text, error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return Ending("interrupted", INTERRUPTED_EXIT)
    if isinstance(error, SystemExit):  # argparse's, Hydra's
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return Ending("", code, is_shown=False)
    if is_out_of_memory(error):
        where = "GPU" if type(error).__name__ == "OutOfMemoryError" else "host"
        cpu = CPU_MEMORY.search(str(error))
        size = f"{int(cpu[1]) / 2**30:.2f} GiB asked for" if cpu else one_line(error, 200)
        text = f"the {where} has no memory left ({size}): give the process more, or less work."
        return Ending(text, 1)
    if is_lost_peer(error):
        return Ending(f"{LOST}: {one_line(error)}", 1)
    if is_out_of_threads(error):
        return Ending(f"no further thread can be started: {_LIMITS['threads']}.", 1)
    if is_out_of_files(error):
        return Ending(f"no further file can be opened: {_LIMITS['EMFILE']}.", 1)
    if isinstance(error, OSError):
        if cure := _LIMITS.get(errno.errorcode.get(error.errno or 0, "")):
            where = f"{error.filename}: " if error.filename else ""
            return Ending(f"{where}{error.strerror}: {cure}.", 1)
        if isinstance(error, BrokenPipeError) and _has_no_reader():
            return Ending("", _SIGPIPE_EXIT, is_shown=False)
    return Ending(traceback.format_exc().rstrip(), 1)


def _has_no_reader() -> bool:
    """Returns whether who read the screen is gone, as of `... | head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def exit_as(error: BaseException) -> NoReturn:
    """Ends the process as the table says, from any thread."""
    exit_with(*ending_of(error))


def exit_with(message: str, code: int, is_shown: bool = True) -> NoReturn:
    """Ends the process, from any thread, with one message on the screen unless another process
    shows it.
    """
    write_error_file(message, code)
    is_traceback = message.startswith("Traceback ")
    # our own launcher prints what is in the error file at its end; but no tracebacks
    is_quoted = LAUNCHED_BY_US in os.environ and ERROR_FILE in os.environ and not is_traceback
    if is_shown and not is_quoted:
        rank = os.environ.get("RANK", "0")
        text = f"{'' if rank == '0' else f'[rank {rank}] '}{message}"
        lines = text.splitlines() if not is_traceback else []
        shown = [wrap_lines(line, len(line) - len(line.lstrip()), sys.stderr) for line in lines]
        print("\n" + ("\n".join(shown) or text), file=sys.stderr, flush=True)
    exit_now(code)


def write_error_file(message: str, code: int) -> None:
    """Writes the file in the form of torch.distributed.elastic's `record`; nothing without a
    launcher.
    """
    if path := os.environ.get(ERROR_FILE):
        text = scrub(message)
        error = {
            "message": text,
            "errorCode": code,
            "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
        }
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": error}))


def exit_now(code: int) -> NoReturn:
    """Ends at once: gloo's threads abort one process in ten that is left to the interpreter's own
    clean-up.
    """
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
