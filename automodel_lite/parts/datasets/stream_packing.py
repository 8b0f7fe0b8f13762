"""The documents of a stream become packs in one pass: no lengths known ahead, a bounded number of
documents in memory.

packs = PackStream(lambda start: islice(documents(), start, None),
Packer(packed_sequence_size=4096))
for pack in packs:              as PackedDataset gives them
    state = packs.state_dict()  {"cursor": 5310, "waiting": [[5297, 0], [5301, 0], [5308, 0]], ...}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from automodel_lite.columns import COLUMNS, IGNORE_INDEX
from automodel_lite.config.sizes import ceil_div
from automodel_lite.data.packing.histogram import LOOKAHEAD, ExactFiller
from automodel_lite.data.packing.overlong import check_overlong, fit_documents
from automodel_lite.data.packing.packs import Packer
from automodel_lite.data.tokens.token_rows import flatten
from automodel_lite.errors import DataError

Row = dict[str, np.ndarray]
Place = tuple[int, int]  # number of a document in the stream, and of a row of it

STREAM_COUNTS = ("num_documents", "num_empty", "num_dropped", "num_tokens", "dropped_tokens")
"""Of the documents that were read: all, those without a row or without a label after cutting,
over-long rows that were dropped; and tokens of all rows, and of those.
"""


class PackStream(Iterator[dict[str, Any]]):
    """Iterates over packs of exact_fill, documents in the order of the stream, shifted by about ten
    places.

    read(start): the documents from number `start` on, the same ones at every call; each is a list
    of the rows {"input_ids", "labels"} that were made of it (none, where nothing of it is trained
    on). At most `lookahead` rows, and those of one document, wait for a fitting pack. `state_dict`
    after a pack holds how many documents were read and the places of the rows that wait;
    `load_state_dict` reads these again and goes on with the next pack. `counts` are STREAM_COUNTS.

    Raises:
        ConfigError: settings that cannot work.
        DataError: a document that cannot.
    """

    def __init__(
        self, read: Callable[[int], Iterable[list[Row]]], packer: Packer, lookahead: int = LOOKAHEAD
    ):
        self._read = read
        self.packer = packer
        self.lookahead = lookahead
        self.load_state_dict({"cursor": 0, "waiting": []})

    def __next__(self) -> dict[str, Any]:
        return self.packer.pack_of(
            flatten(self._held.pop(number)[1] for number in next(self._packs))
        )

    def state_dict(self) -> dict[str, Any]:
        """{"cursor": documents read, "waiting": [document, row] of those in no pack yet, and
        STREAM_COUNTS}.
        """
        waiting = [list(place) for place, _ in self._held.values()]
        return {
            "cursor": self._cursor,
            "waiting": waiting,
            **self.counts,
            "num_documents": self._cursor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = dict.fromkeys(STREAM_COUNTS, 0)
        # by arrival: document and row in the stream, tokens
        self._held: dict[int, tuple[Place, Row]] = {}
        self._arrived = 0
        self._cursor = min((number for number, _ in state["waiting"]), default=state["cursor"])
        wanted = {(number, row) for number, row in state["waiting"]}
        # The documents whose rows wait are read again, and those between them: the first arrivals
        # of a new filler.
        waiting = list(self._arriving(state["cursor"], wanted)) if wanted else []
        self._cursor = state["cursor"]
        self.counts |= {name: state.get(name, 0) for name in STREAM_COUNTS}
        size = self.packer.packed_sequence_size // self.packer.slot_multiple
        self._packs = ExactFiller(chain(waiting, self._arriving()), size, lookahead=self.lookahead)

    def _arriving(self, stop: int | None = None, wanted: set[Place] | None = None) -> Iterator[int]:
        """The slots of the rows of the documents from the cursor on, up to `stop`; all rows, or
        those `wanted`.
        """
        if self._cursor == stop:
            return
        for rows in self._read(self._cursor):
            fitting = self._fitting(rows)
            places = [(self._cursor, piece) for piece in range(len(fitting))]
            self._cursor += 1
            arrived = [held for held in zip(places, fitting) if wanted is None or held[0] in wanted]
            self._held |= enumerate(arrived, start=self._arrived)
            self._arrived += len(arrived)
            # All rows of a document are held before the first is packed: a position is never within
            # a document.
            yield from [
                ceil_div(len(row["input_ids"]), self.packer.slot_multiple) for _, row in arrived
            ]
            if self._cursor == stop:
                return

    def _fitting(self, rows: list[Row]) -> list[Row]:
        """The rows of a document as packs hold them: none over the size of a pack, each with a
        label; counted.
        """
        # 1. The columns of each row, which must be of one length.
        documents = []
        for row in rows:
            columns = {name: np.asarray(row[name]) for name in COLUMNS if name in row}
            length = len(columns["input_ids"])
            if length != len(columns["labels"]) or not length:
                raise DataError(
                    f"document {self._cursor} has {length} input_ids and {len(columns['labels'])} "
                    "labels: both must be equal, of at least 1 token."
                )
            documents.append(columns)
        # 2. What is longer than a pack is refused, dropped or cut, by the packer's `overlong`.
        lengths = np.array([len(columns["input_ids"]) for columns in documents], np.int64)
        size = self.packer.packed_sequence_size
        if self.packer.overlong == "error":
            can_cut = self.packer.can_cut
            check_overlong(lengths, size, "error", first=self._cursor, can_cut=can_cut)

        def has_labels(ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
            parts = [documents[i]["labels"][a:b] for i, a, b in zip(ids, starts, stops)]
            return np.array([(part != IGNORE_INDEX).any() for part in parts], bool)

        pieces, lost = fit_documents(lengths, size, self.packer.overlong, has_labels)
        self.counts["num_tokens"] += int(lengths.sum())
        self.counts["num_dropped"] += lost.get("dropped_documents", 0)
        self.counts["dropped_tokens"] += lost.get("dropped_tokens", 0)
        # 3. The pieces: None, all documents are whole; without starts, those that are left.
        if pieces is None:
            fitting = documents
        elif pieces.starts is None or pieces.stops is None:
            fitting = [documents[i] for i in pieces.doc_ids]
        else:
            fitting = []
            for i, start, stop in zip(pieces.doc_ids, pieces.starts, pieces.stops):
                fitting.append({name: x[start:stop] for name, x in documents[i].items()})
        self.counts["num_empty"] += not fitting and not lost.get("dropped_documents")
        return fitting
