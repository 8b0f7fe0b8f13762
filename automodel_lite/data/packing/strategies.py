"""The strategies: how slots become packs. A slot is a document's length rounded up to slot_multiple.

Each is a pure function of (slots int64 [P] in 1..size, size, seed, epoch); its fields are its options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from automodel_lite.config.rules import Positive
from automodel_lite.data.packing.histogram import LOOKAHEAD, ExactFiller, assign, best_fit, fewest_bins
from automodel_lite.errors import ConfigError
from automodel_lite.seed import seeded_order

WORSE_THAN_BEST_FIT = 1.002  # above it exact_fill gives way to best_fit
TRIAL_PACKS = 1024  # exact_fill is judged early, once it has made so many packs
LONG_SEARCH = 24  # documents searched per packed one: 1 to 8 where exact fits exist, 80 where they are rare
MANY_DOCUMENTS = 100_000  # of which a long search takes longer than packing the histogram


@dataclass(frozen=True)
class Packed:
    """order: positions of the slots in pack order, int64 [P]; offsets int64 [packs + 1]; a note for the report."""

    order: np.ndarray
    offsets: np.ndarray
    note: str = ""


@runtime_checkable
class Strategy(Protocol):
    """Which documents share a pack."""

    @property
    def name(self) -> str: ...

    @property
    def cuts_documents(self) -> bool:
        """Documents are cut where a pack ends, so that none is too long."""

    @property
    def is_ragged(self) -> bool:
        """A row has the length of its one document instead of the pack's."""

    def pack(self, slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
        """Packs of at most `size` slots."""


@dataclass(frozen=True)
class _WholeDocuments:
    cuts_documents = False
    is_ragged = False


@dataclass(frozen=True)
class ExactFill(_WholeDocuments):
    """Documents in the seeded order of the epoch, the tail of each pack filled by subset-sum over the next ones.

    Gives way to `BestFit` where that makes over 0.2 % fewer packs, and, from 100,000 documents on, where exact fits are
    rare (two or three documents of like lengths per pack) and the search would take 15 us per document.

    lookahead   documents that the tail is searched in
    """

    lookahead: Positive = LOOKAHEAD
    name = "exact_fill"

    def __post_init__(self) -> None:
        if self.lookahead < 1:
            raise ConfigError(f"packed_sequence.strategy.lookahead={self.lookahead} must be at least 1.")

    def pack(self, slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
        limit = int(best_fit(np.bincount(slots, minlength=size + 1), size).num_bins * WORSE_THAN_BEST_FIT)
        order = seeded_order(len(slots), seed, epoch)
        filled = self._fill(slots, order, size, limit)
        if filled.is_whole and filled.num_packs <= limit:
            return Packed(order[filled.places], filled.offsets)
        packed = BestFit().pack(slots, size, seed, epoch)
        num_packs = len(packed.offsets) - 1
        why = "" if num_packs < filled.num_packs else "exact fits are rare and take long to find: "
        both = f"exact_fill would make about {filled.num_packs:,} packs, best_fit makes {num_packs:,}"
        return Packed(packed.order, packed.offsets, f"{why}{both}: best_fit taken.")

    def _fill(self, slots: np.ndarray, order: np.ndarray, size: int, limit: int) -> _Filled:
        """Stops early, after 1024, 2048, 4096 ... packs, when the fill so far projects to more than `limit` packs, or,
        from 2048 on, when the search is long. The projection is too low at first, when no documents that fit nowhere
        have gathered yet.
        """
        block = 1 << 16
        blocks = (slots[order[i : i + block]].tolist() for i in range(0, len(order), block))
        filler = ExactFiller(
            (length for lengths in blocks for length in lengths), size, lookahead=self.lookahead, read_ahead=512
        )
        may_be_long = len(slots) >= MANY_DOCUMENTS
        total, filled = int(slots.sum()), 0
        places: list[np.ndarray] = []
        ends = [0]
        recent: list[int] = []
        check = TRIAL_PACKS
        for pack in filler:
            recent += pack
            ends.append(ends[-1] + len(pack))
            if len(ends) <= check and len(recent) < block:
                continue
            places.append(np.array(recent, np.int64))
            filled += int(slots[order[places[-1]]].sum())
            recent = []
            if len(ends) > check:
                projected = round(total / filled * (len(ends) - 1))
                is_long = may_be_long and check > TRIAL_PACKS and filler.num_searched > LONG_SEARCH * ends[-1]
                if projected > limit or is_long:
                    return _Filled(np.concatenate(places), np.array(ends), projected, is_whole=False)
                check *= 2
        places.append(np.array(recent, np.int64))
        return _Filled(np.concatenate(places), np.array(ends), len(ends) - 1, is_whole=True)


@dataclass(frozen=True)
class _Filled:
    """Places in the epoch's order, pack by pack, and their offsets; unless whole, num_packs is a projection."""

    places: np.ndarray
    offsets: np.ndarray
    num_packs: int
    is_whole: bool


@dataclass(frozen=True)
class BestFit(_WholeDocuments):
    """The histogram of lengths, packed by best-fit decreasing or, where that makes fewer packs, by exact fill.

    The fastest for tens of millions of documents. Documents of like lengths share packs; packs are shuffled.
    """

    name = "best_fit"

    def pack(self, slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
        placements = fewest_bins(np.bincount(slots, minlength=size + 1), size, seed)
        return Packed(*assign(placements, slots, size, seed, epoch))


@dataclass(frozen=True)
class NextFit(_WholeDocuments):
    """The order of the dataset, one open pack: a document that does not fit closes it."""

    name = "next_fit"

    def pack(self, slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
        return Packed(np.arange(len(slots)), next_fit(slots, size))


def next_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """Offsets of packs in the order given, int64 [packs + 1]."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    # the document after the last one that fits a pack that begins with document i
    following = (np.searchsorted(ends, ends[:-1] + size, side="right") - 1).tolist()
    offsets = [0]
    while offsets[-1] < len(following):
        offsets.append(following[offsets[-1]])
    return np.array(offsets, np.int64)


@dataclass(frozen=True)
class Wrapped:
    """Documents end to end in the seeded order of the epoch, cut where a pack ends: every pack but the last is full."""

    cuts_documents = True
    is_ragged = False
    name = "wrapped"

    def pack(self, slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
        """Offsets in slots: the packs are the stream of slots cut every `size`."""
        total = int(slots.sum())
        return Packed(seeded_order(len(slots), seed, epoch), np.append(np.arange(0, total, size), total))


@dataclass(frozen=True)
class OnePerRow:
    """No packing: every document is a row, in the order of the dataset."""

    cuts_documents = False
    is_ragged = True
    name = "none"

    def pack(self, slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
        return Packed(np.arange(len(slots)), np.arange(len(slots) + 1))


STRATEGIES: dict[str, type[Strategy]] = {
    "exact_fill": ExactFill,
    "best_fit": BestFit,
    "next_fit": NextFit,
    "wrapped": Wrapped,
    "none": OnePerRow,
}


def strategy_of(strategy: str | Strategy) -> Strategy:
    """A strategy by its name, with its default options. Raises ConfigError for an unknown name."""
    if isinstance(strategy, Strategy):
        return strategy
    if strategy not in STRATEGIES:
        former = " (global is called best_fit now)" if strategy == "global" else ""
        raise ConfigError(
            f"packed_sequence.strategy={strategy!r} is unknown: use one of {', '.join(STRATEGIES)}{former}."
        )
    return STRATEGIES[strategy]()
