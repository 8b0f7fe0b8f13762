"""Parquet, Arrow and saved datasets as raw rows, read by pyarrow from exactly the file that was
named.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from automodel_lite.data.document import RawRow
from automodel_lite.data.reading.paths import WholeFile, check_not_cut
from automodel_lite.data.reading.readers import ConcatenatedRows, RawRows, RowList, check_names
from automodel_lite.errors import ConfigError, DataError, explained

BLOCK_ROWS = 512  # made into Python objects together, of up to as many bytes
BLOCK_BYTES = 2**22


def _read_as(kind: str, name: str) -> AbstractContextManager[None]:
    """Raises DataError for whatever a damaged file makes of its reader."""
    return explained(f"{name}: cannot be read as {kind}", Exception, kind=DataError)


class TableRows:
    """Rows of an Arrow file, mapped; a block of them is made into Python objects at a time.

    Nulls that Arrow fills into objects of different shapes are taken out. Picklable: the file is
    mapped again.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self._block: tuple[int, list[RawRow]] = (-1, [])
        self._file = WholeFile(path)
        with _read_as("arrow", name):
            try:
                reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
            except pyarrow.ArrowInvalid:  # written as a stream
                reader = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
            self._table = reader.read_all()
        check_names(self._table.column_names, name)
        row_bytes = self._table.nbytes // max(1, self._table.num_rows)
        self._block_rows = min(BLOCK_ROWS, max(1, BLOCK_BYTES // max(1, row_bytes)))

    def __reduce__(self) -> tuple:
        return TableRows, (self.path, self.name)

    @property
    def header(self) -> Sequence[str]:
        """Returns the names of the columns, which a file has even without a row."""
        return self._table.column_names

    def __len__(self) -> int:
        return self._table.num_rows

    @property
    def features(self) -> dict[str, Any]:
        """Returns what `datasets` has written of the columns beside them."""
        written = (self._table.schema.metadata or {}).get(b"huggingface")
        try:
            found: dict[str, Any] = json.loads(written or b"{}")["info"]["features"]
        except (ValueError, KeyError, TypeError):
            return {}
        return found

    def __getitem__(self, index: int) -> RawRow:
        number, place = divmod(int(index), self._block_rows)
        if number != self._block[0]:
            check_not_cut([self._file])
            part = self._table.slice(number * self._block_rows, self._block_rows)
            with _read_as("arrow", self.where(index)):
                part.validate(full=True)
                rows = part.to_pylist()
            self._block = (
                number,
                [{name: without_nulls(value) for name, value in row.items()} for row in rows],
            )
        return self._block[1][place]

    def where(self, index: int) -> str:
        return f"{self.name}[{index + 1}]"


def parquet_to_arrow(path: Path, name: str, folder: Path) -> None:
    """Writes the rows of a Parquet file as an Arrow file, `data`, which any row can be read from at
    once.
    """
    with _read_as("parquet", name):
        parquet = pyarrow.parquet.ParquetFile(path, memory_map=False)
        check_names(parquet.schema_arrow.names, name)
        batches = parquet.iter_batches(BLOCK_ROWS)
    # what fails in writing is the cache's, and no damage of the file
    with pyarrow.ipc.new_file(str(folder / "data"), parquet.schema_arrow) as writer:
        while True:
            with _read_as("parquet", name):
                batch = next(batches, None)
            if batch is None:
                return
            writer.write_batch(batch)


def open_saved(path: Path, name: str, split: str) -> RawRows:
    """Opens a folder that `datasets` saved."""
    import datasets

    with _read_as("a saved dataset", name):
        loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ConfigError(
                f"dataset.split={split} is not in {path}, which has {', '.join(loaded)}."
            )
        loaded = loaded[split]
    return DatasetRows(loaded, name)


def open_hub(path: str, name: str | None, split: str, key: str) -> tuple[RawRows, str]:
    """Opens a dataset of the hub; returns its rows and what tells its version."""
    import datasets

    with explained(
        f"{key}={path} is not a local file (looked in {Path.cwd()}), and the hub dataset cannot "
        "be loaded",
        Exception,
    ):
        loaded = datasets.load_dataset(path, name, split=split)
    shown = f"{path}/{name}" if name else path
    return DatasetRows(loaded, shown), f"{shown} {split} {loaded._fingerprint}"


def class_names(rows: RawRows, column: str) -> list[str] | None:
    """Returns the names that `datasets` keeps of the classes whose numbers a column holds; None
    where there are none, or other ones in other files.
    """
    if isinstance(rows, ConcatenatedRows):
        found = [class_names(part, column) for part in rows.datasets]
        return found[0] if all(one == found[0] for one in found) else None
    if isinstance(rows, DatasetRows):
        feature: Any = rows.rows.features.to_dict().get(column)
    elif isinstance(rows, TableRows):
        feature = rows.features.get(column)
    else:
        return None
    # of a list the kind of its items
    if isinstance(feature, dict) and isinstance(feature.get("feature"), dict):
        feature = feature["feature"]
    is_class = isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    return [str(name) for name in feature["names"]] if is_class else None


class DatasetRows(RowList):
    """Rows of a `datasets.Dataset`, without the nulls that Arrow fills in."""

    def __getitem__(self, index: int) -> RawRow:
        return {
            column: without_nulls(value) for column, value in super().__getitem__(index).items()
        }


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [without_nulls(item) for item in value]
    return value
