"""How a process ends: one sentence for a mistake, a traceback for what nobody has foreseen, and the exit code.

Rank 0 alone speaks of mistakes. Under a launcher the sentence also goes into the file from which the launcher quotes
the root cause.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from automodel_lite.cli.commands import as_typed
from automodel_lite.errors import (
    MISTAKE_EXIT,
    ConfigError,
    DataError,
    PeerError,
    RanksDifferError,
    RunStoppedError,
)
from automodel_lite.redact import ScrubbedStream, scrub
from automodel_lite.run.stopping import INTERRUPTED_EXIT, StoppedEarly

LAUNCHED_BY_US = "AUTOMODEL_LITE_LAUNCHER"  # set in ranks whose launcher prints the last words itself
_SIGPIPE_EXIT = 141  # as a shell reports a command whose reader left
_WAIT_FOR_RANK_0_S = 5.0


def run_tool(main: Callable[[list[str]], int | None], argv: list[str] | None = None) -> NoReturn:
    """Runs a recipe that reads its own command line, and exits; codes and messages as those of `run_recipe`."""
    hide_secrets()
    arguments = sys.argv[1:] if argv is None else argv
    end(lambda: main(arguments) or 0)


def end(work: Callable[[], int]) -> NoReturn:
    """Does the work and exits.

    Exit codes: 0 done, 2 a mistake in the settings or the data, 75 stopped by a signal or the time limit (start it
    again), 130 interrupted, 1 any other error.
    """
    try:
        code = work()
    except PeerError as error:  # the rank that it happened to has printed it
        if os.environ.get("RANK", "0") != "0":
            leave_now(MISTAKE_EXIT)
        leave(str(error), MISTAKE_EXIT)
    except RanksDifferError as error:
        leave(str(error), MISTAKE_EXIT, on_every_node=True)
    except (ConfigError, DataError) as error:
        leave(str(error), MISTAKE_EXIT)
    except RunStoppedError as error:
        leave(str(error), 1)
    except StoppedEarly as stopped:
        leave(f"stopped by {stopped} before the first step: nothing to save", stopped.exit_code)
    except KeyboardInterrupt:
        leave("interrupted", INTERRUPTED_EXIT)
    except SystemExit as leaving:  # argparse's, Hydra's
        leave_now(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader(sys.stdout.fileno()):
            os._exit(_SIGPIPE_EXIT)
        leave(traceback.format_exc(), 1)
    leave_now(code)


def leave(message: str, code: int, on_every_node: bool = False) -> NoReturn:
    """Ends the process with one message on the screen. A mistake that all ranks meet is printed by rank 0 alone, one
    that a single rank meets by that rank and by rank 0, and both end at once.

    torchrun prints a summary after every failure; the text it quotes as the root cause is read from the file named by
    TORCHELASTIC_ERROR_FILE. The other ranks wait so that rank 0 is seen to fail first.
    """
    message, rank = as_typed(message).rstrip(), os.environ.get("RANK", "0")
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    is_mistake = code == MISTAKE_EXIT
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher ends the ranks that wait
    if not rank.isdigit() or int(rank) == 0 or not is_mistake:
        if LAUNCHED_BY_US not in os.environ or not error_file or message.startswith("Traceback "):
            prefix = "" if rank == "0" else f"[rank {rank}] "
            print(f"\n{prefix}{message}", file=sys.stderr, flush=True)
        if error_file:
            Path(error_file).write_text(json.dumps({"message": scrub(message), "timestamp": int(time.time())}))
        if is_mistake and not _tell_the_others(message):
            _have_printed()
    else:
        is_first_here = os.environ.get("LOCAL_RANK") == "0"
        if is_first_here if on_every_node else not _tell_the_others(message):
            if LAUNCHED_BY_US not in os.environ or not error_file:
                print(f"\n[rank {rank}] {message}", file=sys.stderr, flush=True)
            if error_file:
                Path(error_file).write_text(json.dumps({"message": scrub(message), "timestamp": int(time.time())}))
            _have_printed()
        time.sleep(_WAIT_FOR_RANK_0_S)  # the launcher ends the ranks that wait
    leave_now(code)


def _tell_the_others(message: str) -> bool:
    """Of a mistake, which ends all ranks. Has rank 0 met it too, and printed it?"""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return True
    from automodel_lite.parallel.peers import open_peers  # imports torch

    peers = open_peers()
    is_told = os.environ.get("RANK") != "0" and peers.is_told_by_first(message)
    if not is_told:
        peers.tell(ConfigError(message))
    return is_told


def _have_printed() -> None:
    from automodel_lite.parallel.peers import open_peers

    open_peers().have_printed()


def leave_now(code: int) -> NoReturn:
    """Ends at once: gloo's threads abort one process in ten that is left to the interpreter's own clean-up."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def hide_secrets() -> None:
    """From now on nothing that this process prints shows a secret."""
    if not isinstance(sys.stdout, ScrubbedStream):
        sys.stdout, sys.stderr = ScrubbedStream(sys.stdout), ScrubbedStream(sys.stderr)


def _has_no_reader(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
