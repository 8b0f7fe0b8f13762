"""Token rows: all documents of a set end to end in two flat arrays, memory-mapped from disk.

input_ids   a b c d │ e f g │ …        int32 [total]
labels      b c d _ │ f g _ │ …        int32 [total], the target of each position; _ = -100, no loss
…           optional columns of `columns.COLUMNS`, [total] or [total, K], where the data bring them;
            those in runs as {name}_at, int64 [runs], and {name}, the value from there on
groups      int64 [N], equal for rows that may share their beginning (trees.py), until trees are
            made of them; -1 of rows that share with none, no array where all do
offsets     0         4       7 …      int64 [N + 1]
lengths     4         3         …      int32 [N]
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from io import BufferedWriter
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from automodel_lite.columns import COLUMNS, IGNORE_INDEX
from automodel_lite.data.reading.documents import Documents
from automodel_lite.data.reading.paths import WholeFile, check_not_cut
from automodel_lite.errors import ConfigError, DataError, counted

ID_DTYPE = np.dtype(np.int32)
CONTENT_HASH = "content.sha256"
TREES = "trees.json"  # what trees save
ALONE = -1  # group of a row that shares with none
PAIRED = frozenset({"answers", "verdicts"})
"""The columns of rows that an objective compares: all of one group are one unit of packing, and
never cut apart.
"""


def stored_dtypes() -> dict[str, str]:
    """Returns the arrays that a folder may hold, a file `<name>.bin` each, with their dtypes."""
    places = {f"{name}_at": "int64" for name, column in COLUMNS.items() if column.in_runs}
    of_documents = {"lengths": "int32", "offsets": "int64", "groups": "int64"}
    return {name: column.stored for name, column in COLUMNS.items()} | places | of_documents


class DocumentReader(ABC):
    """Tokenized documents. Pickling them copies no tokens."""

    lengths: np.ndarray
    """Tokens of each document, int32 or int64 [N]."""
    row_lengths: np.ndarray
    """The same; of the longest row where a document is a tree."""

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: {counted(len(self), 'document')}, {self.num_tokens:,} tokens>"
        )

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        """Returns the columns of one document; they are not to be written to."""

    @property
    def flat(self) -> TokenizedDocuments:
        """Returns the flat rows that all tokens stand in; raises ConfigError for rows of several
        sets.
        """
        raise ConfigError(
            "values per label, and advantages of rewards, are computed for one set of documents "
            "(dataset=files, toy_chat ...): make one of the mixture's sets, or bring `advantages` "
            "in place of `reward`, which policy.advantages_of makes."
        )

    def with_columns(self, columns: Mapping[str, np.ndarray]) -> DocumentReader:
        """Returns the same rows with more columns, [tokens of the flat rows, ...] each."""
        return TokenizedDocuments(
            {**self.flat.columns, **columns}, self.flat.offsets, files=self.flat.files
        )

    def has_labels(self, doc_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Returns which pieces of documents have a label, bool [P]."""
        pieces = zip(doc_ids.tolist(), starts.tolist(), stops.tolist())
        return np.array(
            [(self[i]["labels"][start:stop] != IGNORE_INDEX).any() for i, start, stop in pieces],
            bool,
        )

    def locate(self, doc_ids: np.ndarray) -> tuple[TokenizedDocuments, np.ndarray, np.ndarray]:
        """Flat rows that hold these documents, where each begins in them, and its length; int64 [D]
        each.
        """
        rows = flatten(map(self.__getitem__, doc_ids.tolist()), self.no_tokens())
        return rows, rows.offsets[:-1], rows.lengths

    def no_tokens(self) -> Mapping[str, np.ndarray]:
        """Returns every column that some document brings, of no tokens: those of a pack do not
        depend on which documents are in it, and ranks agree on the parts of their losses.
        """
        return {name: values[:0] for name, values in self[0].items()} if len(self) else {}


def places_within(lengths: np.ndarray) -> np.ndarray:
    """Returns the places inside runs of these lengths, int64 [sum(lengths)].

    >>> places_within(np.array([2, 3]))
    array([0, 1, 0, 1, 2])
    """
    return np.arange(lengths.sum()) - (lengths.cumsum() - lengths).repeat(lengths)


