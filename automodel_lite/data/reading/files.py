"""Anybody's files, or a dataset of the hub, as normalized documents.

From what a user calls their data (a file, a folder, a glob, a hub name) to raw rows, and from these
to documents.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from automodel_lite.classes import Classes, check_names, described, find_classes
from automodel_lite.config.rules import OneOf, Only, PathStr, Positive, Range, Seed
from automodel_lite.data.cache import build_once, cache_root
from automodel_lite.data.formats.known import GROUP
from automodel_lite.data.reading import compressed, remote, tables
from automodel_lite.data.reading.columns import Detected, NormalizedRows, OwnFormat, detect
from automodel_lite.data.reading.documents import DocumentSet, Question
from automodel_lite.data.reading.labels import Alignment, find_alignment
from automodel_lite.data.reading.paths import (
    COMPRESSIONS,
    KINDS,
    FileStamp,
    find_files,
    kind_of,
    stamp,
    stamps,
)
from automodel_lite.data.reading.readers import (
    TEXT_UNITS,
    UTF_8,
    ConcatenatedRows,
    Placed,
    RawRows,
    RowList,
    SpanRows,
    open_csv,
    open_json,
    open_spans,
    placed,
)
from automodel_lite.data.reading.signatures import check_signature
from automodel_lite.data.reading.subsets import Asked
from automodel_lite.errors import ConfigError, DataError, counted, explained, listed, printable

NUM_SNIFFED_ROWS = 20
TEXT_KINDS = frozenset(KINDS) - {".parquet", ".arrow"}
TextUnit = Annotated[str, OneOf(TEXT_UNITS)]
ValPath = PathStr | Sequence[PathStr] | Mapping[str, PathStr | Sequence[PathStr]]


@dataclass(frozen=True)
class ReadOptions:
    """How files are read; raises ConfigError for an encoding that is unknown, or whose lines end
    unlike ASCII's.
    """

    encoding: str = "utf-8"
    text_unit: str = "file"

    def __post_init__(self) -> None:
        try:
            name = codecs.lookup(self.encoding).name
            is_ascii = "\n{".encode(name) == b"\n{"
        except (LookupError, ValueError) as error:
            raise ConfigError(
                f"dataset.encoding={self.encoding} is unknown: use utf-8, cp1252, latin-1 ..."
            ) from error
        if not is_ascii:
            raise ConfigError(
                f"dataset.encoding={self.encoding} cannot be read line by line: convert the files, "
                f"iconv -f {self.encoding} -t utf-8."
            )
        object.__setattr__(self, "encoding", UTF_8 if name == "utf-8" else name)

    def check_files(self, opened: Iterable[OpenedRows]) -> None:
        """Raises ConfigError for an option that is for files of which none was opened."""
        found = {kind_of(path) for one in opened for path in one.paths}
        problem = ""
        if self.text_unit != "file" and ".txt" not in found:
            problem = f"text_unit={self.text_unit} is what a document is in a .txt file"
        if self.encoding != UTF_8 and found.isdisjoint(TEXT_KINDS):
            problem = f"encoding={self.encoding} is for text, JSON and CSV files"
        if problem:
            raise ConfigError(f"dataset.{problem}, and the data have none: leave it out.")


@dataclass
class FilesDataset:
    """Documents from files: JSON lines, JSON, CSV, TSV, text, Parquet, Arrow; or from the hub.

    Raises ConfigError: nothing at `path`, unknown format, columns of no known format, or a file
    that is trained on and validated on.
    """

    path: PathStr | Sequence[PathStr]  # a file, a folder, a glob, a list of these, or a hub name
    name: str | None = None  # subset (configuration) of a hub dataset, or of a folder's
    split: str = "train"  # split of a hub dataset, a saved DatasetDict or a folder
    # null = detected from the columns; or a _target_, a function of a raw row
    format: str | OwnFormat | None = None
    # canonical name -> column, {question: Frage, answer: Antwort}
    columns: Mapping[str, str] | None = None
    # validation files, or several sets by name, {easy: a.jsonl, hard: b.jsonl}
    val_path: ValPath | None = None
    val_split: str | None = None  # or another split of the dataset
    # or this fraction of the documents, 0..1; of rows that name a group, whole groups
    val_frac: Annotated[float, Range(0, below=1)] = 0.0
    max_documents: Positive | None = None  # use only the first documents
    # of token rows: aligned (labels[i] = input_ids[i+1]) | unshifted; null = detected
    labels: Alignment | None = None
    # of dataset.format=labeled, in the order of their numbers; null = those that the labels name
    classes: list[str] | None = None
    encoding: str = "utf-8"  # of text, JSON and CSV files; cp1252 for what Excel and Windows write
    text_unit: TextUnit = "file"  # file | paragraph | line: what a document is in a .txt file
    seed: Annotated[Seed, Only("val_frac")] = 0  # for val_frac

    train: DocumentSet = field(init=False)
    val: dict[str, DocumentSet] = field(init=False)
    kind: str = field(init=False)
    questions: list[Question] = field(init=False, default_factory=list)
    description: str = field(init=False)
    identity: str = field(init=False)
    found_classes: Classes | None = field(init=False)
    train_files: list[FileStamp] = field(init=False)
    val_files: list[FileStamp] = field(init=False)

    def __post_init__(self) -> None:
        if sum([self.val_path is not None, self.val_split is not None, self.val_frac > 0]) > 1:
            raise ConfigError(
                "dataset.val_path, dataset.val_split and dataset.val_frac: set only one of them."
            )
        options = ReadOptions(self.encoding, self.text_unit)
        source, val_sources = self._open(options)
        options.check_files([source, *val_sources.values()])
        columns = sniff_columns(placed(source.rows), f"{source.description}: the file")
        detected, labels = self._detect(columns, source.rows)
        num = min(len(source.rows), self.max_documents or len(source.rows))
        if detected.format.kind == "labeled":
            # of all sets: what one of them lacks is a class all the same
            sets = [placed(source.rows, range(num))]
            sets += [placed(of.rows) for of in val_sources.values()]
            found_classes = self._classes(detected, source.rows, chain(*sets))
            detected = replace(detected, classes=found_classes)
        self.found_classes = detected.classes
        self.val = {
            name: NormalizedRows(of.rows, detected, range(len(of.rows)))
            for name, of in val_sources.items()
        }
        trained: Sequence[int] | np.ndarray = range(num)
        unit = "documents"
        if self.val_frac:
            # Documents of one group share their beginning: what is held out shares none.
            column = detected.renames.get(GROUP, GROUP)
            groups = None
            if column in columns:
                groups = groups_of(placed(source.rows, trained), column)
                unit = "groups"
            trained, held_out = self._hold_out(num, groups)
            self.val["val"] = NormalizedRows(source.rows, detected, held_out)
        self.train = NormalizedRows(source.rows, detected, trained)
        self.kind = kind_of_documents(detected, placed(self.train))
        found = f"{counted(len(self.train), 'document')}, {detected.description}{labels}"
        if detected.classes:
            found += f", {described(detected.classes)}"
        self.description = "; ".join([f"{source.description}: {found}", *source.notes])
        sources = [source.identity, *(f"{name}: {s.identity}" for name, s in val_sources.items())]
        # what decides which rows there are, and how they are read
        self.identity = (
            f"{Path(source.description).stem}({'; '.join(sources)}; "
            f"{detected.format.name}{detected.source}; {dict(detected.renames)}{labels}; "
            f"{detected.classes or ''}"
            f"val_frac={self.val_frac} of {unit}, max_documents={self.max_documents}, "
            f"seed={self.seed}, {options})"
        )

    def with_sets(self, sets: Iterable[tuple[int, ...]]) -> FilesDataset:
        """Returns the data with the numbers of these sets of classes for its labels, where it is
        read beside others.
        """
        assert self.found_classes is not None
        changed = copy(self)
        changed.found_classes = replace(self.found_classes, sets=tuple(sets))

        def numbered(rows: DocumentSet) -> DocumentSet:
            assert isinstance(rows, NormalizedRows)
            return replace(rows, detected=replace(rows.detected, classes=changed.found_classes))

        changed.train = numbered(self.train)
        changed.val = {name: numbered(rows) for name, rows in self.val.items()}
        # the numbers are kept with the tokens
        changed.identity = f"{self.identity} with {changed.found_classes}"
        return changed

    def _open(self, options: ReadOptions) -> tuple[OpenedRows, dict[str, OpenedRows]]:
        """Opens what is trained on, and the validation sets by name."""
        if self.val_split is not None:
            val = {
                "val": open_rows(self.path, self.name, self.val_split, "dataset.val_split", options)
            }
        else:
            val = open_validation(self.val_path, self.split, options)
        val = {name: replace(opened, rows=self.view(opened)) for name, opened in val.items()}
        # Files of validation are known first: training leaves them out of its folders.
        self.val_files = [one for opened in val.values() for one in opened.files]
        held_out = self.val_files if self.val_path is not None else ()
        source = open_rows(self.path, self.name, self.split, "dataset.path", options, held_out)
        self.train_files = list(source.files)
        return replace(source, rows=self.view(source)), val

    def _detect(self, columns: Sequence[str], rows: RawRows) -> tuple[Detected, str]:
        """Finds the format, and, of token rows, how their labels stand, with words for it."""
        detected = detect(columns, self.format, self.columns)
        if self.labels and not has_labels(detected, columns):
            raise ConfigError(
                f"dataset.labels={self.labels} tells how the labels of token ids stand, and the "
                f"data are {detected.format.name} without any: leave it out."
            )
        if self.classes is not None and detected.format.kind != "labeled":
            raise ConfigError(
                f"dataset.classes={list(self.classes)} names the classes of rows with a label, and "
                f"the data are {detected.format.name}",
                key="dataset.classes",
                cure="set dataset.format=labeled, or leave it out",
            )
        if detected.format.kind != "tokens":
            return detected, ""
        alignment = self.labels or find_alignment(
            placed(NormalizedRows(rows, detected, range(len(rows))))
        )
        how = {"aligned": "next-token aligned", "unshifted": "unshifted (shifted once here)"}
        found = replace(detected, labels=alignment, is_checked=self.labels is None)
        return found, f", labels {how[alignment]}"

    def _classes(self, detected: Detected, source: RawRows, rows: Iterable[Placed]) -> Classes:
        """Finds the classes of rows with a label: as they are given, as the `source` of those that
        are trained on names them, or as the labels are.
        """
        column = detected.renames.get("label", "label")
        given = self.classes or tables.class_names(source, column)
        names = None if given is None else check_names(given)
        labels = (row.get(column) for _, row in rows if not isinstance(row, DataError))
        try:
            return find_classes(labels, names)
        except DataError as error:
            raise error.with_columns({"label": column}).at(str(self.path)) from None

    def _hold_out(self, num: int, groups: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Draws `val_frac` of `num` documents, or of their groups; returns those that are trained
        on, and those held out, in the file's order.
        """
        number = np.random.default_rng(self.seed).permutation(num)
        drawn = number if groups is None else groups[number]
        units = list(dict.fromkeys(drawn.tolist()))
        num_val = max(1, round(self.val_frac * len(units)))  # at least one is held out
        if num_val >= len(units):
            unit = "documents" if groups is None else "groups"
            raise ConfigError(
                f"dataset.val_frac={self.val_frac} of {len(units)} {unit} leaves none to train on."
            )
        is_val = np.isin(drawn, units[:num_val])
        return np.sort(number[~is_val]), np.sort(number[is_val])

    def view(self, opened: OpenedRows) -> RawRows:
        """Returns the rows of opened files; a subclass reads more than text in them."""
        return opened.rows


