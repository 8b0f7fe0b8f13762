"""One judge of every raw row: the format of a set, found from its first rows, and what each row has
beside it.

Columns may begin anywhere in a file. The set of columns of a row is judged once, and again for each
other set that rows have: other names of a column are taken, and columns that change what the rest
means are refused with their place.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from automodel_lite.classes import Classes
from automodel_lite.columns import declared_columns
from automodel_lite.data.cache import short_hash
from automodel_lite.data.document import NAMES, UNUSED, Document, RawRow
from automodel_lite.data.formats.known import FORMATS, GROUP, Format, Renames, own_format
from automodel_lite.data.formats.verdict import mismatched
from automodel_lite.data.reading.beside import (
    ANSWERS,
    EMPTY,
    ONE_MESSAGE,
    REJECTED,
    VERDICT,
    VERDICTS,
    Problem,
    part_of,
    problems_beside,
)
from automodel_lite.data.reading.labels import Alignment, align, check_alignment
from automodel_lite.data.reading.readers import RawRows
from automodel_lite.errors import (
    ConfigError,
    DataError,
    did_you_mean,
    is_limit,
    nearest,
    one_line,
    printable,
)

OwnFormat = Callable[[RawRow], Any]

CHOSEN = re.compile(r"chosen|prefer|winner|accepted|better", re.IGNORECASE)
NUMBERED = re.compile(r"id|nr|no|index|number|uuid|.*_id", re.IGNORECASE)  # of a row
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
    classes: Classes | None = None  # of documents with a label
    _judged: dict[tuple[str, ...], tuple[dict[str, str], dict[str, Problem]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def document(self, row: RawRow, where: str) -> Document:
        """Makes a document of a raw row; raises `DataError` with the row's place and the file's own
        column names.
        """
        try:
            renames, problems = self._judge(tuple(row))
            # What changes the meaning of the rest is told before an error of the rest.
            for column, problem in problems.items():
                if problem.part is None and problem.applies(column, row[column], {}):
                    raise DataError(f"column {column} {problem.sentence}")
            document = self._normalized(row, renames)
            for column, problem in problems.items():
                if problem.part and problem.applies(column, row[column], document):
                    raise DataError(f"column {column} {problem.sentence}")
            if self.described is not None and not self.described.issuperset(row):
                used = {
                    *renames.values(),
                    *self.format.columns,
                    *self.format.optional,
                    GROUP,
                    *problems,
                }
                known = self.described | used
                if late := [name for name in row if name not in known and row[name] not in EMPTY]:
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
            raise error.at(where) from error
        except ConfigError:
            raise
        except KeyError as error:
            raise DataError(
                f"{where}: {self.format.name}: there is no {error} in this row."
            ) from error
        except Exception as error:
            if is_limit(error):
                raise
            # of a function of the user's, or of a row that nobody has thought of
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise DataError(f"{where}: {self.format.name} fails: {reason}") from error

    def _normalized(self, row: RawRow, renames: Renames) -> Document:
        """Makes a document of a row by the format; raises DataError with the file's own column
        names.
        """
        named = {**row, **{canonical: row.get(column) for canonical, column in renames.items()}}
        try:
            document = self.format.normalize(named)
            if self.format.kind == "labeled":
                document = {**document, "label": self._code(document["label"])}
        except DataError as error:
            raise error.with_columns(renames) from error
        if named.get(GROUP) is not None:
            document = {**document, GROUP: named[GROUP]}
        return document

    def _code(self, label: Any) -> int | float:
        """Returns the number of a row's label."""
        if self.classes is None:
            raise ConfigError(
                "dataset.format=labeled asks which classes there are, which only dataset=files "
                "finds out",
                key="dataset",
                cure="use dataset=files",
            )
        return self.classes.code(label)

    def _judge(self, columns: tuple[str, ...]) -> tuple[dict[str, str], dict[str, Problem]]:
        """Returns the renames and the problems of rows with these columns."""
        if columns not in self._judged:
            named = {*columns, *self.typed}
            required = _other_names(self.format.columns, named)
            optional = _optional_names(self.format, named - {*required.values()}, self.is_given)
            renames = {**optional, **required, **self.typed}
            problems = (
                {}
                if self.is_given
                else dict(problems_beside(columns, self.format, renames, self.typed))
            )
            if len(self._judged) >= MOST_COLUMN_SETS:
                self._judged.clear()
            self._judged[columns] = renames, problems
        return self._judged[columns]


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
    candidates = [known for known in FORMATS if known.name == format_name]
    if format_name is None:
        candidates = [known for known in FORMATS if known.is_found]
    if not candidates:
        known = ", ".join(dict.fromkeys(known.name for known in FORMATS))
        raise ConfigError(
            f"dataset.format={format_name} is not one of {known}, nor a block with a _target_."
        )
    typed = dict(renames)
    found, renames = _find(candidates, columns, renames, format_name is not None)
    has = [*found.columns, *found.optional]
    for name in [name for name in typed if name not in has]:
        meant = f"{did_you_mean(name, has)} It has {', '.join(has)}."
        if name == "label":
            meant = ": learn it as a class, --config-name classify, or as a verdict on an answer, "
            meant += f"--config-name kto, or leave dataset.columns.{name} out."
        raise ConfigError(
            f"dataset.columns.{name}: the data are taken for {found.name}, which has no "
            f"{name}{meant}"
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
    candidates: Sequence[Format], columns: Sequence[str], renames: Renames, is_given: bool
) -> tuple[Format, dict[str, str]]:
    """Returns the first format whose columns are there, under their own names before other ones;
    and all renames.
    """
    # A column that the user named is not to be left out: formats that have all of them go first.
    candidates = sorted(
        candidates, key=lambda one: not {*renames}.issubset((*one.columns, *one.optional))
    )
    named = {*columns, *renames}
    for takes_others in (False, True):
        for candidate in candidates:
            others = _other_names(candidate.columns, named) if takes_others else {}
            if named.issuperset({*candidate.columns} - others.keys()):
                optional = _optional_names(candidate, named - {*others.values()}, is_given)
                return candidate, {**optional, **others, **renames}
    columns = list(map(printable, columns))
    if is_given:
        wanted = ", or ".join(" + ".join(one.columns) for one in candidates)
        instance = _instance_of(candidates, columns, renames)
        raise ConfigError(
            f"dataset.format={candidates[0].name} needs the columns {wanted}, the data have "
            f"{', '.join(columns)}: name them with dataset.columns{instance}, or set "
            "dataset.format to what the rows are."
        )
    known = ", ".join(" + ".join(known.columns) for known in FORMATS if known.is_found)
    texts = [column for column in columns if not NUMBERED.fullmatch(column)] or columns
    speaker = next((column for column in columns if part_of(column) == "speaker"), None)
    if speaker and len(texts) > 1:
        raise ConfigError(f"the columns {', '.join(columns)}: {speaker} {ONE_MESSAGE}.")
    # a column of text is never one of token ids
    found = [one for one in FORMATS if one.kind != "tokens" and one.is_found]
    canonical = [column for one in found for column in one.columns]
    usual = ["prompt", "completion"] if len(texts) > 1 else ["text"]
    shown_texts = texts if len(texts) < 3 else ["NAME", "NAME"]
    names = [nearest(text, canonical) or name for name, text in zip(usual, shown_texts)]
    if not any({*names}.issuperset(one.columns) for one in found):
        names = usual  # each is near a name, and together they are no format
    hint = " ".join(f"dataset.columns.{name}={text}" for name, text in zip(names, shown_texts))
    raise ConfigError(
        f"the columns {', '.join(columns)} match no known format: name them, for instance {hint}. "
        f"Known formats are {known}."
    )


