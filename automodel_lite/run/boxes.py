"""Shards as boxes of their tensors, which is all that a checkpoint can name.

Where tensor parallelism and FSDP cut the same dim, a rank has rows here and there: those shards travel to where they
lie together before they are written, and back after they are read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def as_boxes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors; copies of those whose shards are no boxes. A collective when there are any."""
    return {name: _box(tensor) for name, tensor in tensors.items()}


@torch.no_grad()
def take_boxes(tensors: Mapping[str, Tensor], boxes: Mapping[str, Tensor]) -> None:
    """Copies what was read into `boxes` back into the tensors that they were made of."""
    for name, tensor in tensors.items():
        box = boxes[name]
        if box is not tensor:
            assert isinstance(tensor, DTensor)
            assert isinstance(box, DTensor)
            tensor.to_local().copy_(box.redistribute(placements=tensor.placements).to_local())


def _box(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor) or not any(isinstance(p, _StridedShard) for p in tensor.placements):
        return tensor
    return tensor.redistribute(
        placements=[Shard(p.dim) if isinstance(p, _StridedShard) else p for p in tensor.placements]
    )
