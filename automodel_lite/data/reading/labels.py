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
from typing import Literal

import numpy as np

from automodel_lite.columns import COLUMNS, IGNORE_INDEX
from automodel_lite.data.document import Document
from automodel_lite.data.reading.readers import Placed
from automodel_lite.errors import DataError

Alignment = Literal["aligned", "unshifted"]


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