@dataclass(frozen=True)
class LabelSpans:
    """A column of few changes: values[i] from token at[i] on, up to the next; a slice of it is an
    array.

    at  int64 [runs], rising from 0
    """

    at: np.ndarray
    values: np.ndarray
    num_tokens: int

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self.num_tokens)
        if stop <= start:
            return self.values[:0]
        first, last = np.searchsorted(self.at, [start + 1, stop]) - [1, 0]
        edges = np.concatenate([[start], self.at[first + 1 : last], [stop]])
        return self.values[first:last].repeat(np.diff(edges))

    @classmethod
    def of(cls, values: np.ndarray) -> LabelSpans:
        return cls(np.arange(len(values)), values, len(values))

    def positive(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens whose value is over 0, and their values."""
        lengths = np.diff(np.append(self.at, self.num_tokens)) * (self.values > 0)
        return self.at.repeat(lengths) + places_within(lengths), self.values.repeat(lengths)


class TokenizedDocuments(DocumentReader):
    """Documents end to end: document i is tokens offsets[i] to offsets[i + 1] of every column.

    columns: arrays, or Runs.
    folder: where they live; such rows are pickled as its path, so that workers map the same pages.
    files: of what is mapped.
    lengths: int32 [N], mapped too.

    Raises DataError for columns of unequal length or scattered in memory.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        offsets: np.ndarray,
        folder: Path | None = None,
        files: Sequence[WholeFile] = (),
        lengths: np.ndarray | None = None,
        groups: np.ndarray | None = None,
    ):
        sizes = {name: len(values) for name, values in columns.items()}
        if len(set(sizes.values())) > 1 or int(offsets[-1]) > sizes["input_ids"]:
            held = " and ".join(f"{size} {name}" for name, size in sizes.items())
            raise DataError(
                f"the rows hold {held} for {int(offsets[-1])} tokens: all must be equal."
            )
        arrays = [values for values in columns.values() if isinstance(values, np.ndarray)]
        if not all(values.flags.c_contiguous for values in arrays):
            raise DataError(
                f"{' and '.join(columns)} of flat rows must be contiguous: use "
                "np.ascontiguousarray."
            )
        self.columns = columns
        self.offsets = offsets
        self.folder = folder
        self.files = files
        self.groups = groups
        self.lengths = np.diff(offsets) if lengths is None else lengths

    @cached_property
    def row_lengths(self) -> np.ndarray:  # type: ignore[override]
        """Tokens of each document, int64 [N]; of a tree those of its longest row."""
        branches = self.columns.get("branches")
        if branches is None:
            return self.lengths
        # Where rows and branches begin, and how many tokens of their row lie before: the last of
        # them ends the row.
        begins, depths = (
            branches if isinstance(branches, LabelSpans) else LabelSpans.of(branches)
        ).positive()
        depths = depths - 1
        starts = np.concatenate([self.offsets[:-1], begins])
        order = starts.argsort(kind="stable")
        starts = starts[order]
        lengths = (
            np.diff(np.append(starts, self.num_tokens))
            + np.append(np.zeros(len(self), np.int64), depths)[order]
        )
        return (
            np.maximum.reduceat(lengths, np.flatnonzero(order < len(self)))
            if len(self)
            else lengths
        )

    @property
    def flat(self) -> TokenizedDocuments:
        return self

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        check_not_cut(self.files)
        start = self.offsets[index % len(self)]
        stop = self.offsets[index % len(self) + 1]
        return {name: values[start:stop] for name, values in self.columns.items()}

    def no_tokens(self) -> dict[str, np.ndarray]:
        return {name: values[:0] for name, values in self.columns.items()}

    def locate(self, doc_ids: np.ndarray) -> tuple[TokenizedDocuments, np.ndarray, np.ndarray]:
        check_not_cut(self.files)
        starts = self.offsets[doc_ids]
        return self, starts, self.offsets[doc_ids + 1] - starts

    def __reduce__(self) -> tuple:
        if self.folder is not None:
            return load_rows, (self.folder,)
        return TokenizedDocuments, (self.columns, self.offsets)


def load_rows(folder: Path) -> TokenizedDocuments:
    """Maps the rows of a folder that `RowsWriter` wrote; nothing is read before it is asked for."""
    dtypes = stored_dtypes()
    paths = {name: folder / f"{name}.bin" for name in dtypes if (folder / f"{name}.bin").is_file()}
    arrays: dict[str, Any] = {name: map_array(path, dtypes[name]) for name, path in paths.items()}
    offsets = arrays.pop("offsets")
    lengths = arrays.pop("lengths")
    groups = arrays.pop("groups", None)
    for name in [name for name in arrays if name.endswith("_at")]:
        column = name.removesuffix("_at")
        arrays[column] = LabelSpans(arrays.pop(name), arrays[column], int(offsets[-1]))
    return TokenizedDocuments(
        arrays, offsets, folder, [WholeFile(path) for path in paths.values()], lengths, groups
    )


