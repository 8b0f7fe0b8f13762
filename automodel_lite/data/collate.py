"""Packs or loose rows -> the tensors of a batch. Rows are not changed: datasets may cache them.

Legend: B rows, S row length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from automodel_lite.data.packing.packs import StackedPacks
from automodel_lite.thd import COLUMNS, SEQ_LENS_PADDING

PAD_TOKEN_IDS_KEY = "___PAD_TOKEN_IDS___"
"""Key of a row under which a dataset may name a pad value for each of its fields."""


def packed_sequence_thd_collater(batch: Sequence[Mapping[str, Any]] | StackedPacks) -> dict[str, Any]:
    """Packs (or loose rows) -> the batch that `thd.to_thd` and `thd.process_input_for_thd` take.

    input_ids, labels, position_ids  int64 [B, S]
    seq_lens, seq_lens_padded        int64 [B, longest list], filled up with SEQ_LENS_PADDING
    qkv_format                       "thd"
    Rows without `seq_lens` become one document each, padded to the longest row of the batch. Raises ValueError for
    packs of unequal length. StackedPacks, which a DataLoader fetches from PackedDataset, hold the batch already.
    """
    if not batch:
        return {}
    if isinstance(batch, StackedPacks):
        return batch.columns | {"qkv_format": "thd"}
    packed = ["seq_lens" in row for row in batch]
    if any(packed) and not all(packed):
        raise ValueError("a batch holds either packs (with seq_lens) or loose rows (without), not both.")
    rows = batch if all(packed) else _rows_as_documents(batch)
    dtypes = {name: getattr(torch, COLUMNS[name].batched) for name in COLUMNS if name in rows[0]}
    collated: dict[str, Any] = {
        key: _stack_rows(key, [row[key] for row in rows], dtype)
        for key, dtype in (dtypes | {"position_ids": torch.long}).items()
    }
    for key in ("seq_lens", "seq_lens_padded"):
        collated[key] = torch.nn.utils.rnn.pad_sequence(
            [torch.as_tensor(row[key], dtype=torch.long) for row in rows],
            batch_first=True,
            padding_value=SEQ_LENS_PADDING,
        )
    return collated | {"qkv_format": "thd"}


def _rows_as_documents(batch: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of any lengths -> packs of one document each, as long as the longest."""
    longest = max(len(row["input_ids"]) for row in batch)
    packs = []
    for row in batch:
        ids = as_list(row["input_ids"])
        padding = {name: column.padding for name, column in COLUMNS.items()}
        padding["input_ids"] = row.get(PAD_TOKEN_IDS_KEY, {}).get("input_ids", 0)
        columns = {name: as_list(row[name]) for name in COLUMNS if name in row}
        mask = row.get("attention_mask")
        num_real = len(ids) if mask is None else int(sum(as_list(mask))) or len(ids)
        packs.append(
            {
                **{name: values + [padding[name]] * (longest - len(values)) for name, values in columns.items()},
                "position_ids": list(range(longest)),
                "seq_lens": [num_real],
                "seq_lens_padded": [longest],
            }
        )
    return packs


def _stack_rows(key: str, rows: list[Any], dtype: torch.dtype) -> Tensor:
    """[B, S]."""
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise ValueError(f"{key}: packs of a batch must have one length, got {lengths}.")
    return torch.stack([torch.as_tensor(row, dtype=dtype) for row in rows])


def as_list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)
