"""Batches of each optimizer step, from a position on.

The trainer owns the position: it advances with finished steps, so nothing that workers have read ahead can leak into
it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from automodel_lite.config.schema import DataloaderConfig
from automodel_lite.data.collate import packed_sequence_thd_collater
from automodel_lite.data.pack_order import BatchShape, Cursor, MicroBatchSampler, deal
from automodel_lite.data.packing.packs import PackedDataset

Batch = dict[str, Any]
_NEVER = 1 << 60
_STAY_S = 120.0  # of a worker that was told to stop; it leaves sooner with its rank


@dataclass(frozen=True)
class StepBatches:
    """What one rank reads for one optimizer step."""

    micro_batches: list[Batch]  # collated [B, S] tensors
    pack_ids: list[int]  # of the whole step, all ranks
    epoch: int
    after: Cursor  # the position once this step is done
    wait_s: float  # how long the trainer waited for it


@dataclass(frozen=True)
class PackLoader:
    """Endless optimizer steps over epochs of packs.

    order_of   epoch -> its packs and the order in which they are consumed, int64 [packs]
    """

    order_of: Callable[[int], tuple[PackedDataset, np.ndarray]]
    shape: BatchShape
    dp_rank: int
    config: DataloaderConfig

    def steps(self, cursor: Cursor) -> Iterator[StepBatches]:
        """The steps that follow `cursor`, for ever."""
        while True:
            yield from self._epoch(cursor)
            cursor = Cursor(cursor.epoch + 1, 0)

    def left_out(self, cursor: Cursor) -> dict[str, int]:
        """Of packs that were planned beforehand this was said at the start."""
        return {}

    def _epoch(self, cursor: Cursor) -> Iterator[StepBatches]:
        packs, order = self.order_of(cursor.epoch)
        size = self.shape.global_batch_size
        starts = range(cursor.packs, len(order), size)
        steps = [deal(order[start : start + size], self.shape) for start in starts]
        batches = iter(read_batches(packs, MicroBatchSampler(steps, self.dp_rank), self.config))
        for start, step in zip(starts, steps):
            began = time.perf_counter()
            micro_batches = [next(batches) for _ in range(len(step))]
            waited_s = time.perf_counter() - began
            ids = order[start : start + size]
            yield StepBatches(
                micro_batches, ids.tolist(), cursor.epoch, _after(cursor.epoch, start + len(ids), len(order)), waited_s
            )


def _after(epoch: int, packs: int, num_packs: int) -> Cursor:
    """The edge of an epoch has one name: (next epoch, 0)."""
    return Cursor(epoch + 1, 0) if packs >= num_packs else Cursor(epoch, packs)


def read_batches(packs: Dataset[Any], sampler: MicroBatchSampler, config: DataloaderConfig) -> StatefulDataLoader:
    """A StatefulDataLoader over collated micro-batches; its own state is not used (the cursor is the position)."""
    return StatefulDataLoader(
        packs,
        batch_sampler=sampler,
        collate_fn=packed_sequence_thd_collater,
        pin_memory=config.pin_memory and torch.cuda.is_available(),
        num_workers=config.num_workers,
        multiprocessing_context="fork" if config.num_workers else None,  # a rank that is killed takes its workers along
        prefetch_factor=config.prefetch_factor if config.num_workers else None,
        snapshot_every_n_steps=_NEVER,
        worker_init_fn=outlive_signals,
    )


def outlive_signals(worker: int) -> None:
    """SLURM signals every process of a job: a worker stays a while, so that the rank can finish its step and save."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _leave_later)


def _leave_later(number: int, frame: FrameType | None) -> None:
    timer = threading.Timer(_STAY_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


def validation_steps(
    packs: PackedDataset, shape: BatchShape, dp_rank: int, config: DataloaderConfig
) -> Iterator[StepBatches]:
    """Every pack once over all ranks, one micro-batch at a time; ranks that run short get empty packs, so all run
    equally often.
    """
    for batch in read_batches(packs, MicroBatchSampler([deal(np.arange(len(packs)), shape)], dp_rank), config):
        yield StepBatches([batch], [], 0, Cursor(), 0.0)
