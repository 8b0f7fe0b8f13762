"""Packing on whole datasets, and dense masks of packed rows.

lengths [2, 1]      1 0 0
                    1 1 0
                    0 0 1      a query (row) sees the keys (columns) of its own document up to
                               itself
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from datasets.fingerprint import Hasher
from torch.utils.data import DataLoader

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.config.sizes import ceil_div, round_up
from automodel_lite.data.packing.packs import fill_slots
from automodel_lite.data.packing.strategies import next_fit
from automodel_lite.data.tokens.token_rows import TokenizedDocuments, flatten
from automodel_lite.errors import ConfigError, DataError

CROSS_ENTROPY_IGNORE_IDX = IGNORE_INDEX
BLOCK_TOKENS = 1 << 20  # written about so many at a time, which stay in the cache
CHUNK_ROWS = 1_000  # of tokenize_dataset_parallel, that a process makes at a time
SeqLens = torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[int]]

logger = logging.getLogger(__name__)


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

    Columns input_ids, labels, position_ids [packed_sequence_size], seq_lens (real tokens),
    seq_lens_padded (slots of 2 * cp_size when cp_size > 1; all padding of the pack is added to the
    last). position_ids run on through the padding, clamped to the last position of the pack.
    `max_packs` takes the first ones. PackedDataset reads the same packs lazily.

    Raises ValueError for a sample over packed_sequence_size unless drop_long_samples, and when
    there is no pack at all.
    """
    if max_packs is not None and max_packs < 1:
        raise ConfigError(f"max_packs={max_packs} must be at least 1: use None for all packs.")
    multiple = 2 * cp_size if cp_size > 1 else 1
    limit = ("packed_sequence_size", packed_sequence_size)
    sentence = "Dataset sample is too long ({}). Please increase `packed_sequence_size`."
    samples = split_of(dataset, split)
    rows, num_dropped = fitting_samples(samples, limit, multiple, drop_long_samples, sentence)
    lengths = rows.lengths
    if not len(lengths):
        raise DataError(
            "No packs were produced: every sample was longer than "
            f"packed_sequence_size={packed_sequence_size} and was dropped ({num_dropped} were), or "
            "the dataset is empty: raise the size or check the dataset."
        )
    slots = round_up(lengths, multiple)
    offsets = next_fit(slots, packed_sequence_size)[: None if max_packs is None else max_packs + 1]
    return _materialize(rows, slots, offsets, packed_sequence_size, padding_idx)


def tokenize_dataset_parallel(dataset: Any, num_proc: int) -> datasets.Dataset:
    """Calls dataset[i] for every i, in `num_proc` forked processes, and keeps the rows in order.

    For datasets that tokenize when they are read. The first error of a row ends the call.
    Raises ConfigError for num_proc < 1, DataError for a dataset without rows.
    """
    if num_proc < 1:
        raise ConfigError(
            f"num_proc={num_proc} must be at least 1 process: use 1 to stay in this one."
        )
    if not len(dataset):
        raise DataError(
            "there are no rows to tokenize: check the path, the split and the filters of the "
            "dataset."
        )
    if num_proc == 1:
        return datasets.Dataset.from_list([dict(dataset[i]) for i in range(len(dataset))])
    chunk = min(CHUNK_ROWS, ceil_div(len(dataset), num_proc))
    # by fork, so that any dataset serves, also one that cannot be pickled
    # with a generator of its own: it draws a seed, and what the caller draws does not depend on
    # `num_proc`
    how: dict[str, Any] = {
        "num_workers": num_proc,
        "multiprocessing_context": "fork",
        "generator": torch.Generator(),
    }
    chunks = DataLoader(dataset, chunk, collate_fn=lambda rows: [dict(row) for row in rows], **how)
    return datasets.Dataset.from_list(list(chain.from_iterable(chunks)))


def create_block_causal_mask(seq_lens: SeqLens) -> torch.Tensor:
    """bool [B, 1, T, T], True where a query may attend. seq_lens: document lengths of each row,
    rows of equal sum T.

    Raises ValueError when the rows have different sums.
    """
    rows = [torch.as_tensor(row, dtype=torch.int64) for row in seq_lens]
    totals = {int(row.sum()) for row in rows}
    if len(totals) != 1:
        raise ValueError(
            f"seq_lens rows sum to {sorted(totals)} and must have one sum: pad their last document."
        )
    documents = [
        torch.repeat_interleave(torch.arange(len(row), device=row.device), row) for row in rows
    ]
    index = torch.stack(documents)
    return (index[:, :, None] == index[:, None, :]).tril()[:, None]


def packed_block_causal_mask(seq_lens: SeqLens) -> torch.Tensor:
    """Returns the same as create_block_causal_mask."""
    return create_block_causal_mask(seq_lens)


