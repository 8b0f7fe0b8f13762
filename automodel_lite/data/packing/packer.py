"""The options of the config node `packed_sequence`, and how packs are balanced over ranks.

Packs of equal tokens differ in attention work; the slowest rank of each micro-step sets the pace. One optimizer step is
`micro_steps x ranks x micro_batch_size` packs, laid out in that order; every rank waits for the slowest one at the end
of each micro-step (FSDP) or of the step (DDP).

    costs of one step, 2 ranks, 2 micro-steps      9 1 | 8 2      waits 9 + 8 = 17 for 20 units of work on 2 ranks
    dealt by "step"                                1 2 | 9 8      waits 2 + 9 = 11

`step` deals the packs that already form one optimizer step: the same packs, the same gradient. `window` deals the packs
of several steps, each step getting its share of every stratum of cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Annotated

import numpy as np

from automodel_lite.config.rules import Count, Positive, Range, Seed
from automodel_lite.config.schema import slot_multiple_of
from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.data.packing.plan import OVERLONG, PackPlan, check_settings, padding_segments, plan_packs
from automodel_lite.data.packing.strategies import Strategy, strategy_of
from automodel_lite.data.token_rows import Rows
from automodel_lite.errors import ConfigError
from automodel_lite.flops import CostModel
from automodel_lite.seed import seeded_order

BALANCES = ("none", "step", "window")
WINDOW_STEPS = 32


def pack_costs(plan: PackPlan, lengths: np.ndarray, model: CostModel) -> np.ndarray:
    """Work of every pack in FLOPs, float64 [packs]: its whole row, and attention inside each slot."""
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
    Under "step" every optimizer step keeps its packs; under "window" every window of 32 steps does.
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


MAX_PACK_TOKENS = 2**24  # more fit into no memory: 20 times the longest context of today's models


class Packer:
    """Plans packs from lengths and reads them; what every option means stands in conf/packed_sequence/.

    cp_size is the mesh's, handed over at build time: slots of documents are multiples of 2 * cp_size when it is over 1.
    slot_multiple asks for wider slots, so that runs on other meshes use the same packs. Raises ConfigError.
    """

    def __init__(
        self,
        packed_sequence_size: Annotated[int, Range(1, MAX_PACK_TOKENS)],
        strategy: str | Strategy = "exact_fill",
        max_packs: Positive | None = None,  # a fair sample of so many packs
        overlong: str | None = None,  # a document longer than a pack: drop (the default) | truncate | split | error
        drop_long_samples: bool | None = None,  # true = overlong: drop, false = overlong: error
        balance: str = "step",  # none | step | window: packs are distributed to ranks by their cost
        slot_multiple: Positive | None = None,  # of the slot of each document; null = 2 * mesh.cp, 1 without
        seed: Seed = 0,
        repack_each_epoch: bool = False,  # other packs in every epoch, from (seed, epoch)
        padding_idx: Count | None = None,  # fills packs up; null = the tokenizer's padding, else its end token
        cp_size: int = 1,
    ):
        if balance not in BALANCES:
            raise ConfigError(f"packed_sequence.balance={balance!r} is unknown: use one of {', '.join(BALANCES)}.")
        self.packed_sequence_size = packed_sequence_size
        self.strategy = strategy_of(strategy)
        self.max_packs = max_packs
        self.overlong = _overlong(overlong, drop_long_samples)
        check_settings(packed_sequence_size, self.overlong, max_packs, 1)
        self.balance = balance
        self.slot_multiple = slot_multiple_of(packed_sequence_size, slot_multiple, cp_size)
        self.seed = seed
        self.repack_each_epoch = repack_each_epoch
        self.padding_idx = padding_idx

    def plan(self, lengths: Sequence[int] | np.ndarray, epoch: int = 0) -> PackPlan:
        """The plan of an epoch; all epochs share one unless `repack_each_epoch`."""
        return plan_packs(
            lengths,
            self.packed_sequence_size,
            strategy=self.strategy,
            seed=self.seed,
            epoch=epoch if self.repack_each_epoch else 0,
            overlong=self.overlong,
            max_packs=self.max_packs,
            slot_multiple=self.slot_multiple,
        )

    def resized(self, packed_sequence_size: int, overlong: str) -> Packer:
        """The same packing in packs of another size; it must be a multiple of `slot_multiple`."""
        return Packer(
            packed_sequence_size,
            self.strategy,
            self.max_packs,
            overlong,
            balance=self.balance,
            slot_multiple=self.slot_multiple,
            seed=self.seed,
            repack_each_epoch=self.repack_each_epoch,
            padding_idx=self.padding_idx,
        )

    def padded_with(self, padding_id: int) -> Packer:
        """The same packing, which fills packs up with `padding_id` unless the settings name another id."""
        padded = copy(self)
        padded.padding_idx = padding_id if self.padding_idx is None else self.padding_idx
        return padded

    def packs(self, rows: Rows, plan: PackPlan) -> PackedDataset:
        return PackedDataset(rows, plan, self.padding_idx or 0)


def _overlong(overlong: str | None, drop_long_samples: bool | None) -> str:
    """`drop_long_samples` is the reference's name for two of the four choices."""
    if overlong is not None and overlong not in OVERLONG:
        raise ConfigError(f"packed_sequence.overlong={overlong!r} is unknown: use one of {', '.join(OVERLONG)}.")
    if drop_long_samples is None:
        return overlong or "drop"
    named = "drop" if drop_long_samples else "error"
    if overlong not in (None, named):
        raise ConfigError(
            f"packed_sequence.drop_long_samples={drop_long_samples} means overlong={named} and contradicts "
            f"packed_sequence.overlong={overlong}: set only overlong."
        )
    return named