def open_validation(
    val_path: ValPath | None, split: str, options: ReadOptions
) -> dict[str, OpenedRows]:
    """Opens the validation sets by name."""
    if val_path is None:
        return {}
    paths = dict(val_path) if isinstance(val_path, Mapping) else {"val": val_path}
    return {
        name: open_rows(path, None, split, "dataset.val_path", options)
        for name, path in paths.items()
    }


def kind_of_documents(detected: Detected, documents: Iterable[Placed]) -> str:
    """Returns the kind of the documents; a format of the user's shows it in its first document that
    can be read.
    """
    if detected.format.kind != "own":
        return detected.format.kind
    first = next((document for _, document in documents if not isinstance(document, DataError)), {})
    return (
        "prompt_completion" if "completion" in first else "text" if "text" in first else "messages"
    )


def sniff_columns(rows: Iterable[Placed], name: str) -> list[str]:
    """Returns the columns of the first rows, in order; broken rows are left to the tokenizer to
    report.
    """
    first = [row for _, row in islice(rows, NUM_SNIFFED_ROWS)]
    columns = dict.fromkeys(
        column for row in first if not isinstance(row, DataError) for column in row
    )
    if not columns:
        empty = DataError(f"{name} is empty: it holds no row.")
        raise next((row for row in first if isinstance(row, DataError)), empty)
    return list(columns)


