"""The numbers of a step: its rates since the last logged step, utilization, and where the time of
the run goes.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from automodel_lite.data.tokens.token_rows import places_within
from automodel_lite.errors import DataError
from automodel_lite.models.flops import CostModel, StepFlops
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.run.nonfinite import StepOutcome
from automodel_lite.run.stopping import STARTED
from automodel_lite.telemetry.profiler import StepProfiler
from automodel_lite.thd import ThdBatch

Scalars = dict[str, float]


def mark(device: torch.device) -> Any:
    """Returns a time in seconds, or an event in the stream of a GPU; see `seconds_between`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(first: Any, last: Any) -> float:
    """Returns the seconds between two marks, which the device has passed."""
    return last - first if isinstance(last, float) else first.elapsed_time(last) / 1e3


class PhaseClock:
    """Laps: `lap("forward")` attributes the time since the last lap to the forward pass.

    On a GPU the laps are events in its stream, which are read by `seconds()`: no lap waits for the
    device, and the time that the device stood idle for data counts as data.
    """

    def __init__(self, device: torch.device, start: float | None = None) -> None:
        self.device = device
        self.restart(start)

    def restart(self, start: float | None = None) -> None:
        """Begins the first lap: now, or at `start`."""
        self._marks: list[tuple[str, Any]] = []
        self._start = mark(self.device) if start is None else start

    def lap(self, phase: str) -> None:
        self._marks.append((phase, mark(self.device)))

    def seconds(self) -> Scalars:
        """Returns phase -> seconds since the last call; waits for the device."""
        spent: Scalars = defaultdict(float)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for phase, now in self._marks:
            spent[phase] += seconds_between(self._start, now)
            self._start = now
        self._marks = []
        return dict(spent)


STARTUP = PhaseClock(torch.device("cpu"), STARTED)
"""From the first line of the program to the first step."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Returns FLOP/s of one device in the compute dtype; None when it is not known (CPU, MIG
    slices, fp32).
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(device_name: str) -> float | None:
    """Returns the peak bf16 FLOP/s by the name that torch gives the device; None when it is not
    listed.
    """
    tflops = yaml.safe_load(Path(__file__).with_name("peak_tflops.yaml").read_text()).get(
        device_name
    )
    return None if tflops is None else tflops * 1e12


NUM_COUNTS = 6


@dataclass(frozen=True)
class Counts:
    """Of one optimizer step, over all ranks."""

    num_tokens: int  # of documents
    num_label_tokens: float  # that the loss is summed over; with loss_weights the sum of these
    num_slots: int  # padding included
    num_pairs: float  # (query, key) pairs that attention sees inside documents
    num_items: float | None = None  # that the loss is divided by; None = num_label_tokens
    tower_flops: float = 0.0  # of images

    @property
    def divisor(self) -> float:
        """Returns what a sum of the step is divided by; raises DataError for a step that trains
        nothing.
        """
        divisor = self.num_label_tokens if self.num_items is None else self.num_items
        if not divisor:
            raise DataError(
                f"a step without a label: none of its {self.num_tokens:,} tokens is trained on, so "
                "it would teach nothing. Where packed_sequence=wrapped has cut prompts from their "
                "answers, take another strategy or larger packs; where loss_weights are 0, leave "
                "these rows out."
            )
        return divisor

    @property
    def items_per_label(self) -> float:
        """Returns how many of the items that the loss counts there are for each label token."""
        return self.divisor / (self.num_label_tokens or 1)


@dataclass(frozen=True)
class StepResult:
    """The result of a step."""

    numbers: StepOutcome  # still on the device: reading them waits for it
    lr: float
    counts: Counts
    # of the loss, sums; still on the device
    parts: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Returns the mean loss; waits until the device has finished the step."""
        return self.numbers.read()[0] / self.counts.divisor


@dataclass(frozen=True)
class StepMetrics:
    """One logged step. Rates and waits are over the steps since the last logged one; validation and
    saving excluded.
    """

    step: int
    epoch: int
    loss: float  # mean over what the loss counts in this step: label tokens, or pairs
    grad_norm: float  # before clipping
    lr: float
    num_tokens: int  # of this step, all ranks
    num_label_tokens: float
    fill_frac: float  # tokens / slots of this step
    tokens_per_s: float  # tokens of documents, all ranks
    label_tokens_per_s: float
    slots_per_s: float
    tflops_per_s: float  # useful work of all ranks (models/flops.py)
    mfu_frac: float | None  # of the devices' peak; None for a device whose peak is not known
    step_s: float
    data_wait_s: float  # waited for the loader, per step
    memory_gib: float  # peak of this process: GPU memory, else resident memory
    eta_s: float
    # phase -> seconds since the last logged step, validation and saving included
    time_s: Scalars
    parts: Scalars = field(default_factory=dict)  # of the loss, means as the loss is

    def as_row(self) -> dict[str, Any]:
        """Returns a flat row for metrics.jsonl and trackers, without what is not known."""
        row = {
            k: value
            for k, value in asdict(self).items()
            if value is not None and k not in ("time_s", "parts")
        }
        return (
            row
            | {f"loss/{name}": value for name, value in self.parts.items()}
            | _time_row(self.time_s)
        )


