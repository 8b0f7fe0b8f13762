"""From best-fit to the lower bound: three ways to save the last packs, on the histogram of lengths.

On realistic mixes best-fit is a few packs over ceil(tokens / size), 69 of 969,600 at ten million documents. The work is
bounded in steps, not seconds, so that every machine finds the same plan.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from automodel_lite.data.packing.exact_fill import LOOKAHEAD, ExactFill
from automodel_lite.data.packing.histogram import Placements, best_fit, join, lower_bound, placements_of
from automodel_lite.data.packing.order import seeded_order

REPACKED_DOCUMENTS = 20_000  # documents given to subset-sum at once: about 0.05 s, 0.3 s on the hardest mixes
MAX_STEPS = 2_000_000  # steps of `perfect_fill`, about 0.5 s


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
        placements = fewer(placements, filled)
    if placements.num_bins > bound * 1.001:
        scaled = _repack_roomiest(_scale_up(histogram, size, seed), size, bound, seed)
        placements = fewer(placements, scaled)
    return placements


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
    return join(placements_of(out, num_bins), best_fit(rest, size))


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


def _repack_roomiest(placements: Placements, size: int, bound: int, seed: int, rounds: int = 3) -> Placements:
    """Empties the bins with the most room and fills their documents again by subset-sum, up to `rounds` times.

    Left alone when even perfect filling of these bins would not reach the bound, or when it saved nothing and more
    than two bins are over.
    """
    for k in range(rounds):
        if placements.num_bins == bound:
            break
        emptied = _roomiest(placements, seed + k)
        if int((size - placements.filled()[emptied]).sum()) // size < placements.num_bins - bound:
            break
        repacked = _repack(placements, emptied, size, seed + k)
        if repacked.num_bins >= placements.num_bins > bound + 2:
            break
        placements = fewer(placements, repacked)
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
    return join(rest, subset_sum(placements.length, gone * placements.copies, size, seed))


def _scale_up(histogram: np.ndarray, size: int, seed: int) -> Placements:
    """Solves histogram // k by subset-sum, takes each bin k times, and adds the remainder by best-fit."""
    k = max(1, int(histogram.sum()) // (2 * REPACKED_DOCUMENTS))
    small = histogram // k
    lengths = np.flatnonzero(small)
    bins = subset_sum(lengths, small[lengths], size, seed, lookahead=128)  # 1.6 x as fast as 256, as good here
    repeated = Placements(bins.length, bins.first * k, bins.bins * k, bins.copies, bins.slot, bins.num_bins * k)
    return join(repeated, best_fit(histogram - small * k, size))


def subset_sum(length: np.ndarray, amount: np.ndarray, size: int, seed: int, lookahead: int = LOOKAHEAD) -> Placements:
    """Packs `amount` documents of each length with ExactFill, in a seeded order."""
    stream = np.repeat(length, amount)
    stream = stream[seeded_order(len(stream), seed, 0)].tolist()
    out = [
        (stream[i], first, 1, 1, slot)
        for first, pack in enumerate(ExactFill(stream, size, lookahead=lookahead, read_ahead=512))
        for slot, i in enumerate(pack)
    ]
    return placements_of(out, out[-1][1] + 1 if out else 0)


def fewer(a: Placements, b: Placements) -> Placements:
    return b if b.num_bins < a.num_bins else a
