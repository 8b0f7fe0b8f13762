"""Pairs of `.bin` and `.idx`, as Megatron's preprocessing writes them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from automodel_lite.data.tokens.memmap import MEGATRON_DTYPES, MEGATRON_MAGIC


def write_memmap(path: Path, documents: Iterable[Sequence[int]], dtype: str = "int32") -> None:
    """Writes `<path>.bin` and `<path>.idx`."""
    rows = [np.array(document, dtype) for document in documents]
    path.with_suffix(".bin").write_bytes(b"".join(row.tobytes() for row in rows))
    lengths = np.array([len(row) for row in rows], np.int32)
    code = next(code for code, name in MEGATRON_DTYPES.items() if name == dtype)
    header = struct.pack("<9sQBQQ", MEGATRON_MAGIC, 1, code, len(rows), len(rows) + 1)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    arrays = lengths, pointers, np.arange(len(rows) + 1)
    path.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
