"""Token rows: all documents of a set end to end in two flat arrays, memory-mapped from disk.

input_ids   a b c d │ e f g │ …        int32 [total]
labels      b c d _ │ f g _ │ …        int32 [total], the target of each position; _ = -100, no loss
offsets     0         4       7 …      int64 [N + 1]

Rows that somebody else tokenised, or packed: taken as they are, once it is clear what their labels mean.

Two conventions are in use, and they look alike. Ours are next-token aligned; Hugging Face's models shift inside:

    input_ids   a b c d
    labels      _ c d _      aligned: labels[i] is the target of position i
    labels      _ _ c d      unshifted: labels[i] is input_ids[i]

Which one a set uses is found by comparing both with its ids; unshifted labels are shifted here, once.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedWriter, FileIO
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from automodel_lite.data.documents import Document
from automodel_lite.errors import DataError
from automodel_lite.thd import COLUMNS, IGNORE_INDEX

ID_DTYPE = np.dtype(np.int32)
CONTENT_HASH = "content.sha256"


class Rows(ABC):
    """Tokenized documents. Pickling them copies no tokens."""

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
        """The columns of one document; they are not to be written to."""

    def located(self, doc_ids: np.ndarray) -> tuple[TokenRows, np.ndarray, np.ndarray]:
        """Flat rows that hold these documents, where each begins in them, and its length; int64 [D] each."""
        rows = flatten(map(self.__getitem__, doc_ids.tolist()))
        return rows, rows.offsets[:-1], rows.lengths


@dataclass(frozen=True)
class TokenRows(Rows):
    """Documents end to end: document i is tokens offsets[i] to offsets[i + 1] of every column.

    Rows that live in a folder are pickled as its path, so that workers map the same pages.
    Raises DataError for columns of unequal length or scattered in memory.
    """

    columns: Mapping[str, np.ndarray]
    offsets: np.ndarray
    folder: Path | None = None
    files: Sequence[WholeFile] = field(default=(), compare=False, repr=False)  # of what is mapped

    def __post_init__(self) -> None:
        sizes = {name: len(values) for name, values in self.columns.items()}
        if len(set(sizes.values())) > 1 or int(self.offsets[-1]) > sizes["input_ids"]:
            held = " and ".join(f"{size} {name}" for name, size in sizes.items())
            raise DataError(f"the rows hold {held} for {int(self.offsets[-1])} tokens: all must be equal.")
        if not all(values.flags.c_contiguous for values in self.columns.values()):
            names = " and ".join(self.columns)
            raise DataError(f"{names} of flat rows must each lie in one piece: use np.ascontiguousarray.")

    @property
    def input_ids(self) -> np.ndarray:
        return self.columns["input_ids"]

    @property
    def labels(self) -> np.ndarray:
        return self.columns["labels"]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        check_not_cut(self.files)
        start, stop = self.offsets[index % len(self)], self.offsets[index % len(self) + 1]
        return {name: values[start:stop] for name, values in self.columns.items()}

    def located(self, doc_ids: np.ndarray) -> tuple[TokenRows, np.ndarray, np.ndarray]:
        check_not_cut(self.files)
        starts = self.offsets[doc_ids]
        return self, starts, self.offsets[doc_ids + 1] - starts

    def __reduce__(self) -> tuple:
        if self.folder is not None:
            return load_rows, (self.folder,)
        return TokenRows, (self.columns, self.offsets)


def load_rows(folder: Path) -> TokenRows:
    """Maps the rows of a folder that `RowsWriter` wrote; nothing is read before it is asked for."""
    paths = {name: folder / f"{name}.npy" for name in (*COLUMNS, "offsets")}
    arrays = {name: np.asarray(np.load(path, mmap_mode="r")) for name, path in paths.items()}
    offsets = arrays.pop("offsets")
    return TokenRows(arrays, offsets, folder, [WholeFile(path) for path in paths.values()])


class WholeFile(FileIO):
    """A mapped file, whose size is compared before pages of it are read: one that was cut short meanwhile would end the
    process by SIGBUS. Its folder may be removed, as its pages stay.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_bytes = os.fstat(self.fileno()).st_size


def check_not_cut(files: Sequence[WholeFile]) -> None:
    """Raises DataError for a file that is shorter than when it was mapped."""
    for file in files:
        if os.fstat(file.fileno()).st_size < file.num_bytes:
            raise DataError(
                f"{file.name}: the file was cut short while it is read: remove its folder, or bring it back."
            )


