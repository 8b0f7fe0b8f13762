"""Which rank reads which packs, workers that read ahead, tokens on the device before they are needed.

    order of epoch 0   7 2 9 0 | 4 1 8 5 | 3 6          global_batch_size 4
    step 1             4 1 8 5
    2 dp ranks, micro_batch_size 1:   rank 0: [4], [8]     rank 1: [1], [5]
    step 2 (short)     3 6            rank 0: [3]          rank 1: [6]

The global batches depend neither on the number of ranks nor on the micro-batch size nor on workers, so a run may
continue on another layout. The recipe owns the position, which advances with finished steps: what workers have read
ahead is not part of it. Every source of packs offers the same to training, whether its packs are planned beforehand or
made from a stream.

Packs of equal tokens differ in attention work, and the slowest rank of each micro-step sets the pace. One optimizer
step is `micro_steps x ranks x micro_batch_size` packs, laid out in that order; every rank waits for the slowest one at
the end of each micro-step (FSDP) or of the step (DDP).

    costs of one step, 2 ranks, 2 micro-steps      9 1 | 8 2      waits 9 + 8 = 17 for 20 units of work on 2 ranks
    balance: step                                  1 2 | 9 8      waits 2 + 9 = 11

`step` distributes the packs that already form one optimizer step: the same packs, the same gradient. `window`
distributes the packs of several steps, each step getting its share of every stratum of cost.
"""

from __future__ import annotations

import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerFast

from automodel_lite.config.schema import Config, DataloaderConfig, TrainingConfig, global_batch_size_of
from automodel_lite.data.packing.packs import (
    EMPTY_PACK,
    Batch,
    PackedDataset,
    Packer,
    packed_sequence_thd_collater,
)
from automodel_lite.data.packing.plan import PackPlan, pack_blocks, padding_segments
from automodel_lite.data.reading.documents import Documents
from automodel_lite.data.tokens.tokenize import Job
from automodel_lite.models.flops import CostModel
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.seed import derive_seed, seeded_order
from automodel_lite.thd import ThdBatch, to_thd

if TYPE_CHECKING:
    from automodel_lite.data.packing.report import PackingReport


@dataclass(frozen=True)
class Cursor:
    """Position in the data: packs of `epoch` consumed so far, over all ranks.

    shards: of a stream, the state of each shard (by its number) after the packs that were consumed.
    """

    epoch: int = 0
    packs: int = 0
    shards: dict[str, Any] | None = None

    def gathered(self, mesh: Mesh) -> Cursor:
        """The position with the states of all shards, which are spread over the ranks; for a checkpoint."""
        if self.shards is None or mesh.root is None:
            return self
        own = {k: v for k, v in self.shards.items() if int(k) % mesh.shape.dp == mesh.dp_rank}
        parts: list[dict[str, Any]] = [{}] * mesh.shape.world_size
        dist.all_gather_object(parts, own)
        return replace(self, shards={shard: state for part in parts for shard, state in part.items()})


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


def batch_shape(config: TrainingConfig, dp_size: int) -> BatchShape:
    """Raises ConfigError when the global batch is not whole micro-batches of all data-parallel ranks."""
    size = global_batch_size_of(config, dp_size)
    return BatchShape(size, config.micro_batch_size, dp_size)


@dataclass(frozen=True)
class StepBatches:
    """What one rank reads for one optimizer step."""

    micro_batches: list[Batch]  # collated [B, S] tensors
    pack_ids: list[int]  # of the whole step, all ranks
    epoch: int
    after: Cursor  # the position once this step is done
    wait_s: float  # how long the trainer waited for it


@dataclass(frozen=True)
class TrainingPlan:
    """Optimizer steps of the run and of its first epoch."""

    max_steps: int
    steps_per_epoch: int | None  # None: of a stream, not known
    shape: BatchShape

    @property
    def num_epochs(self) -> float | None:
        return None if self.steps_per_epoch is None else self.max_steps / self.steps_per_epoch


