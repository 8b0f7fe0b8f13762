"""Column generation for narrow, hard mixes: the linear program over packs as patterns (Gilmore and Gomory 1961).

Needs scipy: pip install "automodel-lite[packing]". A master problem chooses how often each known pattern is used, a
bounded knapsack on its dual prices finds a better pattern, until none is worth more than a pack. Rounded down, the rest
goes through the global packer. N(700, 120) in 2048: see benchmarks/RESULTS.md.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csc_array

from automodel_lite.data.packing.histogram import Placements, assign, best_fit, join, placements_of
from automodel_lite.data.packing.refine import fewer, refine, subset_sum
from automodel_lite.data.packing.strategies import Packed
from automodel_lite.errors import ConfigError

MAX_LENGTHS = 2_000  # distinct lengths: rows of the linear program
FIRST_DOCUMENTS = 10_000  # the first patterns are those of a small subset-sum packing
MAX_ROUNDS = 60
PATTERNS_A_ROUND = 11  # the best one, and the best for prices moved by up to 3 %
GAP_FRAC = 1e-4  # stop when the bound is so near


def generate_columns(slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
    """The packs, with a note, and the lower bound that the linear program proves.

    The same on every rank with the same scipy; other versions may find other packs. Raises ConfigError for more than
    MAX_LENGTHS distinct lengths.
    """
    histogram = np.bincount(slots, minlength=size + 1)
    lengths = np.flatnonzero(histogram)
    if len(lengths) > MAX_LENGTHS:
        raise ConfigError(
            f"packed_sequence.column_generation=true is for at most {MAX_LENGTHS} distinct lengths and there are "
            f"{len(lengths)}: set it to false."
        )
    plain = refine(best_fit(histogram, size), histogram, size, seed)
    patterns, times, bound = _linear_program(lengths, histogram[lengths], size, seed)
    rounded, left = _use_whole(patterns, times, lengths, histogram)
    placements = fewer(plain, join(rounded, refine(best_fit(left, size), left, size, seed)))
    note = f"column generation: {placements.num_bins:,} packs, {plain.num_bins:,} without."
    return Packed(*assign(placements, slots, size, seed, epoch), note, bound)


def _linear_program(
    lengths: np.ndarray, counts: np.ndarray, size: int, seed: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Patterns int64 [lengths, patterns], how often each is used float64 [patterns], and a lower bound in packs.

    The bound is Farley's: the objective over the worth of the best pattern at its prices.
    """
    patterns = _first_patterns(lengths, counts, size, seed)
    noise = np.random.PCG64(np.random.SeedSequence([seed, len(lengths)]))
    most = np.minimum(counts, size // lengths)
    bound = 0.0
    for _ in range(MAX_ROUNDS):
        solved = linprog(np.ones(patterns.shape[1]), A_ub=-csc_array(patterns), b_ub=-counts, method="highs-ds")
        prices = np.maximum(-solved.ineqlin.marginals, 0.0)
        best = _knapsack(prices, lengths, most, size)
        bound = max(bound, solved.fun / max(float(best @ prices), 1.0))
        if bound >= solved.fun * (1 - GAP_FRAC):
            break
        new = [best]
        for _ in range(PATTERNS_A_ROUND - 1):
            shaken = prices * (0.97 + 0.06 * (noise.random_raw(len(prices)) >> np.uint64(11)) / 2**53)
            new.append(_knapsack(shaken, lengths, most, size))
        worth = [pattern for pattern in new if pattern @ prices > 1 + 1e-6]
        patterns = np.concatenate([patterns, np.array(worth, np.int64).reshape(-1, len(lengths)).T], axis=1)
    return patterns, solved.x, math.ceil(bound - 1e-6)


def _first_patterns(lengths: np.ndarray, counts: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Every length alone, and the packs of a subset-sum packing of a share of the documents."""
    share = max(1, int(counts.sum()) // FIRST_DOCUMENTS)
    packed = subset_sum(lengths, -(-counts // share), size, seed)
    patterns = np.zeros((len(lengths), packed.num_bins), np.int64)
    np.add.at(patterns, (np.searchsorted(lengths, packed.length), packed.first), packed.copies)
    return np.concatenate([np.diag(size // lengths), np.unique(patterns, axis=1)], axis=1)


def _knapsack(prices: np.ndarray, lengths: np.ndarray, most: np.ndarray, size: int) -> np.ndarray:
    """The pattern int64 [lengths] of the highest worth that fits `size`, with at most `most` of each length."""
    best = np.zeros(size + 1)
    taken: list[tuple[int, int, np.ndarray]] = []
    for i in np.argsort(-prices / lengths, kind="stable").tolist():
        copies, chunk = int(most[i]) if prices[i] > 0 else 0, 1
        while copies > 0:
            chunk = min(chunk, copies)
            width = chunk * int(lengths[i])
            grown = best[: size + 1 - width] + chunk * prices[i]
            better = grown > best[width:] + 1e-12
            if better.any():
                best[width:] = np.where(better, grown, best[width:])
                taken.append((i, chunk, better))
            copies -= chunk
            chunk *= 2
    pattern, room = np.zeros(len(lengths), np.int64), size
    for i, chunk, better in reversed(taken):
        width = chunk * int(lengths[i])
        if room >= width and better[room - width]:
            pattern[i] += chunk
            room -= width
    return pattern


def _use_whole(
    patterns: np.ndarray, times: np.ndarray, lengths: np.ndarray, histogram: np.ndarray
) -> tuple[Placements, np.ndarray]:
    """The patterns used floor(times) times, as far as there are documents, and the histogram of those left."""
    left = histogram.copy()
    rows: list[tuple[int, int, int, int, int]] = []
    num_bins = 0
    for j in np.flatnonzero(times >= 1).tolist():
        members = np.flatnonzero(patterns[:, j])
        copies = patterns[members, j]
        bins = min(int(times[j] + 1e-6), int((left[lengths[members]] // copies).min()))
        if not bins:
            continue
        left[lengths[members]] -= bins * copies
        slots = np.cumsum(copies) - copies
        rows += [(int(lengths[m]), num_bins, bins, int(c), int(s)) for m, c, s in zip(members, copies, slots)]
        num_bins += bins
    return placements_of(rows, num_bins), left