def has_labels(detected: Detected, columns: Sequence[str]) -> bool:
    """Returns whether rows of these columns are token ids that bring labels, or a mask of them."""
    names = {detected.renames.get(name, name) for name in ("labels", "loss_mask")}
    return detected.format.kind == "tokens" and not names.isdisjoint(columns)


def groups_of(rows: Iterable[Placed], column: str) -> np.ndarray:
    """Returns int64 [N], equal for rows of one group; a row without one is a group of its own."""
    known: dict[Any, int] = {}
    found = []
    for number, (_, row) in enumerate(rows):
        value = None if isinstance(row, DataError) else row.get(column)
        key = ("alone", number) if value is None else str(value)
        found.append(known.setdefault(key, len(known)))
    return np.array(found, np.int64)


@dataclass(frozen=True)
class OpenedRows:
    """Opened files.

    notes     what was left out, what a document is
    identity  what the cache key says of them
    paths     of the files, or folders, that the rows are of, in their order
    """

    rows: RawRows
    description: str
    identity: str
    files: Sequence[FileStamp] = ()
    notes: Sequence[str] = ()
    paths: Sequence[Path] = ()


def open_rows(
    path: str | Sequence[str],
    name: str | None,
    split: str,
    key: str,
    options: ReadOptions = ReadOptions(),
    held_out: Sequence[FileStamp] = (),
) -> OpenedRows:
    """Opens files, or a hub dataset when nothing local has that name; `held_out` are files of
    validation.
    """
    paths = [str(path)] if isinstance(path, (str, Path)) else list(map(str, path))
    asked = [Asked(key, one, name, split) for one in paths]
    copied = {one.path: remote.fetch(one) for one in asked if "://" in one.path}
    paths = [copied[one].path if one in copied else one for one in paths]
    settled = {one.path: one.how for one in copied.values()}
    found, note, by_name, by_split = find_files(paths, key, held_out, name, split, settled)
    if not found:
        opened: RawRows
        opened, identity = tables.open_hub(paths[0], name, split, key)
        return OpenedRows(opened, f"{paths[0]}/{name}" if name else paths[0], identity)
    if name and not by_name:
        raise ConfigError(
            f"dataset.name={name} is a subset of a hub dataset or a folder, and {paths[0]} has "
            "none: leave it out."
        )
    rows = []
    files = []
    for file in found:
        with explained(f"{file} cannot be read", kind=DataError):
            files += stamps(file)
            # a file beside a training set is not of its split; what a split chose has no others
            is_whole = file.is_file() and (file in by_split or key == "dataset.val_path")
            rows.append(_open_file(file, "train" if is_whole else split, options, key))
    headed = [one for one in rows if isinstance(one, (RowList, tables.TableRows)) and one.header]
    if headed and not any(map(len, rows)):  # among others, a shard may be empty
        columns = printable(listed(headed[0].header))
        raise DataError(f"{headed[0].name}: it has a header ({columns}) and no rows below it.")
    shown = (
        printable(found[0].name)
        if len(rows) == 1
        else f"{len(rows)} files from {printable(found[0].name)}"
    )
    identity = f"{', '.join(map(str, files))}, split {split}"
    notes = [text for text in (note, *(one.note for one in copied.values())) if text]
    texts = [one for one in rows if isinstance(one, SpanRows) and not one.is_json and len(one)]
    sizes = [np.diff(one.starts, append=one.num_bytes) for one in texts]
    if sizes:
        median = int(np.median(np.concatenate(sizes)))
        notes.insert(
            0,
            f"a document is a {options.text_unit} of text, median {median:,} bytes "
            "(dataset.text_unit)",
        )
    if several := _unlike(found):
        notes.append(f"files {listed(several, 4)}")
    whole = rows[0] if len(rows) == 1 else ConcatenatedRows(rows)
    return OpenedRows(whole, shown, identity, files, notes, found)


