"""Pack plans: which documents form which pack, decided on lengths alone.

    plan = plan_packs([900, 300, 2000, 724], 1024, overlong="split")
    len(plan)                      4 packs
    plan.doc_ids, plan.offsets     documents (or pieces of them) of pack i:
                                   doc_ids[offsets[i]:offsets[i + 1]]

A plan is a pure function of its arguments: every rank makes the same one, and nothing is exchanged.

How the packs are chosen stands in strategies.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from automodel_lite.config.sizes import ceil_div, round_up, slot_multiple_of
from automodel_lite.data.packing.overlong import (
    HasLabels,
    Part,
    Pieces,
    check_overlong,
    fit_documents,
)
from automodel_lite.data.packing.strategies import Packed, check_choice, strategy_of
from automodel_lite.data.tokens.token_rows import places_within
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.seed import BLOCK, seeded_order

OVERLONG = ("drop", "truncate", "split", "error")
"""(document, start, stop) of pieces [P] -> bool [P], whether a piece has a label."""
# tokens; the tail of a pack is cut into segments of it: no attention quadratic in the tail
PADDING_SEGMENT = 512


@dataclass(frozen=True)
class PlanCounts:
    """What became of every document: packed + dropped + masked + left out; of every token: the same
    + cut.
    """

    documents: int
    tokens: int
    packed_documents: int
    packed_tokens: int
    pieces: int  # entries of doc_ids
    split_documents: int  # in more than one piece
    left_out_documents: int  # by max_packs
    left_out_tokens: int
    dropped_documents: int = 0  # over-long, overlong="drop"
    dropped_tokens: int = 0
    truncated_documents: int = 0  # over-long, overlong="truncate"
    cut_tokens: int = 0
    masked_documents: int = 0  # over-long, without a label once they are cut
    masked_tokens: int = 0  # of pieces without a label
    # of documents that a strategy cuts: they stay in their packs, and train nothing
    unlabeled_pieces: int = 0


@dataclass(frozen=True, kw_only=True)
class PackPlan(Pieces):
    """offsets int64 [packs + 1] into doc_ids, tokens_per_pack int64 [packs] (real tokens).

    `lower_bound` (the volume in slots) and `num_packs_made` are packs before `max_packs` took its
    sample. `note` says what was decided on the way (one sentence or empty).
    """

    offsets: np.ndarray
    tokens_per_pack: np.ndarray
    packed_sequence_size: int
    slot_multiple: int
    strategy: str
    ragged: bool  # rows have the length of their document instead of `packed_sequence_size`
    seed: int
    epoch: int
    num_packs_made: int
    lower_bound: int
    counts: PlanCounts
    note: str = ""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def slots(self, lengths: np.ndarray, part: Part = slice(None)) -> np.ndarray:
        """Returns `piece_lengths`, rounded up to slot_multiple."""
        return round_up(self.piece_lengths(lengths, part), self.slot_multiple)

    def fingerprint(self) -> str:
        """Returns 16 hex digits that are equal for equal plans: ranks compare it, a resumed run
        compares it.
        """
        digest = hashlib.sha256(
            f"{self.packed_sequence_size} {self.slot_multiple} {self.strategy}".encode()
        )
        # As int64, little-endian: ids of 4 and of 8 bytes, and machines of either order, give the
        # same digits.
        everything = (self.doc_ids, self.offsets, self.starts, self.stops)
        for values in [x for x in everything if x is not None]:
            for start in range(0, len(values), BLOCK):
                digest.update(np.ascontiguousarray(values[start : start + BLOCK], "<i8").data)
        return digest.hexdigest()[:16]


def plan_packs(
    lengths: Sequence[int] | np.ndarray,
    packed_sequence_size: int,
    *,
    strategy: str = "exact_fill",
    seed: int = 0,
    epoch: int = 0,
    overlong: str = "drop",
    max_packs: int | None = None,
    slot_multiple: int = 1,
    has_labels: HasLabels | None = None,
    can_cut: bool = True,
) -> PackPlan:
    """Distributes documents over packs of at most `packed_sequence_size` tokens.

    lengths: positive integers [N], tokens of each document; mapped ones of int32 are read where
    they are, and 12 bytes per document are needed beside them. slot_multiple: every document takes
    a slot that is a multiple of it (2 * cp under context parallelism). overlong: what becomes of
    documents over the size, where the strategy does not cut documents anyway. max_packs: a random
    sample of the packs, each document with the same chance. has_labels: asked which pieces of
    over-long documents still train something once they are cut; the others are left out (None: all
    do). can_cut: may an error name that as a cure?

    Raises ConfigError for settings that cannot work, DataError for lengths that cannot.
    """
    lengths = _checked(lengths, packed_sequence_size, strategy, overlong, max_packs, slot_multiple)
    if slot_multiple > 1:
        slot_multiple_of(packed_sequence_size, slot_multiple, cp_size=1)
    pack, cuts_documents, is_ragged = strategy_of(strategy)
    # Documents that fit, in slots, the unit of the strategies; then what the packs hold, in tokens
    # again.
    pool = None
    counts: dict[str, int] = {}
    if not cuts_documents:
        check_overlong(lengths, packed_sequence_size, overlong, can_cut=can_cut)
        pool, counts = fit_documents(lengths, packed_sequence_size, overlong, has_labels)
        if pool is not None and not len(pool.doc_ids):
            raise DataError(
                "no document has a label within packed_sequence.packed_sequence_size="
                f"{packed_sequence_size}: their prompts alone fill a pack; raise it, or set "
                "packed_sequence.overlong=split."
            )
    fitting = lengths if pool is None else pool.piece_lengths(lengths)
    slots = ceil_div(fitting, slot_multiple) if slot_multiple > 1 else fitting
    size = packed_sequence_size // slot_multiple
    packed = pack(slots, size, seed, epoch)
    num_packs = len(packed.offsets) - 1
    if cuts_documents:
        pieces, offsets, counts = _cut_at(packed, lengths, slots, slot_multiple, has_labels)
    else:
        pieces = pool.take(packed.order) if pool else Pieces(packed.order)
        offsets = packed.offsets
    if max_packs is not None and max_packs < num_packs:
        pieces, offsets = _sample(pieces, offsets, max_packs, seed, epoch)
    # A million entries at a time: the lengths of all pieces at once would be 8 bytes for each
    # document.
    tokens_per_pack = np.empty(len(offsets) - 1, np.int64)
    for packs, part, begins in pack_blocks(offsets):
        tokens_per_pack[packs] = np.add.reduceat(pieces.piece_lengths(lengths, part), begins)
    return PackPlan(
        doc_ids=pieces.doc_ids.astype(np.int32 if len(lengths) < 2**31 else np.int64, copy=False),
        offsets=offsets,
        tokens_per_pack=tokens_per_pack,
        starts=pieces.starts,
        stops=pieces.stops,
        packed_sequence_size=packed_sequence_size,
        slot_multiple=slot_multiple,
        strategy=strategy,
        ragged=is_ragged,
        seed=seed,
        epoch=epoch,
        num_packs_made=num_packs,
        lower_bound=ceil_div(int(slots.sum(dtype=np.int64)), size),
        counts=_count(lengths, pieces, int(tokens_per_pack.sum()), counts),
        note=packed.note,
    )


def padding_segments(tail_tokens: int, slot_multiple: int = 1) -> list[int]:
    """Widths of the padding segments that fill a tail: at most PADDING_SEGMENT tokens,
    or one slot.
    """
    widest = max(PADDING_SEGMENT // slot_multiple, 1) * slot_multiple
    whole, rest = divmod(tail_tokens, widest)
    return [widest] * whole + [rest] * (rest > 0)


def pack_blocks(offsets: np.ndarray) -> Iterator[tuple[slice, slice, np.ndarray]]:
    """Yields packs of about a million entries of doc_ids: these packs, their entries, where packs
    begin.
    """
    first = 0
    while first < len(offsets) - 1:
        last = max(
            first + 1, int(np.searchsorted(offsets, offsets[first] + BLOCK, side="right")) - 1
        )
        yield (
            slice(first, last),
            slice(int(offsets[first]), int(offsets[last])),
            offsets[first:last] - offsets[first],
        )
        first = last


def _cut_at(
    packed: Packed,
    lengths: np.ndarray,
    slots: np.ndarray,
    slot_multiple: int,
    has_labels: HasLabels | None,
) -> tuple[Pieces, np.ndarray, dict[str, int]]:
    """Returns the documents of `packed.order` cut at its offsets, which are in slots; offsets in
    pieces; and counts.
    """
    order = packed.order
    pack_starts = packed.offsets[:-1]
    ends = np.cumsum(slots[order])
    # A piece begins where a document or a pack begins; `nth` is the document that it belongs to.
    starts = np.union1d(ends[:-1], pack_starts)
    stops = np.append(starts[1:], ends[-1])
    nth = np.searchsorted(ends, starts, side="right")
    doc_ids = order[nth]
    piece_starts = (starts - (ends[nth] - slots[doc_ids])) * slot_multiple
    # The last slot of a document may not be full.
    piece_lengths = np.minimum((stops - starts) * slot_multiple, lengths[doc_ids] - piece_starts)
    piece_stops = piece_starts + piece_lengths
    offsets = np.append(np.searchsorted(starts, pack_starts), len(starts)).astype(np.int64)
    # What trains nothing stays in its pack, as packs are cut from one stream of all documents.
    num_unlabeled = 0
    if has_labels:
        cut = np.flatnonzero(piece_lengths < lengths[doc_ids])
        is_trained = has_labels(doc_ids[cut], piece_starts[cut], piece_stops[cut])
        num_unlabeled = int((~is_trained).sum())
    return Pieces(doc_ids, piece_starts, piece_stops), offsets, {"unlabeled_pieces": num_unlabeled}


def _sample(
    pieces: Pieces, offsets: np.ndarray, max_packs: int, seed: int, epoch: int
) -> tuple[Pieces, np.ndarray]:
    """Returns `max_packs` random packs in the order of the plan: every document has the same
    chance.
    """
    chosen = np.sort(seeded_order(len(offsets) - 1, seed, epoch)[:max_packs])
    sizes = np.diff(offsets)[chosen]
    kept = pieces.take(places_within(sizes) + offsets[chosen].repeat(sizes))
    return kept, np.append(0, np.cumsum(sizes))


def _count(
    lengths: np.ndarray, pieces: Pieces, packed_tokens: int, lost: dict[str, int]
) -> PlanCounts:
    """Counts what is packed; what is lost to their length is in no pack, the rest was left out."""
    packed_documents = len(pieces.doc_ids)
    split_documents = 0
    if pieces.starts is not None:
        num_pieces = np.bincount(pieces.doc_ids, minlength=len(lengths))
        packed_documents = int((num_pieces > 0).sum())
        split_documents = int((num_pieces > 1).sum())
    tokens = int(lengths.sum())
    lost_tokens = sum(n for key, n in lost.items() if key.endswith("_tokens"))
    lost_documents = lost.get("dropped_documents", 0) + lost.get("masked_documents", 0)
    return PlanCounts(
        documents=len(lengths),
        tokens=tokens,
        packed_documents=packed_documents,
        packed_tokens=packed_tokens,
        pieces=len(pieces.doc_ids),
        split_documents=split_documents,
        left_out_documents=len(lengths) - packed_documents - lost_documents,
        left_out_tokens=tokens - packed_tokens - lost_tokens,
        **lost,
    )


def _checked(
    lengths: Sequence[int] | np.ndarray,
    size: int,
    strategy: str,
    overlong: str,
    max_packs: int | None,
    slot_multiple: int,
) -> np.ndarray:
    """Returns the lengths as an array; raises for arguments of `plan_packs` that cannot work."""
    check_choice("overlong", overlong, OVERLONG)
    for name, number in (
        ("packed_sequence_size", size),
        ("slot_multiple", slot_multiple),
        ("max_packs", max_packs),
    ):
        if number is not None and (
            isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1
        ):
            cure = "use null for all packs" if name == "max_packs" else "use 1 or more"
            raise ConfigError(
                f"packed_sequence.{name}={number!r} must be a whole number over 0: {cure}."
            )
    array = np.asarray(lengths)
    if not len(array):
        raise DataError(
            "there are no documents to pack: check the path, the split and the filters of the "
            "dataset."
        )
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 1:
        raise DataError(
            f"lengths of shape {array.shape} and type {array.dtype}, such as {array.min()}: they "
            "must be a flat list of whole numbers of tokens, at least 1 each; leave empty "
            "documents out."
        )
    return array if array.dtype == np.int32 else array.astype(np.int64, copy=False)
