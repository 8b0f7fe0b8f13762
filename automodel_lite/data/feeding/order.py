"""The order in which the packs of an epoch are consumed, and which rank reads which.

    order of epoch 0   7 2 9 0 | 4 1 8 5 | 3 6          global_batch_size 4
    step 1             4 1 8 5
    2 dp ranks, micro_batch_size 1:   rank 0: [4], [8]     rank 1: [1], [5]
    step 2 (short)     3 6            rank 0: [3]          rank 1: [6]

The global batches depend neither on the number of ranks nor on the micro-batch size nor on workers,
so a run may continue on another layout.

Packs of equal tokens differ in attention work, and the slowest rank of each micro-step sets the
pace. One optimizer step is `micro_steps x ranks x micro_batch_size` packs, laid out in that order;
every rank waits for the slowest one at the end of each micro-step (FSDP) or of the step (DDP).

    costs of one step, 2 ranks, 2 micro-steps      9 1 | 8 2      waits 9 + 8 = 17 for 20 units of
    work on 2 ranks
    balance: step                                  1 2 | 9 8      waits 2 + 9 = 11

`step` distributes the packs that already form one optimizer step: the same packs, the same
gradient. `window` distributes the packs of several steps, each step getting its share of every
stratum of cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from automodel_lite.config.schema import TrainingConfig
from automodel_lite.config.sizes import ceil_div, global_batch_size_of
from automodel_lite.data.packing.packs import EMPTY_PACK
from automodel_lite.data.packing.plan import PackPlan, pack_blocks, padding_segments
from automodel_lite.models.flops import CostModel
from automodel_lite.seed import derive_seed, seeded_order


@dataclass(frozen=True)
class BatchShape:
    """How an optimizer step is cut: global_batch_size packs over dp_size ranks in micro-batches."""

    global_batch_size: int
    micro_batch_size: int
    dp_size: int

    @property
    def micro_steps(self) -> int:
        """Returns the forward passes of each rank for a whole step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)


def batch_shape(config: TrainingConfig, dp_size: int) -> BatchShape:
    """Raises ConfigError when the global batch is not whole micro-batches of all data-parallel
    ranks.
    """
    size = global_batch_size_of(config, dp_size)
    return BatchShape(size, config.micro_batch_size, dp_size)


