"""From what a user calls their data (a file, a folder, a glob, a hub name) to raw rows."""

from __future__ import annotations

import bz2
import glob
import gzip
import lzma
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow

from automodel_lite.data.cache import build_once, default_cache_dir
from automodel_lite.data.sources import (
    ConcatenatedRows,
    RawRow,
    RawRows,
    open_csv,
    open_json,
    open_json_lines,
)
from automodel_lite.errors import ConfigError, DataError


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
    if len(paths) != 1 or looks_local(paths[0]):
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
    return path.is_file() and not path.name.startswith(".") and _kind(path) in KINDS


def _kind(path: Path) -> str:
    """The ending that says what is in the file: `.jsonl` of `a.jsonl.gz`."""
    compressed = path.suffix in COMPRESSIONS and len(path.suffixes) > 1
    return (path.suffixes[-2] if compressed else path.suffix).lower()


def looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or _kind(Path(path)) in KINDS or "*" in path


def _stamp(path: Path) -> str:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return ",".join(f"{file.stat().st_size} B at {file.stat().st_mtime_ns}" for file in files)


def _open_file(path: Path, split: str) -> RawRows:
    if path.is_dir():
        return open_arrow(path, path.name, "", split)
    if split != "train":
        raise ConfigError(f"dataset.split={split}: {path} has no splits; name the files of it in path or val_path.")
    kind = _kind(path)
    if kind not in KINDS:
        raise ConfigError(f"{path}: unknown kind of file: use {', '.join(KINDS)}, or one of them compressed.")
    plain = _decompressed(path) if path.suffix in COMPRESSIONS else path
    if kind in (".jsonl", ".ndjson"):
        return open_json_lines(plain, path.name)
    if kind == ".json":
        return open_json(plain, path.name)
    if kind in (".csv", ".tsv"):
        return open_csv(plain, path.name, "\t" if kind == ".tsv" else ",")
    return open_arrow(plain, path.name, KINDS[kind], split)


def _decompressed(path: Path) -> Path:
    """The file unpacked in the cache, once; rows are then read from any place of it."""

    def unpack(folder: Path) -> None:
        try:
            with COMPRESSIONS[path.suffix](path) as packed, (folder / "data").open("wb") as plain:
                shutil.copyfileobj(packed, plain, 2**20)
        except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
            raise DataError(f"{path.name}: cannot be decompressed: {error}.") from error

    key = {"file": str(path.resolve()), "stamp": _stamp(path)}
    return build_once(default_cache_dir(), "decompressed", path.name, key, unpack).folder / "data"


def _zstandard(path: Path) -> pyarrow.CompressedInputStream:
    return pyarrow.CompressedInputStream(str(path), "zstd")


COMPRESSIONS: dict[str, Callable[[Path], Any]] = {  # file ending -> a readable file of what is in it
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstandard,
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


def open_arrow(path: Path, name: str, builder: str, split: str) -> RawRows:
    """What `datasets` reads: Parquet, Arrow, text, and folders that it saved."""
    import datasets

    try:
        loaded = (
            datasets.load_from_disk(str(path))
            if path.is_dir()
            else datasets.load_dataset(builder, data_files=str(path), split="train")
        )
    except (datasets.exceptions.DatasetGenerationError, pyarrow.ArrowException, ValueError, OSError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[:1]
        raise DataError(f"{name}: cannot be read as {builder or 'a saved dataset'}: {' '.join(reason)}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ConfigError(f"dataset.split={split} is not in {path}, which has {', '.join(loaded)}.")
        loaded = loaded[split]
    return ArrowRows(loaded, name)


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
        return {column: without_nulls(value) for column, value in self.dataset[int(index)].items()}

    def where(self, index: int) -> str:
        return f"{self.name}[{index + 1}]"


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [without_nulls(item) for item in value]
    return value
