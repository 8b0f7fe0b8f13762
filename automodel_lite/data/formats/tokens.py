"""Rows that somebody else tokenized, or packed."""

from __future__ import annotations

from typing import Any

import numpy as np

from automodel_lite.columns import COLUMNS, IGNORE_INDEX, declared_columns
from automodel_lite.data.document import Document
from automodel_lite.errors import DataError, counted


def tokens(row: dict[str, Any]) -> Document:
    """`input_ids`, optional `labels`, `loss_mask` (0 = no loss), `attention_mask` (0 = padding,
    which is cut off), and numbers that stand where the labels do: `loss_weights`, and the columns
    that the loss declares.
    """
    input_ids = integers_of(row, "input_ids")
    labels = integers_of(row, "labels", len(input_ids)) if row.get("labels") is not None else None
    if row.get("loss_mask") is not None:
        masked = integers_of(row, "loss_mask", len(input_ids)) == 0
        labels = np.where(masked, IGNORE_INDEX, input_ids if labels is None else labels).astype(
            np.int32
        )
    columns = {}
    for name in ("loss_weights", *declared_columns()):
        if row.get(name) is not None and COLUMNS[name].of_row in ("", "value"):
            columns[name] = _numbers(row, name, len(input_ids))
    if row.get("attention_mask") is not None:
        real = integers_of(row, "attention_mask", len(input_ids)) != 0
        input_ids = input_ids[real]
        labels = None if labels is None else labels[real]
        columns = {name: values[real] for name, values in columns.items()}
    return {"input_ids": input_ids, "labels": labels, **columns}


def packed_tokens(row: dict[str, Any]) -> Document:
    """A pack: `input_ids`, `labels`, `seq_lens` (real tokens), optional `seq_lens_padded` (slots)
    and `loss_weights`; taken apart again.

    Padding is left out. The documents are packed again, to the size and by the strategy of the run.
    """
    input_ids = integers_of(row, "input_ids")
    columns = {"input_ids": input_ids, "labels": integers_of(row, "labels", len(input_ids))}
    if row.get("loss_weights") is not None:
        columns["loss_weights"] = _numbers(row, "loss_weights", len(input_ids))
    lengths = integers_of(row, "seq_lens")
    slots = (
        integers_of(row, "seq_lens_padded", len(lengths))
        if row.get("seq_lens_padded") is not None
        else lengths
    )
    if (slots < lengths).any() or slots.sum() > len(input_ids):
        raise DataError(
            f"column seq_lens holds documents of {int(lengths.sum())} tokens in slots of "
            f"{int(slots.sum())}, for {len(input_ids)} input_ids: slots must hold their documents, "
            "and the row all slots."
        )
    starts = np.cumsum(slots) - slots
    parts = [slice(int(start), int(start + length)) for start, length in zip(starts, lengths)]
    documents = []
    for part in parts or [slice(0)]:
        documents.append({name: values[part] for name, values in columns.items()})
    return {"documents": documents}


def _numbers(row: dict[str, Any], name: str, length: int) -> np.ndarray:
    """`loss_weights`, or a column that a loss declares; raises DataError for what is not one finite
    number per token, or one of the row, and for weights under 0.
    """
    is_weight = name == "loss_weights"
    if COLUMNS[name].of_row:
        value = row[name]
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise DataError(f"column {name} must be one finite number of the row, not {value!r}.")
        return np.full(length, value, COLUMNS[name].stored)
    try:
        values = np.asarray(row[name], COLUMNS[name].stored)
        shape = values.shape if is_weight else values.shape[:1]
        least = 0 if is_weight else -np.inf
        is_sound = shape == (length,) and (np.isfinite(values) & (values >= least)).all()
    except (TypeError, ValueError, OverflowError):
        is_sound = False
    if not is_sound:
        kind = "numbers from 0 on" if is_weight else "finite numbers"
        raise DataError(f"column {name} must be a list of {length} {kind}, one per input id.")
    return values


def integers_of(row: dict[str, Any], column: str, length: int | None = None) -> np.ndarray:
    value = row.get(column)
    try:
        numbers = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise DataError(f"column {column} must be a flat list of integers.") from error
    if value is None or numbers.ndim != 1 or (numbers.dtype.kind not in "iub" and len(numbers)):
        raise DataError(
            f"column {column} must be a list of integers, not {type(value).__name__} "
            f"{str(value)[:40]!r}."
        )
    if length is not None and len(numbers) != length:
        raise DataError(
            f"column {column} has {counted(len(numbers), 'value')} and input_ids {length}: the "
            "counts must be equal."
        )
    if len(numbers) and (numbers.min() < -(2**31) or numbers.max() >= 2**31):
        raise DataError(f"column {column} holds {numbers.max()}, which is not a token id.")
    return numbers.astype(np.int32)