def map_array(path: Path, dtype: str) -> np.ndarray:
    """Maps a file of nothing but values."""
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.zeros(0, dtype)


def flatten(
    rows: Iterable[Mapping[str, Any]], no_tokens: Mapping[str, np.ndarray] | None = None
) -> TokenizedDocuments:
    """Rows of lists, arrays or tensors end to end; lists take the stored dtype.

    no_tokens  columns [0, ...] that there are also where no row brings them
    """
    parts = {name: [_filled(name, 0)] for name, column in COLUMNS.items() if not column.is_optional}
    for name, values in (no_tokens or {}).items():
        parts.setdefault(name, [values])
    lengths = [0]
    for number, row in enumerate(rows):
        width = len(row["input_ids"])
        for name in [name for name in COLUMNS if name in parts or name in row]:
            if name not in parts:  # no row before this one has brought the column
                shape = np.shape(row[name])[1:]
                parts[name] = [_filled(name, sum(lengths), shape)]
            value = row[name] if name in row else _filled(name, width, parts[name][0].shape[1:])
            if len(value) != width:
                raise DataError(
                    f"document {number} has {width} input_ids and {len(value)} {name}: they must "
                    "be of equal length, labels next-token aligned."
                )
            parts[name].append(
                np.asarray(value, COLUMNS[name].stored if isinstance(value, list) else None)
            )
        lengths.append(width)
    columns = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    return TokenizedDocuments(columns, np.cumsum(lengths))


def _filled(name: str, num_tokens: int, shape: tuple[int, ...] = ()) -> np.ndarray:
    """Returns a column that the rows do not have."""
    return np.full((num_tokens, *shape), COLUMNS[name].padding, COLUMNS[name].stored)


def next_token_labels(
    input_ids: np.ndarray, trained: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Returns labels of documents end to end: the next token where that one is trained on, else
    -100.

    input_ids: [total]; trained: bool [total], whether the token is something to learn; lengths:
    [N].

    The first token of a document is nobody's target, and the last position has none, so that no
    target crosses a
    document: ids `a b c │ d e`, trained `0 1 1 │ 1 1` give `b c _ │ e _`.
    """
    labels = np.full(len(input_ids), IGNORE_INDEX, ID_DTYPE)
    labels[:-1] = np.where(trained[1:], input_ids[1:], IGNORE_INDEX)
    labels[np.cumsum(lengths)[lengths > 0] - 1] = IGNORE_INDEX
    return labels


class RowsWriter:
    """Appends chunks of documents to the arrays of a folder; `close` makes them whole. Nothing is
    kept in memory.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, BufferedWriter] = {}
        self._dtypes = stored_dtypes()
        self._hashes = {name: hashlib.sha256() for name in self._dtypes}
        self._num_tokens = self._num_rows = 0
        # of columns in runs: the last value, and how many there were
        self._last: dict[str, Any] = {}
        self._num_values = dict.fromkeys(COLUMNS, 0)
        for name, column in COLUMNS.items():
            if not column.is_optional:
                self._write(name, _filled(name, 0))
        self._write("lengths", np.zeros(0, np.int32))
        self._write("offsets", np.zeros(1, np.int64))

    def append(
        self,
        columns: Mapping[str, np.ndarray],
        lengths: np.ndarray,
        groups: np.ndarray | None = None,
    ) -> None:
        """Adds documents that lie end to end in each of `columns` [sum(lengths)]."""
        num_tokens = int(lengths.sum(dtype=np.int64))
        for name in [name for name in COLUMNS if name in columns or name in self._files]:
            if name not in self._files:  # the documents before these came without the column
                self._write(name, _filled(name, self._num_tokens))
            values = columns[name] if name in columns else _filled(name, num_tokens)
            assert len(values) == num_tokens
            self._write(name, values)
        if groups is not None and "groups" not in self._files:
            self._write("groups", np.full(self._num_rows, ALONE))
        if "groups" in self._files:
            self._write("groups", np.full(len(lengths), ALONE) if groups is None else groups)
        self._write("lengths", lengths)
        self._write("offsets", self._num_tokens + np.cumsum(lengths, dtype=np.int64))
        self._num_tokens += num_tokens
        self._num_rows += len(lengths)

    def _write(self, name: str, values: np.ndarray) -> None:
        if name not in self._files:
            self._files[name] = (self._folder / f"{name}.bin").open("wb")
        values = np.ascontiguousarray(values, self._dtypes[name])
        if f"{name}_at" in self._dtypes:
            # A run goes on from one call to the next where the value does.
            is_change = np.ones(len(values), bool)
            is_change[1:] = values[1:] != values[:-1]
            if len(values):
                is_change[0] = self._last.get(name) != values[0]
                self._last[name] = values[-1]
            changes = np.flatnonzero(is_change)
            self._write(f"{name}_at", self._num_values[name] + changes)
            self._num_values[name] += len(values)
            values = values[changes]
        data = values.data
        self._files[name].write(data)
        self._hashes[name].update(data)

    def close(self) -> None:
        """Closes the files, and writes one hash of where rows begin and of all columns."""
        for file in self._files.values():
            file.close()
        whole = self._hashes["offsets"]
        for name in self._dtypes:
            if name in self._files and name not in ("lengths", "offsets", "groups"):
                whole.update(self._hashes[name].digest())
        (self._folder / CONTENT_HASH).write_text(whole.hexdigest())


