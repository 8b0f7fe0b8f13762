"""What is known of a step, and the rates over the steps since the last logged one."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_lite.distributed.mesh import Mesh
from automodel_lite.thd import ThdBatch


@dataclass(frozen=True)
class Counts:
    """Of one optimizer step, over all ranks."""

    num_tokens: int  # of documents
    num_label_tokens: int  # that the loss is summed over
    num_slots: int  # padding included


@dataclass(frozen=True)
class StepResult:
    """What `step()` leaves on the device: reading a value waits for the device."""

    loss_sum: Tensor  # of this rank's label tokens
    grad_norm: Tensor  # over all ranks, before clipping
    lr: float
    counts: Counts


@dataclass(frozen=True)
class StepMetrics:
    """One logged step. Rates and waits are over the steps since the last logged one; validation and saving excluded."""

    step: int
    epoch: int
    loss: float  # mean over the label tokens of this step
    grad_norm: float  # before clipping
    lr: float
    num_tokens: int  # of this step, all ranks
    num_label_tokens: int
    fill_frac: float  # tokens / slots of this step
    tokens_per_s: float  # tokens of documents, all ranks
    label_tokens_per_s: float
    slots_per_s: float
    step_s: float
    data_wait_s: float  # waited for the loader, a step
    memory_gib: float  # peak of this process: GPU memory, else resident memory
    eta_s: float


class Throughput:
    """Sums since the last logged step; the clock runs only between start() and stop()."""

    def __init__(self) -> None:
        self.num_steps = self.num_tokens = self.num_label_tokens = self.num_slots = 0
        self.busy_s = self.wait_s = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self, counts: Counts, wait_s: float) -> None:
        self.busy_s += time.perf_counter() - self._began
        self.wait_s += wait_s
        self.num_steps += 1
        self.num_tokens += counts.num_tokens
        self.num_label_tokens += counts.num_label_tokens
        self.num_slots += counts.num_slots


def sum_counts(micro_batches: Sequence[ThdBatch], mesh: Mesh) -> Counts:
    """Counted on the host before context parallelism cuts the streams; the ranks of a cp group count the same
    streams.
    """
    own = [(b.num_tokens, b.num_label_tokens, b.labels.numel()) for b in micro_batches]
    total = mesh.sum(torch.tensor(own, dtype=torch.int64).sum(0)) // mesh.shape.cp
    return Counts(*total.tolist())


def step_metrics(
    result: StepResult, throughput: Throughput, mesh: Mesh, step: int, epoch: int, max_steps: int
) -> StepMetrics:
    """Reads a step's values off the device (every rank calls it)."""
    counts = result.counts
    loss = mesh.sum(result.loss_sum).item() / max(counts.num_label_tokens, 1)
    grad_norm = result.grad_norm.item()
    step_s = throughput.busy_s / throughput.num_steps
    return StepMetrics(
        step=step,
        epoch=epoch,
        loss=loss,
        grad_norm=grad_norm,
        lr=result.lr,
        num_tokens=counts.num_tokens,
        num_label_tokens=counts.num_label_tokens,
        fill_frac=counts.num_tokens / counts.num_slots,
        tokens_per_s=throughput.num_tokens / throughput.busy_s,
        label_tokens_per_s=throughput.num_label_tokens / throughput.busy_s,
        slots_per_s=throughput.num_slots / throughput.busy_s,
        step_s=step_s,
        data_wait_s=throughput.wait_s / throughput.num_steps,
        memory_gib=peak_memory_gib(mesh.device),
        eta_s=step_s * (max_steps - step),
    )


def peak_memory_gib(device: torch.device) -> float:
    """Peak GPU memory of this process, or its peak resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