def flatten(rows: Iterable[Mapping[str, Any]]) -> TokenRows:
    """Rows of lists, arrays or tensors end to end."""
    stream = iter(rows)
    parts: dict[str, list[np.ndarray]] = {name: [np.zeros(0, column.stored)] for name, column in COLUMNS.items()}
    lengths, done = [np.zeros(1, np.int64)], 0
    while batch := list(islice(stream, 1000)):
        widths = [len(row["input_ids"]) for row in batch]
        for name in parts:
            if name not in batch[0]:
                parts[name].append(_filled(name, sum(widths)))
                continue
            values = [row[name] for row in batch]
            for place, (value, width) in enumerate(zip(values, widths)):
                if len(value) != width:
                    raise DataError(
                        f"document {done + place} has {width} input_ids and {len(value)} {name}: they must be of equal "
                        "length, labels next-token aligned."
                    )
            parts[name].append(_joined(values, COLUMNS[name].stored))
        lengths.append(np.array(widths))
        done += len(batch)
    columns = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    return TokenRows(columns, np.cumsum(np.concatenate(lengths)))


def _filled(name: str, num_tokens: int) -> np.ndarray:
    """A column that the rows do not have."""
    return np.full(num_tokens, COLUMNS[name].padding, COLUMNS[name].stored)


def _joined(columns: list[Any], stored: str) -> np.ndarray:
    """Lists take the stored dtype; arrays and tensors keep theirs."""
    if set(map(type, columns)) != {list}:
        return np.concatenate([np.asarray(column) for column in columns])
    if stored != "int32":
        return np.concatenate([np.asarray(column, stored) for column in columns])
    try:  # 7 ns an element; 'i' parses a format string for each one, 14 ns; np.fromiter takes 16 ns
        joined = np.frombuffer(_read(columns, "I"), np.int32)
        if not (joined < 0).any():
            return joined
    except OverflowError:  # labels that are -100, as a rule in the first document
        pass
    return np.frombuffer(_read(columns, "i"), np.int32)


