"""Steps whose tokens are on the device before they are needed.

    compute stream   step 1 ─────────────▶ step 2 ─────────────▶
    host             stage 2: read ─┐      stage 3: read ─┐
    copy stream                     └ copy ▶              └ copy ▶

`stage()` is called once the work of a step has been handed to the GPU and before its result is waited for. A batch of
validation is a step of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from automodel_lite.data.loader import StepBatches
from automodel_lite.thd import ThdBatch, to_thd


@dataclass(frozen=True)
class ReadyStep:
    """One optimizer step of this rank."""

    batches: StepBatches  # its wait_s is 0 when the device was still busy after the reading
    micro_batches: list[ThdBatch]  # whole streams, on the host
    parts: list[ThdBatch]  # the tokens of this context-parallel rank, on the device


class DeviceFeed:
    """An iterator of steps that reads, and copies to the device, one step ahead.

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
