"""Anybody's files, or a dataset of the hub, as normalized documents: prepared first, or streamed.

Streams (of the hub, generators, files too large to be prepared first) are read while they are trained on. A stream is
distributed to a fixed number of shards; each shard is read, tokenized and packed on its own, wherever it lives. Which
process reads a shard is another matter: the packs do not depend on the number of ranks or workers.

    documents   0 1 2 3 4 5 6 7 8 …        num_shards 4
    shard 1       1       5       9 …      on rank 0 of one, on rank 1 of two, in worker 1 of two …
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from automodel_lite.config.components import CodePath
from automodel_lite.config.rules import OneOf, PathStr, Positive, Range, Seed, looks_local
from automodel_lite.data.documents import Document, DocumentList, DocumentSet, Question, question_of
from automodel_lite.data.formats import Alignment, NormalizedRows, detect, find_alignment
from automodel_lite.data.readers import OpenedRows, RawRow, RawRows, is_file_name, open_rows, without_nulls
from automodel_lite.errors import ConfigError, DataError, one_line

NUM_SNIFFED_ROWS = 20
Delimiter = Annotated[str, OneOf(("comma", "semicolon", "tab", "pipe", ",", ";", "|", "\\t"))]
ValPath = PathStr | Sequence[PathStr] | Mapping[str, PathStr | Sequence[PathStr]]
NumShards = Annotated[int, Range(1, 100_000)]


@dataclass
class FilesDataset:
    """Documents from files: JSON lines, JSON, CSV, TSV, text, Parquet, Arrow; or from the hub.

    Raises:
        ConfigError: nothing at `path`, unknown format, columns of no known format.
    """

    path: PathStr | Sequence[PathStr]  # a file, a folder, a glob, a list of these, or a hub name
    name: str | None = None  # configuration of the hub dataset
    split: str = "train"  # split of a hub dataset or a saved DatasetDict
    format: str | None = None  # null = detected from the columns
    columns: Mapping[str, str] | None = None  # canonical name -> column, {question: Frage, answer: Antwort}
    val_path: ValPath | None = None  # validation files, or several sets by name, {easy: a.jsonl, hard: b.jsonl}
    val_split: str | None = None  # or another split of the dataset
    val_frac: Annotated[float, Range(0, below=1)] = 0.0  # or this fraction of the documents, 0..1
    max_documents: Positive | None = None  # use only the first documents
    labels: Alignment | None = None  # of token rows: aligned (labels[i] = input_ids[i+1]) | unshifted; null = detected
    delimiter: Delimiter | None = None  # of CSV files: comma | semicolon | tab | pipe; null = detected
    seed: Seed = 0  # for val_frac

    train: DocumentSet = field(init=False)
    val: dict[str, DocumentSet] = field(init=False)
    kind: str = field(init=False)
    questions: list[Question] = field(init=False, default_factory=list)
    description: str = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        if sum([self.val_path is not None, self.val_split is not None, self.val_frac > 0]) > 1:
            raise ConfigError("dataset.val_path, dataset.val_split and dataset.val_frac: set only one of them.")
        source = open_rows(self.path, self.name, self.split, "dataset.path", self.delimiter)
        detected = detect(sniff_columns(source.rows, source.description), self.format, self.columns)
        labels = ""
        if detected.format.kind == "tokens":
            detected = replace(detected, labels=self.labels or _found_labels(NormalizedRows(source.rows, detected)))
            how = {"aligned": "next-token aligned", "unshifted": "unshifted (shifted once here)"}
            labels = f", labels {how[detected.labels]}"
        val_sources = self._val_sources()
        val: dict[str, DocumentSet] = {name: NormalizedRows(s.rows, detected) for name, s in val_sources.items()}
        train: DocumentSet = NormalizedRows(source.rows, detected)
        if self.max_documents is not None:
            train = SelectedRows(train, np.arange(min(self.max_documents, len(train))))
        if self.val_frac:
            train, val["val"] = split_rows(train, self.val_frac, self.seed)
        self.train, self.val, self.kind = train, val, detected.format.kind
        self.description = f"{source.description}: {len(self.train):,} documents, {detected.description}{labels}"
        sources = "; ".join([source.identity, *(f"{name}: {s.identity}" for name, s in val_sources.items())])
        self.identity = (
            f"{Path(source.description).stem}({sources}; {detected.format.name}; {dict(detected.renames)}{labels}; "
        )
        delimiter = f", delimiter={self.delimiter}" if self.delimiter else ""
        self.identity += f"val_frac={self.val_frac}, max_documents={self.max_documents}, seed={self.seed}{delimiter})"

    def _val_sources(self) -> dict[str, OpenedRows]:
        if self.val_split is not None:
            return {"val": open_rows(self.path, self.name, self.val_split, "dataset.val_split")}
        if self.val_path is None:
            return {}
        paths = dict(self.val_path) if isinstance(self.val_path, Mapping) else {"val": self.val_path}
        return {
            name: open_rows(path, None, self.split, "dataset.val_path", self.delimiter) for name, path in paths.items()
        }


def _found_labels(rows: DocumentSet) -> Alignment:
    """The convention that the labels of the first documents follow."""
    documents = []
    for index in range(min(NUM_SNIFFED_ROWS, len(rows))):
        with suppress(DataError):  # left to the tokenizer to report
            documents.append(rows[index])
    return find_alignment(documents)


def sniff_columns(rows: RawRows, description: str) -> list[str]:
    """The columns of the first rows, in order; broken rows are left to the tokenizer to report."""
    columns: dict[str, None] = {}
    first_error: DataError | None = None
    for index in range(min(NUM_SNIFFED_ROWS, len(rows))):
        try:
            columns |= dict.fromkeys(rows[index])
        except DataError as error:
            first_error = first_error or error
    if columns:
        return list(columns)
    if first_error is not None:
        raise first_error
    raise DataError(f"{description}: the file is empty: it holds no row.")


_ANSWERS = ("completion", "output", "answer")


def read_questions(path: str) -> Iterator[tuple[RawRow, Question]]:
    """The rows of a file, and what each asks: `messages`, `prompt`, `question` or `instruction`, or a `text` to go on
    with. An answer beside it is the expected one.

    Raises ConfigError for columns of no known format, DataError for a row that does not fit.
    """
    source = open_rows(path, None, "train", "--prompts")
    columns = sniff_columns(source.rows, source.description)
    try:
        detected = detect(columns, None, None)
        missing: Sequence[str] = ()
    except ConfigError:
        missing = [name for name in _ANSWERS if name not in columns]
        detected = detect([*columns, *missing], None, None)
    for index in range(len(source.rows)):
        row = source.rows[index]
        question = question_of(detected.document({**dict.fromkeys(missing, ""), **row}, source.rows.where(index)))
        if question is None:
            raise ConfigError(f"--prompts {path}: {detected.description} has no question: it needs prompt or messages.")
        yield row, question


@dataclass(frozen=True)
class SelectedRows:
    """Some of the documents, in the order of `indices`."""

    rows: DocumentSet
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[int(self.indices[index])]

    def where(self, index: int) -> str:
        return self.rows.where(int(self.indices[index]))


def split_rows(rows: DocumentSet, val_frac: float, seed: int) -> tuple[SelectedRows, SelectedRows]:
    """Holds `val_frac` of the documents out, at least one, drawn by `seed`; both parts keep the file's order."""
    num_val = max(1, round(val_frac * len(rows)))
    if num_val >= len(rows):
        raise ConfigError(f"dataset.val_frac={val_frac} of {len(rows)} documents leaves none to train on.")
    drawn = np.random.default_rng(seed).permutation(len(rows))
    return SelectedRows(rows, np.sort(drawn[num_val:])), SelectedRows(rows, np.sort(drawn[:num_val]))


