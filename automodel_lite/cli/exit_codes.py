"""Exit codes: 0 done, 2 a mistake in the settings or the data, 75 stopped by a signal or the time
limit (start it again), 130 interrupted, 1 any other error. A mistake is one sentence, an unexpected
error a traceback.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import yaml

from automodel_lite.cli.line import rewrite_program_name
from automodel_lite.errors import MISTAKE_EXIT, ConfigError, DataError, PeerError, RunStoppedError
from automodel_lite.launched import check_launched, is_first_here
from automodel_lite.redact import ScrubbedStream
from automodel_lite.run.exits import exit_now, exit_with, write_error_file
from automodel_lite.run.stopping import INTERRUPTED_EXIT, PREEMPTED_EXIT, STOP_SIGNALS, StoppedEarly

SAVED = "stopped and saved: run the same command again to continue"
_SIGPIPE_EXIT = 141  # as a shell reports a command whose reader left
_AFTER_RANK_0_S = 2.0
_LIMITS: dict[str, str] = yaml.safe_load(
    Path(__file__).with_name("limits.yaml").read_text(encoding="utf-8")
)
"""Of the machine: nothing in the program is wrong, and a traceback would only hide the number."""


def run_tool(main: Callable[[list[str]], int | None], argv: list[str] | None = None) -> NoReturn:
    """Runs a recipe that reads its own command line, and exits; codes and messages as those of
    `run_recipe`.
    """
    hide_secrets()
    arguments = sys.argv[1:] if argv is None else argv
    end(lambda: main(arguments) or 0)


def end(work: Callable[[], int]) -> NoReturn:
    """Does the work, and exits with its code or that of its error."""
    try:
        check_launched()
        code = work()
    except PeerError as error:
        exit_with(str(error), error.exit_code, is_shown=is_first_here())
    except (ConfigError, DataError) as error:
        # Most mistakes are met by all ranks: the first of each node prints it. The others are a
        # moment late, so that launchers, which quote the first failure and end the rest, quote rank
        # 0.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_AFTER_RANK_0_S)
        exit_with(rewrite_program_name(str(error)).rstrip(), MISTAKE_EXIT, is_shown=is_first_here())
    except RunStoppedError as error:
        exit_with(rewrite_program_name(str(error)).rstrip(), 1)
    except StoppedEarly as stopped:
        for number in STOP_SIGNALS:  # schedulers send more than one
            signal.signal(number, signal.SIG_IGN)
        exit_with(f"stopped by {stopped} before the first step: nothing to save", stopped.exit_code)
    except KeyboardInterrupt:
        exit_with("interrupted", INTERRUPTED_EXIT)
    except SystemExit as leaving:  # argparse's, Hydra's
        exit_now(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
    except MemoryError as error:
        exit_with(
            f"the host has no memory left ({error or 'of this size'}): give the process more, or "
            "less work.",
            1,
        )
    except Exception as error:
        if isinstance(error, OSError) and (
            cure := _LIMITS.get(errno.errorcode.get(error.errno or 0, ""))
        ):
            where = f"{error.filename}: " if error.filename else ""
            exit_with(f"{where}{error.strerror}: {cure}.", 1)
        if isinstance(error, BrokenPipeError):  # the screen's, whose reader is gone, or another one
            poll = select.poll()
            poll.register(sys.stdout.fileno(), 0)
            if any(event & select.POLLERR for _, event in poll.poll(0)):
                os._exit(_SIGPIPE_EXIT)
        exit_with(traceback.format_exc().rstrip(), 1)
    if code in (PREEMPTED_EXIT, INTERRUPTED_EXIT):
        write_error_file(SAVED, code)
    exit_now(code)


def hide_secrets() -> None:
    """Replaces the standard streams: nothing that this process prints shows a secret."""
    if not isinstance(sys.stdout, ScrubbedStream):
        sys.stdout = ScrubbedStream(sys.stdout)
        sys.stderr = ScrubbedStream(sys.stderr)
