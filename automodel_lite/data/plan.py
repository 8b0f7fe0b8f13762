"""How many steps of how many packs: the arithmetic of a run, before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from automodel_lite.config.schema import TrainingConfig
from automodel_lite.data.pack_order import BatchShape, steps_per_epoch
from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.errors import ConfigError


@dataclass(frozen=True)
class TrainingPlan:
    """Optimizer steps of the run and of its first epoch."""

    max_steps: int
    steps_per_epoch: int | None  # None: of a stream, not known
    shape: BatchShape

    @property
    def num_epochs(self) -> float | None:
        return None if self.steps_per_epoch is None else self.max_steps / self.steps_per_epoch


def batch_shape(config: TrainingConfig, dp_size: int) -> BatchShape:
    """Raises ConfigError when the global batch is not whole micro-batches of all data-parallel ranks."""
    smallest = config.micro_batch_size * dp_size
    size = config.global_batch_size or smallest
    if size % smallest:
        nearest = max(smallest, round(size / smallest) * smallest)
        raise ConfigError(
            f"training.global_batch_size={size} must be a multiple of {smallest} (training.micro_batch_size="
            f"{config.micro_batch_size} x {dp_size} data-parallel ranks): use {nearest}."
        )
    return BatchShape(size, config.micro_batch_size, dp_size)


def training_plan(config: TrainingConfig, packs_of: Callable[[int], PackedDataset], shape: BatchShape) -> TrainingPlan:
    """The first of max_steps and num_epochs that is reached; raises ConfigError when neither is set."""
    first = steps_per_epoch(len(packs_of(0)), shape.global_batch_size)
    limits = []
    if config.max_steps is not None:
        limits.append(config.max_steps)
    if config.num_epochs is not None:
        epochs = (len(packs_of(epoch)) for epoch in range(config.num_epochs))
        limits.append(sum(steps_per_epoch(num_packs, shape.global_batch_size) for num_packs in epochs))
    if not limits:
        raise ConfigError(
            f"training.max_steps=null and training.num_epochs=null: set one; an epoch is {first} steps of these packs."
        )
    return TrainingPlan(min(limits), first, shape)


def stream_plan(config: TrainingConfig, shape: BatchShape) -> TrainingPlan:
    """The plan for a stream, whose length is not known; raises ConfigError when max_steps is not set."""
    if config.max_steps is None:
        raise ConfigError(
            "training.max_steps=null: the length of a stream is not known, so say after how many steps to stop, for "
            f"instance training.max_steps=1000 ({1000 * shape.global_batch_size:,} packs)."
        )
    return TrainingPlan(config.max_steps, None, shape)
