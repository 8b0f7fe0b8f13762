"""Batches of packs: which rank reads which, workers that read ahead, tokens on the device before they are needed.

    order of epoch 0   7 2 9 0 | 4 1 8 5 | 3 6          global_batch_size 4
    step 1             4 1 8 5
    2 dp ranks, micro_batch_size 1:   rank 0: [4], [8]     rank 1: [1], [5]
    step 2 (short)     3 6            rank 0: [3]          rank 1: [6]

The global batches depend neither on the number of ranks nor on the micro-batch size nor on workers, so a run may
continue on another layout. The recipe owns the position, which advances with finished steps: what workers have read
ahead is not part of it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from automodel_lite.config.schema import DataloaderConfig
from automodel_lite.data.collate import packed_sequence_thd_collater
from automodel_lite.data.packing.order import seeded_order
from automodel_lite.data.packing.packs import EMPTY_PACK, PackedDataset
from automodel_lite.data.source import BatchShape, Cursor, StepBatches
from automodel_lite.seed import derive_seed
from automodel_lite.thd import ThdBatch, to_thd

_NEVER = 1 << 60
_STAY_S = 120.0  # of a worker that was told to stop; it leaves sooner with its rank


def epoch_order(num_packs: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The packs of an epoch in the order they are consumed, int64 [num_packs]."""
    return seeded_order(num_packs, derive_seed("packs", seed), epoch) if shuffle else np.arange(num_packs)


def steps_per_epoch(num_packs: int, global_batch_size: int) -> int:
    """The short last step counts."""
    return -(-num_packs // global_batch_size)


def deal_to_ranks(pack_ids: np.ndarray, shape: BatchShape) -> np.ndarray:
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
    signal.set_wakeup_fd(-1)  # the rank's own
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
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
    for batch in read_batches(packs, MicroBatchSampler([deal_to_ranks(np.arange(len(packs)), shape)], dp_rank), config):
        yield StepBatches([batch], [], 0, Cursor(), 0.0)


@dataclass(frozen=True)
class ReadyStep:
    """One optimizer step of this rank."""

    batches: StepBatches  # its wait_s is 0 when the device was still busy after the reading
    micro_batches: list[ThdBatch]  # whole streams, on the host
    parts: list[ThdBatch]  # the tokens of this context-parallel rank, on the device


class DeviceFeed:
    """An iterator of steps that reads, and copies to the device, one step ahead.

        compute stream   step 1 ─────────────▶ step 2 ─────────────▶
        host             stage 2: read ─┐      stage 3: read ─┐
        copy stream                     └ copy ▶              └ copy ▶

    `stage()` is called once the work of a step has been handed to the GPU and before its result is waited for. A batch
    of validation is a step of one micro-batch.

    Args:
        place: takes this rank's part of a whole stream (context parallelism), on the host.
    """

    def __init__(self, steps: Iterator[StepBatches], place: Callable[[ThdBatch], ThdBatch], device: torch.device):
        self._steps = steps
        self._place = place
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staged: ReadyStep | None = None

    def __iter__(self) -> Iterator[ReadyStep]:
        return self

    def stage(self) -> None:
        """Reads the next step and starts its copy; nothing when that was done already, or when no step is left."""
        if self._staged is None and (batches := next(self._steps, None)) is not None:
            self._staged = self._ready(batches)

    def peek(self) -> ReadyStep:
        """The step that comes next; raises StopIteration when there is none."""
        self.stage()
        if self._staged is None:
            raise StopIteration
        return self._staged

    def __next__(self) -> ReadyStep:
        ready = self.peek()
        self._staged = None
        if self._copies is not None:
            compute = torch.cuda.current_stream(self._device)
            compute.wait_stream(self._copies)
            for part in ready.parts:
                part.moved(lambda tensor: _used_on(tensor, compute))
        return ready

    def _ready(self, batches: StepBatches) -> ReadyStep:
        micro_batches = [to_thd(batch) for batch in batches.micro_batches]
        parts = [self._place(batch) for batch in micro_batches]
        if self._copies is None:
            return ReadyStep(batches, micro_batches, [part.to(self._device) for part in parts])
        if not torch.cuda.current_stream(self._device).query():  # still at work on the step before: nobody waited
            batches = replace(batches, wait_s=0.0)
        with torch.cuda.stream(self._copies):
            parts = [part.pin_memory().to(self._device, non_blocking=True) for part in parts]
        return ReadyStep(batches, micro_batches, parts)


def _used_on(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """Keeps the memory of a tensor that another stream allocated until `stream` is done with it."""
    if tensor.is_cuda:
        tensor.record_stream(stream)
    return tensor