def build_block_causal_additive_mask(
    seq_lens: torch.Tensor, *, seq_length: int, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """[B, 1, T, T]: 0 where a query may attend, else the lowest number of `dtype`; T = seq_length.

    seq_lens: [B, max_docs], rows padded with 0. Raises ValueError if it is not 2-D or a row does
    not sum to seq_length.
    """
    if seq_lens.ndim != 2:
        raise ValueError(
            "build_block_causal_additive_mask expects a 2D [B, max_docs] seq_lens tensor, got "
            f"shape {tuple(seq_lens.shape)}."
        )
    sums = seq_lens.sum(dim=1).tolist()
    if any(total != seq_length for total in sums):
        raise ValueError(
            f"Packed seq_lens rows must each sum to seq_length={seq_length}, got {sums}."
        )
    allowed = create_block_causal_mask(seq_lens.to(device))
    mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return mask.masked_fill(~allowed, torch.finfo(dtype).min)


def split_of(dataset: Any, split: str) -> Any:
    """Only a DatasetDict is indexed by `split`."""
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset
    if split not in dataset:
        logger.warning("Split %r is not in the dataset.", split)
        raise DataError(
            f"split={split!r} is not in the dataset: use one of {', '.join(map(repr, dataset))}."
        )
    return dataset[split]


def flat_samples(samples: Any) -> TokenizedDocuments:
    """Samples as flat rows, -100 in copies of their labels where loss_mask is 0; the samples are
    not changed.
    """

    def masked(sample: dict[str, Any]) -> dict[str, Any]:
        columns: dict[str, Any] = {
            name: sample[name] for name in ("input_ids", "labels") if name in sample
        }
        if "loss_mask" in sample:
            is_masked = np.asarray(sample["loss_mask"]) == 0
            columns["labels"] = np.where(
                is_masked, CROSS_ENTROPY_IGNORE_IDX, np.asarray(sample["labels"])
            )
        return columns

    each = samples if isinstance(samples, Iterable) else (samples[i] for i in range(len(samples)))
    return flatten(map(masked, each))


def fitting_samples(
    samples: Any, limit: tuple[str, int], multiple: int, drop_long: bool, sentence: str
) -> tuple[TokenizedDocuments, int]:
    """Returns the samples that fit a pack, and how many were too long.

    limit     name and tokens of a pack; slots are multiples of `multiple`
    sentence  of the error for one that is too long, with a place for both numbers
    """
    rows = flat_samples(samples)
    lengths = rows.lengths
    name, size = limit
    slots = round_up(lengths, multiple)
    long = slots > size
    if long.any() and not drop_long:
        first = np.flatnonzero(long)[0]
        n = slots[first] if lengths[first] <= size else lengths[first]
        raise DataError(sentence.format(f"{n} > {size}"))
    if long.any():
        logger.warning("Dropped %d samples longer than %s=%d.", long.sum(), name, size)
    empty = lengths == 0
    if empty.any():
        logger.warning("Left out %d samples without a token.", empty.sum())
    kept = ~long & ~empty
    tokens = np.repeat(kept, lengths)
    columns = {name: values[tokens] for name, values in rows.columns.items()}
    offsets = np.append(0, np.cumsum(lengths[kept]))
    return TokenizedDocuments(columns, offsets), int(long.sum())


def _materialize(
    rows: TokenizedDocuments, slots: np.ndarray, offsets: np.ndarray, size: int, padding_idx: int
) -> datasets.Dataset:
    """Returns all packs as an Arrow table; `offsets` are documents of each pack, in the order of
    the rows.
    """
    # All padding of a pack belongs to its last document.
    slots = slots.copy()
    slots[offsets[1:] - 1] += size - np.diff(np.concatenate([[0], np.cumsum(slots)])[offsets])
    per_block = max(1, BLOCK_TOKENS // size)
    tables = []
    for start in range(0, len(offsets) - 1, per_block):
        block = offsets[start : start + per_block + 1]
        documents = slice(block[0], block[-1])
        tokens = slice(*rows.offsets[block[[0, -1]]])
        lengths = rows.lengths[documents]
        columns = {name: rows.columns[name][tokens] for name in rows.columns}
        filled = fill_slots(columns, lengths, slots[documents], padding_idx)
        filled["position_ids"] = np.minimum(filled["position_ids"], size - 1)
        by_pack = np.arange(len(block)) * size
        lists = {name: _lists(by_pack, values.astype(np.int32)) for name, values in filled.items()}
        of_pack = {"seq_lens": lengths, "seq_lens_padded": slots[documents]}
        lists |= {name: _lists(block - block[0], values) for name, values in of_pack.items()}
        tables.append(pa.table(lists))
    arrays = (*rows.columns.values(), rows.offsets, slots, offsets, np.array([size, padding_idx]))
    fingerprint = Hasher.hash_bytes([np.ascontiguousarray(values).data for values in arrays])
    # or it would pickle the whole table
    return datasets.Dataset(pa.concat_tables(tables), fingerprint=fingerprint)


def _lists(offsets: np.ndarray, values: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
