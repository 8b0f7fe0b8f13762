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
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from automodel_lite.cli.line import as_typed
from automodel_lite.errors import (
    MISTAKE_EXIT,
    ConfigError,
    DataError,
    PeerError,
    RanksDifferError,
    RunStoppedError,
)
from automodel_lite.launched import check_launched
from automodel_lite.progress import wrapped
from automodel_lite.redact import ScrubbedStream, scrub
from automodel_lite.run.stopping import INTERRUPTED_EXIT, PREEMPTED_EXIT, StoppedEarly

if TYPE_CHECKING:
    from automodel_lite.parallel.peers import Peers

LAUNCHED_BY_US = "AUTOMODEL_LITE_LAUNCHER"  # set in ranks whose launcher prints the last words itself
SAVED = "stopped and saved: run the same command again to continue"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # from which a launcher quotes
_SIGPIPE_EXIT = 141  # as a shell reports a command whose reader left
_WAIT_FOR_RANK_0_S = 5.0
_ANSWER_WITHIN_S = 30.0  # importing torch included
_AFTER = """
import os, select, sys
words = sys.stdin.buffer.read()
try:
    select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
except OSError:
    pass
os.write(2, words)
"""


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
        check_launched()
        code = work()
    except PeerError as error:
        leave(str(error), MISTAKE_EXIT, is_told=True)
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
    if code in (PREEMPTED_EXIT, INTERRUPTED_EXIT):
        _tell_the_launcher(SAVED, code)
    leave_now(code)


def leave(message: str, code: int, on_every_node: bool = False, is_told: bool = False) -> NoReturn:
    """Ends the process with one message on the screen. A mistake that all ranks meet is printed by rank 0 alone, one
    that a single rank meets by that rank and by rank 0, and both end at once.

    torchrun prints a summary after every failure; the text it quotes as the root cause is read from the file named by
    TORCHELASTIC_ERROR_FILE. The other ranks wait, so that rank 0 is seen to fail first and alone.

    on_every_node   the first rank of each node prints it
    is_told         the message is of a rank that has printed it
    """
    message, rank = as_typed(message).rstrip(), os.environ.get("RANK", "0")
    is_mistake, is_first_here = code == MISTAKE_EXIT, os.environ.get("LOCAL_RANK") == "0"
    waits = is_mistake and rank.isdigit() and int(rank) > 0
    if waits:
        _leave_unseen_when_ended()
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _tell_the_launcher(message, code)
    if not waits:
        _print(message, rank)
        is_news = is_mistake and not _tell_the_others(message)
    elif is_news := is_first_here if on_every_node else not (is_told or _tell_the_others(message)):
        _print(message, rank)
    if is_news:
        _ask_peers(lambda peers: peers.have_printed())
    if waits:
        time.sleep(_WAIT_FOR_RANK_0_S)
    leave_now(code)


def leave_from_thread(message: str, code: int) -> NoReturn:
    """The same for the mistake of another rank, which has printed it, while the main thread waits in a collective."""
    _tell_the_launcher(message, code)
    if (rank := os.environ.get("RANK", "0")) == "0":
        _print(message, rank)
    leave_now(code)


def _leave_unseen_when_ended() -> None:
    """SIGTERM ends the process with code 0: launchers list every rank that has another one, and rank 0 is enough. By a
    thread, as the main one may wait in a call of C++ where no Python handler runs.
    """
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)

    def wait() -> None:
        while os.read(ours, 1)[0] != signal.SIGTERM:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _print(message: str, rank: str) -> None:
    """Our own launcher prints what is in the error file, as its last words; but no tracebacks."""
    if LAUNCHED_BY_US in os.environ and _ERROR_FILE in os.environ and not message.startswith("Traceback "):
        return
    print(_lines(f"{'' if rank == '0' else f'[rank {rank}] '}{message}"), file=sys.stderr, flush=True)


def _lines(message: str) -> str:
    """As it is shown, below what is on the screen."""
    if message.startswith("Traceback "):
        return f"\n{message}"
    return "\n" + "\n".join(wrapped(line, len(line) - len(line.lstrip()), sys.stderr) for line in message.splitlines())


def _tell_the_launcher(message: str, code: int) -> None:
    """Into the file from which it quotes, as torch.distributed.elastic's `record` writes it."""
    words, now = scrub(message), str(int(time.time()))
    if path := os.environ.get(_ERROR_FILE):
        told = {"message": words, "errorCode": code, "extraInfo": {"py_callstack": words, "timestamp": now}}
        Path(path).write_text(json.dumps({"message": told}))
    if os.environ.get("LOCAL_RANK") == "0" and not words.startswith("Traceback "):
        _repeat_behind_torchrun(words)


def _repeat_behind_torchrun(words: str) -> None:
    """torchrun's last words are its own summary, which no rank can turn off. A process that outlives it for a moment
    repeats the sentence, unless torchrun is to start the ranks again.
    """
    environment = os.environ
    is_torchruns = "TORCHELASTIC_RUN_ID" in environment and LAUNCHED_BY_US not in environment
    is_last = environment.get("TORCHELASTIC_RESTART_COUNT") == environment.get("TORCHELASTIC_MAX_RESTARTS")
    if not is_torchruns or not is_last:
        return
    command = [sys.executable, "-I", "-S", "-c", _AFTER, str(os.getppid())]
    with contextlib.suppress(OSError):
        repeater = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, start_new_session=True)
        assert repeater.stdin
        repeater.stdin.write(f"{_lines(words)}\n".encode())
        repeater.stdin.close()


def _tell_the_others(message: str) -> bool:
    """Of a mistake, which ends all ranks. Has rank 0 met it too, and printed it?"""

    def tell(peers: Peers) -> bool:
        is_told = os.environ.get("RANK") != "0" and peers.is_told_by_first(message)
        if not is_told:
            peers.tell(ConfigError(message))
        return is_told

    return os.environ.get("WORLD_SIZE", "1") == "1" or bool(_ask_peers(tell))


def _ask_peers(question: Callable[[Peers], Any]) -> Any:
    """What the other ranks say, None when nobody answers: the launcher that holds their store may have ended, and a
    store waits half an hour for it.
    """
    answers: list[Any] = []

    def ask() -> None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no C++ frames of a store whose host has left
        from automodel_lite.parallel.peers import open_peers  # imports torch

        with contextlib.suppress(Exception):  # of a store that is not there
            answers.append(question(open_peers()))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER_WITHIN_S)
    return answers[0] if answers else None


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
