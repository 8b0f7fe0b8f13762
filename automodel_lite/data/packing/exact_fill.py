"""Streaming packer: documents in arrival order, the tail of each pack filled exactly by subset-sum.

    waiting   [312 95 40 700 88 ...]        size 1024
    arrival    312 95 40                    takes documents in order until less than half of the pack is free
    tail                 room 577 -> subset of the next <= 256 documents that sums to 577, the oldest ones preferred

The room that can be left is bits of one Python integer, `free |= free >> length`: bit 0 means full, and what does not
fit falls off. The oldest waiting document is always taken first, so none starves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

LOOKAHEAD = 256


class ExactFiller:
    """Iterator of packs (lists of document ids) over a stream of lengths; ids count from `first_id`.

    lengths: any iterable of ints in [1, size]. `waiting` are (id, length) pairs that an earlier iterator had read and
    not yet packed. `read_ahead` is how many lengths are pulled at once: 1 for streams, more where lengths are at hand.
    The packs do not depend on it.

    `num_searched` counts the documents that the tails were searched in: up to 256 a pack where no fit exists.

    To stop and go on: keep `cursor` (how many lengths were read) and `waiting` (at most `lookahead` pairs with
    `read_ahead=1`), and build `ExactFiller(lengths[cursor:], size, first_id=cursor, waiting=waiting)`.
    """

    def __init__(
        self,
        lengths: Iterable[int],
        size: int,
        *,
        lookahead: int = LOOKAHEAD,
        first_id: int = 0,
        waiting: Iterable[tuple[int, int]] = (),
        read_ahead: int = 1,
    ):
        self.size = size
        self.lookahead = lookahead
        self.cursor = first_id
        self.num_searched = 0
        self._stream = iter(lengths)
        self._read_ahead = read_ahead
        pairs = list(waiting)
        self._ids = [i for i, _ in pairs]
        self._lengths = [length for _, length in pairs]
        self._head = 0  # documents before it are packed

    @property
    def waiting(self) -> list[tuple[int, int]]:
        """(id, length) of the documents that were read and are in no pack yet, oldest first."""
        return list(zip(self._ids[self._head :], self._lengths[self._head :]))

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if self._head == len(self._ids) and not self._pull():
            raise StopIteration
        pack, room = self._take_in_order()
        if room:
            self._fill(pack, room)
        if self._head >= 4096:
            del self._ids[: self._head], self._lengths[: self._head]
            self._head = 0
        return pack

    def _pull(self) -> bool:
        new = list(islice(self._stream, self._read_ahead))
        self._ids.extend(range(self.cursor, self.cursor + len(new)))
        self._lengths.extend(new)
        self.cursor += len(new)
        return bool(new)

    def _take_in_order(self) -> tuple[list[int], int]:
        """The oldest document, then the next ones while more than half of the pack stays free."""
        lengths, head = self._lengths, self._head
        half = self.size // 2
        room = self.size - lengths[head]
        at = head + 1
        while room > half:
            if at == len(lengths) and not self._pull():
                break
            left = room - lengths[at]
            if left < half:  # let the subset-sum decide on the rest
                break
            room = left
            at += 1
        self._head = at
        return self._ids[head:at], room

    def _fill(self, pack: list[int], room: int) -> None:
        """Adds to the pack the documents of the look-ahead that fill `room` best, and leaves the others waiting."""
        # Bit r of `free` is set when some subset of the documents seen so far leaves r tokens of the room. A document
        # of n tokens turns r into r - n, which is a shift; subsets that do not fit fall off at bit 0.
        ids, lengths, head = self._ids, self._lengths, self._head
        free = 1 << room
        before: list[int] = []  # `free` before each document that reached a new remainder
        useful: list[int] = []
        at, end = head, head + self.lookahead
        while at < end and not free & 1 and (at < len(lengths) or self._pull()):
            for length in lengths[at:end]:
                if length <= room:
                    grown = free | free >> length
                    if grown != free:
                        before.append(free)
                        useful.append(at)
                        free = grown
                        if free & 1:
                            break
                at += 1
        # Back from the smallest remainder: a document is in the subset exactly if the remainder could not be reached
        # before it. So the oldest documents that reach it are taken.
        self.num_searched += at - head
        rest = (free & -free).bit_length() - 1
        chosen: list[int] = []
        for k in range(len(useful) - 1, -1, -1):
            if not (before[k] >> rest) & 1:
                chosen.append(useful[k])
                rest += lengths[useful[k]]
                if rest == room:
                    break
        pack.extend([ids[at] for at in reversed(chosen)])
        for at in chosen:  # from the right
            del ids[at], lengths[at]
