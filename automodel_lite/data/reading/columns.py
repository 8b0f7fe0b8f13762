"""One judge of every raw row: the format of a set, found from its first rows, and what each row has
beside it.

Columns may begin anywhere in a file. The set of columns of a row is judged once, and again for each
other set that rows have: other names of a column are taken, and columns that change what the rest
means are refused with their place.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from automodel_lite.columns import declared_columns
from automodel_lite.data.cache import short_hash
from automodel_lite.data.reading.documents import MEDIA, NAMES, NOT_READ, UNUSED, Document
from automodel_lite.data.reading.formats import FORMATS, GROUP, Format, own_format
from automodel_lite.data.reading.labels import Alignment, align, check_alignment
from automodel_lite.data.reading.readers import RawRow, RawRows
from automodel_lite.errors import ConfigError, DataError, did_you_mean, nearest, one_line, printable

OwnFormat = Callable[[RawRow], Any]
Renames = Mapping[str, str]  # canonical name -> column of the file

# a column of the answer that is not wanted
REJECTED = re.compile(r"reject|loser|worse|dispreferred", re.IGNORECASE)
CHOSEN = re.compile(r"chosen|prefer|winner|accepted|better", re.IGNORECASE)
VERDICTS = ("label", "kto_tag")  # good or bad: what KTO trains on
VERDICT = (
    "says which answers are good and which are bad (KTO), and all rows would be trained on the "
    "same way: keep only the good rows, or set dataset.format={format} to train on all."
)
WEIGHTS = re.compile(r"(sample_|loss_|row_|example_)?weights?|importance", re.IGNORECASE)
NUMBERED = re.compile(r"id|nr|no|index|number|uuid|.*_id", re.IGNORECASE)  # of a row
MASKS = re.compile(
    r"(do_|is_)?(train|trained|trainable|learn|masked)|(loss|train)_mask|train_on\w*", re.IGNORECASE
)
# names of what is trained on
ANSWERS = frozenset(("completion", "output", "answer", "messages", "text"))
MOST_COLUMN_SETS = 10_000  # that are remembered


@dataclass(frozen=True)
class Detected:
    """The format of a set and the names that its columns have there.

    renames   canonical name -> column, of the first rows
    typed     those that the user named
    is_given  the user named the format: other columns are left out on purpose
    """

    format: Format
    renames: Renames
    description: str
    typed: Renames = field(default_factory=dict)
    is_given: bool = False
    source: str = ""  # hash of the code of a format of the user's
    # columns that `description` names; None: a function reads them all
    described: frozenset[str] | None = None
    labels: Alignment = "aligned"  # of token rows
    is_checked: bool = False  # compare the labels of every row with it
    _judged: dict[tuple[str, ...], tuple[dict[str, str], dict[str, str]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def document(self, row: RawRow, where: str) -> Document:
        """Makes a document of a raw row; raises `DataError` with the row's place and the file's own
        column names.
        """
        renames: Renames = self.renames
        try:
            renames, problems = self._judge(tuple(row))
            for column, problem in problems.items():
                value = row[column]
                # A weight or a mask of 1, and anything empty, changes nothing.
                is_one = value == 1 and (WEIGHTS.fullmatch(column) or MASKS.fullmatch(column))
                if not is_one and value not in _EMPTY:
                    raise DataError(f"column {column} {problem}")
            named = {**row, **{canonical: row.get(column) for canonical, column in renames.items()}}
            document = self.format.normalize(named)
            if named.get(GROUP) is not None:
                document = {**document, GROUP: named[GROUP]}
            if self.described is not None and not self.described.issuperset(row):
                used = {
                    *renames.values(),
                    *self.format.columns,
                    *self.format.optional,
                    GROUP,
                    *problems,
                }
                known = self.described | used
                if late := [name for name in row if name not in known and row[name] not in _EMPTY]:
                    document = {**document, UNUSED: late}
            if self.is_checked:
                for part in document.get("documents", [document]):
                    check_alignment(part, self.labels)
            if self.labels == "aligned":
                return document
            if "documents" in document:
                return {**document, "documents": [align(part) for part in document["documents"]]}
            return align(document)
        except DataError as error:
            message = str(error)
            for canonical, column in renames.items():
                message = message.replace(f"column {canonical} ", f"column {column} ")
            raise DataError(f"{where}: {printable(message)}") from error
        except ConfigError:
            raise
        except KeyError as error:
            raise DataError(
                f"{where}: {self.format.name}: there is no {error} in this row."
            ) from error
        except Exception as error:
            # of a function of the user's, or of a row that nobody has thought of
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise DataError(f"{where}: {self.format.name} fails: {reason}") from error

    def _judge(self, columns: tuple[str, ...]) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the renames and the problems of rows with these columns."""
        if columns not in self._judged:
            named = {*columns, *self.typed}
            required = _other_names(self.format.columns, named)
            optional = _other_names(self.format.optional, named - {*required.values()})
            renames = {**optional, **required, **self.typed}
            problems = (
                {} if self.is_given else dict(_problems(columns, self.format, renames, self.typed))
            )
            if len(self._judged) >= MOST_COLUMN_SETS:
                self._judged.clear()
            self._judged[columns] = renames, problems
        return self._judged[columns]


