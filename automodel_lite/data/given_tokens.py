"""Rows that somebody else tokenised, or packed: taken as they are, once it is clear what their labels mean.

Two conventions are in use, and they look alike. Ours are next-token aligned; Hugging Face's models shift inside:

    input_ids   a b c d
    labels      _ c d _      aligned: labels[i] is the target of position i
    labels      _ _ c d      unshifted: labels[i] is input_ids[i]

Which one a set uses is found by comparing both with its ids; unshifted labels are shifted here, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from automodel_lite.data.documents import Document
from automodel_lite.data.token_rows import ID_DTYPE
from automodel_lite.errors import DataError
from automodel_lite.thd import IGNORE_INDEX

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

    Padding is left out. The documents are packed anew, to the size and by the strategy of the run.
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
        raise DataError(f"column {column} holds {numbers.max()}, which is no token id.")
    return numbers.astype(ID_DTYPE)
