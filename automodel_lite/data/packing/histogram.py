"""How slots are placed in packs: on the histogram of lengths, and in arrival order.

Plans on the histogram cost time by the distinct lengths, not by the documents. Such a plan is a
list of placements: `bins` neighboring bins from `first` on each receive `copies` documents of one
length. Ten million documents make a few thousand placements; only `assign` touches the documents.

    histogram {4: 2, 3: 1, 1: 3}, size 8     best_fit     length  first  bins  copies  slot
                                                          4       0      1     2       0      bin 0
                                                                  = 4 4
                                                          3       1      1     1       0      bin 1
                                                                  = 3 1 1 1
                                                          1       1      1     3       1

The same one by one, which the tests compare it with:

    def best_fit_one_by_one(lengths, size):
        fills = []  # the tokens of each bin
        for length in sorted(lengths, reverse=True):
            # the fullest bin that has room, or a new one
            fitting = [b for b, fill in enumerate(fills) if fill + length <= size]
            if fitting:
                fills[max(fitting, key=lambda b: fills[b])] += length
            else:
                fills.append(length)
        return fills

`ExactFiller` takes documents in arrival order and fills the tail of each pack exactly, by
subset-sum:

    waiting   [312 95 40 700 88 ...]        size 1024
    arrival    312 95 40                    takes documents in order until less than half of the
               pack is free
    tail                 room 577 -> subset of the next <= 256 documents that sums to 577, the
                         oldest ones preferred

The room that can be left is bits of one Python integer, `free |= free >> length`: bit 0 means full,
and what does not fit falls off. The oldest waiting document is always taken first, so none starves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from automodel_lite.config.sizes import ceil_div
from automodel_lite.seed import BLOCK, seeded_order

LOOKAHEAD = 256


class ExactFiller(Iterator[list[int]]):
    """Packs (lists of arrival numbers, from 0 on) over a stream of lengths.

    lengths: any iterable of ints in [1, size]. `read_ahead` is how many lengths are pulled at once:
    1 for streams, more where lengths are at hand; the packs do not depend on it. At most
    `lookahead` documents wait for a pack, with `read_ahead=1`. To go on where another iterator
    stopped, give the documents that waited there first.

    `num_searched` counts the documents that the tails were searched in: up to 256 a pack where no
    fit exists.
    """

    def __init__(
        self, lengths: Iterable[int], size: int, *, lookahead: int = LOOKAHEAD, read_ahead: int = 1
    ):
        self.size = size
        self.lookahead = lookahead
        self.num_searched = 0
        self._stream = iter(lengths)
        self._read_ahead = read_ahead
        self._num_read = 0
        # of the documents that were read; those before `_head` are packed
        self._ids: list[int] = []
        self._lengths: list[int] = []
        self._head = 0

    def __next__(self) -> list[int]:
        lengths = self._lengths
        head = self._head
        if head == len(lengths) and not self._pull():
            raise StopIteration
        # The oldest document, then the next ones while more than half of the pack stays free.
        room = self.size - lengths[head]
        half = self.size // 2
        at = head + 1
        while room > half and (at < len(lengths) or self._pull()):
            left = room - lengths[at]
            if left < half:  # let the subset-sum decide on the rest
                break
            room = left
            at = at + 1
        self._head = at
        pack = self._ids[head:at]
        if room:
            self._fill(pack, room)
        if self._head >= 4096:
            del self._ids[: self._head], self._lengths[: self._head]
            self._head = 0
        return pack

    def _pull(self) -> bool:
        new = list(islice(self._stream, self._read_ahead))
        self._ids += range(self._num_read, self._num_read + len(new))
        self._lengths += new
        self._num_read += len(new)
        return bool(new)

    def _fill(self, pack: list[int], room: int) -> None:
        """Adds to the pack the documents of the look-ahead that fill `room` best, and leaves the
        others waiting.
        """
        ids = self._ids
        lengths = self._lengths
        head = self._head

        # 1. Search which remainders of the room can be reached. Bit r of `free` is set when some
        # subset of the documents seen so far leaves r tokens. Adding a document of n tokens turns
        # r into r - n: a shift, and subsets that do not fit fall off at bit 0. The search ends at
        # the first subset that leaves nothing, or with the look-ahead.
        free = 1 << room
        before = []  # `free` before each document that reached a new remainder
        useful = []  # and where that document stands
        at = head
        end = head + self.lookahead
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
        self.num_searched += at - head

        # 2. Walk back from the smallest remainder to the whole room. A document belongs to the
        # subset if the remainder could not be reached before it; so of several subsets, that of
        # the oldest documents is taken.
        rest = (free & -free).bit_length() - 1
        chosen = []
        for k in range(len(useful) - 1, -1, -1):
            if not (before[k] >> rest) & 1:
                chosen.append(useful[k])
                rest += lengths[useful[k]]
                if rest == room:
                    break

        # 3. Move them into the pack, deleting from the right so that positions stay valid.
        pack.extend([ids[at] for at in reversed(chosen)])
        for at in chosen:
            del ids[at], lengths[at]


SEARCHED_DOCUMENTS = 40_000  # by subset-sum: 0.05 s, 0.9 s where exact fits are rare


class Placements(NamedTuple):
    """Documents in `num_bins` bins: arrays of equal length [P], int64; `slot` is the place of the
    first copy inside.

    Order: placements of the same length take the documents of that length one after the other.
    """

    num_bins: int
    length: np.ndarray
    first: np.ndarray
    bins: np.ndarray
    copies: np.ndarray
    slot: np.ndarray

    def per_bin(self, amount: np.ndarray) -> np.ndarray:
        """Sums over the placements of each bin, int64 [num_bins]; `amount` is per placement and
        bin.
        """
        steps = np.zeros(self.num_bins + 1, np.int64)
        np.add.at(steps, self.first, amount)
        np.subtract.at(steps, self.first + self.bins, amount)
        return np.cumsum(steps)[:-1]


def histogram_of(slots: np.ndarray, size: int) -> np.ndarray:
    """Returns int64 [size + 1], slots of each length; in blocks, as bincount makes int64 of what it
    counts.
    """
    counts = np.zeros(size + 1, np.int64)
    for start in range(0, len(slots), BLOCK):
        counts += np.bincount(slots[start : start + BLOCK], minlength=size + 1)
    return counts


class _BinRange(NamedTuple):
    """`num_bins` neighboring bins from `first` on, each with the same `num_documents` documents."""

    first: int
    num_bins: int
    num_documents: int


def best_fit(histogram: np.ndarray, size: int) -> Placements:
    """Best-fit decreasing, exactly, in milliseconds: at most 11/9 of the optimum + 1 (Johnson
    1973), usually + 2 bins.

    All bins with the same free space are one class. Each step empties a class or a length, and the
    free space of a used class falls below half: O(distinct lengths x log size) steps.
    """
    placements: list[tuple[int, int, int, int, int]] = []
    classes: dict[int, list[_BinRange]] = {}  # by free space
    spaces: list[int] = []  # the keys of `classes`, sorted
    num_bins = 0

    def keep_open(space: int, bins: _BinRange) -> None:
        """Adds bins to the class of their free space; full ones are done with."""
        if space == 0:
            return
        if space not in classes:
            classes[space] = []
            insort(spaces, space)
        classes[space].append(bins)

    for length in np.flatnonzero(histogram)[::-1].tolist():
        left = int(histogram[length])  # documents of this length without a bin
        while left:
            # 1. Take bins of the tightest class that this length fits. Without one, open as many
            # bins as the documents need: they are all alike, and so one class too.
            at = bisect_left(spaces, length)
            if at < len(spaces):
                space = spaces[at]
                bins = classes[space].pop()
                if not classes[space]:
                    del classes[space], spaces[at]
            else:
                space = size
                bins = _BinRange(num_bins, ceil_div(left, size // length), 0)
                num_bins += bins.num_bins

            # 2. Fill bin after bin. Best-fit does that one document at a time, too: after the first
            # one the bin is tighter than its class, so the next one goes there.
            first, num_left, slot = bins
            most = space // length  # documents that fit one bin
            num_filled = min(left // most, num_left)
            if num_filled:
                placements.append((length, first, num_filled, most, slot))
                keep_open(space - most * length, _BinRange(first, num_filled, slot + most))
                left -= num_filled * most
                first += num_filled
                num_left -= num_filled

            # 3. Put the remaining documents, now fewer than `most`, into the next bin.
            if left and num_left:
                placements.append((length, first, 1, left, slot))
                keep_open(space - left * length, _BinRange(first, 1, slot + left))
                left = 0
                first += 1
                num_left -= 1

            # 4. Give back the bins that took nothing.
            if num_left:
                keep_open(space, _BinRange(first, num_left, slot))
    return Placements(num_bins, *np.array(placements, np.int64).reshape(-1, 5).T)


def fewest_bins(histogram: np.ndarray, size: int, seed: int) -> Placements:
    """Returns best-fit decreasing or exact fill in proportion, whichever needs fewer bins.

    Best-fit is within a few bins of the optimum on ordinary mixes. It wastes 4 % where two or three
    documents of like lengths share a bin (N(700, 120) in 2048), which is where subset-sum over many
    documents is better.
    """
    plain = best_fit(histogram, size)
    proportional = exact_fill_in_proportion(histogram, size, seed)
    return proportional if proportional.num_bins < plain.num_bins else plain


def exact_fill_in_proportion(histogram: np.ndarray, size: int, seed: int) -> Placements:
    """Exact fill of a k-th part of the documents of each length, each of its bins k times; best-fit
    for the others.

    The work does not grow with the documents: a part has about SEARCHED_DOCUMENTS of them, in a
    seeded order.
    """
    # What k copies of a bin hold is k documents of each of its lengths, so packs of a k-th part are
    # packs of all but a remainder of under k documents of each length.
    k = max(1, int(histogram.sum()) // SEARCHED_DOCUMENTS)
    part = histogram // k
    documents = np.repeat(np.arange(size + 1), part)
    documents = documents[seeded_order(len(documents), seed, 0)].tolist()
    rows = []
    num_repeated = 0  # bins
    for pack in ExactFiller(documents, size, read_ahead=512):
        for slot, document in enumerate(pack):
            rows.append((documents[document], num_repeated, k, 1, slot))
        num_repeated += k
    repeated = np.array(rows, np.int64).reshape(-1, 5).T
    # The remainder goes into bins of its own, numbered behind the repeated ones.
    rest = best_fit(histogram - part * k, size)
    rest = rest._replace(first=rest.first + num_repeated)
    columns = [np.concatenate(pair) for pair in zip(repeated, rest[1:])]
    return Placements(num_repeated + rest.num_bins, *columns)


def assign(
    placements: Placements, lengths: np.ndarray, size: int, seed: int, epoch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns document ids in pack order (int32 or int64 [N]) and offsets (int64 [packs + 1]).

    Documents of equal length and the packs themselves stand in a seeded order.
    """
    # Both sides by falling length: then the documents of a placement are a run of `source`.
    source = seeded_order(len(lengths), seed, epoch, lengths, size)
    length, first, bins, copies, slot = placements[1:]
    by_length = np.argsort(-length, kind="stable")
    first = first[by_length]
    bins = bins[by_length]
    copies = copies[by_length]
    slot = slot[by_length]
    ends = np.cumsum(bins * copies)  # of each placement, in `source`
    # Packs are shuffled bins: where in doc_ids each bin begins.
    shuffled = seeded_order(placements.num_bins, seed, epoch)
    offsets = np.append(0, np.cumsum(placements.per_bin(placements.copies)[shuffled]))
    begin = np.empty(placements.num_bins, np.int64)
    begin[shuffled] = offsets[:-1]
    doc_ids = np.empty(len(lengths), np.int32 if len(lengths) < 2**31 else np.int64)
    # A block of documents at a time: which placement each belongs to, and which of its copies in
    # which bin it is.
    for start in range(0, len(lengths), BLOCK):
        nth = np.arange(start, min(start + BLOCK, len(lengths)))
        placement = np.searchsorted(ends, nth, side="right")
        bin_of, copy = np.divmod(nth - (ends - bins * copies)[placement], copies[placement])
        doc_ids[begin[first[placement] + bin_of] + slot[placement] + copy] = source[nth]
    return doc_ids, offsets