_EMPTY: tuple[Any, ...] = (None, [], {}, "")
_IGNORED = "would be ignored: "
_MEANT = "set dataset.format={format} to train without it."
_REJECTED_ANSWER = (
    f"is the answer that is not wanted, of a preference pair: keep one answer, or {_MEANT}"
)
_SECOND_ANSWER = (
    "may hold the answer that is meant: choose with dataset.columns.answer=solution or "
    "dataset.columns.answer=answer."
)
# of documents that are not token ids: columns, what a row with a value in one of them is told
_TRAPS = (
    (
        re.compile("|".join(MEDIA)),
        f"{_IGNORED}{NOT_READ}; {_MEANT}",
    ),
    (re.compile("|".join(VERDICTS)), VERDICT),
    (re.compile("history|chat_template_kwargs"), f"{_IGNORED}{_MEANT}"),
    (re.compile(f".*({REJECTED.pattern}).*", re.IGNORECASE | re.DOTALL), _REJECTED_ANSWER),
    (re.compile("solution"), _SECOND_ANSWER),
    (WEIGHTS, f"{_IGNORED}all rows weigh the same; leave rows of weight 0 out, or {_MEANT}"),
    (
        MASKS,
        "is another program's loss mask: set weight: 0 for turns that are not trained on, or "
        f"{_MEANT}",
    ),
)


def _problems(
    columns: Sequence[str], found: Format, renames: Renames, typed: Renames
) -> Iterator[tuple[str, str]]:
    """Yields the columns that would change what is trained, and what a row with a value in one of
    them is told.
    """
    meant = set()
    if not ANSWERS.isdisjoint(typed):
        meant |= {_REJECTED_ANSWER, _SECOND_ANSWER}
    if "answer" not in found.columns:
        meant.add(_SECOND_ANSWER)
    if found.kind not in ("messages", "prompt_completion"):
        meant.add(VERDICT)
    for name in columns:
        if name in renames.values() or name in found.columns or name in found.optional:
            continue
        if found.kind == "tokens":
            if "mask" in name.lower():
                cure = f"call it loss_mask if its zeros are not trained on, or {_MEANT}"
                yield name, f"{_IGNORED}{cure}".format(format=found.name)
            continue
        for pattern, told in _TRAPS:
            if told not in meant and pattern.fullmatch(name):
                yield name, told.format(format=found.name)
                break


def detect(
    columns: Sequence[str], format_name: str | OwnFormat | None, renames: Renames | None
) -> Detected:
    """Finds the format from the columns, or checks the given one.

    Columns that change what the others mean (an answer that was rejected, a verdict, pictures) are
    refused unless the format is given, which says that they are left out on purpose.

    format_name: or a function from a raw row to messages, or to prompt and completion.
    renames: canonical name -> column of the file (`{"question": "Frage"}`).

    Raises ConfigError: unknown format, a column that is not there, or columns of no known format.
    """
    renames = dict(renames or {})
    if format_name is not None and not isinstance(format_name, str):
        return _by_function(format_name, renames)
    for canonical, column in renames.items():
        if column not in columns:
            names = printable(", ".join(columns))
            raise ConfigError(
                f"dataset.columns.{canonical}={column} is not a column of the data, which has "
                f"{names}."
            )
    if format_name is None and any(REJECTED.search(name) for name in columns):
        _check_preferences(columns, renames)
    candidates = [known for known in FORMATS if format_name in (None, known.name)]
    if not candidates:
        known = ", ".join(known.name for known in FORMATS)
        raise ConfigError(
            f"dataset.format={format_name} is not one of {known}, nor a block with a _target_."
        )
    typed = dict(renames)
    found, renames = _find(candidates, columns, renames)
    has = [*found.columns, *found.optional]
    for name in [name for name in typed if name not in has]:
        raise ConfigError(
            f"dataset.columns.{name}: the data are taken for {found.name}, which has no {name}"
            f"{did_you_mean(name, has)} It has {', '.join(has)}."
        )
    untyped = [name for name in columns if name not in typed.values()]
    verdict = next((name for name in VERDICTS if name in untyped), None)
    if format_name is None and verdict and found.kind in ("messages", "prompt_completion"):
        raise ConfigError(f"column {verdict} {VERDICT.format(format=found.name)}")
    return Detected(
        found,
        renames,
        _describe(found, columns, renames),
        typed,
        format_name is not None,
        described=frozenset(columns),
    )


