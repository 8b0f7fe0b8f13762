"""How a process ends: a message on the screen, the file that the launcher quotes, and the exit
code.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from automodel_lite.progress import wrap_lines
from automodel_lite.redact import scrub

LAUNCHED_BY_US = "AUTOMODEL_LITE_LAUNCHER"  # set in ranks whose launcher prints the final message
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # from which a launcher quotes the root cause


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
        now = str(int(time.time()))
        error = {
            "message": text,
            "errorCode": code,
            "extraInfo": {"py_callstack": text, "timestamp": now},
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
