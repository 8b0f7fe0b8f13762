"""Samples of a dataset -> the tensors of a batch. Samples are never changed: datasets may cache them.

Legend: B rows, S row length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from automodel_lite.thd import IGNORE_INDEX, SEQ_LENS_PADDING

PAD_TOKEN_IDS_KEY = "___PAD_TOKEN_IDS___"
"""Key of a sample under which a dataset may name a pad value for each of its fields."""


def packed_sequence_thd_collater(batch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Packs (or loose rows) -> the batch that `thd.to_thd` and `thd.process_input_for_thd` take.

    input_ids, labels, position_ids  int64 [B, S]
    seq_lens, seq_lens_padded        int64 [B, longest list], filled up with SEQ_LENS_PADDING
    qkv_format                       "thd"
    Rows without `seq_lens` become one document each, padded to the longest row of the batch. Raises ValueError for
    packs of unequal length.
    """
    if not batch:
        return {}
    rows = batch if all("seq_lens" in row for row in batch) else _rows_as_documents(batch)
    collated: dict[str, Any] = {
        key: _stack_rows(key, [row[key] for row in rows]) for key in ("input_ids", "labels", "position_ids")
    }
    for key in ("seq_lens", "seq_lens_padded"):
        collated[key] = torch.nn.utils.rnn.pad_sequence(
            [torch.as_tensor(row[key], dtype=torch.long) for row in rows],
            batch_first=True,
            padding_value=SEQ_LENS_PADDING,
        )
    return collated | {"qkv_format": "thd"}


def pack_features_for_thd(
    features: Sequence[Mapping[str, Any]], *, ignore_index: int = IGNORE_INDEX
) -> dict[str, list[int]]:
    """Loose examples -> one pre-packed record: `input_ids, labels, position_ids, seq_lens, seq_lens_padded`.

    An example without labels carries no loss (`ignore_index`). Raises ValueError without examples, for an empty one,
    and where labels and ids differ in length.
    """
    if not features:
        raise ValueError("pack_features_for_thd requires at least one feature")
    record: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": [], "seq_lens": []}
    for feature in features:
        ids = _as_list(feature["input_ids"])
        labels = _as_list(feature["labels"]) if feature.get("labels") is not None else [ignore_index] * len(ids)
        if not ids:
            raise ValueError("pack_features_for_thd cannot pack an empty sequence")
        if len(labels) != len(ids):
            raise ValueError(f"labels length {len(labels)} does not match input_ids length {len(ids)}")
        record["input_ids"] += ids
        record["labels"] += labels
        record["position_ids"] += range(len(ids))
        record["seq_lens"].append(len(ids))
    return record | {"seq_lens_padded": list(record["seq_lens"])}


def _rows_as_documents(batch: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of any lengths -> packs of one document each, as long as the longest."""
    longest = max(len(row["input_ids"]) for row in batch)
    packs = []
    for row in batch:
        ids, labels = _as_list(row["input_ids"]), _as_list(row["labels"])
        missing = longest - len(ids)
        pad_id = row.get(PAD_TOKEN_IDS_KEY, {}).get("input_ids", 0)
        mask = row.get("attention_mask")
        packs.append(
            {
                "input_ids": ids + [pad_id] * missing,
                "labels": labels + [IGNORE_INDEX] * (longest - len(labels)),
                "position_ids": list(range(longest)),
                "seq_lens": [len(ids) if mask is None else int(sum(_as_list(mask)))],
                "seq_lens_padded": [longest],
            }
        )
    return packs


def _stack_rows(key: str, rows: list[Any]) -> Tensor:
    """int64 [B, S]."""
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise ValueError(f"{key}: packs of a batch must have one length, got {lengths}.")
    return torch.stack([torch.as_tensor(row, dtype=torch.long) for row in rows])


def _as_list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)
