"""The one rule of documents that are longer than a pack: dropped, cut to their beginning, split
into pieces, or an error. Packs of files and of streams follow it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from automodel_lite.config.sizes import ceil_div
from automodel_lite.data.tokens.token_rows import places_within
from automodel_lite.errors import DataError, counted

Part = slice | np.ndarray
HasLabels = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(documents, starts, stops) -> bool: does this part of each train something?"""


@dataclass(frozen=True)
class Pieces:
    """Documents or parts of them.

    doc_ids         int32|int64 [P]
    starts, stops   int64 [P], the tokens of each document that are meant; None where every document
                    is whole
    """

    doc_ids: np.ndarray
    starts: np.ndarray | None = None
    stops: np.ndarray | None = None

    def piece_lengths(self, lengths: np.ndarray, part: Part = slice(None)) -> np.ndarray:
        """Returns real tokens of the entries of doc_ids, all or a part of them, int64; `lengths` of
        documents.
        """
        if self.starts is None or self.stops is None:
            return np.asarray(lengths)[self.doc_ids[part]].astype(np.int64, copy=False)
        return self.stops[part] - self.starts[part]

    def take(self, order: np.ndarray) -> Pieces:
        whole = self.starts is None or self.stops is None
        return (
            Pieces(self.doc_ids[order])
            if whole
            else Pieces(*(x[order] for x in vars(self).values()))
        )


def check_overlong(
    lengths: np.ndarray, size: int, overlong: str, first: int = 0, can_cut: bool = True
) -> None:
    """Raises DataError for documents over the size where the rule leaves none, or is `error`.

    first    the number of the first document, for the message
    can_cut  would a run of these documents cut them?
    """
    long = lengths > size
    if not long.any() or not (overlong == "error" or (overlong == "drop" and long.all())):
        return
    extreme = int(lengths.argmax() if overlong == "error" else lengths.argmin())
    drop = "drop" if overlong == "error" else ""
    cut = "truncate or split" if can_cut else ""
    others = ", ".join(filter(None, (drop, cut)))
    cure = f", or set packed_sequence.overlong to {others}" if others else ""
    raise DataError(
        f"{counted(int(long.sum()), 'document', 'is', of=len(lengths))} over "
        f"packed_sequence.packed_sequence_size={size}, such as document {first + extreme} with "
        f"{int(lengths[extreme])} tokens: raise it{cure}."
    )


def fit_documents(
    lengths: np.ndarray, size: int, overlong: str, has_labels: HasLabels | None
) -> tuple[Pieces | None, dict[str, int]]:
    """Returns what is left of the documents when none is over the size (None: all of them), and
    `PlanCounts` of the rest.

    has_labels  asked which pieces of over-long documents still train something; the others are left
                out (None: all do)
    """
    long = lengths > size
    if not long.any():
        return None, {}
    if overlong == "drop":
        counts = {"dropped_documents": int(long.sum()), "dropped_tokens": int(lengths[long].sum())}
        return Pieces(np.flatnonzero(~long)), counts
    counts = {}
    # a document gives all of its pieces, or its first one
    num_pieces = ceil_div(lengths, size)
    if overlong == "truncate":
        num_pieces = np.ones(len(lengths), np.int64)
        counts["truncated_documents"] = int(long.sum())
        counts["cut_tokens"] = int((lengths[long] - size).sum())
    doc_ids = np.repeat(np.arange(len(lengths)), num_pieces)
    starts = places_within(num_pieces) * size
    stops = np.minimum(starts + size, lengths[doc_ids])
    pieces = Pieces(doc_ids, starts, stops)
    if has_labels is None:
        return pieces, counts
    # documents that fit are whole, and were judged when they were tokenized
    cut = np.flatnonzero(long[doc_ids])
    is_masked = np.zeros(len(doc_ids), bool)
    is_masked[cut] = ~has_labels(doc_ids[cut], starts[cut], stops[cut])
    kept = pieces.take(np.flatnonzero(~is_masked))
    counts["masked_documents"] = len(np.setdiff1d(doc_ids[is_masked], kept.doc_ids))
    counts["masked_tokens"] = int((stops - starts)[is_masked].sum())
    return kept, counts