def _by_function(function: OwnFormat, renames: Renames) -> Detected:
    """Returns what reads rows by a function of the user's; its identity is the text of
    its module.
    """
    if renames:
        raise ConfigError(
            "dataset.columns: a dataset.format of your own reads the columns by itself: remove "
            "them."
        )
    if not callable(function):
        raise ConfigError(
            f"dataset.format={function!r:.60} must be a name, or a _target_ that is a function of "
            "a row."
        )
    plain = function.func if isinstance(function, partial) else function
    code = plain if inspect.isroutine(plain) else type(plain)
    name = f"{code.__module__}.{code.__qualname__}"
    options = repr(function.keywords) if isinstance(function, partial) else ""
    try:
        source = short_hash(Path(inspect.getfile(code)).read_text(errors="replace") + options)
    except (TypeError, OSError):  # written in C, or typed into a prompt
        source = options
    description = f"read by {name}{f' {options}' if options else ''}"
    return Detected(own_format(name, function), {}, description, is_given=True, source=source)


def _check_preferences(columns: Sequence[str], renames: Renames) -> None:
    """Raises ConfigError for pairs of a wanted and a rejected answer, unless the wanted one is
    named.
    """
    rejected = [name for name in columns if REJECTED.search(name)]
    others = [name for name in columns if name not in rejected]
    chosen = [name for name in others if CHOSEN.search(name)]
    named = set(renames.values())
    if not ANSWERS.isdisjoint(renames) and not named & set(rejected):
        return
    wanted = printable(next(iter(chosen or others[-1:]), "..."))
    pairs = printable(", ".join([*chosen, *rejected]))
    taken = [name for name in rejected if name in named]
    what = f"{taken[0]} would be trained on" if taken else "this program trains on one answer"
    raise ConfigError(
        f"the columns {pairs} are preference pairs, and {what}: select the chosen answers with "
        f"dataset.columns.completion={wanted} (texts after a prompt), "
        f"dataset.columns.messages={wanted} (chats) or dataset.columns.text={wanted} (whole "
        "texts), or set dataset.format=... to train on the columns you named. To learn from both "
        "answers, train with --config-name dpo."
    )


def _find(
    candidates: Sequence[Format], columns: Sequence[str], renames: Renames
) -> tuple[Format, dict[str, str]]:
    """Returns the first format whose columns are there, under their own names before other ones;
    and all renames.
    """
    named = {*columns, *renames}
    for takes_others in (False, True):
        for candidate in candidates:
            others = _other_names(candidate.columns, named) if takes_others else {}
            if named.issuperset({*candidate.columns} - others.keys()):
                optional = _other_names(candidate.optional, named - {*others.values()})
                return candidate, {**optional, **others, **renames}
    columns = list(map(printable, columns))
    if len(candidates) == 1:
        wanted = " + ".join(candidates[0].columns)
        raise ConfigError(
            f"dataset.format={candidates[0].name} needs the columns {wanted}, the data have "
            f"{', '.join(columns)}: name them with dataset.columns, or set dataset.format to what "
            "the rows are."
        )
    known = ", ".join(" + ".join(known.columns) for known in FORMATS)
    texts = [column for column in columns if not NUMBERED.fullmatch(column)] or columns
    canonical = [column for one in FORMATS for column in one.columns]
    usual = ["prompt", "completion"] if len(texts) > 1 else ["text"]
    hint = " ".join(
        f"dataset.columns.{nearest(text, canonical) or name}={text}"
        for name, text in zip(usual, texts if len(texts) < 3 else ["NAME", "NAME"], strict=False)
    )
    raise ConfigError(
        f"the columns {', '.join(columns)} match no known format: name them, for instance {hint}. "
        f"Known formats are {known}."
    )


def _other_names(wanted: Sequence[str], named: set[str]) -> dict[str, str]:
    """Other names under which columns are there: Dolly's `context` is Alpaca's `input`."""
    others = {
        name: [other for other in NAMES["columns"].get(name, ()) if other in named]
        for name in wanted
    }
    return {name: there[0] for name, there in others.items() if there and name not in named}


def _describe(found: Format, columns: Sequence[str], renames: Renames) -> str:
    """`columns Frage,Antwort → question_answer (question = Frage, answer = Antwort)`."""
    mapped = ", ".join(f"{canonical} = {column}" for canonical, column in renames.items())
    description = f"columns {','.join(columns)}" + (
        f" → {found.name}" if list(columns) != [found.name] else ""
    )
    description += f" ({mapped})" if mapped else ""
    used = {*renames.values(), *found.columns, *found.optional, GROUP}
    if "input_ids" in found.columns:  # rows of tokens bring what their loss declares
        used |= {*declared_columns()}
    ignored = [name for name in columns if name not in used]
    return printable(description + (f", ignored: {', '.join(ignored)}" if ignored else ""))


@dataclass(frozen=True)
class NormalizedRows:
    """Raw rows as documents: those of `indices`, in their order."""

    raw: RawRows
    detected: Detected
    indices: Sequence[int] | np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Document:
        row = int(self.indices[index])
        return self.detected.document(self.raw[row], self.raw.where(row))

    def where(self, index: int) -> str:
        return self.raw.where(int(self.indices[index]))
