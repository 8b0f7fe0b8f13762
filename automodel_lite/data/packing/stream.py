"""Packs of a stream of documents: one pass, no lengths known ahead, a bounded number of documents in memory.

packs = PackStream(read=lambda start: islice(documents(), start, None), packed_sequence_size=4096)
for pack in packs:              as PackedDataset gives them
    state = packs.state_dict()  {"cursor": 5310, "piece": 0, "waiting": [[5297, 0], [5301, 0], [5308, 0]], ...}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from automodel_lite.data.packing.exact_fill import LOOKAHEAD, ExactFiller
from automodel_lite.data.packing.packs import lay_out
from automodel_lite.data.token_rows import flatten
from automodel_lite.errors import ConfigError, DataError

OVERLONG_IN_STREAMS = ("drop", "truncate", "error")

Place = tuple[int, int]  # number of a document in the stream, and of a row of it
Document = dict[str, np.ndarray]  # input_ids, labels


class PackStream(torch.utils.data.IterableDataset):
    """Iterates over packs of exact_fill, documents in the order of the stream, moved by about ten places.

    read(start): the documents from number `start` on, the same ones at every call; each is a row {"input_ids",
    "labels"}, or a list of the rows that were made of it (none, where nothing of it is trained on). At most 256 rows
    wait for a fitting pack. `state_dict` after a pack holds how many documents were read and the places of the rows
    that wait; `load_state_dict` reads these again and goes on with the next pack. `num_dropped` counts over-long rows,
    `num_empty` documents without a row. Raises ConfigError for settings that cannot work, DataError for a document
    that cannot.
    """

    def __init__(
        self,
        read: Callable[[int], Iterable[dict[str, Any] | list[dict[str, Any]]]],
        packed_sequence_size: int,
        *,
        overlong: str = "drop",
        slot_multiple: int = 1,
        padding_idx: int = 0,
        lookahead: int = LOOKAHEAD,
    ):
        if overlong not in OVERLONG_IN_STREAMS:
            raise ConfigError(
                f"packed_sequence.overlong={overlong!r} does not work on a stream: use one of "
                f"{', '.join(OVERLONG_IN_STREAMS)}."
            )
        if packed_sequence_size % slot_multiple:
            raise ConfigError(
                f"packed_sequence.packed_sequence_size={packed_sequence_size} must be a multiple of {slot_multiple} "
                f"(packed_sequence.slot_multiple): use {-(-packed_sequence_size // slot_multiple) * slot_multiple}."
            )
        self.read = read
        self.packed_sequence_size = packed_sequence_size
        self.overlong = overlong
        self.slot_multiple = slot_multiple
        self.padding_idx = padding_idx
        self.lookahead = lookahead
        self.num_dropped = self.num_empty = 0
        self.load_state_dict({"cursor": 0, "piece": 0, "waiting": [], "num_dropped": 0, "num_empty": 0})

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        rows = flatten(self._held.pop(number)[1] for number in next(self._packs))
        starts, lengths = rows.offsets[:-1], np.diff(rows.offsets)
        return lay_out(rows, starts, lengths, self.packed_sequence_size, self.slot_multiple, self.padding_idx)

    def state_dict(self) -> dict[str, Any]:
        """{"cursor": documents read, "piece": rows read of the one behind, "waiting": [document, row] of those that are
        in no pack yet, "num_dropped", "num_empty"}.
        """
        waiting = [list(self._held[number][0]) for number, _ in self._packs.waiting]
        cursor, piece = self._cursor
        counts = {"num_dropped": self.num_dropped, "num_empty": self.num_empty}
        return {"cursor": cursor, "piece": piece, "waiting": waiting, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cursor = (state["cursor"], state["piece"])
        self._held: dict[int, tuple[Place, Document]] = {}  # by arrival: document and row in the stream, tokens
        self._arrived = 0
        wanted = {(number, piece) for number, piece in state["waiting"]}
        if wanted:
            first, last = min(wanted)[0], max(wanted)[0]
            for number, rows in enumerate(self.read(first), start=first):
                for piece, row in enumerate(_rows(rows)):
                    if (number, piece) in wanted:
                        self._hold((number, piece), row)
                if number >= last:
                    break
        self.num_empty = state["num_empty"]
        self.num_dropped = state["num_dropped"]
        slots = [(number, self._slots(document)) for number, (_, document) in self._held.items()]
        self._packs = ExactFiller(
            self._arriving(*self._cursor),
            self.packed_sequence_size // self.slot_multiple,
            lookahead=self.lookahead,
            first_id=self._arrived,
            waiting=slots,
        )

    def _arriving(self, start: int, num_seen: int) -> Iterator[int]:
        """The slots of the rows from document `start` on, of which `num_seen` rows were read before."""
        for number, rows in enumerate(self.read(start), start=start):
            pieces = list(enumerate(_rows(rows)))
            self.num_empty += not pieces
            for piece, row in pieces[num_seen:]:
                self._cursor = (number, piece + 1) if piece + 1 < len(pieces) else (number + 1, 0)
                if self._hold((number, piece), row):
                    yield self._slots(self._held[self._arrived - 1][1])
            self._cursor, num_seen = (number + 1, 0), 0

    def _hold(self, place: Place, row: dict[str, Any]) -> bool:
        """Keeps the row for a pack; False when it is dropped."""
        number = place[0]
        input_ids, labels = np.asarray(row["input_ids"]), np.asarray(row["labels"])
        if len(input_ids) != len(labels) or not len(input_ids):
            raise DataError(
                f"document {number} has {len(input_ids)} input_ids and {len(labels)} labels: both must be equal, of "
                "at least 1 token."
            )
        if len(input_ids) > self.packed_sequence_size:
            if self.overlong == "error":
                raise DataError(
                    f"document {number} has {len(input_ids)} tokens, over packed_sequence.packed_sequence_size="
                    f"{self.packed_sequence_size}: raise it, or set packed_sequence.overlong to drop or truncate."
                )
            if self.overlong == "drop":
                self.num_dropped += 1
                return False
            input_ids, labels = input_ids[: self.packed_sequence_size], labels[: self.packed_sequence_size]
        self._held[self._arrived] = (place, {"input_ids": input_ids, "labels": labels})
        self._arrived += 1
        return True

    def _slots(self, document: Document) -> int:
        return -(-len(document["input_ids"]) // self.slot_multiple)


def _rows(rows: dict[str, Any] | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return rows if isinstance(rows, list) else [rows]