@dataclass(frozen=True)
class PackSource(ABC):
    """Where the packs of a run come from. A position means the same packs on every number of ranks and workers.

    The methods with a body here answer for packs that are not known before the start.
    """

    documents: Documents
    job: Job
    packer: Packer
    val_packs: Mapping[str, PackedDataset]
    notes: tuple[str, ...]  # what tokenizing did, a line per set
    shape: BatchShape
    dataloader: DataloaderConfig

    @classmethod
    @abstractmethod
    def prepared(cls, config: Config, documents: Any, packer: Packer, batches: BatchShape) -> PackSource:
        """The packs of a dataset; tokenizes what is not in the cache, once per node."""

    @classmethod
    @abstractmethod
    def tokenize_shard(cls, config: Config, documents: Any) -> tuple[tuple[str, ...], list[int]]:
        """Tokenizes one shard of the documents, for `prepared` to join: notes, and the shards still missing."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self.job.tokenizer

    @property
    @abstractmethod
    def held_out(self) -> Mapping[str, PackedDataset]:
        """The validation sets, or all documents where there is none; raises ConfigError for a stream without one."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Tokens of the longest document (or piece of one) that a pack may hold."""

    @abstractmethod
    def plan(self, config: TrainingConfig) -> TrainingPlan:
        """How many steps; raises ConfigError when the settings do not say."""

    @abstractmethod
    def steps(self, cursor: Cursor, mesh: Mesh, costs: CostModel) -> Iterator[StepBatches]:
        """The steps of this rank that follow `cursor`, without end."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What the order of the data follows from, for checkpoints: other values are other data."""

    @property
    def counts(self) -> dict[str, int]:
        """What was read and left out, for metrics.jsonl."""
        return {}

    def left_out(self, cursor: Cursor, mesh: Mesh) -> dict[str, int]:
        """Documents left out up to `cursor`, where `counts` could not tell before the start. Every rank calls it."""
        return {}

    def report(self, costs: CostModel | None = None) -> PackingReport | None:
        """What the packs of the first epoch cost and gain."""
        return None

    def lengths(self) -> dict[str, list[float]]:
        """For drawing: documents in equal bins of length, and the lengths in one pack of the first epoch."""
        return {}


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


WINDOW_STEPS = 32


def pack_costs(plan: PackPlan, lengths: np.ndarray, model: CostModel) -> np.ndarray:
    """Work of every pack in FLOPs, float64 [packs]: its whole row, and attention inside each slot."""
    multiple = plan.slot_multiple
    attention, used = np.empty(len(plan), np.float64), np.empty(len(plan), np.int64)
    for packs, part, begins in pack_blocks(plan.offsets):
        slots = plan.slots(lengths, part)
        attention[packs] = np.add.reduceat(model.pairs(slots), begins)
        used[packs] = np.add.reduceat(slots, begins)
    if plan.ragged:
        return model.per_token * used + model.per_pair * attention
    tails, which = np.unique(plan.packed_sequence_size - used, return_inverse=True)
    padding = np.array([model.pairs(np.array(padding_segments(int(t), multiple), np.int64)).sum() for t in tails])
    return model.per_token * plan.packed_sequence_size + model.per_pair * (attention + padding[which])


def deal(costs: np.ndarray, balance: str, shape: BatchShape, seed: int = 0) -> np.ndarray:
    """The order in which packs are consumed, int64 [n]: positions in `costs`, which stands in the epoch's order.

    Position p of the result goes to step p // global_batch_size, then micro-step, rank and place in the micro-batch.
    An unfinished last step (or window) keeps its place.
    The steps of "window" depend on the number of ranks, those of "step" do not.
    Under "step" every optimizer step keeps its packs; under "window" every window of 32 steps does.
    """
    order = np.arange(len(costs))
    step, ranks = shape.global_batch_size, shape.dp_size
    if balance == "window":
        order = _mix_windows(costs, step, ranks * shape.micro_batch_size, seed)
    if balance == "none" or step == ranks:
        return order
    whole = len(costs) // step * step
    steps = order[:whole].reshape(-1, step)
    rising = np.take_along_axis(steps, np.argsort(costs[steps], axis=1, kind="stable"), axis=1)
    dealt = rising.reshape(-1, shape.micro_steps, shape.micro_batch_size, ranks).copy()
    dealt[:, :, 1::2] = dealt[:, :, 1::2, ::-1]  # there and back, so that the sums of micro-batches agree
    dealt[:, 1::2] = dealt[:, 1::2, :, ::-1]  # and the sums of steps, where ranks wait once a step only
    order[:whole] = dealt.swapaxes(2, 3).reshape(-1)
    return order