class Meter:
    """Rates, utilization and the split of the time since the last logged step.

    The clock of the rates runs only between start() and stop(): validation and saving are not in
    them. The host is a step ahead of the device; before what is not in the rates, and before a row,
    the recipe waits for the device.
    """

    def __init__(self, mesh: Mesh, flops: StepFlops, compute_dtype: torch.dtype) -> None:
        self.mesh = mesh
        self.profiler: StepProfiler | None = None
        self.flops = flops
        device_peak = peak_flops(mesh.device, compute_dtype)
        self.peak = None if device_peak is None else device_peak * mesh.shape.world_size
        if mesh.device.type == "cuda":
            # that of the start is higher where each rank loads all
            torch.cuda.reset_peak_memory_stats(mesh.device)
        self.clock = PhaseClock(mesh.device)
        self.lap = self.clock.lap
        self._total_s = 0.0
        self._total_steps = 0
        self._reset()

    def profile(
        self, steps: Sequence[int] | None, folder: Path, say: Callable[[str, str], None]
    ) -> None:
        """Profiles these steps (first and last), when they come."""
        if steps:
            path = folder / "profile" / f"rank_{self.mesh.rank:05d}"
            self.profiler = StepProfiler(steps, path, self.mesh.device, say)

    def start(self, step: int) -> None:
        if self.profiler:
            self.profiler.begin(step)
        self.lap("other")
        self._began = time.perf_counter()

    def stop(self, step: int, counts: Counts, wait_s: float) -> None:
        self.busy_s += time.perf_counter() - self._began
        if self.profiler:
            self.profiler.end(step)
        self.lap("other")
        self.wait_s += wait_s
        self.counts.append(counts)

    def row(self, result: StepResult, step: int, epoch: int, max_steps: int) -> StepMetrics:
        """Returns the step's numbers and the rates since the last row; starts over."""
        counts = result.counts
        loss_sum, grad_norm = result.numbers.read()
        tokens, labels, slots, pairs, of_towers = (
            sum(getattr(c, name) for c in self.counts)
            for name in ("num_tokens", "num_label_tokens", "num_slots", "num_pairs", "tower_flops")
        )
        step_s = self.busy_s / len(self.counts)
        time_s = self.clock.seconds()
        flops_per_s = (self.flops.of(tokens, labels, pairs) + of_towers) / self.busy_s
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # resident memory
        if self.mesh.device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self.mesh.device)
        # the time left is by the mean of all steps of this process, their validation and
        # checkpoints included
        self._total_s += self.busy_s + time_s.get("validation", 0.0) + time_s.get("checkpoint", 0.0)
        self._total_steps += len(self.counts)
        row = StepMetrics(
            step=step,
            epoch=epoch,
            loss=loss_sum / counts.divisor,
            grad_norm=grad_norm,
            lr=result.lr,
            num_tokens=counts.num_tokens,
            num_label_tokens=counts.num_label_tokens,
            fill_frac=counts.num_tokens / counts.num_slots,
            tokens_per_s=tokens / self.busy_s,
            label_tokens_per_s=labels / self.busy_s,
            slots_per_s=slots / self.busy_s,
            tflops_per_s=flops_per_s / 1e12,
            mfu_frac=None if self.peak is None else flops_per_s / self.peak,
            step_s=step_s,
            data_wait_s=self.wait_s / len(self.counts),
            memory_gib=peak_bytes / 2**30,
            eta_s=self._total_s / self._total_steps * (max_steps - step),
            time_s=time_s,
            parts={name: float(part) / counts.divisor for name, part in result.parts.items()},
        )
        self._reset()
        return row

    def close(self) -> None:
        """The training is over: a profile that is under way is written."""
        if self.profiler:
            self.profiler.end()

    def rest(self) -> Scalars:
        """Returns the time since the last row, by phase: the last validation and checkpoint."""
        return _time_row(self.clock.seconds())

    def _reset(self) -> None:
        self.counts: list[Counts] = []
        self.busy_s = self.wait_s = 0.0


def _time_row(seconds: Scalars) -> Scalars:
    return {f"time_s/{phase}": round(value, 6) for phase, value in seconds.items()}


def count_own(
    micro_batches: Sequence[ThdBatch],
    mesh: Mesh,
    costs: CostModel,
    items: Callable[[ThdBatch], float] | None = None,
) -> list[float]:
    """Returns this rank's share of a step's `Counts`, to be summed over the ranks: counted on the
    host before context parallelism cuts the streams. The ranks of a cp or tp group read the same
    streams, of which one counts.

    items  what the loss counts of a stream; None = label tokens
    """
    if mesh.rank % (mesh.shape.cp * mesh.shape.tp):
        micro_batches = ()
    own = [
        (
            b.num_tokens,
            b.labels.numel(),
            visible_pairs(b, costs),
            b.images.flops if b.images else 0.0,
            b.num_label_tokens,
            items(b) if items else b.num_label_tokens,
        )
        for b in micro_batches
    ]
    return [float(sum(column)) for column in zip(*own)] or [0.0] * NUM_COUNTS


def counts_of(sums: Sequence[float]) -> Counts:
    """Returns the counts whose shares were summed over the ranks."""
    num_tokens, num_slots, num_pairs, tower_flops, *counted = sums
    num_label_tokens, num_items = (
        int(count) if count == int(count) else count for count in counted
    )
    return Counts(
        int(num_tokens), num_label_tokens, int(num_slots), num_pairs, num_items, tower_flops
    )


def visible_pairs(batch: ThdBatch, costs: CostModel) -> float:
    """Counts the (query, key) pairs of a whole stream; a query of a tree sees the keys
    of its path.
    """
    lengths = np.diff(batch.cu_seqlens.numpy())
    if batch.attention.tree is None:
        return float(costs.pairs(lengths).sum())
    # Each real token sees as many keys as its place in its row says, its own included.
    starts = batch.cu_seqlens_padded.numpy()[:-1]
    places = starts.repeat(lengths) + places_within(lengths)
    depths = batch.position_ids.numpy()[places]
    return float((costs.pairs(depths + 1) - costs.pairs(depths)).sum())
