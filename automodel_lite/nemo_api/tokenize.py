"""Rows of a map-style dataset made in several processes."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Protocol

import datasets
import pyarrow as pa

from automodel_lite.errors import ConfigError, DataError

CHUNK_ROWS = 1_000


class MapStyle(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


def tokenize_dataset_parallel(dataset: MapStyle, num_proc: int) -> datasets.Dataset:
    """Calls dataset[i] for every i, in `num_proc` forked processes, and keeps the rows in order.

    For datasets that tokenise when they are read. The first error of a row ends the call.
    Raises ConfigError for num_proc < 1, DataError for a dataset without rows.
    """
    if num_proc < 1:
        raise ConfigError(f"num_proc={num_proc} must be at least 1 process: use 1 to stay in this one.")
    if not len(dataset):
        raise DataError("there are no rows to tokenise: check the path, the split and the filters of the dataset.")
    if num_proc == 1:
        return datasets.Dataset(_rows(dataset, 0, len(dataset)))
    width = min(CHUNK_ROWS, -(-len(dataset) // num_proc))
    starts = range(0, len(dataset), width)
    context = multiprocessing.get_context("fork")  # any dataset serves, also one that cannot be pickled
    with ProcessPoolExecutor(num_proc, context, initializer=_hold, initargs=(dataset,)) as pool:
        tables = list(pool.map(_held_rows, starts, [min(start + width, len(dataset)) for start in starts]))
    return datasets.Dataset(pa.concat_tables(tables, promote_options="permissive"))


_held: MapStyle  # the dataset of a worker process


def _hold(dataset: MapStyle) -> None:
    global _held
    _held = dataset


def _held_rows(start: int, stop: int) -> pa.Table:
    return _rows(_held, start, stop)


def _rows(dataset: MapStyle, start: int, stop: int) -> pa.Table:
    rows = datasets.Dataset.from_list([dict(dataset[i]) for i in range(start, stop)])
    return rows.data.table.replace_schema_metadata(None)  # the types of all chunks together decide