NUM_HEAD_DOCUMENTS = 2000  # that a tokenizer is trained on, or that are looked at beforehand
Placed = tuple[str, RawRow | DataError]


@dataclass(frozen=True)
class RawStream(ABC):
    """A stream of raw rows that can be read from any place on, again and again with the same result."""

    name: str
    identity: str

    @abstractmethod
    def read(self, shard: int, num_shards: int, start: int) -> Iterator[Placed]:
        """(place, row) of every row of a shard but the first `start`; a broken row is the error that says so."""


@dataclass(frozen=True)
class FileStream(RawStream):
    """Local files; any row is found at once."""

    rows: RawRows

    def read(self, shard: int, num_shards: int, start: int) -> Iterator[Placed]:
        for index in range(shard + start * num_shards, len(self.rows), num_shards):
            try:
                yield self.rows.where(index), self.rows[index]
            except DataError as error:
                yield self.rows.where(index), error


@dataclass(frozen=True)
class HubStream(RawStream):
    """A dataset of the hub, streamed; files are distributed to shards where there are enough of them, else rows are."""

    path: str
    config: str | None
    split: str

    def read(self, shard: int, num_shards: int, start: int) -> Iterator[Placed]:
        import datasets

        try:
            stream = datasets.load_dataset(self.path, self.config, split=self.split, streaming=True)
        except Exception as error:
            raise ConfigError(f"dataset.path={self.path} cannot be streamed: {one_line(error)}") from error
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


