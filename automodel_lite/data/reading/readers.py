"""Files as rows of raw columns, each of which knows its place: `train.jsonl:17`.

Files are read here and not through `datasets`: it reports a bad line without its file, turns
`"007"` into 7 and `"NA"` into nothing, pads tool schemas of different shapes with nulls, takes a
file's name for a pattern, and gives the old rows of a file that was replaced by one of the same
time. Lines are indexed by their byte offsets and parsed when they are asked for, so a file of any
size costs 16 bytes per row.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch.utils.data import ConcatDataset

from automodel_lite.data.document import RawRow
from automodel_lite.data.strict_json import read_json
from automodel_lite.errors import DataError, counted

UTF_8 = "utf-8-sig"  # in which a byte order mark at the beginning is no text
INDEX_BLOCK_BYTES = 64 * 2**20
MAX_ROW_BYTES = 64 * 2**20  # of one line, paragraph or text file: more takes a tokenizer gigabytes


class RawRows(Protocol):
    """Map-style raw rows; reading a broken one raises `DataError` that names its place."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> RawRow: ...

    def where(self, index: int) -> str: ...


Placed = tuple[str, dict[str, Any] | DataError]
"""A row or a document, or the error that reading it raised, and its place."""


def placed(rows: RawRows, indices: Iterable[int] | None = None) -> Iterator[Placed]:
    """Yields rows or documents, all or those of `indices`, with their places."""
    for index in range(len(rows)) if indices is None else indices:
        try:
            yield rows.where(index), rows[index]
        except DataError as error:
            yield rows.where(index), error


MAX_OPEN_FILES = 256  # a process may have 1,024 of all kinds
_OPEN: deque[weakref.ref[SpanRows]] = deque()


@dataclass(frozen=True)
class SpanRows:
    """Rows that are stretches of a text file: JSON objects or plain text. Picklable: a worker
    indexes nothing again.

    They are read, not mapped: a mapped file that somebody cuts short ends the process by a signal.
    """

    path: Path
    name: str
    starts: np.ndarray  # byte offset of each row, int64
    line_numbers: np.ndarray  # of the line where it starts, from 1
    num_bytes: int  # of the file
    encoding: str
    is_json: bool

    @cached_property
    def _file(self) -> FileIO:
        """Opens the file, and closes the one that has been open for longest when there are many: a
        folder may hold a hundred thousand.
        """
        _OPEN.append(weakref.ref(self))
        while len(_OPEN) > MAX_OPEN_FILES:
            if oldest := _OPEN.popleft()():
                oldest.__dict__.pop("_file", None)
        return FileIO(self.path)

    def __reduce__(self) -> tuple:
        return SpanRows, tuple(getattr(self, own.name) for own in fields(self))

    def __len__(self) -> int:
        return len(self.line_numbers)

    def __getitem__(self, index: int) -> RawRow:
        span = self.span(index)
        if self.is_json:
            return parse_json_object(span, self.where(index), self.encoding)
        try:
            return {"text": span.decode(self.encoding).strip("\r\n")}
        except UnicodeDecodeError as error:
            line = self.line_numbers[index] + span.count(b"\n", 0, error.start)
            raise DataError(
                f"{self.name}:{line}: {undecodable(span[error.start], self.encoding)}"
            ) from error

    def span(self, index: int) -> bytes:
        """Returns the bytes of one row, up to where the next one starts."""
        start = int(self.starts[index])
        stop = int(self.starts[index + 1]) if index + 1 < len(self) else self.num_bytes
        size = stop - start
        if size > MAX_ROW_BYTES:
            raise DataError(
                f"{self.where(index)}: has {size:,} bytes, over the {MAX_ROW_BYTES:,} of a "
                "row: split it into documents (a text file: dataset.text_unit=paragraph or line)."
            )
        file = self._file  # kept here: another thread may close what it no longer finds in the row
        span = os.pread(file.fileno(), size, start)
        if len(span) != size:
            raise DataError(
                f"{self.where(index)}: the file was truncated while it was being read: it had "
                f"{self.num_bytes:,} bytes. Restore it and start again."
            )
        return span

    def where(self, index: int) -> str:
        return f"{self.name}:{self.line_numbers[index]}"


