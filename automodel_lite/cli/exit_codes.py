"""Exit codes: 0 done, 2 a mistake in the settings or the data, 75 stopped by a signal or the time
limit (start it again), 130 interrupted, 1 any other error. A mistake is one sentence, an unexpected
error a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from automodel_lite.cli.line import rewrite_program_name
from automodel_lite.errors import SENTENCES, ConfigError, DataError, PeerError
from automodel_lite.launched import check_launched
from automodel_lite.redact import ScrubbedStream
from automodel_lite.results import write_results
from automodel_lite.run.ending import ending_of, exit_now, exit_with, write_error_file
from automodel_lite.run.stopping import (
    INTERRUPTED_EXIT,
    PREEMPTED_EXIT,
    SIGNALS,
    STOP_SIGNALS,
    StoppedEarly,
)

SAVED = "stopped and saved: run the same command again to continue"
_AFTER_RANK_0_S = 2.0


def run_tool(main: Callable[[list[str]], int | None], argv: list[str] | None = None) -> NoReturn:
    """Runs a recipe that reads its own command line, and exits; codes and messages as those of
    `run_recipe`.
    """
    hide_secrets()
    arguments = sys.argv[1:] if argv is None else argv
    end(lambda: main(arguments) or 0)


def end(work: Callable[[], int]) -> NoReturn:
    """Does the work, and exits with its code, or as its error ends a process."""
    try:
        check_launched()
        try:
            code = work()
        finally:
            write_results()
    except BaseException as raised:
        error = SIGNALS.cause_of(raised)
        text, code, is_shown = ending_of(error)
        if not text:
            exit_now(code)
        if isinstance(error, StoppedEarly):
            for number in STOP_SIGNALS:  # schedulers send more than one
                signal.signal(number, signal.SIG_IGN)
        if isinstance(error, (ConfigError, DataError)) and not isinstance(error, PeerError):
            # Most mistakes are met by all ranks: the first of each node prints it. The others are a
            # moment late, so that launchers, which quote the first failure and end the rest, quote
            # rank 0.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if os.environ.get("RANK", "0") != "0":
                time.sleep(_AFTER_RANK_0_S)
        if isinstance(error, SENTENCES):
            text = rewrite_program_name(text).rstrip()
        exit_with(text, code, is_shown)
    if code in (PREEMPTED_EXIT, INTERRUPTED_EXIT):
        write_error_file(SAVED, code)
    exit_now(code)


def hide_secrets() -> None:
    """Replaces the standard streams: nothing that this process prints shows a secret."""
    if not isinstance(sys.stdout, ScrubbedStream):
        sys.stdout = ScrubbedStream(sys.stdout)
        sys.stderr = ScrubbedStream(sys.stderr)