class GeneratorStream(RawStream):
    """Rows that a function of the user yields, called `name`: once for every shard, and the same rows each time."""

    def read(self, shard: int, num_shards: int, start: int) -> Iterator[Placed]:
        first = shard + start * num_shards
        for number, row in enumerate(islice(_locate(self.name)(), first, None, num_shards)):
            place = f"{self.name}[{first + number * num_shards}]"
            yield place, row if isinstance(row, dict) else DataError(f"{place}: a row must be a dict, not {row!r:.40}.")


@dataclass
class StreamingDataset:
    """Documents of a stream.

    A configuration may name a generator when the command line allows its package, `security.allow_targets`. A run may
    continue on another number of ranks as long as num_shards stays. Streams that cannot be entered in the middle
    (generators, hub datasets of few files) are read from the start by each shard.
    """

    path: PathStr | Sequence[PathStr] | None = None  # files or a hub name; or use generator
    generator: CodePath | None = None  # package.module:function that yields the same rows on every call
    name: str | None = None  # configuration of the hub dataset
    split: str = "train"  # of a hub dataset
    format: str | None = None  # null = detected from the columns
    columns: Mapping[str, str] | None = None  # canonical name -> column, {question: Frage, answer: Antwort}
    val_path: ValPath | None = None  # validation files, or several sets by name
    num_shards: NumShards = 8  # a multiple of data-parallel ranks x dataloader.num_workers; fixed for the run
    delimiter: Delimiter | None = None  # of CSV files: comma | semicolon | tab | pipe; null = detected

    stream: RawStream = field(init=False)
    val: dict[str, DocumentSet] = field(init=False)
    kind: str = field(init=False)
    questions: list[Question] = field(init=False, default_factory=list)
    description: str = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        self.stream = self._open()
        first = list(islice(self.stream.read(0, 1, 0), NUM_SNIFFED_ROWS))
        columns = {column: None for _, row in first if not isinstance(row, DataError) for column in row}
        if not columns:
            empty = DataError(f"{self.stream.name}: the stream is empty: it holds no row.")
            raise next((row for _, row in first if isinstance(row, DataError)), empty)
        self._detected = detect(list(columns), self.format, self.columns)
        self.kind = self._detected.format.kind
        if self.kind == "tokens":
            raise ConfigError(
                f"{self.stream.name} contains token ids, but streams are tokenized during training: use dataset=files."
            )
        self.val = dict(self._val())
        self.description = f"{self.stream.name}: a stream in {self.num_shards} shards, {self._detected.description}"
        self.identity = f"stream({self.stream.identity}; {self._detected.format.name}; "
        self.identity += f"{dict(self._detected.renames)}; num_shards={self.num_shards})"

    def read(self, shard: int, start: int) -> Iterator[tuple[str, Document | DataError]]:
        """(place, document) of every document of a shard but the first `start`."""
        return map(self._document, self.stream.read(shard, self.num_shards, start))

    @cached_property
    def train(self) -> DocumentList:
        """The first documents, for whoever wants to look at some (training a tokenizer on them)."""
        head = map(self._document, islice(self.stream.read(0, 1, 0), NUM_HEAD_DOCUMENTS))
        return DocumentList([d for _, d in head if not isinstance(d, DataError)], self.name or "")

    def _document(self, placed: Placed) -> tuple[str, Document | DataError]:
        place, row = placed
        if isinstance(row, DataError):
            return placed
        try:
            return place, self._detected.document(row, place)
        except DataError as error:
            return place, error

    def _open(self) -> RawStream:
        if (self.path is None) == (self.generator is None):
            raise ConfigError("dataset.path and dataset.generator: set exactly one of them.")
        if self.generator is not None:
            _locate(self.generator)
            return GeneratorStream(self.generator, self.generator)
        assert self.path is not None
        if isinstance(self.path, str) and not (looks_local(self.path) or is_file_name(self.path)):
            shown = f"{self.path}/{self.name}" if self.name else self.path
            return HubStream(shown, f"{shown} {self.split}", self.path, self.name, self.split)
        source = open_rows(self.path, self.name, self.split, "dataset.path", self.delimiter)
        return FileStream(source.description, source.identity, source.rows)

    def _val(self) -> Iterator[tuple[str, DocumentSet]]:
        if self.val_path is not None:
            named = self.val_path if isinstance(self.val_path, Mapping) else {"val": self.val_path}
            for name, path in named.items():
                held_out = FilesDataset(path, None, self.split, self.format, self.columns, delimiter=self.delimiter)
                yield name, held_out.train


def _locate(function: str) -> Callable[[], Iterable[Any]]:
    module, _, name = function.partition(":")
    try:
        found = vars(importlib.import_module(module))[name]
    except (ImportError, KeyError, ValueError) as error:
        raise ConfigError(
            f"dataset.generator={function} cannot be found ({error}): write package.module:function."
        ) from error
    if not callable(found):
        raise ConfigError(f"dataset.generator={function} is not a function.")
    return found