TEXT_UNITS = ("file", "paragraph", "line")


def open_spans(path: Path, name: str, encoding: str, unit: str | None = None) -> SpanRows:
    """Indexes the rows of a file: JSON objects, one per line that is not blank, or a `unit` of
    text.
    """
    breaks = []
    num_bytes = 0
    with path.open("rb") as file:
        while block := file.read(INDEX_BLOCK_BYTES):
            breaks.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + num_bytes)
            num_bytes += len(block)
        stops = np.concatenate([*breaks, [num_bytes]]).astype(np.int64)
        starts = np.append(0, stops[:-1] + 1)
        is_row = stops > starts
        # A line of white space is blank too; only short ones are looked at.
        for line in np.flatnonzero(is_row & (stops - starts < 8)):
            file.seek(int(starts[line]))
            is_row[line] = bool(file.read(int(stops[line] - starts[line])).strip())
    if unit == "paragraph":  # a line with text behind a line without
        is_row = is_row & ~np.append(False, is_row[:-1])
    if unit == "file":
        starts = starts[:1]
        is_row = np.array([is_row.any()])
    return SpanRows(
        path, name, starts[is_row], np.flatnonzero(is_row) + 1, num_bytes, encoding, unit is None
    )


def undecodable(byte: int, encoding: str) -> str:
    """Describes a byte that cannot be read, and what it would be in the encoding that is the usual
    cause.
    """
    if encoding != UTF_8:
        return (
            f"byte {byte:#04x} is not {encoding}: set dataset.encoding to what the file was "
            "written in."
        )
    if byte in (0xFE, 0xFF):  # how UTF-16 begins, and no letter that is common
        return (
            f"byte {byte:#04x} is not UTF-8: the file is damaged, or UTF-16: save it as UTF-8, or "
            "convert it, iconv -f utf-16 -t utf-8."
        )
    meant = bytes([byte]).decode("cp1252", errors="ignore")
    cure = (
        f"; in cp1252 (Excel, Windows) it is {meant!r}: if so, set dataset.encoding=cp1252"
        if meant
        else ""
    )
    return f"byte {byte:#04x} is not UTF-8{cure}."


def parse_json_object(line: bytes, where: str, encoding: str = UTF_8) -> RawRow:
    """Parses one row; raises DataError, which names `where` and the column (character) of the
    fault.
    """
    try:
        row = read_json(line.decode(encoding).rstrip())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}:{error.start + 1}: {undecodable(line[error.start], encoding)}"
        ) from error
    except json.JSONDecodeError as error:
        shown = error.doc[max(0, error.pos - 20) : error.pos + 20]
        cure = _AS_JSON if error.doc.startswith("[") else json_cure(error)
        raise DataError(
            f"{where}:{error.pos + 1}: not JSON: {error.msg}, near {shown!r}",
            cure=cure or _MEND,
            can_skip=not cure,
        ) from error
    except ValueError as error:  # a number of thousands of digits, a key that is there twice
        raise DataError(f"{where}: not JSON that can be read: {error}.") from error
    row = _as_chat(row)
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: a row must be a JSON object, not {type(row).__name__}: {_AS_JSON}."
        )
    return row


_OF_TURN = {"role", "content", "from", "value", "name", "weight"}
_OF_TURN |= {"reasoning_content", "tool_calls", "tool_call_id", "function_call"}


def _as_chat(value: Any) -> Any:
    """Returns a list of messages as the row that it is meant to be, and any other value as it
    is.
    """
    if not isinstance(value, list) or not value:
        return value
    is_chat = all(
        isinstance(turn, dict)
        and (turn.keys() >= {"from", "value"} or "role" in turn)
        and turn.keys() <= _OF_TURN
        for turn in value
    )
    return {"messages": value} if is_chat else value


_MEND = "mend it there"
_AS_JSON = "an array of rows belongs in a file named .json"


