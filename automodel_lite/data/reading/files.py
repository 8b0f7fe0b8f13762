"""Anybody's files, or a dataset of the hub, as normalized documents.

From what a user calls their data (a file, a folder, a glob, a hub name) to raw rows, and from these to documents.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import lzma
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow

from automodel_lite.config.rules import OneOf, PathStr, Positive, Range, Seed, looks_local
from automodel_lite.data.reading.documents import DocumentSet, Question, question_of
from automodel_lite.data.reading.formats import Alignment, NormalizedRows, detect, find_alignment
from automodel_lite.data.reading.readers import (
    DELIMITERS,
    ArrowRows,
    ConcatenatedRows,
    RawRow,
    RawRows,
    find_delimiter,
    open_arrow,
    open_csv,
    open_json,
    open_json_lines,
)
from automodel_lite.data.tokens.cache import build_once, cache_root
from automodel_lite.errors import ConfigError, DataError, one_line

NUM_SNIFFED_ROWS = 20
Delimiter = Annotated[str, OneOf(("comma", "semicolon", "tab", "pipe", ",", ";", "|", "\\t"))]
ValPath = PathStr | Sequence[PathStr] | Mapping[str, PathStr | Sequence[PathStr]]


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


MAX_ENTRIES = 200_000  # of a folder: more is a whole disk, named by mistake


@dataclass(frozen=True)
class OpenedRows:
    """Opened files."""

    rows: RawRows
    description: str
    identity: str


def open_rows(
    path: str | Sequence[str], name: str | None, split: str, key: str, delimiter: str | None = None
) -> OpenedRows:
    """Opens files, or a hub dataset when nothing local has that name."""
    paths = [path] if isinstance(path, str) else list(path)
    if address := next((one for one in paths if "://" in one), None):
        raise ConfigError(f"{key}={address} is a URL: download the file, or use the name of a hub dataset.")
    found = {one: _local_files(one, key) for one in paths}
    files = [file for one in paths for file in found[one]]
    if files and (missing := [one for one in paths if not found[one]]):
        raise ConfigError(f"{key}: {', '.join(missing)} does not exist (looked in {Path.cwd()}).")
    if files:
        rows = []
        for file in files:
            try:
                rows.append(_open_file(file, split, delimiter))
            except OSError as error:
                raise DataError(f"{file} cannot be read ({error.strerror or error}).") from error
        shown = files[0].name if len(files) == 1 else f"{len(files)} files from {files[0].name}"
        identity = ", ".join(f"{file} {_stamp(file)}" for file in files)
        return OpenedRows(rows[0] if len(rows) == 1 else ConcatenatedRows(rows), shown, f"{identity}, split {split}")
    if len(paths) != 1 or looks_local(paths[0]) or is_file_name(paths[0]):
        raise ConfigError(f"{key}={path} does not exist (looked in {Path.cwd()}).")
    return _open_hub(paths[0], name, split, key)


def _local_files(path: str, key: str) -> list[Path]:
    if not path.strip():
        raise ConfigError(f"{key}={path} is empty: was a shell variable not set?")
    expanded = Path(path).expanduser()
    try:
        if expanded.is_dir():
            is_saved_dataset = (expanded / "state.json").exists() or (expanded / "dataset_dict.json").exists()
            return [expanded] if is_saved_dataset else _files_below(expanded.rglob("*"), path, key)
        if expanded.is_file():
            return [expanded]
        if expanded.exists():
            raise ConfigError(f"{key}={path} is neither a file nor a folder, and rows need random access to a file.")
        return _files_below(map(Path, glob.iglob(str(expanded), recursive=True)), path, key, is_glob=True)
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be read ({error.strerror}).") from error


def _files_below(found: Iterator[Path], path: str, key: str, is_glob: bool = False) -> list[Path]:
    """The files among them that hold data, in order; of a glob all files."""
    files: list[Path] = []
    for number, one in enumerate(found):
        if number >= MAX_ENTRIES:
            raise ConfigError(f"{key}={path} holds over {MAX_ENTRIES:,} files and folders: name the one with the data.")
        if one.is_file() and (is_glob or (not one.name.startswith(".") and _kind(one) in KINDS)):
            files.append(one)
    if not files and not is_glob:
        raise ConfigError(f"{key}={path} is a folder without data: it has no {', '.join(KINDS)} in it.")
    return sorted(files)


def _kind(path: Path) -> str:
    """The ending that says what is in the file: `.jsonl` of `a.jsonl.gz`."""
    compressed = path.suffix in COMPRESSIONS and len(path.suffixes) > 1
    return (path.suffixes[-2] if compressed else path.suffix).lower()


def is_file_name(path: str) -> bool:
    """Does it end as a file of data does? Then it is not the name of a hub dataset."""
    return _kind(Path(path)) in KINDS


def _stamp(path: Path) -> str:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return ",".join(f"{file.stat().st_size} B at {file.stat().st_mtime_ns}" for file in files)


def _open_file(path: Path, split: str, delimiter: str | None) -> RawRows:
    if path.is_dir():
        return open_arrow(path, path.name, "", split)
    if split != "train":
        raise ConfigError(f"dataset.split={split}: {path} has no splits: name its files in path or val_path.")
    kind = _kind(path)
    if kind not in KINDS:
        raise ConfigError(f"{path}: unknown kind of file: use {', '.join(KINDS)}, or one of them compressed.")
    plain = _decompressed(path) if path.suffix in COMPRESSIONS else path
    if kind in (".jsonl", ".ndjson"):
        return open_json_lines(plain, path.name)
    if kind == ".json":
        return open_json(plain, path.name)
    if kind in (".csv", ".tsv"):
        usual = "\t" if kind == ".tsv" else ","
        return open_csv(plain, path.name, DELIMITERS[delimiter] if delimiter else find_delimiter(plain, usual))
    return open_arrow(plain, path.name, KINDS[kind], split)


def _decompressed(path: Path) -> Path:
    """The file unpacked in the cache, once; rows are then read from any place of it."""

    def unpack(folder: Path) -> None:
        try:
            with COMPRESSIONS[path.suffix](path) as packed, (folder / "data").open("wb") as plain:
                shutil.copyfileobj(packed, plain, 2**20)
        except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
            raise DataError(f"{path.name}: cannot be decompressed: {error}.") from error

    key = {"file": str(path.resolve()), "stamp": _stamp(path)}
    return build_once(cache_root(), "decompressed", path.name, key, unpack).folder / "data"


COMPRESSIONS: dict[str, Callable[[Path], Any]] = {  # file ending -> a readable file of what is in it
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda path: pyarrow.CompressedInputStream(str(path), "zstd"),
}
KINDS = {  # file ending -> builder of `datasets` ("": read here)
    ".jsonl": "",
    ".ndjson": "",
    ".json": "",
    ".csv": "",
    ".tsv": "",
    ".txt": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
}


def _open_hub(path: str, name: str | None, split: str, key: str) -> OpenedRows:
    import datasets

    try:
        loaded = datasets.load_dataset(path, name, split=split)
    except Exception as error:
        raise ConfigError(
            f"{key}={path} is not a local file (looked in {Path.cwd()}), and the hub dataset cannot be loaded: "
            f"{one_line(error)}"
        ) from error
    shown = f"{path}/{name}" if name else path
    return OpenedRows(ArrowRows(loaded, shown), shown, f"{shown} {split} {loaded._fingerprint}")
