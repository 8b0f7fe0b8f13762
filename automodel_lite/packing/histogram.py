"""Plans on the histogram of lengths: cost grows with the distinct lengths, not with the documents.

A plan is a list of placements: `bins` neighbouring bins from `first` on each receive `copies` documents of one length.
Ten million documents make a few thousand placements; only `assign` touches the documents.

    histogram {4: 2, 3: 1, 1: 3}, size 8     best_fit     length  first  bins  copies  slot
                                                          4       0      1     2       0      bin 0 = 4 4
                                                          3       1      1     1       0      bin 1 = 3 1 1 1
                                                          1       1      1     3       1
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from automodel_lite.packing.exact_fill import ExactFill
from automodel_lite.packing.order import longest_first, seeded_order

REPACKED_DOCUMENTS = 20_000  # refinement by subset-sum: about 0.05 s on easy mixes, 0.3 s on the hardest
MAX_STEPS = 2_000_000
ASSIGN_BLOCK = 1 << 20


@dataclass(frozen=True)
class Placements:
    """Arrays of equal length [P], int64; `slot` is the place of the first copy inside of its bin.

    Order: placements of the same length take the documents of that length one after the other.
    """

    length: np.ndarray
    first: np.ndarray
    bins: np.ndarray
    copies: np.ndarray
    slot: np.ndarray
    num_bins: int

    def per_bin(self, amount: np.ndarray) -> np.ndarray:
        """Sum over the placements of each bin, int64 [num_bins]; `amount` is per placement and bin."""
        steps = np.zeros(self.num_bins + 1, np.int64)
        np.add.at(steps, self.first, amount)
        np.subtract.at(steps, self.first + self.bins, amount)
        return np.cumsum(steps)[:-1]

    def filled(self) -> np.ndarray:
        return self.per_bin(self.length * self.copies)


def lower_bound(histogram: np.ndarray, size: int) -> int:
    """No packing uses fewer bins: the larger of ceil(sum / size) and the L2 bound of Martello and Toth (1990).

    histogram: int64 [size + 1], documents of each length. L2 counts, for each small length a, that documents over
    size - a share a bin with none of length >= a, and documents over size / 2 with none of their kind.
    """
    lengths = np.arange(size + 1)
    volume = histogram * lengths
    total = int(volume.sum())
    bound = -(-total // size)
    if not histogram[size // 2 + 1 :].any():
        return bound
    count_over = np.concatenate([np.cumsum(histogram[::-1])[::-1], [0]])  # [a] = documents of length >= a
    volume_over = np.concatenate([np.cumsum(volume[::-1])[::-1], [0]])
    a = np.arange(size // 2 + 1)
    half = size // 2 + 1
    large = count_over[size - a + 1]
    middle = count_over[half] - large
    middle_volume = volume_over[half] - volume_over[size - a + 1]
    small_volume = volume_over[a] - volume_over[half]
    beyond = small_volume - (middle * size - middle_volume)
    return max(bound, int((large + middle + np.maximum(0, -(-beyond // size))).max()))


def best_fit(histogram: np.ndarray, size: int) -> Placements:
    """Best-fit decreasing, exactly, in milliseconds: at most 11/9 of the optimum + 1 (Johnson 1973), usually + 2 bins.

    All bins with the same free space are one class. Each step empties a class or a length, and the free space of a
    used class falls below half: O(distinct lengths x log size) steps.
    """
    out: list[tuple[int, int, int, int, int]] = []
    classes: dict[int, list[tuple[int, int, int]]] = {}  # free space -> (first bin, bins, documents in each)
    spaces: list[int] = []  # the keys of `classes`, sorted
    num_bins = 0

    def file(space: int, ranges: tuple[int, int, int]) -> None:
        if not space:
            return
        if space in classes:
            classes[space].append(ranges)
        else:
            classes[space] = [ranges]
            insort(spaces, space)

    for length in np.flatnonzero(histogram)[::-1].tolist():
        left = int(histogram[length])
        while left:
            at = bisect_left(spaces, length)
            if at < len(spaces):
                space = spaces[at]
                first, bins, slot = classes[space].pop()
            else:
                space, slot, first = size, 0, num_bins
                bins = -(-left // (size // length))
                num_bins += bins
            fit = space // length
            whole = min(left // fit, bins)  # bins that take as many as fit
            if whole:
                out.append((length, first, whole, fit, slot))
                file(space - fit * length, (first, whole, slot + fit))
                left -= whole * fit
            if whole < bins and left:  # then left < fit: one bin takes the last ones
                out.append((length, first + whole, 1, left, slot))
                file(space - left * length, (first + whole, 1, slot + left))
                left, whole = 0, whole + 1
            if whole < bins:
                classes[space].append((first + whole, bins - whole, slot))
            if at < len(spaces) and not classes.get(space, [()]):
                del classes[space]
                del spaces[bisect_left(spaces, space)]
    return _placements(out, num_bins)


def perfect_fill(histogram: np.ndarray, size: int, max_steps: int = MAX_STEPS) -> Placements:
    """Minimum bin slack on the histogram: the longest length left, and the others that fill its bin exactly.

    Each pattern is used as often as its counts allow, so there are about as many patterns as distinct lengths. After
    `max_steps` steps of the subset sums (of 4096 slots; larger sizes get fewer) best-fit takes what is left.
    Minimum bin slack: Gupta and Ho (1999).
    """
    out: list[tuple[int, int, int, int, int]] = []
    num_bins = 0
    falling = np.flatnonzero(histogram)[::-1].tolist()
    negated = [-length for length in falling]  # rising, for bisect
    left = [int(histogram[length]) for length in falling]
    while negated and max_steps > 0:
        pattern, steps = _fullest_bin(negated, left, size)
        max_steps -= steps * (1 + size // 4096)
        times = min(left[at] // copies for at, copies in pattern)
        slot = 0
        for at, copies in pattern:
            out.append((-negated[at], num_bins, times, copies, slot))
            slot += copies
            left[at] -= copies * times
        num_bins += times
        for at, _ in sorted(pattern, reverse=True):
            if not left[at]:
                del negated[at], left[at]
    rest = np.zeros_like(histogram)
    rest[[-length for length in negated]] = left
    return _join(_placements(out, num_bins), best_fit(rest, size))


def _fullest_bin(negated: list[int], left: list[int], size: int) -> tuple[list[tuple[int, int]], int]:
    """[(position, copies)] of the longest length and those that fill its bin best; and how many steps it took."""
    room = size + negated[0]
    if not room:
        return [(0, 1)], 1
    full = 1 << room
    mask = (full << 1) - 1
    reach = 1
    taken: list[tuple[int, int, int]] = []  # reachable sums before, position, copies
    at = bisect_left(negated, -room)
    steps = 1
    while at < len(negated) and not reach & full:
        length = -negated[at]
        copies = min(left[at] - (at == 0), room // length)
        chunk = 1
        while copies > 0:  # 1, 2, 4, ... and the rest: every number of copies is a sum of them
            chunk = min(chunk, copies)
            grown = (reach | reach << length * chunk) & mask
            steps += 1
            if grown != reach:
                taken.append((reach, at, chunk))
                reach = grown
                if reach & full:
                    break
            copies -= chunk
            chunk *= 2
        at += 1
    filled = reach.bit_length() - 1
    chosen = {0: 1}
    for before, position, copies in reversed(taken):
        if not (before >> filled) & 1:
            filled += negated[position] * copies
            chosen[position] = chosen.get(position, 0) + copies
    return list(chosen.items()), steps


def refine(placements: Placements, histogram: np.ndarray, size: int, seed: int) -> Placements:
    """Fewer bins, as far as `lower_bound`, for a bounded amount of work: steps are counted, not seconds, so that
    every machine finds the same plan.

    Three ways, each only when bins are still over: the bins with the most room are emptied and filled again by
    subset-sum; the whole histogram by `perfect_fill`; every count divided by k, the small problem solved by
    subset-sum, and each of its bins used k times.
    """
    bound = lower_bound(histogram, size)
    placements = _repack_roomiest(placements, size, bound, seed)
    if placements.num_bins > bound:
        filled = _repack_roomiest(perfect_fill(histogram, size), size, bound, seed)
        placements = _fewer(placements, filled)
    if placements.num_bins > bound * 1.001:
        scaled = _repack_roomiest(_scale_up(histogram, size, seed), size, bound, seed)
        placements = _fewer(placements, scaled)
    return placements


def assign(
    placements: Placements, lengths: np.ndarray, size: int, seed: int, epoch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Document ids in pack order (int32 or int64 [N]) and offsets (int64 [packs + 1]).

    Documents of equal length and the packs themselves stand in a seeded order.
    """
    n = len(lengths)
    source = longest_first(lengths, size, seed, epoch)
    by_length = np.argsort(-placements.length, kind="stable")
    length, first, bins, copies, slot = (
        x[by_length] for x in (placements.length, placements.first, placements.bins, placements.copies, placements.slot)
    )
    del length
    amount = bins * copies
    taken = np.cumsum(amount)
    shuffled = seeded_order(placements.num_bins, seed, epoch)
    counts = placements.per_bin(placements.copies)
    offsets = np.zeros(placements.num_bins + 1, np.int64)
    np.cumsum(counts[shuffled], out=offsets[1:])
    begin = np.empty(placements.num_bins, np.int64)
    begin[shuffled] = offsets[:-1]
    doc_ids = np.empty(n, np.int32 if n < 2**31 else np.int64)
    large = amount >= 4096
    for j in np.flatnonzero(large).tolist():
        stop = int(taken[j])
        places = begin[first[j] : first[j] + bins[j]] + slot[j]
        for copy in range(int(copies[j])):
            doc_ids[places + copy] = source[stop - int(amount[j]) + copy : stop : int(copies[j])]
    _assign_small(np.flatnonzero(~large), taken, amount, first, copies, slot, begin, source, doc_ids)
    return doc_ids, offsets