def _unlike(files: Sequence[Path]) -> list[str]:
    """Returns the names of files that are not shards of one set, below the folder of all."""
    common = os.path.commonpath([file.parent for file in files])
    names = [printable(str(file.relative_to(common))) for file in files]
    is_one = len({re.sub(r"\d+", "", name) for name in names}) == 1
    return [] if is_one else names


def _open_file(path: Path, split: str, options: ReadOptions, key: str) -> RawRows:
    name = printable(path.name)
    if path.is_dir():
        return tables.open_saved(path, name, split)
    if split != "train":
        setting = key if key == "dataset.val_split" else "dataset.split"
        raise ConfigError(
            f"{setting}={split}: {name} has no splits: name its files in path or val_path."
        )
    kind = kind_of(path)
    if kind not in KINDS:
        if path.is_file():
            check_signature(path, name)
        raise ConfigError(
            f"{name}: unknown kind of file: use {', '.join(KINDS)}, or one of them compressed."
        )
    plain = path
    if path.suffix.lower() in COMPRESSIONS:
        plain = _in_cache(path, name, compressed.decompress)
    if kind not in (".parquet", ".arrow"):
        check_signature(plain, name)
    if kind in (".jsonl", ".ndjson", ".txt"):
        return open_spans(
            plain, name, options.encoding, options.text_unit if kind == ".txt" else None
        )
    if kind == ".json":
        return open_json(plain, name, options.encoding)
    if kind in (".csv", ".tsv"):
        return open_csv(plain, name, "\t" if kind == ".tsv" else ",", options.encoding)
    if kind == ".parquet":
        plain = _in_cache(plain, name, tables.parquet_to_arrow)
    return tables.TableRows(plain, name)


def _in_cache(path: Path, name: str, write: Callable[[Path, str, Path], None]) -> Path:
    """Writes a file anew in the cache, once, so that any row of it can be read at once."""
    key = {"file": str(stamp(path)), "as": write.__name__}
    return (
        build_once(cache_root(), "decompressed", name, key, partial(write, path, name)).folder
        / "data"
    )
