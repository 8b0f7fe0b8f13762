"""Packs as rows of tokens: read lazily from flat rows when asked for, or all at once by `pack_dataset`.

    size 16, slots of 4, documents [1 2 3] and [4 5 6 7 8]
    input_ids        1 2 3 0 | 4 5 6 7 8 0 0 0 | 0 0 0 0
    position_ids     0 1 2 3 | 0 1 2 3 4 5 6 7 | 0 1 2 3
    seq_lens         3         5                 0           a segment without tokens: the tail of the pack
    seq_lens_padded  4         8                 4

Packing never shifts labels: labels[i] already is the target of position i.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import datasets
import numpy as np
import pyarrow as pa
import torch

from automodel_lite.datasets.token_rows import IndexedRows
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.packing.plan import PackPlan, padding_segments
from automodel_lite.packing.strategies import next_fit

CROSS_ENTROPY_IGNORE_IDX = -100
EMPTY_PACK = -1  # PackedDataset[EMPTY_PACK] is padding only, for ranks that run short in the last step

Document = tuple[np.ndarray, np.ndarray]  # input_ids and labels of one document or piece

logger = logging.getLogger(__name__)


class FlatRows(Protocol):
    """All documents one after the other: document i is tokens offsets[i] to offsets[i + 1] of both arrays."""

    @property
    def input_ids(self) -> np.ndarray: ...

    @property
    def labels(self) -> np.ndarray: ...

    @property
    def offsets(self) -> np.ndarray: ...


@dataclass(frozen=True)
class TokenArrays:
    """FlatRows in memory: input_ids and labels [tokens], offsets int64 [N + 1]."""

    input_ids: np.ndarray
    labels: np.ndarray
    offsets: np.ndarray


def flatten(rows: Iterable[dict[str, Any]]) -> TokenArrays:
    """FlatRows of samples {"input_ids", "labels"} of lists, arrays or tensors."""
    input_ids, labels, lengths = [], [], [0]
    for row in rows:
        ids, targets = np.asarray(row["input_ids"]), np.asarray(row["labels"])
        if len(ids) != len(targets):
            raise DataError(
                f"document {len(lengths) - 1} has {len(ids)} input_ids and {len(targets)} labels: they must be of "
                "equal length, labels next-token aligned."
            )
        input_ids.append(ids)
        labels.append(targets)
        lengths.append(len(ids))
    empty = [np.zeros(0, np.int64)]
    return TokenArrays(np.concatenate(input_ids or empty), np.concatenate(labels or empty), np.cumsum(lengths))


class PackedDataset(torch.utils.data.Dataset):
    """Pack i of a plan, gathered from `rows` when it is asked for.

    [i] -> {"input_ids", "labels", "position_ids": int64 tensors [S], "seq_lens", "seq_lens_padded": lists of ints}.
    `seq_lens_padded` are the slots (multiples of the plan's slot_multiple) and sum to S; `seq_lens` the real tokens in
    them, 0 for padding at the tail. A plan of strategy none gives {"input_ids", "labels", "attention_mask"} of the
    document's own slot instead, which the collater pads to the longest of its batch. [EMPTY_PACK] is a pack of padding.
    """

    def __init__(self, rows: FlatRows | IndexedRows, plan: PackPlan, padding_idx: int = 0):
        num_rows = len(rows) if isinstance(rows, IndexedRows) else _num_flat_rows(rows)
        if plan.counts.documents != num_rows:
            raise DataError(
                f"the plan was made for {plan.counts.documents} documents and the rows hold "
                f"{num_rows}: plan again from the lengths of these rows."
            )
        self.rows = rows
        self.plan = plan
        self.padding_idx = padding_idx

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> dict[str, Any]:
        documents = self._documents(int(index))
        if self.plan.ragged:
            return _alone(documents, self.plan.slot_multiple, self.padding_idx)
        return lay_out(documents, self.plan.packed_sequence_size, self.plan.slot_multiple, self.padding_idx)

    def _documents(self, index: int) -> list[Document]:
        plan = self.plan
        if index == EMPTY_PACK:
            return []
        if not 0 <= index < len(plan):
            raise IndexError(f"pack {index} of {len(plan)}")
        piece = slice(int(plan.offsets[index]), int(plan.offsets[index + 1]))
        doc_ids = np.asarray(plan.doc_ids[piece])
        if isinstance(self.rows, IndexedRows):
            return self._read(self.rows, doc_ids, piece)
        offsets = np.asarray(self.rows.offsets)
        starts, stops = offsets[doc_ids], offsets[doc_ids + 1]
        if plan.starts is not None and plan.stops is not None:
            starts, stops = starts + plan.starts[piece], starts + plan.stops[piece]
        input_ids, labels = np.asarray(self.rows.input_ids), np.asarray(self.rows.labels)
        return [(input_ids[start:stop], labels[start:stop]) for start, stop in zip(starts.tolist(), stops.tolist())]

    def _read(self, rows: IndexedRows, doc_ids: np.ndarray, piece: slice) -> list[Document]:
        documents = [(row["input_ids"], row["labels"]) for row in map(rows.__getitem__, doc_ids.tolist())]
        if self.plan.starts is None or self.plan.stops is None:
            return documents
        pieces = zip(self.plan.starts[piece].tolist(), self.plan.stops[piece].tolist())
        return [(ids[start:stop], labels[start:stop]) for (ids, labels), (start, stop) in zip(documents, pieces)]


def _num_flat_rows(rows: FlatRows) -> int:
    if int(rows.offsets[-1]) > len(rows.input_ids) or len(rows.labels) != len(rows.input_ids):
        raise DataError(
            f"the rows hold {len(rows.input_ids)} input_ids and {len(rows.labels)} labels for "
            f"{int(rows.offsets[-1])} tokens: all three must be equal."
        )
    return len(rows.offsets) - 1


def lay_out(documents: Sequence[Document], size: int, slot_multiple: int = 1, padding_idx: int = 0) -> dict[str, Any]:
    """One pack of documents that together fit it, as PackedDataset returns it."""
    seq_lens = [len(input_ids) for input_ids, _ in documents]
    slots = [-(-length // slot_multiple) * slot_multiple for length in seq_lens]
    tail = padding_segments(size - sum(slots), slot_multiple)
    counting = np.arange(size)
    input_ids = np.full(size, padding_idx, np.int64)
    labels = np.full(size, CROSS_ENTROPY_IGNORE_IDX, np.int64)
    position_ids = np.empty(size, np.int64)
    at = 0
    for (document_ids, document_labels), length, slot in zip(documents, seq_lens, slots):
        input_ids[at : at + length] = document_ids
        labels[at : at + length] = document_labels
        position_ids[at : at + slot] = counting[:slot]
        at += slot
    for width in tail:
        position_ids[at : at + width] = counting[:width]
        at += width
    return {
        "input_ids": torch.from_numpy(input_ids),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(position_ids),
        "seq_lens": seq_lens + [0] * len(tail),
        "seq_lens_padded": slots + tail,
    }


def _alone(documents: Sequence[Document], slot_multiple: int, padding_idx: int) -> dict[str, torch.Tensor]:
    """One document in its own slot, without layout: the collater pads it to the longest of its batch."""
    length = sum(len(input_ids) for input_ids, _ in documents)
    slot = max(1, -(-length // slot_multiple)) * slot_multiple
    row = lay_out(documents, slot, slot_multiple, padding_idx)
    attention_mask = torch.zeros(slot, dtype=torch.int64)
    attention_mask[:length] = 1
    return {"input_ids": row["input_ids"], "labels": row["labels"], "attention_mask": attention_mask}


def pack_dataset(
    dataset: Any,
    split: str,
    packed_sequence_size: int,
    max_packs: int | None = None,
    padding_idx: int = 0,
    drop_long_samples: bool = True,
    cp_size: int = 1,
) -> datasets.Dataset:
    """Next-fit in dataset order, all packs at once, as NeMo AutoModel's function of this name does.

    Columns input_ids, labels, position_ids [packed_sequence_size], seq_lens (real tokens), seq_lens_padded (slots of
    2 * cp_size when cp_size > 1; all padding of the pack is added to the last). position_ids run on through the
    padding, clamped to the last position of the pack. `max_packs` takes the first ones. PackedDataset reads the same
    packs lazily.

    Raises ValueError for a sample over packed_sequence_size unless drop_long_samples, and when there is no pack at all.
    """
    if max_packs is not None and max_packs < 1:
        raise ConfigError(f"max_packs={max_packs} must be at least 1: use None for all packs.")
    multiple = 2 * cp_size if cp_size > 1 else 1
    rows, num_dropped = _fitting_samples(split_of(dataset, split), packed_sequence_size, multiple, drop_long_samples)
    lengths = np.diff(rows.offsets)
    if not len(lengths):
        raise DataError(
            f"No packs were produced: every sample was longer than packed_sequence_size={packed_sequence_size} and was "
            f"dropped ({num_dropped} were), or the dataset is empty: raise the size or check the dataset."
        )
    if num_dropped:
        logger.warning("Dropped %d samples longer than packed_sequence_size=%d.", num_dropped, packed_sequence_size)
    slots = -(-lengths // multiple) * multiple
    offsets = next_fit(slots, packed_sequence_size)[: None if max_packs is None else max_packs + 1]
    return _materialise(rows, slots, offsets, packed_sequence_size, padding_idx)


def split_of(dataset: Any, split: str) -> Any:
    """Only a DatasetDict is indexed by `split`."""
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset
    if split not in dataset:
        logger.warning("Split %r is not in the dataset.", split)
        raise DataError(f"split={split!r} is not in the dataset: use one of {', '.join(map(repr, dataset))}.")
    return dataset[split]


def flat_samples(samples: Any) -> TokenArrays:
    """Samples as flat rows, -100 in copies of their labels where loss_mask is 0; the samples are not changed."""
    rows = _flat_columns(samples) if isinstance(samples, datasets.Dataset) else None
    return flatten(_without_masked_labels(sample) for sample in _each(samples)) if rows is None else rows


def _fitting_samples(samples: Any, size: int, multiple: int, drop_long: bool) -> tuple[TokenArrays, int]:
    """The samples that fit a pack, and how many were too long."""
    rows = flat_samples(samples)
    lengths = np.diff(rows.offsets)
    slots = -(-lengths // multiple) * multiple
    long = slots > size
    if long.any() and not drop_long:
        n = int(slots[long][0]) if lengths[long][0] <= size else int(lengths[long][0])
        raise DataError(f"Dataset sample is too long ({n} > {size}). Please increase `packed_sequence_size`.")
    empty = lengths == 0
    if empty.any():
        logger.warning("Left out %d samples without a token.", int(empty.sum()))
    kept = ~long & ~empty
    if kept.all():
        return rows, 0
    tokens = np.repeat(kept, lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths[kept])])
    return TokenArrays(rows.input_ids[tokens], rows.labels[tokens], offsets), int(long.sum())


def _each(samples: Any) -> Iterable[dict[str, Any]]:
    """Anything with __len__ and __getitem__, or an iterable."""
    if isinstance(samples, Iterable):
        return samples
    return (samples[i] for i in range(len(samples)))


def _without_masked_labels(sample: dict[str, Any]) -> dict[str, Any]:
    if "loss_mask" not in sample:
        return sample
    labels = np.where(np.asarray(sample["loss_mask"]) == 0, CROSS_ENTROPY_IGNORE_IDX, np.asarray(sample["labels"]))
    return {"input_ids": sample["input_ids"], "labels": labels}


def _flat_columns(dataset: datasets.Dataset) -> TokenArrays | None:
    """The columns of an Arrow dataset without a Python object a token; None where only its rows say what is meant."""
    if dataset.format["type"] not in (None, "numpy", "torch", "python") or not len(dataset):
        return None
    names = [name for name in ("input_ids", "labels", "loss_mask") if name in dataset.column_names]
    arrow = dataset.with_format("arrow", columns=names)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in names}
    lengths: list[np.ndarray] = []
    for table in arrow.iter(batch_size=10_000):
        widths = [table[name].combine_chunks().value_lengths().to_numpy(zero_copy_only=False) for name in names]
        if any((w != widths[0]).any() for w in widths):
            return None  # the way row by row says which one it is
        lengths.append(widths[0])
        for name in names:
            columns[name].append(table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False))
    flat = {name: np.concatenate(parts) for name, parts in columns.items()}
    if "loss_mask" in flat:
        flat["labels"] = np.where(flat["loss_mask"] == 0, CROSS_ENTROPY_IGNORE_IDX, flat["labels"])
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    return TokenArrays(flat["input_ids"], flat["labels"], offsets)


def _materialise(
    rows: TokenArrays, slots: np.ndarray, offsets: np.ndarray, size: int, padding_idx: int
) -> datasets.Dataset:
    """All packs as an Arrow table; `offsets` are documents of each pack, in the order of the rows."""
    num_packs, num_documents = len(offsets) - 1, int(offsets[-1])
    slots = slots[:num_documents]
    pack = np.repeat(np.arange(num_packs), np.diff(offsets))
    ends = np.cumsum(slots)
    used = np.concatenate([[0], ends])[offsets]
    begins = ends - slots - used[pack] + pack * size
    padded = slots.copy()
    padded[offsets[1:] - 1] += size - np.diff(used)
    lengths = np.diff(rows.offsets)[:num_documents]
    num_tokens = int(lengths.sum())
    places = np.arange(num_tokens) + np.repeat(begins - rows.offsets[:num_documents], lengths)
    input_ids = np.full(num_packs * size, padding_idx, np.int64)
    labels = np.full(num_packs * size, CROSS_ENTROPY_IGNORE_IDX, np.int64)
    input_ids[places] = rows.input_ids[:num_tokens]
    labels[places] = rows.labels[:num_tokens]
    position_ids = np.minimum(np.arange(num_packs * size) - np.repeat(begins, padded), size - 1)
    by_pack = np.arange(num_packs + 1) * size
    columns = {
        "input_ids": _lists(by_pack, input_ids),
        "labels": _lists(by_pack, labels),
        "position_ids": _lists(by_pack, position_ids),
        "seq_lens": _lists(offsets, lengths),
        "seq_lens_padded": _lists(offsets, padded),
    }
    return datasets.Dataset(pa.table(columns))


def _lists(offsets: np.ndarray, values: np.ndarray) -> pa.ChunkedArray:
    """A column of lists, in chunks whose 32-bit offsets suffice."""
    chunks, start = [], 0
    while start < len(offsets) - 1:
        stop = int(np.searchsorted(offsets, offsets[start] + 2**30, side="right")) - 1
        stop = max(stop, start + 1)
        part = offsets[start : stop + 1]
        within = pa.array((part - part[0]).astype(np.int32))
        chunks.append(pa.ListArray.from_arrays(within, pa.array(values[part[0] : part[-1]])))
        start = stop
    return pa.chunked_array(chunks)
