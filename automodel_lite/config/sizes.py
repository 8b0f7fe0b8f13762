"""The sizes that have to divide one another: the mesh divides the processes, micro-batches the
global batch, and slots of documents the pack. Arithmetic alone, so they are checked together with
the keys, before any process group exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from automodel_lite.config.schema import MeshConfig, TrainingConfig
from automodel_lite.errors import ConfigError


def ceil_div(number: Any, size: Any) -> Any:
    """Returns how many parts of this size hold the number.

    >>> ceil_div(9, 4)
    3
    """
    return -(-number // size)


def round_up(number: Any, multiple: Any) -> Any:
    """Returns the next multiple.

    >>> round_up(9, 4)
    12
    """
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the axes, known before any process group exists."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int = 1
    ep: int = 1  # over ranks of the other axes: no factor of world_size

    @property
    def dp(self) -> int:
        """Data-parallel ranks: each reads packs of its own."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp


def model_axes(mesh: MeshConfig | MeshShape) -> list[str]:
    """Returns the settings that cut layers: `["mesh.tp=2"]`; those of one rank cut nothing."""
    axes = {"mesh.tp": mesh.tp, "mesh.ep": mesh.ep}
    return [f"{key}={size}" for key, size in axes.items() if size > 1]


def without(axes: list[str]) -> str:
    """Returns what to set instead of the settings of `model_axes`: `mesh.tp=1 mesh.ep=1`."""
    return " ".join(f"{axis.partition('=')[0]}=1" for axis in axes)


def mesh_shape(config: MeshConfig, num_processes: int) -> MeshShape:
    """Fills in dp_shard=-1; raises ConfigError, with the arithmetic, unless the axes multiply to
    the processes.
    """
    fixed = config.dp_replicate * config.cp * config.tp
    tp = f" x mesh.tp={config.tp}" if config.tp > 1 else ""
    dp_shard = config.dp_shard
    if dp_shard == -1:
        if num_processes % fixed:
            raise ConfigError(
                f"mesh.dp_replicate={config.dp_replicate} x mesh.cp={config.cp}{tp} = {fixed} must "
                f"divide the number of processes, {num_processes}: start "
                f"{round_up(num_processes, fixed)} (--nproc), or lower these."
            )
        dp_shard = num_processes // fixed
    elif dp_shard < 1:
        raise ConfigError(
            f"mesh.dp_shard={dp_shard} must be at least 1, or -1 for all processes that remain."
        )
    shape = MeshShape(config.dp_replicate, dp_shard, config.cp, config.tp, config.ep)
    if shape.world_size != num_processes:
        raise ConfigError(
            f"mesh.dp_replicate={shape.dp_replicate} x mesh.dp_shard={shape.dp_shard} x "
            f"mesh.cp={shape.cp}{tp} = {shape.world_size} must equal the number of processes, "
            f"{num_processes}: set mesh.dp_shard=-1, or start {shape.world_size}."
        )
    ranks = shape.dp_shard * shape.cp * shape.tp
    if ranks % shape.ep or (shape.ep > 1 and shape.ep % shape.tp):
        cure = f"{ranks} or 1" if ranks > 1 else "1, or start more processes"
        raise ConfigError(
            f"mesh.ep={shape.ep} must divide mesh.dp_shard x mesh.cp x mesh.tp = {ranks}, the "
            f"ranks that share the experts, and be a multiple of mesh.tp={shape.tp}: use "
            f"mesh.ep={cure}."
        )
    return shape


AUTO_BATCH_SIZE = 8  # packs
LEAST_STEPS = 50  # that `global_batch_size=auto` leaves the optimizer


def global_batch_size_of(config: TrainingConfig, dp_size: int) -> int:
    """Packs of an optimizer step; raises ConfigError unless they are whole micro-batches of all
    data-parallel ranks.
    """
    smallest = config.micro_batch_size * dp_size
    # the largest; data of few packs lower it, and documents per step decide it with the packs
    if config.global_batch_size == "auto" or config.global_batch_documents:
        return max(smallest, AUTO_BATCH_SIZE // smallest * smallest)
    size = int(config.global_batch_size or smallest)
    if size % smallest:
        nearest = max(smallest, round(size / smallest) * smallest)
        raise ConfigError(
            f"training.global_batch_size={size} must be a multiple of {smallest} "
            f"(training.micro_batch_size={config.micro_batch_size} x {dp_size} data-parallel "
            f"ranks): use {nearest}, or micro-batches and ranks that divide {size}, as a run that "
            "continues has to."
        )
    return size


def fitted_batch_size(smallest: int, largest: int, num_packs: int, num_epochs: int) -> int:
    """Returns the largest multiple of `smallest` up to `largest` that gives LEAST_STEPS steps; else
    `smallest`.
    """
    sizes = range(largest // smallest * smallest, smallest, -smallest)
    return next(
        (size for size in sizes if num_epochs * ceil_div(num_packs, size) >= LEAST_STEPS), smallest
    )


def slot_multiple_of(size: int, slot_multiple: int | None, cp_size: int) -> int:
    """What the slots of documents are multiples of; raises ConfigError when it does not fit the
    pack or the mesh.
    """
    needed = 2 * cp_size if cp_size > 1 else 1
    multiple = needed if slot_multiple is None else slot_multiple
    if multiple < 1 or multiple % needed:
        raise ConfigError(
            f"packed_sequence.slot_multiple={multiple} must be a multiple of {needed} (2 * "
            f"mesh.cp): use {max(1, ceil_div(multiple, needed)) * needed}, or null."
        )
    if size % multiple:
        rule = "2 * mesh.cp" if slot_multiple is None else "packed_sequence.slot_multiple"
        raise ConfigError(
            f"packed_sequence.packed_sequence_size={size} must be a multiple of {multiple} "
            f"({rule}): use {round_up(size, multiple)}."
        )
    return multiple
