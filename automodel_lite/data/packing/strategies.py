"""The strategies: slots of documents in, packs out. A slot is a document's length, rounded up to slot_multiple.

Every strategy is a pure function (slots int64 [P] in 1..size, size, seed, epoch) -> Packed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from automodel_lite.data.packing.exact_fill import LOOKAHEAD, ExactFill
from automodel_lite.data.packing.histogram import assign, best_fit
from automodel_lite.data.packing.order import seeded_order
from automodel_lite.data.packing.refine import refine

WORSE_THAN_BEST_FIT = 1.002  # above it exact_fill hands over to global
TRIAL_PACKS = 1024  # exact_fill is judged early, once it has made so many packs
LONG_SEARCH = 24  # documents searched for each one packed: 1 to 8 where exact fits exist, 80 where they are rare
MANY_DOCUMENTS = 100_000  # of which a long search takes longer than the global plan
WORSE_THAN_EXACT_FILL = 1.01  # the global plan may be where the search is long; half of it is the early projection


@dataclass(frozen=True)
class Packed:
    """order: positions of the slots in pack order, int64 [P]; offsets int64 [packs + 1]; a note, a bound if better."""

    order: np.ndarray
    offsets: np.ndarray
    note: str = ""
    lower_bound: int = 0


Strategy = Callable[[np.ndarray, int, int, int], Packed]


def exact_fill(slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
    """ExactFill over the seeded epoch order, or the global plan where that is over 0.2 % better.

    Where exact fits are rare (two or three documents a pack) the search takes 15 us a document: from 100,000 documents
    on, such a mix gets the global plan as well, unless that needs over 1 % more packs than the first ones project to.
    """
    histogram = np.bincount(slots, minlength=size + 1)
    plain = best_fit(histogram, size)
    limit = int(plain.num_bins * WORSE_THAN_BEST_FIT)
    order = seeded_order(len(slots), seed, epoch)
    long_search = LONG_SEARCH if len(slots) >= MANY_DOCUMENTS else LOOKAHEAD
    places, offsets, expected = _fill_up_to(slots, order, size, limit, long_search)
    if expected <= limit and len(places) == len(slots):
        return Packed(order[places], offsets)
    placements = refine(plain, histogram, size, seed)
    if placements.num_bins > expected * WORSE_THAN_EXACT_FILL:
        places, offsets, expected = _fill_up_to(slots, order, size, limit, LOOKAHEAD)
        if expected <= limit:
            return Packed(order[places], offsets)
    why = "" if placements.num_bins < expected else "exact fits are rare and take long to look for: "
    note = f"{why}exact_fill would make about {expected:,} packs, global makes {placements.num_bins:,}: global taken."
    return Packed(*assign(placements, slots, size, seed, epoch), note)


def _fill_up_to(
    slots: np.ndarray, order: np.ndarray, size: int, limit: int, long_search: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Packs of ExactFill: places in `order`, offsets, and how many packs there are.

    Stops early, after 1024, 2048, 4096 ... packs, when the fill so far projects to more than `limit`, or, from 2048
    on, when more than `long_search` documents were searched for each one packed. Then the number is the projection (too
    low at first, when no documents that fit nowhere have gathered yet) and the packs are not all there are.
    """
    block = 1 << 16
    blocks = (slots[order[i : i + block]].tolist() for i in range(0, len(order), block))
    stream = ExactFill((length for lengths in blocks for length in lengths), size, read_ahead=512)
    total, filled = int(slots.sum()), 0
    places: list[np.ndarray] = []
    ends = [0]
    recent: list[int] = []
    check = TRIAL_PACKS
    for pack in stream:
        recent += pack
        ends.append(ends[-1] + len(pack))
        if len(ends) > check or len(recent) >= block:
            places.append(np.array(recent, np.int64))
            filled += int(slots[order[places[-1]]].sum())
            recent = []
            if len(ends) > check:
                projected = round(total / filled * (len(ends) - 1))
                searched_long = check > TRIAL_PACKS and stream.num_searched > long_search * ends[-1]
                if projected > limit or searched_long:
                    return np.concatenate(places), np.array(ends), projected
                check *= 2
    places.append(np.array(recent, np.int64))
    return np.concatenate(places), np.array(ends), len(ends) - 1


def global_plan(slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
    """Best-fit decreasing on the histogram of lengths, refined towards the lower bound."""
    histogram = np.bincount(slots, minlength=size + 1)
    placements = refine(best_fit(histogram, size), histogram, size, seed)
    return Packed(*assign(placements, slots, size, seed, epoch))


def worst_fit_plan(slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
    packs = worst_fit(slots, size)
    order = np.fromiter((i for pack in packs for i in pack), np.int64, len(slots))
    return Packed(order, np.cumsum([0, *map(len, packs)]))


def worst_fit(lengths: Sequence[int] | np.ndarray, size: int) -> list[list[int]]:
    """Longest first into the emptiest pack if it fits there, else a new pack; over-long documents are skipped."""
    lengths = np.asarray(lengths, np.int64)
    order = np.argsort(-lengths, kind="stable")
    packs: list[list[int]] = []
    fills: list[tuple[int, int]] = []  # heap of (tokens, pack)
    for i, length in zip(order.tolist(), lengths[order].tolist()):
        if length > size:
            continue
        if fills and fills[0][0] + length <= size:
            tokens, pack = fills[0]
            heapq.heapreplace(fills, (tokens + length, pack))
            packs[pack].append(i)
        else:
            heapq.heappush(fills, (length, len(packs)))
            packs.append([i])
    return packs


def next_fit_plan(slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
    return Packed(np.arange(len(slots)), next_fit(slots, size))


def next_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """Offsets of packs in the order given: a document that does not fit closes the pack. int64 [packs + 1]."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    following = (np.searchsorted(ends, ends[:-1] + size, side="right") - 1).tolist()
    offsets = [0]
    while offsets[-1] < len(following):
        offsets.append(following[offsets[-1]])
    return np.array(offsets, np.int64)


def one_each(slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
    return Packed(np.arange(len(slots)), np.arange(len(slots) + 1), lower_bound=len(slots))


def strategy_of(name: str, column_generation: bool) -> Strategy:
    """The function of a strategy that keeps documents whole; `wrapped` cuts them (see plan.py)."""
    if column_generation:
        from automodel_lite.data.packing.column_generation import generate_columns  # needs scipy

        return generate_columns
    return {
        "exact_fill": exact_fill,
        "global": global_plan,
        "worst_fit": worst_fit_plan,
        "next_fit": next_fit_plan,
        "none": one_each,
    }[name]
