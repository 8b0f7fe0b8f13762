"""What every source of packs offers to training, whether its packs are planned beforehand or made from a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch.distributed as dist
from transformers import PreTrainedTokenizerFast

from automodel_lite.config.schema import DataloaderConfig, TrainingConfig
from automodel_lite.config.sizes import global_batch_size_of
from automodel_lite.data.documents import Documents
from automodel_lite.data.packing.packer import Packer
from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.data.packing.report import PackingReport
from automodel_lite.flops import CostModel
from automodel_lite.parallel.mesh import Mesh

Batch = dict[str, Any]


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


class PackSource(Protocol):
    """Where the packs of a run come from. A position means the same packs on every number of ranks and workers."""

    @property
    def documents(self) -> Documents: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast: ...

    @property
    def packer(self) -> Packer: ...

    @property
    def shape(self) -> BatchShape: ...

    @property
    def dataloader(self) -> DataloaderConfig: ...

    @property
    def val_packs(self) -> Mapping[str, PackedDataset]: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What tokenizing did, a line per set."""

    @property
    def counts(self) -> dict[str, int]:
        """What was read and left out, for metrics.jsonl; empty for a stream, whose position counts."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document (or piece of one) that a pack may hold."""

    def plan(self, config: TrainingConfig) -> TrainingPlan:
        """How many steps; raises ConfigError when the settings do not say."""

    def steps(self, cursor: Cursor, mesh: Mesh, costs: CostModel) -> Iterator[StepBatches]:
        """The steps of this rank that follow `cursor`, without end."""

    def left_out(self, cursor: Cursor, mesh: Mesh) -> dict[str, int]:
        """Documents left out up to `cursor`, where this was not known before the start. Every rank calls it."""

    def report(self, costs: CostModel | None = None) -> PackingReport | None:
        """What the packs of the first epoch cost and gain; None where they are not known before the start."""

    def lengths(self) -> dict[str, list[float]]:
        """For drawing: documents in equal bins of length, and the lengths in one pack of the first epoch."""

    def fingerprint(self) -> dict[str, Any]:
        """What the order of the data follows from, for checkpoints: other values are other data."""
