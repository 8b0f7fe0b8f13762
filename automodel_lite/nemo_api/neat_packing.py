"""Neat packing: worst-fit decreasing, rows with an indexed attention mask instead of document
lengths.

documents [1 2 3] and [4 5], size 6     input_ids 1 2 3 4 5 0   attention_mask 1 1 1 2 2 0
position_ids 0 1 2 0 1 0
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
import torch

from automodel_lite.data.packing.packs import fill_slots
from automodel_lite.data.tokens.token_rows import flatten
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.nemo_api.packed_sequence import fitting_samples, split_of


def greedy_knapsack(lengths: Sequence[int] | np.ndarray, max_length: int) -> list[list[int]]:
    """Returns positions in `lengths` of each bin: longest first into the emptiest bin if it fits,
    else a new one.

    Items over max_length are skipped. greedy_knapsack([3, 2, 4, 1], 5) -> [[2, 3], [0, 1]]
    """
    lengths = np.asarray(lengths, np.int64)
    order = np.argsort(-lengths, kind="stable")
    packs: list[list[int]] = []
    fills: list[tuple[int, int]] = []  # heap of (tokens, pack)
    for i, length in zip(order.tolist(), lengths[order].tolist()):
        if length > max_length:
            continue
        if fills and fills[0][0] + length <= max_length:
            tokens, pack = fills[0]
            heapq.heapreplace(fills, (tokens + length, pack))
            packs[pack].append(i)
        else:
            heapq.heappush(fills, (length, len(packs)))
            packs.append([i])
    return packs


def neat_pack_dataset(
    dataset: Any,
    split: str,
    pack_size: int,
    max_packs: int | None = None,
    padding_idx: int = 0,
    drop_long_samples: bool = False,
) -> datasets.Dataset:
    """All packs of greedy_knapsack at once: columns input_ids, labels, attention_mask, position_ids
    [pack_size].

    attention_mask is the document's index from 1 on, 0 on padding; position_ids restart in each
    document and are 0 on padding; labels are -100 on padding. `max_packs` takes the first ones.
    Raises ValueError for a sample over pack_size unless drop_long_samples, and when no sample is
    left.
    """
    if max_packs is not None and max_packs < 1:
        raise ConfigError(f"max_packs={max_packs} must be at least 1: use None for all packs.")
    sentence = "Sample is too long ({}). Set drop_long_samples=True or increase pack_size."
    samples = split_of(dataset, split)
    rows, _ = fitting_samples(samples, ("pack_size", pack_size), 1, drop_long_samples, sentence)
    if not len(rows):
        raise DataError("No samples remaining after filtering.")
    packs = greedy_knapsack(rows.lengths, pack_size)[:max_packs]
    packed = [
        _build_packed_sample([rows[i] for i in pack], pack_size, padding_idx) for pack in packs
    ]
    return datasets.Dataset.from_dict(
        {name: [row[name].numpy() for row in packed] for name in packed[0]}
    )


def _build_packed_sample(
    samples: Sequence[dict[str, Any]], pack_size: int, padding_idx: int
) -> dict[str, torch.Tensor]:
    """One row of int64 tensors [pack_size] from samples {"input_ids", "labels"} that together fit
    it.
    """
    rows = flatten(samples)
    num_padding = pack_size - rows.num_tokens
    if num_padding < 0:
        raise DataError(
            f"samples of {rows.num_tokens} tokens do not fit pack_size={pack_size}: pass fewer."
        )
    # the padding is a segment of its own, without a token
    slots = np.append(rows.lengths, num_padding)
    columns = {name: rows.columns[name] for name in ("input_ids", "labels")}
    filled = fill_slots(columns, np.append(rows.lengths, 0), slots, padding_idx)
    is_real = np.arange(pack_size) < rows.num_tokens
    filled["position_ids"] *= is_real
    filled["attention_mask"] = np.arange(1, len(slots) + 1).repeat(slots) * is_real
    names = ("input_ids", "labels", "attention_mask", "position_ids")
    return {name: torch.from_numpy(filled[name].astype(np.int64)) for name in names}
