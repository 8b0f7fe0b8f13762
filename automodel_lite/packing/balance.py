"""Packs of equal tokens differ in attention work; the slowest rank of each micro-step sets the pace.

Pure functions on the costs of packs. One optimizer step is `micro_steps x ranks x micro_batch_size` packs, laid out in
that order; every rank waits for the slowest one at the end of each micro-step (FSDP) or of the step (DDP).

    costs of one step, 2 ranks, 2 micro-steps      9 1 | 8 2      waits 9 + 8 = 17 for 20 units of work on 2 ranks
    dealt by "step"                                1 2 | 9 8      waits 2 + 9 = 11

`step` deals the packs that already form one optimizer step: the same packs, the same gradient. `window` deals the packs
of several steps, each step getting its share of every stratum of cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from automodel_lite.packing.order import seeded_order
from automodel_lite.packing.plan import PackPlan, padding_segments

BALANCES = ("none", "step", "window")
WINDOW_STEPS = 16


@dataclass(frozen=True)
class CostModel:
    """Work of a forward and backward pass: `per_token` a token and `per_pair` a visible (query, key) pair, in FLOPs.

    window: keys that a query sees in sliding-window layers; `window_frac` of the layers have it.
    """

    per_token: float
    per_pair: float
    window: int | None = None
    window_frac: float = 0.0

    @staticmethod
    def of_decoder(
        *,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        intermediate_size: int,
        vocab_size: int,
        experts_per_token: int = 1,
        window: int | None = None,
        window_frac: float = 0.0,
    ) -> CostModel:
        """From the integers of a model config: gated MLP, grouped-query attention, an output head; 6 FLOPs a weight and
        token, 12 a pair and attention channel (two products, forward and twice backward)."""
        attention = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
        mlp = 3 * hidden_size * intermediate_size * experts_per_token
        weights = num_layers * (attention + mlp) + hidden_size * vocab_size
        return CostModel(6.0 * weights, 12.0 * num_layers * num_heads * head_dim, window, window_frac)

    def pairs(self, lengths: np.ndarray) -> np.ndarray:
        """Visible pairs of causal documents, float64: s (s + 1) / 2, fewer where a window cuts them."""
        s = lengths.astype(np.float64)
        full = s * (s + 1) / 2
        if self.window is None or not self.window_frac:
            return full
        beyond = np.maximum(s - self.window, 0)
        return full - self.window_frac * beyond * (beyond + 1) / 2


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
