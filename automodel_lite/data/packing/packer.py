"""The options of the config node `packed_sequence`, checked when it is built."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Annotated

import numpy as np

from automodel_lite.config.rules import Count, Positive, Range, Seed
from automodel_lite.config.sizes import slot_multiple_of
from automodel_lite.data.packing.balance import BALANCES
from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.data.packing.plan import OVERLONG, PackPlan, check_settings, plan_packs
from automodel_lite.data.packing.strategies import Strategy, strategy_of
from automodel_lite.data.token_rows import Rows
from automodel_lite.errors import ConfigError

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
        max_packs: Positive | None = None,
        overlong: str | None = None,
        drop_long_samples: bool | None = None,
        balance: str = "step",
        slot_multiple: Positive | None = None,
        seed: Seed = 0,
        repack_each_epoch: bool = False,
        padding_idx: Count | None = None,
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