def _instance_of(candidates: Sequence[Format], columns: Sequence[str], renames: Renames) -> str:
    """Returns the settings that would name all columns as those of a format, of the one that lacks
    the fewest, plain texts first; nothing where no format lacks as many columns as there are.
    """
    named = {*columns, *renames}
    fitting = []
    for one in candidates:
        missing = [name for name in one.columns if name not in named]
        free = [name for name in columns if name not in {*one.columns, *renames.values()}]
        if len(free) == len(missing):
            fitting.append((len(missing), "text" not in one.columns, missing, free))
    if not fitting:
        return ""
    # of those that lack as many, the one that is listed first
    _, _, missing, free = min(fitting, key=lambda one: one[:2])
    pairs = zip(missing, free)
    return ", for instance " + " ".join(f"dataset.columns.{name}={text}" for name, text in pairs)


def _other_names(wanted: Sequence[str], named: set[str]) -> dict[str, str]:
    """Other names under which columns are there: Dolly's `context` is Alpaca's `input`."""
    others = {
        name: [other for other in NAMES["columns"].get(name, ()) if other in named]
        for name in wanted
    }
    return {name: there[0] for name, there in others.items() if there and name not in named}


def _optional_names(found: Format, named: set[str], is_given: bool) -> dict[str, str]:
    """As `_other_names`, of the columns that a format may have. A format that the user named leaves
    thoughts out, unless their column is named too.
    """
    wanted = [name for name in found.optional if not (is_given and name == "reasoning_content")]
    return _other_names(wanted, named)


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
        document = self._own(index)
        if "verdict" not in document:
            return document
        # The answer of the row before it in the set, as far as that can be read; the first row
        # takes the last one's. So it follows from the order of the data alone.
        for distance in range(1, len(self)):
            with suppress(DataError):
                other = self._own((index - distance) % len(self))
                return {**document, "mismatched": mismatched(document, other)}
        raise DataError(
            f"{self.where(index)}: dataset.format=verdict reads each answer beside another "
            "row's, and this set has no second row that can be read: add rows to it."
        )

    def _own(self, index: int) -> Document:
        row = int(self.indices[index])
        return self.detected.document(self.raw[row], self.raw.where(row))

    def where(self, index: int) -> str:
        return self.raw.where(int(self.indices[index]))
