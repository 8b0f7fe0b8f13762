"""Packs as rows of tokens, read lazily from flat rows when asked for.

    size 16, slots of 4, documents [1 2 3] and [4 5 6 7 8]
    input_ids        1 2 3 0 | 4 5 6 7 8 0 0 0 | 0 0 0 0
    position_ids     0 1 2 3 | 0 1 2 3 4 5 6 7 | 0 1 2 3
    seq_lens         3         5                 0           a segment without tokens: the tail of the pack
    seq_lens_padded  4         8                 4

Packing never shifts labels: labels[i] already is the target of position i.

A stream of documents becomes packs in one pass: no lengths known ahead, a bounded number of documents in memory.

    packs = PackStream(read=lambda start: islice(documents(), start, None), packed_sequence_size=4096)
    for pack in packs:              as PackedDataset gives them
        state = packs.state_dict()  {"cursor": 5310, "piece": 0, "waiting": [[5297, 0], [5301, 0], [5308, 0]], ...}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from automodel_lite.data.packing.plan import PackPlan, padding_segments
from automodel_lite.data.packing.strategies import LOOKAHEAD, ExactFiller
from automodel_lite.data.token_rows import Rows, TokenRows, flatten
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.thd import COLUMNS, SEQ_LENS_PADDING

EMPTY_PACK = -1  # PackedDataset[EMPTY_PACK] is padding only, for ranks that run short in the last step


class PackedDataset(torch.utils.data.Dataset):
    """Pack i of a plan, gathered from `rows` when it is asked for.

    [i] -> int64 tensors "input_ids", "labels", "position_ids" [S] and "seq_lens", "seq_lens_padded" [segments].
    `seq_lens_padded` are the slots (multiples of the plan's slot_multiple) and sum to S; `seq_lens` the real tokens in
    them, 0 for padding at the tail. A plan of strategy none gives {"input_ids", "labels", "attention_mask"} of the
    document's own slot instead, which the collater pads to the longest of its batch. [EMPTY_PACK] is a pack of padding.
    """

    def __init__(self, rows: Rows, plan: PackPlan, padding_idx: int = 0):
        if plan.counts.documents != len(rows):
            raise DataError(
                f"the plan was made for {plan.counts.documents} documents and the rows hold "
                f"{len(rows)}: plan again from the lengths of these rows."
            )
        self.rows = rows
        self.plan = plan
        self.padding_idx = padding_idx

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> StackedPacks | list[dict[str, torch.Tensor]]:
        """Many packs at once, which is how a DataLoader asks for a batch: twice as fast as one by one."""
        rows, starts, lengths, num_documents = self._documents([int(index) for index in indices])
        plan = self.plan
        if not plan.ragged:
            shape = (plan.packed_sequence_size, plan.slot_multiple, self.padding_idx)
            return lay_out_packs(rows, starts, lengths, num_documents, *shape)
        ends = np.cumsum(num_documents).tolist()
        own = [slice(end - num, end) for end, num in zip(ends, num_documents.tolist())]
        return [_alone(rows, starts[i], lengths[i], plan.slot_multiple, self.padding_idx) for i in own]

    def _documents(self, indices: list[int]) -> tuple[TokenRows, np.ndarray, np.ndarray, np.ndarray]:
        """Flat rows, where in them the documents of the packs start, their lengths, and how many each pack has."""
        plan = self.plan
        spans = [self._span(index) for index in indices]
        num_documents = np.array([stop - start for start, stop in spans], np.int64)
        doc_ids = _joined_spans(plan.doc_ids, spans)
        rows, starts, lengths = self.rows.located(doc_ids)
        if plan.starts is None or plan.stops is None:
            return rows, starts, lengths, num_documents
        cut, stops = _joined_spans(plan.starts, spans), _joined_spans(plan.stops, spans)
        return rows, starts + cut, stops - cut, num_documents

    def _span(self, index: int) -> tuple[int, int]:
        """Where the documents of a pack stand in the plan's doc_ids."""
        if index == EMPTY_PACK:
            return 0, 0
        if not 0 <= index < len(self.plan):
            raise IndexError(f"pack {index} of {len(self.plan)}")
        return int(self.plan.offsets[index]), int(self.plan.offsets[index + 1])


def _joined_spans(array: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """array[start:stop] of all spans, one after the other.

    Joining memory copies runs with wide loads, in half the time of a gather by indices, which waits for memory at each
    cache line: 15 us against 35 us for 8,192 tokens of 40 documents anywhere in 40 MB.
    """
    view = array.data
    return np.frombuffer(b"".join([view[start:stop] for start, stop in spans]), array.dtype)


@dataclass(frozen=True)
class StackedPacks:
    """A batch of packs that were laid out together. [i] is one of them, as PackedDataset gives it.

    columns       input_ids, labels, position_ids int64 [B, S]; seq_lens, seq_lens_padded int64 [B, most segments],
                  filled up with SEQ_LENS_PADDING: what the collater makes of the packs
    num_segments  of each pack: documents and padding segments
    """

    columns: dict[str, torch.Tensor]
    num_segments: list[int]

    def __len__(self) -> int:
        return len(self.num_segments)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        num = self.num_segments[index]
        return {name: x[index, :num] if name.startswith("seq_lens") else x[index] for name, x in self.columns.items()}


def lay_out(
    rows: TokenRows, starts: np.ndarray, lengths: np.ndarray, size: int, slot_multiple: int = 1, padding_idx: int = 0
) -> dict[str, torch.Tensor]:
    """One pack, as PackedDataset returns it, of the documents rows[start : start + length] that together fit it."""
    return lay_out_packs(rows, starts, lengths, np.array([len(starts)]), size, slot_multiple, padding_idx)[0]


def lay_out_packs(
    rows: TokenRows,
    starts: np.ndarray,
    lengths: np.ndarray,
    num_documents: np.ndarray,
    size: int,
    slot_multiple: int = 1,
    padding_idx: int = 0,
) -> StackedPacks:
    """Packs of the documents rows[start : start + length]; the first num_documents[0] of them are pack 0, and so on.

    Everything is done for all packs at once: they are one stream of B * S positions until the end.
    """
    spans = list(zip(starts.tolist(), (starts + lengths).tolist()))
    tokens = {name: _joined_spans(rows.columns[name], spans).astype(COLUMNS[name].batched) for name in rows.columns}
    num_packs = len(num_documents)
    slots, num_segments, full = lengths, num_documents, len(tokens["input_ids"]) == num_packs * size
    # Segments: each document in its slot, and where a pack is not full, padding at its tail.
    if not full:
        lengths, slots, num_segments = _padded(lengths, num_documents, size, slot_multiple)
    # Positions count from the start of their slot, so a position is real when it is under the segment's length.
    position_ids = np.arange(num_packs * size)
    position_ids -= (slots.cumsum() - slots).repeat(slots)
    if not full:
        real = position_ids < lengths.repeat(slots)
        padding = {name: column.padding for name, column in COLUMNS.items()} | {"input_ids": padding_idx}
        tokens = {name: spread(values, real, padding[name], values.dtype) for name, values in tokens.items()}
    # One row of segments per pack, filled up to the longest.
    segments = np.arange(num_segments.max(initial=0)) < num_segments[:, None]
    columns = {
        **{name: values.reshape(num_packs, size) for name, values in tokens.items()},
        "position_ids": position_ids.reshape(num_packs, size),
        "seq_lens": spread(lengths, segments, SEQ_LENS_PADDING),
        "seq_lens_padded": spread(slots, segments, SEQ_LENS_PADDING),
    }
    return StackedPacks({name: torch.from_numpy(x) for name, x in columns.items()}, num_segments.tolist())


def _padded(
    lengths: np.ndarray, num_documents: np.ndarray, size: int, slot_multiple: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths and slots of all segments, those of length 0 at the tails of packs included, and how many a pack has."""
    slots = -(-lengths // slot_multiple) * slot_multiple
    last = np.cumsum(num_documents)
    used = np.diff(np.append(0, np.cumsum(slots))[last], prepend=0)
    tails = [padding_segments(free, slot_multiple) for free in (size - used).tolist()]
    num_tails = np.array(list(map(len, tails)))
    behind = last.repeat(num_tails)
    widths = list(chain.from_iterable(tails))
    return np.insert(lengths, behind, 0), np.insert(slots, behind, widths), num_documents + num_tails


def spread(values: np.ndarray, places: np.ndarray, filler: float, dtype: Any = np.int64) -> np.ndarray:
    """The values, in order, where `places` is True; an array of its shape."""
    out = np.full(places.shape, filler, dtype)
    out[places] = values
    return out


def _alone(
    rows: TokenRows, starts: np.ndarray, lengths: np.ndarray, slot_multiple: int, padding_idx: int
) -> dict[str, torch.Tensor]:
    """One document in its own slot, without layout: the collater pads it to the longest of its batch."""
    length = int(lengths.sum())
    slot = max(1, -(-length // slot_multiple)) * slot_multiple
    row = lay_out(rows, starts, lengths, slot, slot_multiple, padding_idx)
    attention_mask = torch.zeros(slot, dtype=torch.int64)
    attention_mask[:length] = 1
    return {name: row[name] for name in rows.columns} | {"attention_mask": attention_mask}


OVERLONG_IN_STREAMS = ("drop", "truncate", "error")

Place = tuple[int, int]  # number of a document in the stream, and of a row of it
Document = dict[str, np.ndarray]  # input_ids, labels


class PackStream(torch.utils.data.IterableDataset):
    """Iterates over packs of exact_fill, documents in the order of the stream, shifted by about ten places.

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
