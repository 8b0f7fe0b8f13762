"""Data that are read while they are trained on: hub streams, generators, and files too large to be prepared first.

The stream is dealt out to a fixed number of shards; each shard is read, tokenised and packed on its own, wherever it
lives. Which process reads a shard is another matter: the packs do not depend on the number of ranks or workers.

    documents   0 1 2 3 4 5 6 7 8 …        num_shards 4
    shard 1       1       5       9 …      on rank 0 of one, on rank 1 of two, in worker 1 of two …
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Annotated, Any, Protocol

from automodel_lite.config.components import CodePath
from automodel_lite.config.rules import PathStr, Range, looks_local
from automodel_lite.data.documents import Document, DocumentList, DocumentRows, Question
from automodel_lite.data.files import Delimiter, FilesDataset
from automodel_lite.data.formats import NormalisedRows, detect
from automodel_lite.data.readers import RawRow, RawRows, is_file_name, open_source, without_nulls
from automodel_lite.errors import ConfigError, DataError

NUM_SNIFFED_ROWS = 20
NUM_HEAD_DOCUMENTS = 2000  # that a tokenizer is trained on, or that are looked at beforehand
Placed = tuple[str, RawRow | DataError]


class RawStream(Protocol):
    """A stream of raw rows that can be read from any place on, again and again with the same result."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str: ...

    def read(self, shard: int, num_shards: int, start: int) -> Iterator[Placed]:
        """(place, row) of every row of a shard but the first `start`; a broken row is the error that says so."""


@dataclass(frozen=True)
class FileStream:
    """Local files; any row is found at once."""

    rows: RawRows
    name: str
    identity: str

    def read(self, shard: int, num_shards: int, start: int) -> Iterator[Placed]:
        for index in range(shard + start * num_shards, len(self.rows), num_shards):
            try:
                yield self.rows.where(index), self.rows[index]
            except DataError as error:
                yield self.rows.where(index), error


@dataclass(frozen=True)
class HubStream:
    """A dataset of the hub, streamed; files are dealt to shards where there are enough of them, else rows are."""

    path: str
    config: str | None
    split: str
    key: str

    @property
    def name(self) -> str:
        return f"{self.path}/{self.config}" if self.config else self.path

    @property
    def identity(self) -> str:
        return f"{self.name} {self.split}"

    def read(self, shard: int, num_shards: int, start: int) -> Iterator[Placed]:
        import datasets

        try:
            stream = datasets.load_dataset(self.path, self.config, split=self.split, streaming=True)
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(f"{self.key}={self.path} cannot be streamed: {reason}") from error
        by_file = stream.num_shards >= num_shards
        rows: Iterable[RawRow] = (
            stream.shard(num_shards, shard).skip(start)
            if by_file
            else islice(stream, shard + start * num_shards, None, num_shards)
        )
        step, first = (1, start) if by_file else (num_shards, shard + start * num_shards)
        place = f"{self.name}, shard {shard}, row " if by_file else f"{self.name}, row "
        for number, row in enumerate(rows):
            yield f"{place}{first + number * step + 1}", {name: without_nulls(value) for name, value in row.items()}


@dataclass(frozen=True)
class GeneratorStream:
    """Rows that a function of the user yields; it is called anew for every shard, and must yield the same each time."""

    function: str

    @property
    def name(self) -> str:
        return self.function

    @property
    def identity(self) -> str:
        return self.function

    def read(self, shard: int, num_shards: int, start: int) -> Iterator[Placed]:
        first = shard + start * num_shards
        for number, row in enumerate(islice(_locate(self.function)(), first, None, num_shards)):
            place = f"{self.function}[{first + number * num_shards}]"
            yield place, row if isinstance(row, dict) else DataError(f"{place}: a row must be a dict, not {row!r:.40}.")