def json_cure(error: json.JSONDecodeError) -> str:
    """Returns the cure of a whole file or row; "" where one row is broken in the middle."""
    if error.doc.rstrip()[-1:] in ("{", ",") and len(error.doc.rstrip()) <= error.pos:
        return "one row per line is wanted, and this one goes on over lines: jq -c . writes it so"
    if error.msg.startswith("Unterminated") or len(error.doc) == error.pos:
        return "it ends too soon, as a file that was cut off: write the file again"
    return ""


@dataclass(frozen=True)
class RowList:
    """Rows of a CSV file, a JSON array or a `datasets.Dataset`; a broken one is the error that
    reading it raises.

    line_numbers  of each row; None: its place is its number, from 1
    header        names of the columns, where a file has them even without a row
    """

    rows: Any
    name: str
    line_numbers: Sequence[int] | None = None
    header: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> RawRow:
        row = self.rows[int(index)]
        if isinstance(row, DataError):
            raise row
        if not isinstance(row, dict):
            raise DataError(
                f"{self.where(index)}: a row must be a JSON object, not {type(row).__name__}."
            )
        return row

    def where(self, index: int) -> str:
        return (
            f"{self.name}[{index + 1}]"
            if self.line_numbers is None
            else f"{self.name}:{self.line_numbers[index]}"
        )


def open_json(path: Path, name: str, encoding: str) -> RawRows:
    """Opens a `.json` file: an array of objects, an object with one array of them in it, or one
    object per line.
    """
    lines = open_spans(path, name, encoding)
    # The first line is a row (a broken one too), or the opening of something that goes on.
    first = lines.span(0).strip().removeprefix(b"\xef\xbb\xbf") if len(lines) else b"{}"
    is_row = first.startswith(b"{") and first.endswith(b"}")
    if is_row and (
        len(lines) != 1 or not _rows_in(parse_json_object(first, lines.where(0), encoding))
    ):
        return lines
    content = path.read_bytes()
    try:
        whole = read_json(content.decode(encoding))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name}:{line}: {undecodable(content[error.start], encoding)}") from error
    except ValueError as error:
        # the file is one value: no row of it can be left out
        if isinstance(error, json.JSONDecodeError):
            cure = json_cure(error) or _MEND
            raise DataError(f"{name}: not JSON: {error}", cure=cure) from error
        raise DataError(f"{name}: not JSON: {error}.") from error
    if isinstance(whole, list) and isinstance(chat := _as_chat(whole), dict):
        return RowList([chat], name)
    arrays = [list(map(_as_chat, whole))] if isinstance(whole, list) else []
    if isinstance(whole, dict):
        arrays = _rows_in(whole)
    if len(arrays) != 1:
        raise DataError(
            f"{name}: must be an array of JSON objects, an object with one such array, or JSON "
            "lines."
        )
    return RowList(arrays[0], name)


def _rows_in(whole: RawRow) -> list[list[Any]]:
    """Returns the values of an object that are lists of rows (messages are objects too, but no
    rows).
    """
    lists = [value for value in whole.values() if isinstance(value, list) and value]
    return [
        rows
        for rows in lists
        if all(isinstance(row, dict) and not {"role", "from"} & row.keys() for row in rows)
    ]


NUM_SNIFFED_RECORDS = 20
_SNIFFED_CHARS = 2**20


def find_delimiter(path: Path, usual: str, encoding: str) -> str:
    """Finds what separates values: `usual` unless only another one gives the same number (over 1)
    in each of the first records, which may go over several lines.
    """
    # a bad byte is named when its line is read
    with path.open(newline="", encoding=encoding, errors="surrogateescape") as file:
        text = file.read(_SNIFFED_CHARS)

    def columns(delimiter: str) -> int:
        """Values of each record; 1 when the records differ."""
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        records: list[list[str]] = []
        try:
            records += islice(filter(None, reader), NUM_SNIFFED_RECORDS)
        except csv.Error:  # of the last one, which may be cut
            if len(text) < _SNIFFED_CHARS:
                return 1
        if len(text) == _SNIFFED_CHARS and 1 < len(records) < NUM_SNIFFED_RECORDS:
            records.pop()
        numbers = {len(record) for record in records}
        return numbers.pop() if len(numbers) == 1 else 1

    others = [
        delimiter
        for delimiter in (",", ";", "\t", "|")
        if delimiter != usual and columns(delimiter) > 1
    ]
    return others[0] if columns(usual) == 1 and len(others) == 1 else usual


