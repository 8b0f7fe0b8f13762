"""Corpora that were tokenized beforehand: flat token files, mapped into memory and read as they
are.

    corpus.bin    a b c d e f g …      tokens, documents end to end
    corpus.idx    Megatron's index: their type, and where documents begin

Where there is no index, `dataset.dtype` and a token that ends each document describe the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.config.rules import Count, OneOf, PathStr
from automodel_lite.data.cache import short_hash
from automodel_lite.data.reading.documents import DocumentList, Documents, DocumentSet, Question
from automodel_lite.data.reading.paths import WholeFile, check_not_cut, stamp
from automodel_lite.data.reading.readers import ConcatenatedRows
from automodel_lite.data.tokens.token_rows import (
    ID_DTYPE,
    DocumentReader,
    RowCounts,
    TokenizedData,
    map_array,
)
from automodel_lite.errors import ConfigError, DataError, printable
from automodel_lite.seed import BLOCK

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
DTYPES = ("uint16", "uint32")
SCAN_TOKENS = 1 << 24


class MemmapRows(DocumentReader):
    """The documents of a mapped token file; every token but the first of a document is trained on.

    path: the `.bin` file; opened again where the rows are unpickled.
    offsets: int64 [N + 1], where each document starts; the tokens between are the document.
    """

    def __init__(self, path: Path, dtype: str, offsets: np.ndarray):
        self._arguments = (path, dtype, offsets)
        self._files = [WholeFile(path)]
        self.tokens = _map_tokens(path, dtype)
        # Documents lie one behind the other inside the file. Blocks of them bound the memory of
        # 10^8.
        self._offsets = offsets
        self.lengths = self.row_lengths = np.empty(max(0, len(offsets) - 1), np.int32)
        is_rising = len(offsets) > 0 and offsets[0] >= 0 and offsets[-1] <= len(self.tokens)
        for start in range(0, len(self.lengths) if is_rising else 0, BLOCK):
            lengths = np.diff(offsets[start : start + BLOCK + 1])
            is_rising = is_rising and not (lengths < 0).any()
            self.lengths[start : start + BLOCK] = lengths
        if not is_rising:
            held = f"{len(self.tokens):,} tokens"
            raise DataError(
                f"{path.name}: its index belongs to another file: documents are outside the {held}."
            )

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        """Returns a view of the file's tokens, and their labels; raises DataError when the file was
        cut short.
        """
        check_not_cut(self._files)
        tokens = self.tokens[self._offsets[index] : self._offsets[index + 1]]
        labels = np.full(len(tokens), IGNORE_INDEX, ID_DTYPE)
        labels[:-1] = tokens[1:]
        return {"input_ids": tokens, "labels": labels}

    def __reduce__(self) -> tuple:
        return MemmapRows, self._arguments


@dataclass
class MemmapCorpus:
    """Pre-tokenized corpora; nothing is tokenized or cached, the files are the rows."""

    path: PathStr | Sequence[PathStr]  # a .bin file, or a list of them
    val_path: PathStr | Mapping[str, PathStr] | None = None  # validation corpus, or several by name
    dtype: Annotated[str, OneOf(DTYPES)] | None = None  # of the tokens, for files without .idx
    separator_id: Count | None = None  # the token that ends each document, for files without .idx

    rows: DocumentReader = field(init=False)
    val_rows: dict[str, DocumentReader] = field(init=False)
    train: DocumentSet = field(init=False, default=DocumentList((), "no text"))
    val: dict[str, DocumentSet] = field(init=False, default_factory=dict)
    datasets: dict[str, Documents] = field(init=False, default_factory=dict)
    kind: str = field(init=False, default="rows")
    questions: list[Question] = field(init=False, default_factory=list)
    description: str = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        paths = [self.path] if isinstance(self.path, str) else list(self.path)
        if not paths:
            raise ConfigError("dataset.path= is empty: was a shell variable not set?")
        corpora = [self._open(path, "dataset.path") for path in paths]
        self.rows = corpora[0] if len(corpora) == 1 else JoinedRows(corpora)
        named = (
            dict(self.val_path) if isinstance(self.val_path, Mapping) else {"val": self.val_path}
        )
        self.val_rows = {
            name: self._open(path, "dataset.val_path")
            for name, path in named.items()
            if path is not None
        }
        self.description = (
            f"{', '.join(printable(Path(path).name) for path in paths)}: {len(self.rows):,} "
            "documents, "
        )
        self.description += f"{self.rows.num_tokens:,} tokens, mapped as they are"
        stamps = "; ".join(str(stamp(_bin_path(path))) for path in paths)
        self.identity = f"memmap({stamps}; separator_id={self.separator_id})"

    def combine(self, datasets: Mapping[str, TokenizedData], vocab_size: int) -> TokenizedData:
        sets = {"train": self.rows} | {f"val/{name}": rows for name, rows in self.val_rows.items()}
        for name, rows in sets.items():
            # A thousand documents spread over the set: ids beyond the tokenizer were made with
            # another one.
            for index in np.unique(
                np.linspace(0, len(rows) - 1, min(len(rows), 1000)).astype(np.int64)
            ).tolist():
                tokens = rows[index]["input_ids"]
                if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
                    raise DataError(
                        f"{name}: document {index} holds the token {tokens.max()}, and the "
                        f"tokenizer has ids up to {vocab_size - 1}: the corpus was made with "
                        "another tokenizer, or dataset.dtype is wrong."
                    )
        counts = {
            name: RowCounts(
                len(rows), len(rows), rows.num_tokens, int(np.maximum(rows.lengths - 1, 0).sum())
            )
            for name, rows in sets.items()
        }
        notes = tuple(f"{name}: {counts[name]}" for name in sets)
        return TokenizedData(self.rows, self.val_rows, counts, notes, short_hash(self.identity))

    def _open(self, path: str, key: str) -> MemmapRows:
        file = _bin_path(path)
        if not file.is_file():
            cure = "dataset=memmap reads tokens; for text or chats set dataset=files"
            raise ConfigError(f"{key}={path}: there is no file {file}: {cure}.")
        index = file.with_suffix(".idx")
        if index.is_file():
            return MemmapRows(file, *read_megatron_index(index))
        if self.dtype is None or self.separator_id is None:
            raise ConfigError(
                f"{file.name} has no {index.name}: set dataset.dtype={' or '.join(DTYPES)} and "
                "dataset.separator_id, the token that ends its documents."
            )
        if self.separator_id > np.iinfo(self.dtype).max:
            raise ConfigError(
                f"dataset.separator_id={self.separator_id} is not a token of {self.dtype}."
            )
        # A document ends behind its separator; what follows the last one is a document too.
        tokens = _map_tokens(file, self.dtype)
        blocks = range(0, len(tokens), SCAN_TOKENS)
        ends = [
            np.flatnonzero(tokens[i : i + SCAN_TOKENS] == self.separator_id) + i + 1 for i in blocks
        ]
        offsets = np.unique(np.concatenate([[0], *ends, [len(tokens)]])).astype(np.int64)
        return MemmapRows(file, self.dtype, offsets)


class JoinedRows(ConcatenatedRows, DocumentReader):
    """Rows of several corpora end to end."""

    def __init__(self, corpora: Sequence[DocumentReader]):
        super().__init__(corpora)
        self.lengths = self.row_lengths = np.concatenate([corpus.lengths for corpus in corpora])


def write_memmap(
    path: str | Path, documents: Iterable[Sequence[int]], dtype: str = "int32"
) -> None:
    """Writes Megatron's `<path>.bin` and `<path>.idx`; raises ConfigError for a `dtype` that is
    none of Megatron's, and DataError for a token that it cannot hold.
    """
    codes = {name: code for code, name in MEGATRON_DTYPES.items()}
    dtype = np.dtype(dtype).name
    if dtype not in codes:
        raise ConfigError(f"dtype={dtype} must be one of {', '.join(codes)}.")
    target = _bin_path(str(path))
    most = np.iinfo(dtype).max
    lengths = []
    with target.open("wb") as file:
        for number, document in enumerate(documents):
            tokens = np.asarray(document, np.int64)
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() <= most:
                raise DataError(
                    f"document {number} holds the token {tokens.max()}; {dtype} holds up to {most}."
                )
            file.write(tokens.astype(dtype).tobytes())
            lengths.append(len(tokens))
    header = struct.pack("<9sQBQQ", MEGATRON_MAGIC, 1, codes[dtype], len(lengths), len(lengths) + 1)
    pointers = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    arrays = np.array(lengths, np.int32), pointers.astype(np.int64), np.arange(len(lengths) + 1)
    target.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))


def read_megatron_index(path: Path) -> tuple[str, np.ndarray]:
    """Returns the token type of a Megatron `.idx` file, and the offsets of its documents in tokens,
    int64 [N + 1].

    Layout: magic, version (u64 = 1), type code (u8), number of sequences S (u64), number of
    document bounds D (u64), int32 [S] lengths, int64 [S] byte pointers, int64 [D] first sequence of
    each document.
    """
    data = path.read_bytes()
    header = struct.calcsize("<9sQBQQ")
    if len(data) < header:
        raise DataError(f"{path.name}: is too short for a Megatron index.")
    magic, version, code, num_sequences, num_bounds = struct.unpack_from("<9sQBQQ", data)
    if magic != MEGATRON_MAGIC or version != 1 or code not in MEGATRON_DTYPES:
        raise DataError(
            f"{path.name}: is not a Megatron index (magic {magic!r}, version {version}, token type "
            f"{code})."
        )
    if len(data) < header + 12 * num_sequences + 8 * num_bounds:
        raise DataError(f"{path.name}: is cut off: it should hold {num_sequences:,} sequences.")
    dtype = MEGATRON_DTYPES[code]
    lengths = np.frombuffer(data, np.int32, num_sequences, header)
    pointers = np.frombuffer(data, np.int64, num_sequences, header + 4 * num_sequences)
    bounds = np.frombuffer(data, np.int64, num_bounds, header + 12 * num_sequences)
    ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
    if not np.array_equal(pointers, ends[:-1] * np.dtype(dtype).itemsize):
        raise DataError(f"{path.name}: its sequences are not contiguous in the .bin file.")
    if len(bounds) and not 0 <= bounds.min() <= bounds.max() < len(ends):
        raise DataError(f"{path.name}: its documents refer to sequences that do not exist.")
    return dtype, ends[bounds]


def _map_tokens(path: Path, dtype: str) -> np.ndarray:
    if path.stat().st_size % np.dtype(dtype).itemsize:
        raise DataError(
            f"{path.name}: {path.stat().st_size} bytes are not a whole number of {dtype} tokens."
        )
    return map_array(path, dtype)


def _bin_path(path: str) -> Path:
    return Path(path if path.endswith(".bin") else f"{path}.bin").expanduser()