@dataclass
class StreamingDataset:
    """Documents of a stream.

    Args:
        path: files or a hub name, as for `FilesDataset`; or
        generator: `package.module:function`, a function without arguments that yields rows; a configuration may name
            it when the command line allows its package, `security.allow_targets`.
        num_shards: into how many the stream is dealt; a multiple of data-parallel ranks x workers. A run may continue
            on another number of ranks as long as this one stays. Streams that cannot be entered in the middle
            (generators, hub datasets of few files) are read from the start by each shard.
        name, split, format, columns, val_path, delimiter: as for `FilesDataset`.
    """

    path: PathStr | Sequence[PathStr] | None = None
    generator: CodePath | None = None
    name: str | None = None
    split: str = "train"
    format: str | None = None
    columns: Mapping[str, str] | None = None
    val_path: PathStr | Sequence[PathStr] | Mapping[str, PathStr | Sequence[PathStr]] | None = None
    num_shards: Annotated[int, Range(1, 100_000)] = 8
    delimiter: Delimiter | None = None

    stream: RawStream = field(init=False)
    val: dict[str, DocumentRows] = field(init=False)
    kind: str = field(init=False)
    questions: list[Question] = field(init=False, default_factory=list)
    description: str = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ConfigError(f"dataset.num_shards={self.num_shards} must be at least 1.")
        self.stream = self._open()
        first = list(islice(self.stream.read(0, 1, 0), NUM_SNIFFED_ROWS))
        columns = {column: None for _, row in first if not isinstance(row, DataError) for column in row}
        if not columns:
            raise next((row for _, row in first if isinstance(row, DataError)), DataError(self._is_empty()))
        self._detected = detect(list(columns), self.format, self.columns)
        self.kind = self._detected.format.kind
        if self.kind == "tokens":
            raise ConfigError(f"{self.stream.name} holds token ids; streams are tokenised here: use dataset=files.")
        self.val = dict(self._val())
        self.description = f"{self.stream.name}: a stream in {self.num_shards} shards, {self._detected.description}"
        self.identity = f"stream({self.stream.identity}; {self._detected.format.name}; "
        self.identity += f"{dict(self._detected.renames)}; num_shards={self.num_shards})"

    def read(self, shard: int, start: int) -> Iterator[tuple[str, Document | DataError]]:
        """(place, document) of every document of a shard but the first `start`."""
        for place, row in self.stream.read(shard, self.num_shards, start):
            if isinstance(row, DataError):
                yield place, row
                continue
            try:
                yield place, NormalisedRows(_OneRow(row, place), *self._normalise)[0]
            except DataError as error:
                yield place, error

    @cached_property
    def train(self) -> DocumentList:
        """The first documents, for whoever wants to look at some (training a tokenizer on them)."""
        head = islice(self.stream.read(0, 1, 0), NUM_HEAD_DOCUMENTS)
        rows = (_OneRow(row, place) for place, row in head if not isinstance(row, DataError))
        return DocumentList(
            [d for d in (_normalised_or_none(row, *self._normalise) for row in rows) if d], self.name or ""
        )

    @property
    def _normalise(self) -> tuple[Callable[[RawRow], Document], Mapping[str, str], tuple[str, ...]]:
        return self._detected.format.normalise, self._detected.renames, self._detected.media

    def _open(self) -> RawStream:
        if (self.path is None) == (self.generator is None):
            raise ConfigError("dataset.path and dataset.generator: give one of them.")
        if self.generator is not None:
            _locate(self.generator)
            return GeneratorStream(self.generator)
        assert self.path is not None
        if isinstance(self.path, str) and not (looks_local(self.path) or is_file_name(self.path)):
            return HubStream(self.path, self.name, self.split, "dataset.path")
        source = open_source(self.path, self.name, self.split, "dataset.path", self.delimiter)
        return FileStream(source.rows, source.description, source.identity)

    def _val(self) -> Iterator[tuple[str, DocumentRows]]:
        if self.val_path is not None:
            named = self.val_path if isinstance(self.val_path, Mapping) else {"val": self.val_path}
            for name, path in named.items():
                held_out = FilesDataset(path, None, self.split, self.format, self.columns, delimiter=self.delimiter)
                yield name, held_out.train

    def _is_empty(self) -> str:
        return f"{self.stream.name}: the stream is empty: it holds no row."


@dataclass(frozen=True)
class _OneRow:
    """A row on its own, as `NormalisedRows` reads them."""

    row: RawRow
    place: str

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> RawRow:
        return self.row

    def where(self, index: int) -> str:
        return self.place


def _normalised_or_none(row: _OneRow, *normalise: Any) -> Document | None:
    try:
        return NormalisedRows(row, *normalise)[0]
    except DataError:
        return None  # met again, and reported, when it is its turn


def _locate(function: str) -> Callable[[], Iterable[Any]]:
    module, _, name = function.partition(":")
    try:
        found = vars(importlib.import_module(module))[name]
    except (ImportError, KeyError, ValueError) as error:
        raise ConfigError(
            f"dataset.generator={function} cannot be found ({error}): write package.module:function."
        ) from error
    if not callable(found):
        raise ConfigError(f"dataset.generator={function} is no function.")
    return found