def _assign_small(
    small: np.ndarray,
    taken: np.ndarray,
    amount: np.ndarray,
    first: np.ndarray,
    copies: np.ndarray,
    slot: np.ndarray,
    begin: np.ndarray,
    source: np.ndarray,
    doc_ids: np.ndarray,
) -> None:
    """Writes the documents of many small placements into doc_ids, about a million at a time."""
    ends = np.cumsum(amount[small])
    start = 0
    while start < len(small):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + ASSIGN_BLOCK, side="right")))
        part = small[start:stop]
        which = np.repeat(part, amount[part])
        nth = np.arange(len(which)) - np.repeat(np.cumsum(amount[part]) - amount[part], amount[part])
        bin_of, copy = np.divmod(nth, copies[which])
        doc_ids[begin[first[which] + bin_of] + slot[which] + copy] = source[(taken - amount)[which] + nth]
        start = stop


def _repack_roomiest(placements: Placements, size: int, bound: int, seed: int, rounds: int = 3) -> Placements:
    """Empties the bins with the most room and fills their documents again by subset-sum, up to `rounds` times.

    Left alone when even perfect filling of these bins would not reach the bound.
    """
    for k in range(rounds):
        if placements.num_bins == bound:
            break
        emptied = _roomiest(placements, seed + k)
        if int((size - placements.filled()[emptied]).sum()) // size < placements.num_bins - bound:
            break
        placements = _fewer(placements, _repack(placements, emptied, size, seed + k))
    return placements


