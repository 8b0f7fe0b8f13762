"""Which documents share a pack: strategies, each a pure function of (slots int32 or int64 [P] in
1..size, size, seed, epoch). Slots are the lengths of documents, rounded up to slot_multiple.

strategy     packs are at most                      order of documents
exact_fill   1.002 x best-fit                       seeded epoch order, shifted by about ten places
best_fit     11/9 of the optimum + 1                by length, shuffled inside equal lengths; packs
             shuffled
next_fit     2 x the optimum                        the order of the dataset, one open pack
wrapped      ceil(tokens / size), documents cut     the seeded epoch order
none         one document per row                   the order of the dataset
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from automodel_lite.config.components import locate
from automodel_lite.data.packing.histogram import (
    ExactFiller,
    assign,
    best_fit,
    fewest_bins,
    histogram_of,
)
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.seed import BLOCK, seeded_order

WORSE_THAN_BEST_FIT = 1.002  # above it exact_fill gives way to best_fit
TRIAL_PACKS = 1024  # exact_fill is judged early, once it has made so many packs

# documents searched per packed one: 1 to 8 where exact fits exist, 80 where they are rare
LONG_SEARCH = 24
MANY_DOCUMENTS = 100_000  # of which a long search takes longer than packing the histogram


@dataclass(frozen=True)
class Packed:
    """order: positions of the slots in pack order, integers [P]; offsets int64 [packs + 1]; a note
    for the report.
    """

    order: np.ndarray
    offsets: np.ndarray
    note: str = ""


def pack_exact_fill(slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
    """Documents in the seeded order of the epoch, the tail of each pack filled by subset-sum over
    the next ones.

    Gives way to best-fit where that makes over 0.2 % fewer packs, and, from 100,000 documents on,
    where exact fits are rare (two or three documents of like lengths per pack) and the search would
    take 15 us per document.
    """
    # Best-fit on the histogram takes milliseconds, so what it would need is known before the long
    # search begins.
    limit = int(best_fit(histogram_of(slots, size), size).num_bins * WORSE_THAN_BEST_FIT)
    order = seeded_order(len(slots), seed, epoch)
    filled, num_filled = _fill(slots, order, size, limit)
    if filled is not None and num_filled <= limit:
        return filled
    packed = pack_best_fit(slots, size, seed, epoch)
    num_packs = len(packed.offsets) - 1
    why = "" if num_packs < num_filled else "exact fits are rare and take long to find: "
    both = f"exact_fill would make about {num_filled:,} packs, best_fit makes {num_packs:,}"
    return replace(packed, note=f"{why}{both}: best_fit taken.")


def _fill(slots: np.ndarray, order: np.ndarray, size: int, limit: int) -> tuple[Packed | None, int]:
    """Returns the packs of exact fill and their number; None and a projection where it stops early.

    That is after 1024, 2048, 4096 ... packs, when the fill so far projects to more than `limit`
    packs, or, from 2048 on, when the search is long. The projection is too low at first, when no
    documents that fit nowhere have gathered yet.
    """
    blocks = (slots[order[i : i + BLOCK]].tolist() for i in range(0, len(order), BLOCK))
    filler = ExactFiller(chain.from_iterable(blocks), size, read_ahead=512)
    total = int(slots.sum())
    check = TRIAL_PACKS
    # Arrivals in pack order, 4 bytes each where that is enough, as the lists of packs would take
    # 60.
    arrivals = array("i" if len(slots) < 2**31 else "q")
    ends = array("q", [0])
    for pack in filler:
        arrivals.extend(pack)
        ends.append(len(arrivals))
        # Each doubling of the packs: are they as full as best-fit's would be, and found as fast?
        if len(ends) > check:
            filled = int(slots[order[np.array(arrivals)]].sum(dtype=np.int64))
            projected = round(total / filled * (len(ends) - 1))
            is_long = check > TRIAL_PACKS and filler.num_searched > LONG_SEARCH * ends[-1]
            if projected > limit or (is_long and len(slots) >= MANY_DOCUMENTS):
                return None, projected
            check *= 2
    packed = np.frombuffer(arrivals, arrivals.typecode)
    for i in range(0, len(packed), BLOCK):  # in place: arrivals become documents
        block = packed[i : i + BLOCK]
        block[:] = order[block]
    return Packed(packed, np.array(ends)), len(ends) - 1


def pack_best_fit(slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
    """Packs the histogram of lengths by best-fit decreasing or, where that makes fewer packs, by
    exact fill.

    The fastest for tens of millions of documents. Documents of like lengths share packs; packs are
    shuffled.
    """
    return Packed(
        *assign(fewest_bins(histogram_of(slots, size), size, seed), slots, size, seed, epoch)
    )


def next_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """Returns offsets of packs in the order given, int64 [packs + 1]: a document that does not fit
    closes its pack.
    """
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    offsets = array("q", [0])
    # One search finds where every possible pack of a block would end; the loop then only jumps from
    # pack to pack.
    for start in range(0, len(lengths), BLOCK):
        block = ends[start : min(start + BLOCK, len(lengths))]
        # the document after the last one that fits a pack that begins with document start + i
        following = (np.searchsorted(ends, block + size, side="right") - 1).tolist()
        while offsets[-1] < start + len(block):
            offsets.append(following[offsets[-1] - start])
    return np.array(offsets, np.int64)


def pack_wrapped(slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
    """Documents end to end in the seeded order of the epoch, cut where a pack ends: every pack but
    the last is full.

    Offsets are in slots: the packs are the stream of slots cut every `size`.
    """
    total = int(slots.sum())
    return Packed(
        seeded_order(len(slots), seed, epoch), np.append(np.arange(0, total, size), total)
    )


class Strategy(NamedTuple):
    """Which documents share a pack.

    pack             (slots, size, seed, epoch) -> packs of at most `size` slots
    cuts_documents   where a pack ends, so that none is too long
    is_ragged        a row has the length of its one document instead of the pack's
    """

    pack: Callable[[np.ndarray, int, int, int], Packed]
    cuts_documents: bool = False
    is_ragged: bool = False


STRATEGIES = {
    "exact_fill": Strategy(pack_exact_fill),
    "best_fit": Strategy(pack_best_fit),
    "next_fit": Strategy(
        lambda slots, size, *_: Packed(np.arange(len(slots)), next_fit(slots, size))
    ),
    "wrapped": Strategy(pack_wrapped, cuts_documents=True),
    "none": Strategy(
        lambda slots, *_: Packed(np.arange(len(slots)), np.arange(len(slots) + 1)), is_ragged=True
    ),
}
STRATEGY_NAMES = ("exact_fill", "best_fit", "next_fit", "wrapped", "none")


def strategy_of(name: str) -> Strategy:
    """Returns the strategy of that name; `package.module:function` is a user's, whose packs are
    checked.

    Raises ConfigError for an unknown name, and DataError for packs that lose, repeat or overfill.
    """
    if ":" not in name:
        check_choice("strategy", name, STRATEGY_NAMES)
        return STRATEGIES[name]
    pack = locate(name.replace(":", "."))

    def checked(slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
        packed = pack(slots, size, seed, epoch)
        if not np.array_equal(np.sort(packed.order), np.arange(len(slots))):
            raise DataError(
                f"packed_sequence.own_strategy={name} must return each of {len(slots)} documents "
                "once."
            )
        if (widest := int(np.add.reduceat(slots[packed.order], packed.offsets[:-1]).max())) > size:
            raise DataError(
                f"packed_sequence.own_strategy={name} made a pack of {widest} slots; at most "
                f"{size} fit."
            )
        return packed

    return Strategy(checked)


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Raises ConfigError for an option of `packed_sequence` that is not one of those that are
    known.
    """
    if value not in known:
        raise ConfigError(
            f"packed_sequence.{name}={value!r} is unknown: use one of {', '.join(known)}."
        )
