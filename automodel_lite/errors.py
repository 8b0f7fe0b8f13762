"""The errors that a user can mend; each message names the key, its value, the rule and the cure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

MISTAKE_EXIT = 2  # exit code of a mistake that the user can mend


class UserError(ValueError):
    """A mistake that a user can mend, as a value: what is wrong, of which key, and the cure.

    text      the key, its value and the rule; a sentence by itself where no cure is given
    key       the setting at fault, dotted: `training.max_steps`
    cure      what to do; the message is `text: cure.`
    problems  several mistakes in one error, each of them
    """

    def __init__(
        self, text: str, *, key: str = "", cure: str = "", problems: Sequence[UserError] = ()
    ) -> None:
        super().__init__(text)
        self.text = text
        self.key = key
        self.cure = cure
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return self._with_cure(self.cure)

    def _with_cure(self, cure: str) -> str:
        message = f"{self.text}: {cure}." if cure else self.text
        return printable(message, kept="\n")  # names of files and columns are in it

    @classmethod
    def of(cls, problems: Sequence[UserError]) -> Self:
        """Returns one error of several, a line each."""
        return cls("\n".join(map(str, problems)), problems=problems)


class ConfigError(UserError):
    """A setting that cannot work:
    `packed_sequence.packed_sequence_size=63 must be a multiple of 4: use 64.`
    """


class UnknownKeyError(ConfigError):
    """A setting that does not exist."""


class MissingPackageError(ConfigError):
    """An optional package that a part needs."""

    def __init__(self, wanted_by: str, package: str, extra: str) -> None:
        super().__init__(
            f"{wanted_by} needs the package {package}",
            key=wanted_by,
            cure=f"pip install 'automodel-lite[{extra}]'",
        )
        self.package = package


class IdleSettingError(ConfigError):
    """A setting that does nothing beside the others."""


class DataError(UserError):
    """Data that cannot be trained on: names the file, the line and the column.

    key       the setting that the cure names: it does nothing where the data are a question
    can_skip  leaving bad rows out is a cure, too
    """

    def __init__(
        self,
        text: str,
        *,
        key: str = "",
        cure: str = "",
        problems: Sequence[UserError] = (),
        can_skip: bool = False,
    ) -> None:
        super().__init__(text, key=key, cure=cure, problems=problems)
        self.can_skip = can_skip

    def __str__(self) -> str:
        skip = ", or leave bad rows out with tokenize.on_bad_row=skip" * self.can_skip
        return self._with_cure(self.cure + skip)

    def left_out(self) -> str:
        """Returns the message where bad rows are left out already."""
        return self._with_cure(self.cure)

    def at(self, place: str) -> DataError:
        """Returns the error, one line, with the place of the row: `train.jsonl:17`."""
        text = f"{place}: {printable(self.text)}"
        return DataError(text, key=self.key, cure=self.cure, can_skip=self.can_skip)

    def with_columns(self, columns: Mapping[str, str]) -> DataError:
        """Returns the error with the file's names of columns in place of the format's.

        >>> str(DataError("column label is 3.").with_columns({"label": "text", "text": "body"}))
        'column text is 3.'
        """
        # in one pass: a file may use a name of the format for another column
        text = re.sub(
            r"\bcolumn (\w+)",
            lambda found: f"column {columns.get(found[1], found[1])}",
            self.text,
        )
        return DataError(text, key=self.key, cure=self.cure, can_skip=self.can_skip)


class DroppedError(DataError):
    """A bad document that is left out and counted, whatever tokenize.on_bad_row says."""


class PeerError(ConfigError):
    """The error of another rank, which has printed it; rank 0 repeats it. One that could not print
    anything is told by all.
    """

    def __init__(self, text: str, exit_code: int = MISTAKE_EXIT, is_printed: bool = True) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        self.is_printed = is_printed


class RunStoppedError(RuntimeError):
    """A run that cannot go on, and why, in a sentence that needs no traceback."""


SENTENCES = (ConfigError, DataError, RunStoppedError)
"""Whose message is a sentence that is shown without a traceback."""

LOST_PEER = re.compile(
    r"gloo|NCCL|ProcessGroup|Connection (closed|reset|refused)|Broken pipe|TCPStore|store->|"
    r"DistBackend",
    re.IGNORECASE,
)
LOST = (
    "another rank ended without a message (killed, out of memory, or its host is down), or did not "
    "answer within mesh.timeout_s"
)
# Python's words, and those of C++ for EAGAIN
_NO_THREAD = re.compile(r"can't start new thread|^Resource temporarily unavailable")
# of the queue of data workers; where the receiver has no room, a number of what came with a
# message; of a receiver that is a thread, which pins, that it ended
_NO_FILE = re.compile(
    r"Too many open files|received \d+ items of ancdata|Pin memory thread exited unexpectedly"
)
_MAPPED_MEMORY = re.compile(r"mmap .*Cannot allocate memory", re.DOTALL)  # of a file of weights
CPU_MEMORY = re.compile(r"DefaultCPUAllocator: .*you tried to allocate (\d+) bytes")


def is_lost_peer(error: BaseException) -> bool:
    """Returns whether this rank only noticed that another one is gone."""
    # by name, as torch is not imported here: an error in the settings need not wait for it
    is_distributed = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return is_distributed or (
        isinstance(error, RuntimeError) and bool(LOST_PEER.search(str(error)))
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether memory ran out: on a GPU that has a type of its own, on CPU torch raises
    RuntimeError.
    """
    has_type = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    text = str(error)
    return has_type or bool(CPU_MEMORY.search(text) or _MAPPED_MEMORY.search(text))