def _mix_windows(costs: np.ndarray, step: int, group: int, seed: int) -> np.ndarray:
    """Gives every step of a window one group of neighbors in cost from each stratum of the window's packs."""
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


def imbalance(costs: np.ndarray, shape: BatchShape) -> float:
    """Time over the time of perfectly shared work, at least 1: every micro-step lasts as long as its slowest rank.

    costs: float [n] in the order of consumption (see `deal`); an unfinished last step is left out.
    """
    whole = len(costs) // shape.global_batch_size * shape.global_batch_size
    if not whole:
        return 1.0
    work = costs[:whole].reshape(-1, shape.dp_size, shape.micro_batch_size).sum(axis=2)
    return float(work.max(axis=1).sum() / work.mean(axis=1).sum())


def read_batches(
    packs: Dataset[Any], steps: Iterable[np.ndarray], dp_rank: int, config: DataloaderConfig
) -> StatefulDataLoader:
    """The collated micro-batches of a rank; `steps` are pack ids, dealt to ranks."""
    micro_batches = [micro_batch for step in steps for micro_batch in step[:, dp_rank].tolist()]
    pins = config.pin_memory and torch.cuda.is_available()
    options = worker_options(config)
    return StatefulDataLoader(
        packs, batch_sampler=micro_batches, collate_fn=packed_sequence_thd_collater, pin_memory=pins, **options
    )


def worker_options(config: DataloaderConfig) -> dict[str, Any]:
    """Arguments of a StatefulDataLoader. Its own state is not used: the cursor, or each turn of a stream, has it."""
    return {
        "num_workers": config.num_workers,
        "multiprocessing_context": "fork" if config.num_workers else None,  # a killed rank takes its workers along
        "prefetch_factor": config.prefetch_factor if config.num_workers else None,
        "snapshot_every_n_steps": _NEVER,
        "worker_init_fn": outlive_signals,
    }


def outlive_signals(worker: int) -> None:
    """SLURM signals every process of a job: a worker stays a while, so that the rank can finish its step and save."""
    signal.set_wakeup_fd(-1)  # the rank's own
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
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
    for batch in read_batches(packs, [deal_to_ranks(np.arange(len(packs)), shape)], dp_rank, config):
        yield StepBatches([batch], [], 0, Cursor(), 0.0)


@dataclass(frozen=True)
class ReadyStep:
    """One optimizer step of this rank."""

    batches: StepBatches  # its wait_s is 0 when the device was still busy after the reading
    micro_batches: list[ThdBatch]  # whole streams, on the host
    inputs: list[ThdBatch]  # of the model: this context-parallel rank's tokens of each micro-batch, on the device


class DeviceFeed:
    """An iterator of steps that reads, and copies to the device, one step ahead.

        compute stream   step 1 ─────────────▶ step 2 ─────────────▶
        host             stage 2: read ─┐      stage 3: read ─┐
        copy stream                     └ copy ▶              └ copy ▶

    `stage()` is called once the work of a step has been handed to the GPU and before its result is waited for. A batch
    of validation is a step of one micro-batch.

    Args:
        place: takes this rank's part of a whole stream (context parallelism), on the host.
        with_mixers: see `to_thd`.
    """

    def __init__(
        self,
        steps: Iterator[StepBatches],
        place: Callable[[ThdBatch], ThdBatch],
        device: torch.device,
        with_mixers: bool = True,
    ):
        self._with_mixers = with_mixers
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
            for batch in ready.inputs:
                batch.map_tensors(lambda tensor: _used_on(tensor, compute))
        return ready

    def _ready(self, batches: StepBatches) -> ReadyStep:
        micro_batches = [to_thd(batch, self._with_mixers) for batch in batches.micro_batches]
        inputs = [self._place(batch) for batch in micro_batches]
        if self._copies is None:
            return ReadyStep(batches, micro_batches, [batch.to(self._device) for batch in inputs])
        if not torch.cuda.current_stream(self._device).query():  # still at work on the step before: nobody waited
            batches = replace(batches, wait_s=0.0)
        with torch.cuda.stream(self._copies):
            inputs = [batch.pin_memory().to(self._device, non_blocking=True) for batch in inputs]
        return ReadyStep(batches, micro_batches, inputs)


def _used_on(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """Keeps the memory of a tensor that another stream allocated until `stream` is done with it."""
    if tensor.is_cuda:
        tensor.record_stream(stream)
    return tensor
