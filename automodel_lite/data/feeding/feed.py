"""Workers that read ahead, and tokens on the device before they are needed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from automodel_lite.compat import ExceptionWrapper
from automodel_lite.config.schema import DataloaderConfig
from automodel_lite.data.feeding.order import BatchShape, assign_to_ranks
from automodel_lite.data.feeding.source import Cursor, HostStep
from automodel_lite.data.packing.packs import PackedDataset, join_packs
from automodel_lite.errors import RunStoppedError, one_line
from automodel_lite.thd import ThdBatch, to_thd

_NEVER = 1 << 60
_PREFETCHED = 4  # batches of each worker
_GRACE_S = 120.0  # of a worker that was told to stop; it leaves sooner with its rank


def read_batches(
    packs: Dataset[Any], steps: Iterable[np.ndarray], dp_rank: int, config: DataloaderConfig
) -> StatefulDataLoader:
    """Returns the micro-batches of a rank, a row each; `steps` are pack ids, assigned to ranks."""
    micro_batches = [micro_batch for step in steps for micro_batch in step[:, dp_rank].tolist()]
    pins = torch.cuda.is_available()
    options = worker_options(config)
    return StatefulDataLoader(
        packs,
        batch_sampler=micro_batches,
        collate_fn=join_packs,
        pin_memory=pins,
        **options,
    )


def worker_options(config: DataloaderConfig) -> dict[str, Any]:
    """Arguments of a StatefulDataLoader. Its own state is not used: the cursor, or each turn of a
    stream, has it.
    """
    return {
        "num_workers": config.num_workers,
        # a killed rank takes its workers along
        "multiprocessing_context": "fork" if config.num_workers else None,
        "prefetch_factor": _PREFETCHED if config.num_workers else None,
        "snapshot_every_n_steps": _NEVER,
        "worker_init_fn": start_worker,
    }


class FromWorkerError(Exception):
    """An error of a worker: its sentence, without the worker's traceback, which a DataLoader puts
    in front of it.
    """

    def __str__(self) -> str:
        return super().__str__().rpartition(f"{type(self).__name__}: ")[2].strip()


class UnsentBatchError(FromWorkerError, RunStoppedError):
    """A batch that a worker cannot hand over."""


def start_worker(worker: int) -> None:
    """Makes a new process a worker that stays while its rank is stopped, and that tells what it
    cannot hand over.
    """
    _delay_exit()
    Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]


def _send_error(queue: Queue[Any], error: Exception, item: Any) -> None:
    """Sends the reason in place of a batch, in the thread of the worker's queue, which only prints
    it: the rank waited for that batch without end.
    """
    (number, (_, worker, state)) = item
    reason = UnsentBatchError(
        f"a data worker cannot hand over a batch ({one_line(error)}): make room in /dev/shm (of a "
        "container: --shm-size=16g or --ipc=host), raise `ulimit -n`, `ulimit -f` and `ulimit -v`, "
        "or set dataloader.num_workers=0. Run the same command again to continue from the newest "
        "checkpoint."
    )
    where = f"in data worker {worker}"
    told = ExceptionWrapper((UnsentBatchError, reason, None), where)
    queue.put((number, (told, worker, state)))


def _delay_exit() -> None:
    """SLURM signals every process of a job: a worker stays a while, so that the rank can finish its
    step and save.
    """

    def exit_later(*_: object) -> None:
        timer = threading.Timer(_GRACE_S, os._exit, (0,))
        timer.daemon = True
        timer.start()

    signal.set_wakeup_fd(-1)  # the rank's own
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, exit_later)


def validation_steps(
    packs: PackedDataset, shape: BatchShape, dp_rank: int, config: DataloaderConfig
) -> Iterator[HostStep]:
    """Yields every pack once over all ranks, by micro-batches; ranks that run short get empty
    packs.
    """
    for batch in read_batches(
        packs, [assign_to_ranks(np.arange(len(packs)), shape)], dp_rank, config
    ):
        yield HostStep([batch], [], 0, Cursor(), 0.0)


@dataclass(frozen=True)
class DeviceStep:
    """One optimizer step of this rank."""

    batches: HostStep  # its wait_s is 0 when the device was still busy after the reading
    micro_batches: list[ThdBatch]  # whole streams, on the host
    # of the model: this context-parallel rank's tokens of each micro-batch, on the device
    inputs: list[ThdBatch]


class DeviceFeed(Iterator[DeviceStep]):
    """Reads steps, and copies them to the device, one step ahead.

        compute stream   step 1 ─────────────▶ step 2 ─────────────▶
        host             stage 2: read ─┐      stage 3: read ─┐
        copy stream                     └ copy ▶              └ copy ▶

    `stage()` is called once the work of a step has been handed to the GPU and before its result is
    waited for. A batch of validation is a step of one micro-batch.

    place: takes this rank's part of a whole stream (context parallelism), on the host.
    with_mixers: see `to_thd`.
    """

    def __init__(
        self,
        steps: Iterator[HostStep],
        place: Callable[[ThdBatch], ThdBatch],
        device: torch.device,
        with_mixers: bool = True,
    ):
        self._with_mixers = with_mixers
        self._steps = steps
        self._place = place
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staged: DeviceStep | None = None

    def stage(self) -> None:
        """Reads the next step and starts its copy; nothing when that was done already, or when no
        step is left.
        """
        if self._staged is not None or (batches := next(self._steps, None)) is None:
            return
        micro_batches = [to_thd(batch, self._with_mixers) for batch in batches.micro_batches]
        inputs = [self._place(batch) for batch in micro_batches]
        if self._copies is not None:
            # still at work on the step before: nobody waited
            if not torch.cuda.current_stream(self._device).query():
                batches = replace(batches, wait_s=0.0)
            with torch.cuda.stream(self._copies):
                inputs = [
                    batch.pin_memory().to(self._device, non_blocking=True) for batch in inputs
                ]
        self._staged = DeviceStep(batches, micro_batches, inputs)

    def peek(self) -> DeviceStep:
        """Returns the step that comes next; raises StopIteration when there is none."""
        self.stage()
        if self._staged is None:
            raise StopIteration
        return self._staged

    def __next__(self) -> DeviceStep:
        ready = self.peek()
        self._staged = None
        if self._copies is not None:
            compute = torch.cuda.current_stream(self._device)
            compute.wait_stream(self._copies)

            # the other stream allocated it, and must not take it back while this one reads
            def keep(tensor: Tensor) -> Tensor:
                if tensor.is_cuda:
                    tensor.record_stream(compute)
                return tensor

            for batch in ready.inputs:
                batch.map_tensors(keep)
        return ready