def is_out_of_threads(error: BaseException) -> bool:
    """Returns whether a thread could not be started: under `ulimit -v` its stack has no room."""
    return isinstance(error, RuntimeError) and bool(_NO_THREAD.search(str(error)))


def is_out_of_files(error: BaseException) -> bool:
    """Returns whether a batch of a data worker could not be opened: each of its tensors is a
    file.
    """
    return isinstance(error, RuntimeError) and bool(_NO_FILE.search(str(error)))


def is_limit(error: BaseException) -> bool:
    """Returns whether the machine ran out of something. Who catches whatever a template, a file or
    a function of the user's does wrong raises it again: no document, file or setting is at fault.
    """
    return is_out_of_memory(error) or is_out_of_threads(error) or is_out_of_files(error)


@contextmanager
def system_errors() -> Iterator[None]:
    """Raises OSError for what a package in Rust raises, any Exception with the system's number."""
    try:
        yield
    except Exception as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), one_line(error)) from error
        raise


@contextmanager
def explained(
    sentence: str,
    *errors: type[Exception],
    kind: type[UserError] = ConfigError,
    key: str = "",
    cure: str = "",
) -> Iterator[None]:
    """Raises `sentence (reason): cure.` for one of `errors`, without any for OSError; what is a
    sentence already passes.
    """
    errors = errors or (OSError,)
    try:
        yield
    except (ConfigError, DataError):
        raise
    except errors as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        text = f"{sentence} ({reason})"
        raise kind(text if cure else f"{text}.", key=key, cure=cure) from error


def printable(text: str, kept: str = "") -> str:
    """The text with everything that no line shows as it is escaped: control characters, halves of
    surrogate pairs.
    """
    return "".join(
        char if char.isprintable() or char in kept else ascii(char)[1:-1] for char in text
    )


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """Returns text of data or of a model for a screen: what would move the cursor, set a title or
    turn the line around is escaped.
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def listed(items: Sequence[object], most: int = 8) -> str:
    """Returns `3, 5, 7`, of more than `most` items `3, 5 and 4 more`."""
    shown = ", ".join(map(str, items[:most]))
    return f"{shown} and {len(items) - most} more" if items[most:] else shown


_PLURAL_VERBS = {"is": "are", "has": "have", "does": "do"}


def counted(number: int, noun: str, verb: str = "", of: int | None = None) -> str:
    """Returns a number with its noun, and a verb that follows the number.

    >>> counted(1, "document"), counted(1121, "document", "is")
    ('1 document', '1,121 documents are')
    >>> counted(1, "row", "has", of=60)
    '1 of 60 rows has'
    """
    among = number if of is None else of
    words = [f"{number:,}"]
    if of is not None:
        words.append(f"of {of:,}")
    words.append(noun if among == 1 else f"{noun}s")
    if verb:
        words.append(verb if number == 1 else _PLURAL_VERBS.get(verb, verb.removesuffix("s")))
    return " ".join(words)


def one_line(error: object, limit: int = 300) -> str:
    """Returns the message of an error that is quoted in a sentence; its type where it has no
    message.
    """
    return " ".join(str(error).split())[:limit] or type(error).__name__


def format_value(value: Any) -> str:
    """Returns a value of the configuration as it is typed: null, true, 0.1."""
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def did_you_mean_path(path: str) -> str:
    """Returns `; did you mean X?` or ".": the entry of the same folder with the closest name, of a
    plain name a run's too. A folder on the way may be misspelled as well.
    """
    wanted = Path(path).expanduser()
    if wanted.is_symlink():
        return f": it is a link to {wanted.readlink()}, where nothing is."
    below = Path()
    while not wanted.parent.exists():
        below = wanted.name / below
        wanted = wanted.parent
    folders = [wanted.parent]
    if wanted.name == path:
        folders.append(Path("runs"))
    for folder in folders:
        with suppress(OSError):
            names = sorted(entry.name for entry in folder.iterdir())
            same = [name for name in names if name.lower() == wanted.name.lower()]
            if close := same or difflib.get_close_matches(wanted.name, names, n=1, cutoff=0.6):
                found = folder / close[0] / below
                if not found.exists():
                    return did_you_mean_path(str(found))
                return f"; did you mean {found}?"
    return "."


def folders_with(file: str, folder: Path) -> str:
    """Returns `; name one of those in it: runs/a, runs/b.` or ".": the folders in a folder that
    hold the file which it was expected to hold itself.
    """
    held = sorted(str(path.parent) for path in folder.glob(f"*/{file}"))
    return f"; name one of those in it: {listed(held)}." if held else "."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of a sentence: `; did you mean X?`, or "." where nothing is close."""
    return meant(nearest(name, known))


def meant(near: str | None) -> str:
    """Returns the end of a sentence: `; did you mean X?`, or "." for None."""
    return f"; did you mean {near}?" if near else "."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the closest last part in the same group, the closest group, then any group; None
    where nothing is close.
    """
    known = [k for k in known if not k.split(".")[-1].startswith("_")]
    group, _, last = name.rpartition(".")
    here = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == group}
    tops = {k.split(".")[0] for k in known}
    anywhere = {k.rpartition(".")[2]: k for k in known}
    top, _, rest = name.partition(".")
    groups = {} if not rest or top in tops else {other: f"{other}.{rest}" for other in tops}
    for word, names, cutoff in ((last, here, 0.6), (top, groups, 0.8), (last, anywhere, 0.75)):
        # `LoRA` is lora
        lowered = {known_word.lower(): meaning for known_word, meaning in names.items()}
        if close := difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=cutoff):
            return lowered[close[0]]
    return None