def _read(columns: list[list[int]], typecode: str) -> array[int]:
    joined = array(typecode)
    for column in columns:
        joined.fromlist(column)
    return joined


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
    """Appends chunks of documents to the arrays of a folder; `close` makes them whole."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files = {name: _open_array(folder / f"{name}.npy", column.stored) for name, column in COLUMNS.items()}
        self._lengths: list[np.ndarray] = []
        self._hashes = {name: hashlib.sha256() for name in self._files}

    def append(self, columns: Mapping[str, np.ndarray], lengths: np.ndarray) -> None:
        """Adds documents that lie end to end in each of `columns` [sum(lengths)]."""
        num_tokens = int(lengths.sum())
        for name, file in self._files.items():
            values = columns[name] if name in columns else _filled(name, num_tokens)
            assert len(values) == num_tokens
            data = np.ascontiguousarray(values, COLUMNS[name].stored).data
            file.write(data)
            self._hashes[name].update(data)
        self._lengths.append(np.asarray(lengths, np.int64))

    def close(self) -> None:
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        for name, file in self._files.items():
            _finish_array(file, int(offsets[-1]), COLUMNS[name].stored)
        np.save(self._folder / "offsets.npy", offsets)
        whole = hashlib.sha256(offsets.tobytes())
        for digest in self._hashes.values():
            whole.update(digest.digest())
        (self._folder / CONTENT_HASH).write_text(whole.hexdigest())


def _header(num_items: int, dtype: str) -> dict:
    return {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": (num_items,)}


def _open_array(path: Path, dtype: str) -> BufferedWriter:
    file = path.open("wb")
    np.lib.format.write_array_header_1_0(file, _header(0, dtype))
    return file


def _finish_array(file: BufferedWriter, num_items: int, dtype: str) -> None:
    """Writes the true size into the header: NumPy leaves room for it to grow."""
    start = 128  # magic, version and the padded header of a one-dimensional array
    assert file.tell() == start + num_items * np.dtype(dtype).itemsize
    file.seek(0)
    np.lib.format.write_array_header_1_0(file, _header(num_items, dtype))
    assert file.tell() == start
    file.close()


Alignment = Literal["aligned", "unshifted"]


def tokens(row: dict[str, Any]) -> Document:
    """`input_ids`, optional `labels`, `loss_mask` (0 = no loss), `attention_mask` (0 = padding, which is cut off)."""
    input_ids = _integers(row, "input_ids")
    labels = _integers(row, "labels", len(input_ids)) if row.get("labels") is not None else None
    if row.get("loss_mask") is not None:
        masked = _integers(row, "loss_mask", len(input_ids)) == 0
        labels = np.where(masked, IGNORE_INDEX, input_ids if labels is None else labels).astype(ID_DTYPE)
    if row.get("attention_mask") is not None:
        real = _integers(row, "attention_mask", len(input_ids)) != 0
        input_ids, labels = input_ids[real], None if labels is None else labels[real]
    return {"input_ids": input_ids, "labels": labels, "lengths": [len(input_ids)]}


def packed_tokens(row: dict[str, Any]) -> Document:
    """A pack: `input_ids`, `labels`, `seq_lens` (real tokens), optional `seq_lens_padded` (slots); taken apart again.

    Padding is left out. The documents are packed again, to the size and by the strategy of the run.
    """
    input_ids = _integers(row, "input_ids")
    labels = _integers(row, "labels", len(input_ids))
    lengths = _integers(row, "seq_lens")
    slots = _integers(row, "seq_lens_padded", len(lengths)) if row.get("seq_lens_padded") is not None else lengths
    if (slots < lengths).any() or slots.sum() > len(input_ids):
        raise DataError(
            f"column seq_lens holds documents of {int(lengths.sum())} tokens in slots of {int(slots.sum())}, for "
            f"{len(input_ids)} input_ids: slots must hold their documents, and the row all slots."
        )
    starts = np.cumsum(slots) - slots
    real = [slice(int(start), int(start + length)) for start, length in zip(starts, lengths)]
    return {
        "input_ids": np.concatenate([input_ids[part] for part in real] or [input_ids[:0]]),
        "labels": np.concatenate([labels[part] for part in real] or [labels[:0]]),
        "lengths": [int(length) for length in lengths],
    }


def find_alignment(documents: Iterable[Document]) -> Alignment:
    """Which convention the labels of some documents follow.

    Raises:
        DataError: neither fits.
    """
    num_labels = num_aligned = num_unshifted = 0
    for document in documents:
        ids, labels = document["input_ids"], document["labels"]
        if labels is None:
            continue
        has_label = labels != IGNORE_INDEX
        num_labels += int(has_label.sum())
        num_unshifted += int((has_label & (labels == ids)).sum())
        num_aligned += int((has_label[:-1] & (labels[:-1] == ids[1:])).sum())
    if num_aligned == num_labels and num_aligned >= num_unshifted:
        return "aligned"
    if num_unshifted == num_labels:
        return "unshifted"
    raise DataError(
        f"of {num_labels:,} labels {num_aligned:,} are the next token and {num_unshifted:,} the token itself: labels "
        "must be all of one kind; set dataset.labels=aligned or dataset.labels=unshifted to take them as they are."
    )


def align(document: Document) -> Document:
    """Unshifted labels made next-token aligned, document by document."""
    if document["labels"] is None:
        return document
    labels = np.full_like(document["labels"], IGNORE_INDEX)
    labels[:-1] = document["labels"][1:]
    lasts = np.cumsum(document["lengths"]) - 1
    labels[lasts[lasts >= 0]] = IGNORE_INDEX
    return {**document, "labels": labels}


def _integers(row: dict[str, Any], column: str, length: int | None = None) -> np.ndarray:
    value = row.get(column)
    try:
        numbers = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise DataError(f"column {column} must be a flat list of integers.") from error
    if value is None or numbers.ndim != 1 or (numbers.dtype.kind not in "iub" and len(numbers)):
        raise DataError(f"column {column} must be a list of integers, not {type(value).__name__} {str(value)[:40]!r}.")
    if length is not None and len(numbers) != length:
        raise DataError(f"column {column} has {len(numbers)} values and input_ids {length}: they must be as many.")
    if len(numbers) and (numbers.min() < -(2**31) or numbers.max() >= 2**31):
        raise DataError(f"column {column} holds {numbers.max()}, which is not a token id.")
    return numbers.astype(ID_DTYPE)
