"""Loss over validation packs as (sum, count): every document counted once, on any layout of ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from automodel_lite.data.device_feed import DeviceFeed
from automodel_lite.data.loader import PackLoader, validation_steps
from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.data.stream_loader import StreamLoader
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.thd import ThdBatch


@torch.no_grad()
def validation_loss(
    model: ParallelModel,
    packs: PackedDataset,
    loader: PackLoader | StreamLoader,
    mesh: Mesh,
    shard: Callable[[ThdBatch], ThdBatch],
    must_stop: Callable[[], bool],
) -> float | None:
    """Mean over all label tokens of the packs; ranks that run short of packs get empty ones. Every rank calls it.

    `shard` takes this rank's part of a stream. `must_stop` is asked after every batch, on all ranks; None when it says
    so.
    """
    model.module.eval()
    loss_sum = torch.zeros((), device=mesh.device)
    num_label_tokens = 0
    feed = DeviceFeed(validation_steps(packs, loader.shape, loader.dp_rank, loader.config), shard, mesh.device)
    for ready in feed:
        loss_sum += model(ready.parts[0])
        num_label_tokens += ready.micro_batches[0].num_label_tokens
        feed.stage()
        if must_stop():
            model.module.train()
            return None
    model.module.train()
    count = mesh.sum(torch.tensor(num_label_tokens)).item() / mesh.shape.cp
    return mesh.sum(loss_sum).item() / max(count, 1)