def epoch_order(num_packs: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Returns the packs of an epoch in the order they are consumed, int64 [num_packs]."""
    return (
        seeded_order(num_packs, derive_seed("packs", seed), epoch)
        if shuffle
        else np.arange(num_packs)
    )


def step_edges(documents: np.ndarray, per_step: int) -> np.ndarray:
    """Returns where the steps of an epoch begin, and its end: steps of whole packs, each ending as
    near as it can to a multiple of `per_step` documents, so that an epoch has as many steps as one
    of unpacked documents.

    documents   of each pack in the order they are consumed, int [packs]

    >>> step_edges(np.array([47, 48, 47, 48]), 64)  # 190 documents: ends near 64, 128 and 190
    array([0, 1, 3, 4])
    """
    ends = np.cumsum(documents, dtype=np.int64)
    num_packs = len(ends)
    if not num_packs:
        return np.zeros(1, np.int64)
    num_steps = max(1, min(ceil_div(int(ends[-1]), per_step), num_packs))
    wanted = per_step * np.arange(1, num_steps + 1)
    # the pack that reaches the number, or the one before it where that is nearer
    behind = np.minimum(np.searchsorted(ends, wanted), num_packs - 1)
    before = np.maximum(behind - 1, 0)
    is_nearer = np.abs(ends[before] - wanted) < np.abs(ends[behind] - wanted)
    edges = np.where(is_nearer, before, behind) + 1
    edges[-1] = num_packs
    # a step has at least one pack: edges rise, and leave enough packs to the steps behind them
    places = np.arange(num_steps)
    edges = np.maximum.accumulate(edges - places) + places
    edges = np.minimum(edges, num_packs - places[::-1])
    return np.concatenate([np.zeros(1, np.int64), edges])


def assign_to_ranks(pack_ids: np.ndarray, shape: BatchShape) -> np.ndarray:
    """Lays out the packs of one step: int64 [micro-steps, dp ranks, micro_batch_size], filled up
    with EMPTY_PACK.
    """
    width = shape.dp_size * shape.micro_batch_size
    num_micro = ceil_div(len(pack_ids), width)
    filled = np.full(num_micro * width, EMPTY_PACK, dtype=np.int64)
    filled[: len(pack_ids)] = pack_ids
    return filled.reshape(num_micro, shape.dp_size, shape.micro_batch_size)


WINDOW_STEPS = 32


def pack_costs(
    plan: PackPlan,
    lengths: np.ndarray,
    model: CostModel,
    row_lengths: np.ndarray | None = None,
    of_towers: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Returns the work of every pack in FLOPs, float64 [packs]: its whole row, attention inside
    each slot, and `of_towers`, of its images.

    row_lengths  of the longest row of each document that is a tree, else its length: no query of a
                 tree sees more keys
    """

    @cache
    def of_padding(tail: int) -> float:
        widths = np.array(padding_segments(tail, plan.slot_multiple), np.int64)
        return float(model.pairs(widths).sum())

    costs = np.empty(len(plan), np.float64)  # of 10^9 documents the largest array, a byte of each
    for packs, part, begins in pack_blocks(plan.offsets):
        slots = plan.slots(lengths, part)
        pairs = model.pairs(slots)
        if row_lengths is not None and row_lengths is not lengths:
            # The longest row whole, and for the tokens beside it at most as many keys as it has.
            ids = plan.doc_ids[part]
            longest = row_lengths[ids].astype(np.float64)
            along_paths = model.pairs(longest) + (slots - longest) * longest
            pairs = np.where(longest < lengths[ids], np.minimum(pairs, along_paths), pairs)
        attention = np.add.reduceat(pairs, begins)
        used = np.add.reduceat(slots, begins)
        if not plan.ragged:
            # Tails repeat: the pairs of each width are counted once.
            tails, which = np.unique(plan.packed_sequence_size - used, return_inverse=True)
            attention += np.array([of_padding(int(tail)) for tail in tails])[which]
            used += tails[which]
        costs[packs] = model.per_token * used + model.per_pair * attention
    costs += of_towers
    return costs


def assign_packs(costs: np.ndarray, balance: str, shape: BatchShape, seed: int = 0) -> np.ndarray:
    """Returns the order in which packs are consumed, int64 [n]: positions in `costs`, which stands
    in the epoch's order.

    Position p of the result goes to step p // global_batch_size, then micro-step, rank and place in
    the micro-batch. An unfinished last step (or window) keeps its place.

    balance  "none": the epoch's order. "step": each optimizer step keeps its packs, and ranks get
             packs of equal cost at the same time, whatever the number of ranks. "window": packs
             also move between the steps of a window of 32, so that steps cost the same; which packs
             a step has depends on the number of ranks.
    """
    order = np.arange(len(costs))
    step = shape.global_batch_size
    ranks = shape.dp_size

    # 1. Under "window", make the steps of a window equal. Sort its packs by cost and cut them into
    # strata; each step draws one group of neighbors in cost from every stratum, so it has cheap
    # and dear packs in the proportion of the window.
    if balance == "window":
        num_strata = step // (ranks * shape.micro_batch_size)
        for number, start in enumerate(range(0, len(costs) // step * step, WINDOW_STEPS * step)):
            num_steps = min(WINDOW_STEPS, (len(costs) - start) // step)
            window = order[start : start + num_steps * step]
            rising = window[np.argsort(costs[window], kind="stable")]
            strata = rising.reshape(num_strata, num_steps, -1)
            drawn = [
                stratum[seeded_order(num_steps, seed, number * num_strata + k)]
                for k, stratum in enumerate(strata)
            ]
            order[start : start + num_steps * step] = np.stack(drawn, axis=1).reshape(-1)
    if balance == "none" or step == ranks:
        return order

    # 2. Within a step, give neighbors in cost to all ranks at the same time: nobody waits long at
    # the end of a micro-step.
    whole = len(costs) // step * step
    steps = order[:whole].reshape(-1, step)
    rising = np.take_along_axis(steps, np.argsort(costs[steps], axis=1, kind="stable"), axis=1)
    laid_out = rising.reshape(-1, shape.micro_steps, shape.micro_batch_size, ranks).copy()

    # 3. The last rank would get the dearest pack of each group. Reverse every second group of a
    # micro-batch, so that the sums of micro-batches agree, and every second micro-step, so that
    # the sums of steps do where ranks wait only once a step.
    laid_out[:, :, 1::2] = laid_out[:, :, 1::2, ::-1]
    laid_out[:, 1::2] = laid_out[:, 1::2, :, ::-1]
    order[:whole] = laid_out.swapaxes(2, 3).reshape(-1)
    return order


def balance_steps(
    costs: np.ndarray, balance: str, shape: BatchShape, edges: Sequence[int]
) -> np.ndarray:
    """Returns the order in which packs are consumed, as `assign_packs` does, where steps begin at
    `edges` and each keeps its packs.
    """
    order = np.arange(len(costs))
    width = shape.dp_size * shape.micro_batch_size
    for start, stop in pairwise(edges):
        # what is over whole micro-batches of all ranks keeps its place
        if whole := (stop - start) // width * width:
            step = BatchShape(whole, shape.micro_batch_size, shape.dp_size)
            order[start:stop] = start + assign_packs(costs[start:stop], balance, step)
    return order


def imbalance(costs: np.ndarray, shape: BatchShape) -> float:
    """Time over the time of perfectly shared work, at least 1: every micro-step lasts as long as
    its slowest rank.

    costs: float [n] in the order of consumption (see `assign_packs`); an unfinished last step is
    left out.
    """
    whole = len(costs) // shape.global_batch_size * shape.global_batch_size
    if not whole:
        return 1.0
    work = costs[:whole].reshape(-1, shape.dp_size, shape.micro_batch_size).sum(axis=2)
    return float(work.max(axis=1).sum() / work.mean(axis=1).sum())


def plan_imbalance(
    plan: PackPlan,
    lengths: np.ndarray,
    model: CostModel | None,
    balance: str,
    shape: BatchShape,
    row_lengths: np.ndarray | None = None,
    of_towers: np.ndarray | float = 0.0,
) -> tuple[float, float] | None:
    """Returns the imbalance of one epoch before and after balancing; None without a cost model or
    with one rank.
    """
    if model is None or shape.dp_size == 1:
        return None
    costs = pack_costs(plan, lengths, model, row_lengths, of_towers)
    drawn = costs[seeded_order(len(plan), plan.seed, plan.epoch)]
    balanced = drawn[assign_packs(drawn, balance, shape, plan.seed)]
    return imbalance(drawn, shape), imbalance(balanced, shape)
