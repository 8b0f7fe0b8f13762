"""Anybody's files, or a dataset of the hub, as normalised documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from automodel_lite.config.rules import OneOf, PathStr, Positive, Range, Seed
from automodel_lite.data.documents import Document, DocumentRows, Question
from automodel_lite.data.formats import Normalise, NormalisedRows, detect
from automodel_lite.data.readers import RawRow, RawRows, Source, open_source
from automodel_lite.data.token_rows import Alignment, align, find_alignment
from automodel_lite.errors import ConfigError, DataError

NUM_SNIFFED_ROWS = 20
Delimiter = Annotated[str, OneOf(("comma", "semicolon", "tab", "pipe", ",", ";", "|", "\\t"))]


@dataclass
class FilesDataset:
    """Documents from files: JSON lines, JSON, CSV, TSV, text, Parquet, Arrow; or from the hub.

    Args:
        path: a file, a folder, a glob, several of these, or a hub name.
        name: the configuration of a hub dataset.
        split: of a hub dataset or of a saved `DatasetDict`.
        format: `messages`, `alpaca`, …; found from the columns by default.
        columns: canonical name -> column of the files, `{"question": "Frage"}`.
        val_path: files of validation documents, or several by name, `{"easy": …, "hard": …}`.
        val_split: in place of `val_path`, another split of the same dataset.
        val_frac: in place of both, this part (0..1) of the documents, drawn by `seed`.
        max_documents: take no more than this many documents of the training set, the first ones.
        labels: of pre-tokenised rows, `aligned` (labels[i] is the target of position i) or `unshifted` (labels[i] is
            input_ids[i], as Hugging Face models take them); found by comparing them by default.
        delimiter: between the values of a CSV file, `comma`, `semicolon`, `tab` or `pipe`; found by default.

    Raises:
        ConfigError: nothing at `path`, unknown format, columns of no known format.
    """

    path: PathStr | Sequence[PathStr]
    name: str | None = None
    split: str = "train"
    format: str | None = None
    columns: Mapping[str, str] | None = None
    val_path: PathStr | Sequence[PathStr] | Mapping[str, PathStr | Sequence[PathStr]] | None = None
    val_split: str | None = None
    val_frac: Annotated[float, Range(0, below=1)] = 0.0
    max_documents: Positive | None = None
    labels: Alignment | None = None
    delimiter: Delimiter | None = None
    seed: Seed = 0

    train: DocumentRows = field(init=False)
    val: dict[str, DocumentRows] = field(init=False)
    kind: str = field(init=False)
    questions: list[Question] = field(init=False, default_factory=list)
    description: str = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.val_frac < 1:
            raise ConfigError(f"dataset.val_frac={self.val_frac} must be in [0, 1).")
        if sum([self.val_path is not None, self.val_split is not None, self.val_frac > 0]) > 1:
            raise ConfigError("dataset.val_path, dataset.val_split and dataset.val_frac: give one of them.")
        source = open_source(self.path, self.name, self.split, "dataset.path", self.delimiter)
        detected = detect(sniff_columns(source.rows, source.description), self.format, self.columns)

        normalise, labels = detected.format.normalise, ""
        if detected.format.kind == "tokens":
            normalise, labels = self._aligned(NormalisedRows(source.rows, normalise, detected.renames))

        def normalised(rows: RawRows) -> DocumentRows:
            return NormalisedRows(rows, normalise, detected.renames, detected.media)

        val_sources = self._val_sources()
        val: dict[str, DocumentRows] = {name: normalised(val_source.rows) for name, val_source in val_sources.items()}
        train = normalised(source.rows)
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

    def _aligned(self, rows: NormalisedRows) -> tuple[Normalise, str]:
        """How token rows are normalised, by the convention that their labels follow."""
        first = (_row_or_none(rows, index) for index in range(min(NUM_SNIFFED_ROWS, len(rows))))
        alignment = self.labels or find_alignment(row for row in first if row is not None)
        if alignment == "aligned":
            return rows.normalise, ", labels next-token aligned"
        return Composed(align, rows.normalise), ", labels unshifted (shifted once here)"

    def _val_sources(self) -> dict[str, Source]:
        if self.val_split is not None:
            return {"val": open_source(self.path, self.name, self.val_split, "dataset.val_split")}
        if self.val_path is None:
            return {}
        paths = dict(self.val_path) if isinstance(self.val_path, Mapping) else {"val": self.val_path}
        return {
            name: open_source(path, None, self.split, "dataset.val_path", self.delimiter)
            for name, path in paths.items()
        }


@dataclass(frozen=True)
class Composed:  # a function that can be pickled
    """`after(before(row))`."""

    after: Callable[[Document], Document]
    before: Normalise

    def __call__(self, row: RawRow) -> Document:
        return self.after(self.before(row))


def _row_or_none(rows: NormalisedRows, index: int) -> Document | None:
    try:
        return rows[index]
    except DataError:
        return None  # left to the tokeniser to report


def sniff_columns(rows: RawRows, description: str) -> list[str]:
    """The columns of the first rows, in order; broken rows are left to the tokeniser to report."""
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


@dataclass(frozen=True)
class SelectedRows:
    """Some of the documents, in the order of `indices`."""

    rows: DocumentRows
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[int(self.indices[index])]

    def where(self, index: int) -> str:
        return self.rows.where(int(self.indices[index]))


def split_rows(rows: DocumentRows, val_frac: float, seed: int) -> tuple[SelectedRows, SelectedRows]:
    """Holds `val_frac` of the documents out, at least one, drawn by `seed`; both parts keep the file's order."""
    num_val = max(1, round(val_frac * len(rows)))
    if num_val >= len(rows):
        raise ConfigError(f"dataset.val_frac={val_frac} of {len(rows)} documents leaves none to train on.")
    drawn = np.random.default_rng(seed).permutation(len(rows))
    return SelectedRows(rows, np.sort(drawn[num_val:])), SelectedRows(rows, np.sort(drawn[:num_val]))
