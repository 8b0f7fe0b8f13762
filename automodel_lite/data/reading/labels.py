"""Rows that somebody else tokenized, or packed: taken as they are, once it is clear what their
labels mean.

Two conventions are in use, and they look alike. Ours are next-token aligned; Hugging Face's models
shift inside:

    input_ids   a b c d
    labels      _ c d _      aligned: labels[i] is the target of position i
    labels      _ _ c d      unshifted: labels[i] is input_ids[i]

Which one a set uses is found by comparing both with its ids, and every row is compared with what
was found. Unshifted labels are shifted here, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from automodel_lite.data.reading.documents import Document
from automodel_lite.data.reading.readers import Placed
from automodel_lite.errors import DataError
from automodel_lite.thd import COLUMNS, IGNORE_INDEX, declared_columns

Alignment = Literal["aligned", "unshifted"]


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
    if row.get("loss_weights") is not None:
        columns["loss_weights"] = _weights(row, len(input_ids))
    for name in declared_columns():
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
        columns["loss_weights"] = _weights(row, len(input_ids))
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


def find_alignment(documents: Iterable[Placed]) -> Alignment:
    """Finds which convention the labels follow: that of the first row whose labels fit only one of
    them.

    Rows without a label say nothing, however many there are; nor does `a a a`, whose next token is
    the token itself.

    documents: (place, document), read until one decides.

    Raises DataError: the labels of a row fit neither (names its place).
    """
    for where, row in documents:
        for document in [] if isinstance(row, DataError) else row.get("documents", [row]):
            is_aligned, is_unshifted, found = _compare(document)
            if not is_aligned and not is_unshifted:
                raise DataError(f"{where}: {found}: {_ONE_KIND}")
            if is_aligned != is_unshifted:
                return "aligned" if is_aligned else "unshifted"
    return "aligned"


def check_alignment(document: Document, alignment: Alignment) -> None:
    """Raises DataError for labels that follow another convention than those of the rows before."""
    is_aligned, is_unshifted, found = _compare(document)
    if not (is_aligned if alignment == "aligned" else is_unshifted):
        raise DataError(f"{found}, and the labels of other rows are {alignment}: {_ONE_KIND}")


_ONE_KIND = (
    "all labels must be of one kind; set dataset.labels=aligned or dataset.labels=unshifted to "
    "take them as they are."
)


def _compare(document: Document) -> tuple[bool, bool, str]:
    """Returns whether the labels may be next-token aligned, whether they may be unshifted, and what
    was counted.
    """
    ids = document["input_ids"]
    labels = document["labels"]
    if labels is None:
        return True, True, "no labels"
    has_label = labels != IGNORE_INDEX
    # The last token has no next one here: rows cut as ids[:-1], ids[1:] do have a label there.
    num = int(has_label.sum())
    num_inner = int(has_label[:-1].sum())
    num_own = int((has_label & (labels == ids)).sum())
    num_next = int((has_label[:-1] & (labels[:-1] == ids[1:])).sum())
    is_unshifted = num_own == num
    # Labels that are all the token itself, none of them the next one, are no aligned ones that all
    # stand at the end.
    is_aligned = num_next == num_inner and (num_next > 0 or not num or not is_unshifted)
    found = f"of {num:,} labels {num_next:,} are the next token and {num_own:,} the token itself"
    return is_aligned, is_unshifted, found


def align(document: Document) -> Document:
    """Makes unshifted labels next-token aligned; other values per token go with their labels."""
    if document["labels"] is None:
        return document
    shifted = {}
    for name in [name for name in COLUMNS if name in document and name != "input_ids"]:
        shifted[name] = np.full_like(document[name], COLUMNS[name].padding)
        shifted[name][:-1] = document[name][1:]
    return {**document, **shifted}


def _weights(row: dict[str, Any], length: int) -> np.ndarray:
    """Column `loss_weights`; raises DataError for what is no finite number from 0 on, or not one
    per token.
    """
    try:
        weights = np.asarray(row["loss_weights"], COLUMNS["loss_weights"].stored)
        is_sound = weights.shape == (length,) and bool(
            (np.isfinite(weights) & (weights >= 0)).all()
        )
    except (TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise DataError(
            f"column loss_weights must be a list of {length} numbers from 0 on, one per input id."
        )
    return weights


def _numbers(row: dict[str, Any], name: str, length: int) -> np.ndarray:
    """A column that a loss declares; raises DataError for what is not one finite number per token,
    or one of the row.
    """
    if COLUMNS[name].of_row:
        value = row[name]
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise DataError(f"column {name} must be one finite number of the row, not {value!r}.")
        return np.full(length, value, COLUMNS[name].stored)
    try:
        values = np.asarray(row[name], COLUMNS[name].stored)
        is_sound = values.shape[:1] == (length,) and bool(np.isfinite(values).all())
    except (TypeError, ValueError, OverflowError):
        is_sound = False
    if not is_sound:
        raise DataError(
            f"column {name} must be a list of {length} finite numbers, one per input id."
        )
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
            f"column {column} has {len(numbers)} values and input_ids {length}: the counts must be "
            "equal."
        )
    if len(numbers) and (numbers.min() < -(2**31) or numbers.max() >= 2**31):
        raise DataError(f"column {column} holds {numbers.max()}, which is not a token id.")
    return numbers.astype(np.int32)