def _roomiest(placements: Placements, seed: int) -> np.ndarray:
    """bool [num_bins]: the bins with the most room, and as many documents again in random bins, for variety."""
    documents = placements.per_bin(placements.copies)
    emptied = np.zeros(placements.num_bins, bool)
    for order in (np.argsort(placements.filled(), kind="stable"), seeded_order(placements.num_bins, seed, 0)):
        num = int(np.searchsorted(np.cumsum(documents[order]), REPACKED_DOCUMENTS // 2, side="right"))
        emptied[order[: num + 1]] = True
    return emptied


def _repack(placements: Placements, emptied: np.ndarray, size: int, seed: int) -> Placements:
    emptied_before = np.concatenate([[0], np.cumsum(emptied)])
    gone = emptied_before[placements.first + placements.bins] - emptied_before[placements.first]
    kept = gone < placements.bins
    rest = Placements(
        placements.length[kept],
        (placements.first - emptied_before[placements.first])[kept],
        (placements.bins - gone)[kept],
        placements.copies[kept],
        placements.slot[kept],
        placements.num_bins - int(emptied.sum()),
    )
    return _join(rest, _subset_sum(placements.length, gone * placements.copies, size, seed))


def _scale_up(histogram: np.ndarray, size: int, seed: int) -> Placements:
    """Solves histogram // k by subset-sum, takes each bin k times, and adds the remainder by best-fit."""
    k = max(1, int(histogram.sum()) // (2 * REPACKED_DOCUMENTS))
    small = histogram // k
    lengths = np.flatnonzero(small)
    bins = _subset_sum(lengths, small[lengths], size, seed)
    repeated = Placements(bins.length, bins.first * k, bins.bins * k, bins.copies, bins.slot, bins.num_bins * k)
    return _join(repeated, best_fit(histogram - small * k, size))


def _subset_sum(length: np.ndarray, amount: np.ndarray, size: int, seed: int) -> Placements:
    """Packs `amount` documents of each length with ExactFill, in a seeded order."""
    stream = np.repeat(length, amount)
    stream = stream[seeded_order(len(stream), seed, 0)].tolist()
    out = [
        (stream[i], first, 1, 1, slot)
        for first, pack in enumerate(ExactFill(stream, size, read_ahead=512))
        for slot, i in enumerate(pack)
    ]
    return _placements(out, out[-1][1] + 1 if out else 0)


def _fewer(a: Placements, b: Placements) -> Placements:
    return b if b.num_bins < a.num_bins else a


def _join(a: Placements, b: Placements) -> Placements:
    return Placements(
        np.concatenate([a.length, b.length]),
        np.concatenate([a.first, b.first + a.num_bins]),
        np.concatenate([a.bins, b.bins]),
        np.concatenate([a.copies, b.copies]),
        np.concatenate([a.slot, b.slot]),
        a.num_bins + b.num_bins,
    )


def _placements(rows: list[tuple[int, int, int, int, int]], num_bins: int) -> Placements:
    length, first, bins, copies, slot = np.array(rows, np.int64).reshape(-1, 5).T
    return Placements(length, first, bins, copies, slot, num_bins)
