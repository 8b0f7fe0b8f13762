"""Token rows: all documents of a set end to end in two flat arrays, memory-mapped from disk.

input_ids   a b c d │ e f g │ …        int32 [total]
labels      b c d _ │ f g _ │ …        int32 [total], the target of each position; _ = -100, no loss
offsets     0         4       7 …      int64 [N + 1]
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path

import numpy as np

from automodel_lite.thd import IGNORE_INDEX

ID_DTYPE = np.dtype(np.int32)
CONTENT_HASH = "content.sha256"


class IndexedRows(ABC):
    """Rows that are no flat arrays: they are read one by one. Pickling them copies no tokens."""

    @property
    @abstractmethod
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [N]."""

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        """`input_ids` and `labels` of one document."""


@dataclass(frozen=True)
class TokenRows:
    """N tokenised documents. Rows that live in a folder are pickled as its path, so workers map the same pages."""

    input_ids: np.ndarray
    labels: np.ndarray
    offsets: np.ndarray
    folder: Path | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [N]."""
        return np.diff(self.offsets)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Views of the `input_ids` and `labels` of one document; they are not to be written to."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start, stop = self.offsets[index % len(self)], self.offsets[index % len(self) + 1]
        return {"input_ids": self.input_ids[start:stop], "labels": self.labels[start:stop]}

    def __reduce__(self) -> tuple:
        if self.folder is not None:
            return load_rows, (self.folder,)
        return TokenRows, (self.input_ids, self.labels, self.offsets)


def load_rows(folder: Path) -> TokenRows:
    """Maps the rows of a folder that `RowsWriter` wrote; nothing is read before it is asked for."""
    input_ids, labels, offsets = (
        np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ("input_ids", "labels", "offsets")
    )
    return TokenRows(input_ids, labels, offsets, folder)


def rows_from_lists(rows: Iterable[dict[str, list[int]]]) -> TokenRows:
    """Rows in memory, from `{"input_ids", "labels"}` lists."""
    documents = list(rows)
    offsets = np.cumsum([0, *(len(document["input_ids"]) for document in documents)], dtype=np.int64)
    flat = {
        name: np.array([token for document in documents for token in document[name]], ID_DTYPE)
        for name in ("input_ids", "labels")
    }
    return TokenRows(flat["input_ids"], flat["labels"], offsets)


def next_token_labels(input_ids: np.ndarray, trained: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Labels of documents end to end: the next token where that one is trained on, else -100.

    Args:
        input_ids: [total]; trained: bool [total], whether the token is something to learn; offsets: [N + 1].

    The first token of a document is nobody's target, and the last position has none, so that no target crosses a
    document: ids `a b c │ d e`, trained `0 1 1 │ 1 1` give `b c _ │ e _`.
    """
    labels = np.full(len(input_ids), IGNORE_INDEX, ID_DTYPE)
    labels[:-1] = np.where(trained[1:], input_ids[1:], IGNORE_INDEX)
    lasts = offsets[1:][np.diff(offsets) > 0] - 1
    labels[lasts] = IGNORE_INDEX
    return labels


class RowsWriter:
    """Appends chunks of documents to the three arrays of a folder; `close` makes them whole."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files = {name: _open_array(folder / f"{name}.npy") for name in ("input_ids", "labels")}
        self._lengths: list[np.ndarray] = []
        self._hashes = {name: hashlib.sha256() for name in self._files}

    def append(self, input_ids: np.ndarray, labels: np.ndarray, lengths: np.ndarray) -> None:
        """Adds documents that lie end to end in `input_ids` and `labels` [sum(lengths)]."""
        assert len(input_ids) == len(labels) == lengths.sum()
        for name, values in (("input_ids", input_ids), ("labels", labels)):
            data = np.ascontiguousarray(values, ID_DTYPE).data
            self._files[name].write(data)
            self._hashes[name].update(data)
        self._lengths.append(np.asarray(lengths, np.int64))

    def close(self) -> None:
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        for file in self._files.values():
            _finish_array(file, int(offsets[-1]))
        np.save(self._folder / "offsets.npy", offsets)
        whole = hashlib.sha256(offsets.tobytes())
        for digest in self._hashes.values():
            whole.update(digest.digest())
        (self._folder / CONTENT_HASH).write_text(whole.hexdigest())


def _header(num_items: int) -> dict:
    return {"descr": np.lib.format.dtype_to_descr(ID_DTYPE), "fortran_order": False, "shape": (num_items,)}


def _open_array(path: Path) -> BufferedWriter:
    file = path.open("wb")
    np.lib.format.write_array_header_1_0(file, _header(0))
    return file


def _finish_array(file: BufferedWriter, num_items: int) -> None:
    """Writes the true size into the header: NumPy leaves room for it to grow."""
    start = 128  # magic, version and the padded header of a one-dimensional array
    assert file.tell() == start + num_items * ID_DTYPE.itemsize
    file.seek(0)
    np.lib.format.write_array_header_1_0(file, _header(num_items))
    assert file.tell() == start
    file.close()