_EXCEL = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)


def open_csv(path: Path, name: str, usual: str, encoding: str) -> RowList:
    """Reads a CSV or TSV file with a header line, separated by `usual` or by what is found; values
    stay text.
    """
    csv.field_size_limit(2**31 - 1)
    # Excel writes the delimiter as a line of its own before the header.
    with path.open(newline="", encoding=encoding, errors="surrogateescape") as file:
        named = _EXCEL.fullmatch(file.readline(16))
    delimiter = named[1] if named else find_delimiter(path, usual, encoding)
    rows: list[RawRow | DataError] = []
    line_numbers: list[int] = []
    header: list[str] | None = None
    with path.open(newline="", encoding=encoding, errors="surrogateescape") as file:
        num_before = 1 if named else 0
        for _ in range(num_before):
            file.readline()
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        while True:
            line = reader.line_num + 1 + num_before
            fault: DataError | None = None
            try:
                values = next(reader, None)
                if values is not None:
                    fault = _csv_fault(values, header, delimiter, encoding)
            except csv.Error as error:
                values = []
                fault = DataError(f"not CSV: {error}", cure=_QUOTES, can_skip=True)
                # An open quote takes all lines below it into its value: to skip them as one bad
                # row would drop the rest of the file.
                if reader.line_num + num_before > line:
                    raise DataError(
                        f"{name}:{line}: not CSV: a quote that opens in this row is not closed "
                        "until the end of the file",
                        cure=_QUOTES,
                    ) from error
            if values is None:
                return RowList(rows, name, line_numbers, header or ())
            if fault is not None:
                fault = fault.at(f"{name}:{line}")
            if header is None:
                if fault is not None:
                    raise fault
                header = [value.strip() for value in values]
                check_names(header, f"{name}:{line}")
            elif fault is not None:
                rows.append(fault)
                line_numbers.append(line)
            elif values:
                rows.append(dict(zip(header, values)))
                line_numbers.append(line)


_QUOTES = 'close each quote, and write "" for one inside a quoted value'
_TOO_FEW = "write each value, also an empty one, and a value of several lines in quotes"
_TOO_MANY = "write a value that has {!r} in it in quotes"


def _csv_fault(
    values: Sequence[str], header: Sequence[str] | None, delimiter: str, encoding: str
) -> DataError | None:
    """Returns what is wrong with a line; bytes that are not text were read as halves of surrogate
    pairs.
    """
    if values and header is not None and len(values) != len(header):
        return DataError(
            f"{counted(len(values), 'value')} for {counted(len(header), 'column')}",
            cure=_TOO_FEW if len(values) < len(header) else _TOO_MANY.format(delimiter),
            can_skip=True,
        )
    try:
        "".join(values).encode()
    except UnicodeEncodeError as error:
        return DataError(undecodable(ord(error.object[error.start]) - 0xDC00, encoding))
    return None


def check_names(names: Sequence[str], where: str) -> None:
    """Raises DataError for two columns of one name."""
    twice = next((column for column in names if names.count(column) > 1), None)
    if twice is not None:
        raise DataError(f"{where}: two columns are called {twice!r}: give each its own name.")


class ConcatenatedRows(ConcatDataset):
    """Rows of several sources end to end: raw ones, documents or token rows."""

    datasets: list[Any]

    def __init__(self, parts: Sequence[Any]):
        super().__init__(parts)

    def where(self, index: int) -> str:
        part = bisect_right(self.cumulative_sizes, index)
        return self.datasets[part].where(index - [0, *self.cumulative_sizes][part])
