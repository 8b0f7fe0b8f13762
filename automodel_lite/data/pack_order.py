"""Which packs form each optimizer step, and which rank reads which: a pure function of (seed, epoch).

    order of epoch 0   7 2 9 0 | 4 1 8 5 | 3 6          global_batch_size 4
    step 1             4 1 8 5
    2 dp ranks, micro_batch_size 1:   rank 0: [4], [8]     rank 1: [1], [5]
    step 2 (short)     3 6            rank 0: [3]          rank 1: [6]

The global batches depend neither on the number of ranks nor on the micro-batch size nor on workers, so a run may
continue on another layout. Its position is (epoch, packs consumed).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from automodel_lite.data.packing.order import seeded_order
from automodel_lite.data.packing.packs import EMPTY_PACK
from automodel_lite.seed import derive_seed


@dataclass(frozen=True)
class Cursor:
    """Position in the data: packs of `epoch` consumed so far, over all ranks.

    shards: of a stream, the state of each shard (by its number) behind the packs that were consumed.
    """

    epoch: int = 0
    packs: int = 0
    shards: dict[str, Any] | None = None


@dataclass(frozen=True)
class BatchShape:
    """How an optimizer step is cut: global_batch_size packs over dp_size ranks in micro-batches."""

    global_batch_size: int
    micro_batch_size: int
    dp_size: int

    @property
    def micro_steps(self) -> int:
        """Forward passes of each rank for a whole step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)


def epoch_order(num_packs: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The packs of an epoch in the order they are consumed, int64 [num_packs]."""
    return seeded_order(num_packs, derive_seed("packs", seed), epoch) if shuffle else np.arange(num_packs)


def steps_per_epoch(num_packs: int, global_batch_size: int) -> int:
    """The short last step counts."""
    return -(-num_packs // global_batch_size)


def deal(pack_ids: np.ndarray, shape: BatchShape) -> np.ndarray:
    """The packs of one step -> int64 [micro-steps, dp ranks, micro_batch_size], filled up with EMPTY_PACK."""
    width = shape.dp_size * shape.micro_batch_size
    num_micro = -(-len(pack_ids) // width)
    filled = np.full(num_micro * width, EMPTY_PACK, dtype=np.int64)
    filled[: len(pack_ids)] = pack_ids
    return filled.reshape(num_micro, shape.dp_size, shape.micro_batch_size)


class MicroBatchSampler(Sampler[list[int]]):
    """This rank's micro-batches of one epoch, from a position on; a batch sampler for StatefulDataLoader.

    steps      pack ids of each optimizer step, dealt: int64 [micro-steps, dp ranks, micro_batch_size]
    """

    def __init__(self, steps: list[np.ndarray], dp_rank: int) -> None:
        self.steps = steps
        self.dp_rank = dp_rank

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            for micro in step[:, self.dp_rank]:
                yield micro.tolist()

    def __len__(self) -> int:
        return sum(len(step) for step in self.steps)
