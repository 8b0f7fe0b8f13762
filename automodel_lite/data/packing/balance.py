"""Packs of equal tokens differ in attention work; the slowest rank of each micro-step sets the pace.

Pure functions on the costs of packs. One optimizer step is `micro_steps x ranks x micro_batch_size` packs, laid out in
that order; every rank waits for the slowest one at the end of each micro-step (FSDP) or of the step (DDP).

    costs of one step, 2 ranks, 2 micro-steps      9 1 | 8 2      waits 9 + 8 = 17 for 20 units of work on 2 ranks
    dealt by "step"                                1 2 | 9 8      waits 2 + 9 = 11

`step` deals the packs that already form one optimizer step: the same packs, the same gradient. `window` deals the packs
of several steps, each step getting its share of every stratum of cost.
"""

from __future__ import annotations

import numpy as np

from automodel_lite.data.packing.order import seeded_order
from automodel_lite.data.packing.plan import PackPlan, padding_segments
from automodel_lite.flops import CostModel

BALANCES = ("none", "step", "window")
WINDOW_STEPS = 16


def pack_costs(plan: PackPlan, lengths: np.ndarray, model: CostModel) -> np.ndarray:
    """Work of every pack in FLOPs, float64 [packs]: its whole row, and attention inside of each slot."""
    multiple = plan.slot_multiple
    slots = -(-plan.piece_lengths(np.asarray(lengths)) // multiple) * multiple
    attention = np.add.reduceat(model.pairs(slots), plan.offsets[:-1])
    used = np.add.reduceat(slots, plan.offsets[:-1])
    if plan.ragged:
        return model.per_token * used + model.per_pair * attention
    tails, which = np.unique(plan.packed_sequence_size - used, return_inverse=True)
    padding = np.array([model.pairs(np.array(padding_segments(int(t), multiple), np.int64)).sum() for t in tails])
    return model.per_token * plan.packed_sequence_size + model.per_pair * (attention + padding[which])


def deal(
    costs: np.ndarray, balance: str, *, ranks: int, micro_steps: int, micro_batch_size: int = 1, seed: int = 0
) -> np.ndarray:
    """The order in which packs are consumed, int64 [n]: positions in `costs`, which stands in the epoch's order.

    Position p of the result goes to step p // G, then micro-step, rank and place in the micro-batch, with
    G = micro_steps * ranks * micro_batch_size. An unfinished last step (or window) keeps its place.
    The steps of "window" depend on the number of ranks, those of "step" do not.
    Under "step" every optimizer step keeps its packs; under "window" every window of 16 steps does.
    """
    order = np.arange(len(costs))
    step = ranks * micro_steps * micro_batch_size
    if balance == "window":
        order = _mix_windows(costs, step, ranks * micro_batch_size, seed)
    if balance == "none" or micro_steps * micro_batch_size == 1:
        return order
    whole = len(costs) // step * step
    steps = order[:whole].reshape(-1, step)
    rising = np.take_along_axis(steps, np.argsort(costs[steps], axis=1, kind="stable"), axis=1)
    shape = (-1, micro_steps, micro_batch_size, ranks)
    dealt = rising.reshape(shape).copy()
    dealt[:, :, 1::2] = dealt[:, :, 1::2, ::-1]  # there and back, so that the sums of micro-batches agree
    dealt[:, 1::2] = dealt[:, 1::2, :, ::-1]  # and the sums of steps, where ranks wait once a step only
    order[:whole] = dealt.swapaxes(2, 3).reshape(-1)
    return order


def _mix_windows(costs: np.ndarray, step: int, group: int, seed: int) -> np.ndarray:
    """Gives every step of a window one group of neighbours in cost from each stratum of the window's packs."""
    order = np.arange(len(costs))
    for number, start in enumerate(range(0, len(costs) // step * step, WINDOW_STEPS * step)):
        num_steps = min(WINDOW_STEPS, (len(costs) - start) // step)
        window = order[start : start + num_steps * step]
        rising = window[np.argsort(costs[window], kind="stable")]
        strata = rising.reshape(step // group, num_steps, group)
        mixed = [
            stratum[seeded_order(num_steps, seed, number * (step // group) + k)] for k, stratum in enumerate(strata)
        ]
        order[start : start + num_steps * step] = np.stack(mixed, axis=1).reshape(-1)
    return order


def imbalance(costs: np.ndarray, *, ranks: int, micro_steps: int, micro_batch_size: int = 1) -> float:
    """Time over the time of perfectly shared work, at least 1: every micro-step lasts as long as its slowest rank.

    costs: float [n] in the order of consumption (see `deal`); an unfinished last step is left out.
    """
    step = ranks * micro_steps * micro_batch_size
    whole = len(costs) // step * step
    if not whole:
        return 1.0
    work = costs[:whole].reshape(-1, ranks, micro_batch_size).sum(axis=2)
    return float(work.max(axis=1).sum() / work.mean(axis=1).sum())
