"""Packs as rows of tokens, read lazily from flat rows when asked for; a batch is one longer row.

    size 16, slots of 4, documents [1 2 3] and [4 5 6 7 8]
    input_ids        1 2 3 0 | 4 5 6 7 8 0 0 0 | 0 0 0 0
    position_ids     0 1 2 3 | 0 1 2 3 4 5 6 7 | 0 1 2 3
    seq_lens         3         5                 0           a segment without tokens: the tail of
                     the pack
    seq_lens_padded  4         8                 4

Packing never shifts labels: labels[i] already is the target of position i. Nothing here changes the
rows that it is given: datasets may cache them.

Legend: S tokens of a pack, T of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from automodel_lite.columns import COLUMNS
from automodel_lite.config.components import CodePath
from automodel_lite.config.rules import Auto, OneOf, Positive, Range, Seed
from automodel_lite.config.sizes import round_up, slot_multiple_of
from automodel_lite.data.packing.plan import OVERLONG, PackPlan, padding_segments, plan_packs
from automodel_lite.data.packing.shared_plan import plan_of_host
from automodel_lite.data.packing.strategies import STRATEGY_NAMES, strategy_of
from automodel_lite.data.tokens.token_rows import (
    DocumentReader,
    LabelSpans,
    TokenizedDocuments,
    places_within,
)
from automodel_lite.errors import ConfigError, DataError

StrategyName = Annotated[str, OneOf(STRATEGY_NAMES)]
Overlong = Annotated[str, OneOf(OVERLONG)]
Balance = Annotated[str, OneOf(("none", "step", "window"))]
TreeMode = Annotated[str, OneOf(("auto", "off", "all"))]
Batch = dict[str, Any]
MAX_PACK_TOKENS = 2**24  # more fit into no memory: 20 times the longest context of today's models
SHARED_FROM = 1_000_000  # documents; a smaller plan is made sooner than it is looked up
MAX_DROPPED_FRAC = 0.2  # of the tokens, where the settings do not say overlong: drop


class Packer:
    """Plans packs from lengths and reads them; what every option means stands in
    conf/packed_sequence/.

    cp_size is the mesh's, handed over at build time: slots of documents are multiples of 2 *
    cp_size when it is over 1. slot_multiple asks for wider slots, so that runs on other meshes use
    the same packs. Raises ConfigError.
    """

    def __init__(
        self,
        # tokens of a pack; auto (resolved before) = holds 99.5 % of the documents
        packed_sequence_size: Annotated[int, Range(1, MAX_PACK_TOKENS)] | Auto,
        strategy: StrategyName = "exact_fill",  # exact_fill | best_fit | next_fit | wrapped | none
        max_packs: Positive | None = None,  # use a random sample of this many packs
        # documents longer than a pack: drop (the default) | truncate | split | error
        overlong: Overlong | None = None,
        balance: Balance = "step",  # none | step | window: distribute packs over ranks by cost
        # pad documents to a multiple of it; null = 2 * mesh.cp, or 1 without
        slot_multiple: Positive | None = None,
        seed: Seed = 0,
        repack_each_epoch: bool = False,  # new packs in every epoch, from (seed, epoch)
        # auto | off | all: rows of one document (all: any) share their beginning
        tree: TreeMode = "auto",
        # package.module:function(slots, size, seed, epoch) -> Packed
        own_strategy: CodePath | None = None,
        cp_size: int = 1,
    ):
        if isinstance(packed_sequence_size, str):
            raise ConfigError(
                f"packed_sequence.packed_sequence_size={packed_sequence_size} is not resolved: "
                "call automodel_lite.training.resolve.resolve_auto(config) first, or set a number."
            )
        self.packed_sequence_size = packed_sequence_size
        self.strategy = strategy if own_strategy is None else own_strategy
        self.max_packs = max_packs
        self.overlong = overlong or "drop"
        self.is_overlong_given = overlong is not None
        _, self.cuts_documents, self.is_ragged = strategy_of(self.strategy)
        if tree == "all" and (self.cuts_documents or self.is_ragged):
            why = "does not pack, and only packs hold"
            if self.cuts_documents:
                why = "cuts documents, and"
            raise ConfigError(
                f"packed_sequence.tree=all: packed_sequence.strategy={strategy} {why} trees: use "
                "strategy=exact_fill."
            )
        if repack_each_epoch and max_packs is None and self.strategy in ("next_fit", "none"):
            raise ConfigError(
                f"packed_sequence.repack_each_epoch=true: packed_sequence.strategy={strategy} "
                "takes the documents in their order, in each epoch: use exact_fill, best_fit or "
                "wrapped, or leave it out."
            )
        self.tree = "off" if self.cuts_documents or self.is_ragged else tree
        self.balance = balance
        self.slot_multiple = slot_multiple_of(packed_sequence_size, slot_multiple, cp_size)
        self.seed = seed
        self.repack_each_epoch = repack_each_epoch
        self.padding_idx = 0
        # pairs of answers, rows of policies, and documents with images, stay whole
        self.can_cut = True

    def pack_of(self, rows: TokenizedDocuments) -> dict[str, torch.Tensor]:
        """Returns one pack, as PackedDataset gives it, of rows that together fit it; of none, a
        pack of padding.
        """
        batch = lay_out_packs(
            rows,
            rows.offsets[:-1],
            rows.lengths,
            np.array([len(rows)]),
            self.packed_sequence_size,
            self.slot_multiple,
            self.padding_idx,
        )
        return batch[0]

    def for_document_kind(self, kind: str, padding_id: int = 0) -> Packer:
        """Returns the packing for a kind of documents: text is split, unless the settings say
        otherwise.
        """
        fitted = copy(self)
        fitted.padding_idx = padding_id
        fitted.can_cut &= kind != "preference"
        if kind == "text" and not self.is_overlong_given:
            fitted.overlong = "split"
        return fitted

    def keep_whole(self, what: str, refused: Sequence[str], *, together: bool = False) -> None:
        """Raises ConfigError for the one setting that would cut `what`, or, where what belongs
        `together`, part it.

        what     `documents with images stay whole`, for the sentence
        refused  ways of `overlong` that do not do
        """
        setting, value, cure = "overlong", self.overlong, ""
        if self.cuts_documents or (together and self.is_ragged):
            setting, value, cure = "strategy", self.strategy, "exact_fill, best_fit or next_fit"
        elif self.overlong in refused:
            *kept, last = [way for way in ("drop", "truncate", "error") if way not in refused]
            cure = f"{', '.join(kept)} or {last}"
        if cure:
            key = f"packed_sequence.{setting}"
            raise ConfigError(f"{key}={value}: {what}", key=key, cure=f"use {cure}")

    def check_dropped(
        self, dropped_tokens: int, tokens: int, name: str, lengths: np.ndarray | None = None
    ) -> None:
        """Raises DataError when more is dropped than anybody means by saying nothing; `lengths` of
        documents.
        """
        if self.is_overlong_given or dropped_tokens <= MAX_DROPPED_FRAC * tokens:
            return
        setting = "packed_sequence.packed_sequence_size"
        larger = f"{setting} larger"
        if lengths is not None:
            larger = f"{setting}={pack_size_for_coverage(lengths)} (keeps 99 %)"
        split = ", packed_sequence.overlong=split" if self.can_cut else ""
        raise DataError(
            f"{name}: documents over {setting}={self.packed_sequence_size} would be dropped, with "
            f"{dropped_tokens / tokens:.0%} of all tokens: set "
            f"{larger}{split}, or packed_sequence.overlong=drop if that is meant."
        )

    def packs(
        self, rows: DocumentReader, epoch: int = 0, shared: tuple[Path, str] | None = None
    ) -> PackedDataset:
        """Plans an epoch of these rows, of which nothing is read; epochs share a plan unless
        `repack_each_epoch`.

        shared  the cache, and what tells these rows from all others: processes of a host make the
                plan of many rows once; None = each makes its own
        """
        settings: dict[str, Any] = {
            "packed_sequence_size": self.packed_sequence_size,
            "strategy": self.strategy,
            "seed": self.seed,
            "epoch": epoch if self.repack_each_epoch else 0,
            "overlong": self.overlong,
            "max_packs": self.max_packs,
            "slot_multiple": self.slot_multiple,
        }

        def make() -> PackPlan:
            return plan_packs(
                rows.lengths, has_labels=rows.has_labels, can_cut=self.can_cut, **settings
            )

        # the strategy of a user may change
        if shared is None or len(rows) < SHARED_FROM or ":" in self.strategy:
            return PackedDataset(rows, make(), self.padding_idx)
        plan = plan_of_host(make, settings, *shared)
        return PackedDataset(rows, plan, self.padding_idx)


def pack_size_for_coverage(lengths: np.ndarray) -> int:
    """Returns the pack size, a multiple of 128, holding the documents of 99 % of the tokens."""
    rising = np.sort(lengths)
    total = np.cumsum(rising, dtype=np.int64)
    longest = int(rising[np.searchsorted(total, 0.99 * total[-1])])
    return round_up(longest, 128)


# PackedDataset[EMPTY_PACK] is padding only, for ranks that run short in the last step
EMPTY_PACK = -1


class PackedDataset(torch.utils.data.Dataset):
    """Pack i of a plan, gathered from `rows` when it is asked for.

    [i] -> int64 tensors "input_ids", "labels", "position_ids" [S] and "seq_lens", "seq_lens_padded"
    [segments]. `seq_lens_padded` are the slots (multiples of the plan's slot_multiple) and sum to
    S; `seq_lens` the real tokens in them, 0 for padding at the tail. S is the size of the packs; of
    strategy none, the longest slot of those that are asked for together. [EMPTY_PACK] is a pack of
    padding.
    """

    def __init__(self, rows: DocumentReader, plan: PackPlan, padding_idx: int = 0):
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

    def tower_flops(self) -> np.ndarray | float:
        """Returns the work of a composite's towers for each pack, float64 [packs]; 0 of text."""
        return 0.0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> PackBatch:
        """Returns many packs at once, which is how a DataLoader asks for a batch: twice as fast as
        one by one.
        """
        plan = self.plan
        spans = []
        for index in map(int, indices):
            if not EMPTY_PACK <= index < len(plan):
                raise IndexError(f"pack {index} of {len(plan)}")
            span = (
                (0, 0)
                if index == EMPTY_PACK
                else (int(plan.offsets[index]), int(plan.offsets[index + 1]))
            )
            spans.append(span)  # where the documents of the pack stand in the plan's doc_ids
        rows, starts, lengths = self.rows.locate(_joined_spans(plan.doc_ids, spans))
        if plan.starts is not None and plan.stops is not None:
            cut = _joined_spans(plan.starts, spans)
            starts = starts + cut
            lengths = _joined_spans(plan.stops, spans) - cut
        size = plan.packed_sequence_size
        multiple = plan.slot_multiple
        if plan.ragged:
            size = round_up(max(1, int(lengths.max(initial=0))), multiple)
        num_documents = np.array([stop - start for start, stop in spans], np.int64)
        return lay_out_packs(rows, starts, lengths, num_documents, size, multiple, self.padding_idx)


def _joined_spans(array: np.ndarray | LabelSpans, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns array[start:stop] of all spans, one after the other.

    Joining memory copies runs with wide loads, in half the time of a gather by indices, which waits
    for memory at each cache line: 15 us against 35 us for 8,192 tokens of 40 documents anywhere in
    40 MB.
    """
    if isinstance(array, LabelSpans):
        return np.concatenate([array.values[:0], *(array[start:stop] for start, stop in spans)])
    view = array.data
    joined = np.frombuffer(b"".join([view[start:stop] for start, stop in spans]), array.dtype)
    return joined.reshape(-1, *array.shape[1:])


@dataclass(frozen=True)
class PackBatch:
    """Packs that were laid out together. [i] is one of them, as PackedDataset gives it.

    row           all of them, one behind the other: what `to_thd` takes
    num_segments  of each pack: documents and padding segments
    """

    row: Batch
    num_segments: list[int]

    def __len__(self) -> int:
        return len(self.num_segments)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        index = range(len(self))[index]
        size = len(self.row["input_ids"]) // len(self)
        first = sum(self.num_segments[:index])
        tokens = slice(index * size, (index + 1) * size)
        segments = slice(first, first + self.num_segments[index])
        return {
            name: x[segments if name.startswith("seq_lens") else tokens]
            for name, x in self.row.items()
            if name != "images"
        }


def lay_out_packs(
    rows: TokenizedDocuments,
    starts: np.ndarray,
    lengths: np.ndarray,
    num_documents: np.ndarray,
    size: int,
    slot_multiple: int = 1,
    padding_idx: int = 0,
) -> PackBatch:
    """Packs of the documents rows[start : start + length]; the first num_documents[0] of them are
    pack 0, and so on. Everything is done for all packs at once.
    """
    spans = list(zip(starts.tolist(), (starts + lengths).tolist()))
    tokens = {
        name: _joined_spans(rows.columns[name], spans).astype(COLUMNS[name].batched)
        for name in rows.columns
    }
    # Where the tokens fill all positions, slots are the lengths, the very same array: nothing is
    # spread over padding.
    num_packs = len(num_documents)
    slots = lengths
    num_segments = num_documents
    if len(tokens["input_ids"]) != num_packs * size:
        # Segments: each document in its slot, and where a pack is not full, padding of length 0 at
        # its tail.
        slots = round_up(lengths, slot_multiple)
        last = np.cumsum(num_documents)
        used = np.diff(np.append(0, np.cumsum(slots))[last], prepend=0)
        tails = [padding_segments(free, slot_multiple) for free in (size - used).tolist()]
        num_tails = np.array(list(map(len, tails)))
        behind = last.repeat(num_tails)
        widths = list(chain.from_iterable(tails))
        lengths = np.insert(lengths, behind, 0)
        slots = np.insert(slots, behind, widths)
        num_segments = num_documents + num_tails
    row = fill_slots(tokens, lengths, slots, padding_idx)
    row |= {"seq_lens": lengths, "seq_lens_padded": slots}
    return PackBatch({name: torch.from_numpy(x) for name, x in row.items()}, num_segments.tolist())


def fill_slots(
    tokens: Mapping[str, np.ndarray], lengths: np.ndarray, slots: np.ndarray, padding_idx: int
) -> dict[str, np.ndarray]:
    """Documents end to end, each padded to its slot: the columns of `tokens` and `position_ids`,
    [sum(slots)] each, which go back where a branch of a tree begins.

    tokens   columns of the real tokens, [sum(lengths)] each; they keep their dtypes
    lengths, slots  int64 [segments]; the very same array when every slot is full
    """
    # Positions count from the start of their slot, so a position is real when it is under the
    # segment's length.
    position_ids = places_within(slots)
    if lengths is not slots:
        real = position_ids < lengths.repeat(slots)
        padding = {name: column.padding for name, column in COLUMNS.items()} | {
            "input_ids": padding_idx
        }
        padded = {}
        for name, values in tokens.items():
            shape = len(real), *values.shape[1:]
            padded[name] = np.full(shape, padding[name], values.dtype)
            padded[name][real] = values
        tokens = padded
    if "branches" in tokens:
        # From a branch to the next, or to the end of the slot, all positions are off by as much as
        # its first.
        starts = np.flatnonzero((tokens["branches"] > 0) | (position_ids == 0))
        firsts = np.maximum(tokens["branches"][starts] - 1, 0)
        position_ids += (firsts - position_ids[starts]).repeat(
            np.diff(np.append(starts, len(position_ids)))
        )
    return {
        **{name: x for name, x in tokens.items() if name != "branches"},
        "position_ids": position_ids,
    }


def join_packs(packs: Sequence[Mapping[str, Any]] | PackBatch) -> Batch:
    """Returns packs one behind the other: the flat row that `thd.to_thd` takes. A pack without an
    optional column that others have gets its padding.
    """
    if isinstance(packs, PackBatch):
        return packs.row
    row = {}
    for name in (*COLUMNS, "position_ids", "seq_lens", "seq_lens_padded"):
        dtype = getattr(torch, COLUMNS[name].batched) if name in COLUMNS else torch.int64
        brought = [torch.as_tensor(pack[name], dtype=dtype) for pack in packs if name in pack]
        if not brought:
            continue
        following = iter(brought)
        parts = []
        for pack in packs:
            if name in pack:
                parts.append(next(following))
            else:
                shape = len(pack["input_ids"]), *brought[0].shape[1:]
                parts.append(brought[0].new_full(shape, COLUMNS[name].padding))
        row[name] = torch.cat(parts)
    if "images" in packs[0]:  # a stream's pack, which is alone
        row["images"] = packs[0]["images"]
    return row
