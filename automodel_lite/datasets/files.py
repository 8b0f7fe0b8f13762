"""Anybody's files, or a dataset of the hub, as normalised documents."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from automodel_lite.datasets.documents import DocumentRows, Question
from automodel_lite.datasets.formats import NormalisedRows, detect
from automodel_lite.datasets.sources import (
    ConcatenatedRows,
    RawRow,
    RawRows,
    open_csv,
    open_json,
    open_json_lines,
)
from automodel_lite.errors import ConfigError, DataError

NUM_SNIFFED_ROWS = 20


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

    Raises:
        ConfigError: nothing at `path`, unknown format, columns of no known format.
    """

    path: str | Sequence[str]
    name: str | None = None
    split: str = "train"
    format: str | None = None
    columns: Mapping[str, str] | None = None
    val_path: str | Sequence[str] | Mapping[str, str | Sequence[str]] | None = None
    val_split: str | None = None
    val_frac: float = 0.0
    max_documents: int | None = None
    seed: int = 0

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
        source = open_source(self.path, self.name, self.split, "dataset.path")
        detected = detect(sniff_columns(source.rows, source.description), self.format, self.columns)

        def normalised(rows: RawRows) -> DocumentRows:
            return NormalisedRows(rows, detected.format.normalise, detected.renames)

        val_sources = self._val_sources()
        val: dict[str, DocumentRows] = {name: normalised(val_source.rows) for name, val_source in val_sources.items()}
        train = normalised(source.rows)
        if self.max_documents is not None:
            train = SelectedRows(train, np.arange(min(self.max_documents, len(train))))
        if self.val_frac:
            train, val["val"] = split_rows(train, self.val_frac, self.seed)
        self.train, self.val, self.kind = train, val, detected.format.kind
        self.description = f"{source.description}: {len(self.train):,} documents, {detected.description}"
        sources = "; ".join([source.identity, *(f"{name}: {s.identity}" for name, s in val_sources.items())])
        self.identity = f"{Path(source.description).stem}({sources}; {detected.format.name}; {dict(detected.renames)}; "
        self.identity += f"val_frac={self.val_frac}, max_documents={self.max_documents}, seed={self.seed})"

    def _val_sources(self) -> dict[str, Source]:
        if self.val_split is not None:
            return {"val": open_source(self.path, self.name, self.val_split, "dataset.val_split")}
        if self.val_path is None:
            return {}
        paths = dict(self.val_path) if isinstance(self.val_path, Mapping) else {"val": self.val_path}
        return {name: open_source(path, None, self.split, "dataset.val_path") for name, path in paths.items()}


@dataclass(frozen=True)
class Source:
    """Opened files."""

    rows: RawRows
    description: str
    identity: str


def open_source(path: str | Sequence[str], name: str | None, split: str, key: str) -> Source:
    """Opens files, or a hub dataset when nothing local has that name."""
    paths = [path] if isinstance(path, str) else list(path)
    files = [file for one in paths for file in _local_files(one)]
    if files:
        rows = [_open_file(file, split) for file in files]
        shown = files[0].name if len(files) == 1 else f"{len(files)} files from {files[0].name}"
        identity = ", ".join(f"{file} {_stamp(file)}" for file in files)
        return Source(rows[0] if len(rows) == 1 else ConcatenatedRows(rows), shown, f"{identity}, split {split}")
    if len(paths) != 1 or _looks_local(paths[0]):
        raise ConfigError(f"{key}={path} does not exist (looked in {Path.cwd()}).")
    return _open_hub(paths[0], name, split, key)


def _local_files(path: str) -> list[Path]:
    expanded = Path(path).expanduser()
    if expanded.is_dir():
        return [expanded] if _is_saved_dataset(expanded) else sorted(p for p in expanded.rglob("*") if _opens(p))
    if expanded.exists():
        return [expanded]
    return [Path(found) for found in sorted(glob.glob(str(expanded), recursive=True)) if Path(found).is_file()]


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


def _opens(path: Path) -> bool:
    return path.is_file() and path.suffix in {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt"}


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or bool(Path(path).suffix) or "*" in path


def _stamp(path: Path) -> str:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return ",".join(f"{file.stat().st_size} B at {file.stat().st_mtime_ns}" for file in files)


def _open_file(path: Path, split: str) -> RawRows:
    if path.is_dir():
        return open_arrow(path, split)
    if path.suffix in (".jsonl", ".ndjson"):
        return open_json_lines(path, path.name)
    if path.suffix == ".json":
        return open_json(path, path.name)
    if path.suffix in (".csv", ".tsv"):
        return open_csv(path, path.name, "\t" if path.suffix == ".tsv" else ",")
    if path.suffix in (".parquet", ".arrow", ".txt"):
        return open_arrow(path, split)
    raise ConfigError(f"{path}: unknown kind of file: use .jsonl, .json, .csv, .tsv, .txt or .parquet.")


def open_arrow(path: Path, split: str) -> RawRows:
    """What `datasets` reads: Parquet, Arrow, text, and folders that it saved."""
    import datasets

    if path.is_dir():
        loaded = datasets.load_from_disk(str(path))
    else:
        builder = {".parquet": "parquet", ".arrow": "arrow", ".txt": "text"}[path.suffix]
        try:
            loaded = datasets.load_dataset(builder, data_files=str(path), split="train")
        except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise DataError(f"{path.name}: cannot be read as {builder}: {reason}.") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ConfigError(f"dataset.split={split} is not in {path}, which has {', '.join(loaded)}.")
        loaded = loaded[split]
    return ArrowRows(loaded, path.name)


def _open_hub(path: str, name: str | None, split: str, key: str) -> Source:
    import datasets

    try:
        loaded = datasets.load_dataset(path, name, split=split)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{key}={path} is no local file (looked in {Path.cwd()}), and the hub dataset cannot be loaded: {reason}"
        ) from error
    shown = f"{path}/{name}" if name else path
    return Source(ArrowRows(loaded, shown), shown, f"{shown} {split} {loaded._fingerprint}")


@dataclass(frozen=True)
class ArrowRows:
    """Rows of a `datasets.Dataset`; nulls that Arrow fills into objects of different shapes are taken out."""

    dataset: Any
    name: str

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> RawRow:
        return {column: _without_nulls(value) for column, value in self.dataset[int(index)].items()}

    def where(self, index: int) -> str:
        return f"{self.name}[{index + 1}]"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [_without_nulls(item) for item in value]
    return value


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