@dataclass(frozen=True)
class RowCounts:
    """What became of the documents of one set; one that gave no row is bad, empty or fully
    masked.
    """

    num_documents: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_label_tokens: int = 0
    num_trees: int = 0  # of rows that share a beginning
    num_saved_tokens: int = 0  # of their beginnings, which the trees hold once
    num_split_chats: int = 0  # became one row a turn, because the template rewrites earlier turns
    num_bad: int = 0
    num_empty: int = 0
    num_fully_masked: int = 0
    num_equal_pairs: int = 0  # whose answers have the same tokens

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(
            **{name: value + asdict(other)[name] for name, value in asdict(self).items()}
        )

    def __str__(self) -> str:
        """`2,000 documents → 1,998 rows, 151,022 tokens, 45% trained on, 2 bad skipped`."""
        parts = [
            f"{counted(self.num_documents, 'document')} → {counted(self.num_rows, 'row')}",
            counted(self.num_tokens, "token"),
        ]
        if self.num_tokens:
            parts.append(f"{self.num_label_tokens / self.num_tokens:.0%} trained on")
        if self.num_trees:
            frac = self.num_saved_tokens / self.num_tokens
            parts.append(
                f"{self.num_trees:,} trees of rows that begin alike save {frac:.0%} of the tokens"
            )
        notes = {
            "bad skipped": self.num_bad,
            "empty dropped": self.num_empty,
            "fully masked dropped": self.num_fully_masked,
            "pairs of equal tokens dropped": self.num_equal_pairs,
            "split into one row per turn": self.num_split_chats,
        }
        parts += [f"{count:,} {note}" for note, count in notes.items() if count]
        return ", ".join(parts)


@dataclass(frozen=True)
class TokenizedData:
    """Rows of a dataset: `train`, `val` by name, their `counts` (`"train"`, `"val/<name>"`), and
    notes to print.
    """

    train: DocumentReader
    val: Mapping[str, DocumentReader]
    counts: dict[str, RowCounts]
    notes: tuple[str, ...]
    # of the training rows' content: other documents, tokenizer, template or mask rule change it
    fingerprint: str
    # epoch -> its training rows, where they differ by epoch
    drawn: Callable[[int], DocumentReader] | None = None
    longest: int = 0  # of all that may be drawn


@runtime_checkable
class RowDataset(Protocol):
    """A dataset without documents of its own to tokenize: a tokenized corpus, or a mixture of
    datasets.
    """

    @property
    def datasets(self) -> Mapping[str, Documents]:
        """What it is made of, by name; each is tokenized alone."""

    def combine(self, datasets: Mapping[str, TokenizedData], vocab_size: int) -> TokenizedData:
        """Its rows, from those of its datasets; raises DataError for token ids that a tokenizer
        does not have.
        """


def row_dataset(documents: Documents | RowDataset) -> RowDataset | None:
    """Returns a dataset that combines rows; None for one whose documents are tokenized."""
    return documents if isinstance(documents, RowDataset) else None


def members_of(documents: Documents | RowDataset) -> Mapping[str, Documents]:
    """Returns the datasets that are tokenized, by name: of a mixture each, else the dataset."""
    combining = row_dataset(documents)
    return combining.datasets if combining is not None else {"": cast(Documents, documents)}
