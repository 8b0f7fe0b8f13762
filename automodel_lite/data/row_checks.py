"""What is wrong with a set of token rows is found here: counted row by row, judged at the end of the set.

Token rows made visible: which tokens are trained on.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import asdict, dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from automodel_lite.errors import DataError
from automodel_lite.thd import IGNORE_INDEX

MAX_UNSTOPPED_FRAC = 0.01
SHOWN_TOKENS = 300


@dataclass(frozen=True)
class RowCounts:
    """What became of the documents of one set; one that gave no row is in one of the last three counts."""

    num_documents: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_label_tokens: int = 0
    num_split_chats: int = 0  # became one row a turn, because the template rewrites earlier turns
    num_bad: int = 0
    num_empty: int = 0
    num_fully_masked: int = 0

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(**{name: value + asdict(other)[name] for name, value in asdict(self).items()})

    def __str__(self) -> str:
        """`2,000 documents → 1,998 rows, 151,022 tokens, 45% trained on, 2 bad skipped`."""
        parts = [f"{self.num_documents:,} documents → {self.num_rows:,} rows", f"{self.num_tokens:,} tokens"]
        if self.num_tokens:
            parts.append(f"{self.num_label_tokens / self.num_tokens:.0%} trained on")
        notes = {
            "bad skipped": self.num_bad,
            "empty dropped": self.num_empty,
            "fully masked dropped": self.num_fully_masked,
            "split into one row a turn": self.num_split_chats,
        }
        parts += [f"{count:,} {note}" for note, count in notes.items() if count]
        return ", ".join(parts)


@dataclass(frozen=True)
class Chunk:
    """Rows of some documents, end to end, those that train nothing left out; counts, and one example a fault."""

    input_ids: np.ndarray  # int32 [total]
    labels: np.ndarray  # int32 [total]
    lengths: np.ndarray  # int64 [N]
    counts: RowCounts
    num_fully_trained: int
    num_unstopped: int
    fully_masked: tuple[np.ndarray, np.ndarray] | None  # input_ids, labels
    unstopped: tuple[np.ndarray, np.ndarray] | None
    first_error: str


def check_rows(
    input_ids: np.ndarray,
    labels: np.ndarray,
    lengths: np.ndarray,
    *,
    stop_ids: Set[int],
    num_documents: int,
    num_bad: int,
    num_split_chats: int,
    first_error: str,
) -> Chunk:
    """Leaves out rows without a label; counts those where all is trained on, or that train no stop token last."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    has_label = labels != IGNORE_INDEX
    num_labels = np.diff(np.concatenate([[0], np.cumsum(has_label)])[offsets])
    kept = num_labels > 0
    unstopped = kept & ~np.isin(_last_labels(labels, has_label, offsets), sorted(stop_ids))
    kept_tokens = np.repeat(kept, lengths)
    counts = RowCounts(
        num_documents=num_documents,
        num_rows=int(kept.sum()),
        num_tokens=int(lengths[kept].sum()),
        num_label_tokens=int(num_labels.sum()),
        num_split_chats=num_split_chats,
        num_bad=num_bad,
        num_empty=int((lengths == 0).sum()),
        num_fully_masked=int((~kept & (lengths > 0)).sum()),
    )

    def first(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        if not rows.any():
            return None
        row = int(np.flatnonzero(rows)[0])
        part = slice(offsets[row], min(offsets[row + 1], offsets[row] + SHOWN_TOKENS))
        return input_ids[part].copy(), labels[part].copy()

    return Chunk(
        input_ids=input_ids[kept_tokens],
        labels=labels[kept_tokens],
        lengths=lengths[kept],
        counts=counts,
        num_fully_trained=int((kept & (num_labels == lengths - 1)).sum()),
        num_unstopped=int(unstopped.sum()),
        fully_masked=first(~kept & (lengths > 0)),
        unstopped=first(unstopped),
        first_error=first_error,
    )


def _last_labels(labels: np.ndarray, has_label: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The last label of each document that has one (of the others: anything)."""
    if not len(labels):
        return np.full(len(offsets) - 1, IGNORE_INDEX)
    last_label_at = np.maximum.accumulate(np.where(has_label, np.arange(len(labels)), 0))
    return labels[last_label_at[offsets[1:] - 1]]


class Tally:
    """Counts the chunks of a set and stops when too much of it cannot be trained on.

    Args:
        kind: of the documents, see `Documents`; text is meant to be trained on whole, and what ends given token ids
            is their maker's choice.
        max_bad_frac: of the documents may be bad, empty or fully masked.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kind: str, train_on: str, max_bad_frac: float):
        self.counts = RowCounts()
        self._tokenizer = tokenizer
        self._kind = kind
        self._train_on = train_on
        self._max_bad_frac = max_bad_frac
        self._num_fully_trained = self._num_unstopped = 0
        self._fully_masked: tuple[np.ndarray, np.ndarray] | None = None
        self._unstopped: tuple[np.ndarray, np.ndarray] | None = None
        self._row: tuple[np.ndarray, np.ndarray] | None = None
        self._first_error = ""

    def add(self, chunk: Chunk) -> None:
        self.counts += chunk.counts
        self._num_fully_trained += chunk.num_fully_trained
        self._num_unstopped += chunk.num_unstopped
        self._fully_masked = self._fully_masked or chunk.fully_masked
        self._unstopped = self._unstopped or chunk.unstopped
        self._first_error = self._first_error or chunk.first_error
        if self._row is None and len(chunk.lengths):
            shown = slice(0, min(int(chunk.lengths[0]), SHOWN_TOKENS))
            self._row = chunk.input_ids[shown].copy(), chunk.labels[shown].copy()

    def finish(self, name: str) -> None:
        """Judges the whole set `name`.

        Raises:
            DataError: too many unusable documents, no row, everything trained on, or no trained stop token.
        """
        counts = self.counts
        if not counts.num_documents:
            raise DataError(f"{name}: there is no document in it.")
        unusable = counts.num_bad + counts.num_empty + counts.num_fully_masked
        if counts.num_rows == 0 or unusable > self._max_bad_frac * counts.num_documents:
            raise DataError(f"{name}: {self._unusable()}")
        if self._num_fully_trained == counts.num_rows and self._kind != "text" and self._train_on != "all":
            raise DataError(
                f"{name}: every token of all {counts.num_rows:,} rows is trained on, the questions too; "
                f"train_on=all asks for that, train_on={self._train_on} does not. {self._shown(self._row)}"
            )
        if self._kind != "tokens" and self._num_unstopped > MAX_UNSTOPPED_FRAC * counts.num_rows:
            raise DataError(
                f"{name}: {self._num_unstopped:,} of {counts.num_rows:,} rows do not end on a trained stop token, so "
                f"the model would not learn to stop: mend the chat template. {self._shown(self._unstopped)}"
            )

    def _unusable(self) -> str:
        counts = self.counts
        text = (
            f"{counts.num_documents:,} documents: {counts.num_bad:,} bad, {counts.num_empty:,} empty, "
            f"{counts.num_fully_masked:,} with nothing trained on (train_on={self._train_on}); "
        )
        text += (
            f"max_bad_frac={self._max_bad_frac} allows {int(self._max_bad_frac * counts.num_documents):,}."
            if counts.num_rows
            else "nothing is left to train on."
        )
        if self._first_error:
            text += f" First bad row: {self._first_error}"
        return f"{text} {self._shown(self._fully_masked)}" if self._fully_masked else text

    def _shown(self, row: tuple[np.ndarray, np.ndarray] | None) -> str:
        assert row is not None
        return f"One of them, trained tokens in ⟦ ⟧: {mark_trained(self._tokenizer, *row)!r}"


def mark_trained(
    tokenizer: PreTrainedTokenizerBase, input_ids: np.ndarray, labels: np.ndarray, colour: bool = False
) -> str:
    """The decoded document with what is trained on in `⟦ ⟧`, or in green: `<|user|>Hi<|end|>⟦Hello<|end|>⟧`.

    A token is trained on when the position before it has a label.
    """
    trained = np.concatenate([[False], labels[:-1] != IGNORE_INDEX]) if len(labels) else np.zeros(0, bool)
    edges = np.flatnonzero(np.diff(trained)) + 1
    start_mark, end_mark = ("\x1b[32m", "\x1b[0m") if colour else ("⟦", "⟧")
    parts = []
    for piece in np.split(np.arange(len(input_ids)), edges):
        text = str(tokenizer.decode([int(i) for i in input_ids[piece]]))
        parts.append(f"{start_mark}{text}{end_mark}" if len(piece) and trained[piece[0]] else text)
    return "".join(parts)
