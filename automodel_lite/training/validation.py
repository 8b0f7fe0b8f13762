"""Loss over validation packs as (sum, count): every document counted once, on any layout of ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from automodel_lite.distributed.mesh import Mesh
from automodel_lite.distributed.parallelize import ParallelModel
from automodel_lite.packing.packs import PackedDataset
from automodel_lite.thd import ThdBatch, to_thd
from automodel_lite.training.loader import PackLoader, validation_batches
from automodel_lite.training.stream_loader import StreamLoader


@torch.no_grad()
def validation_loss(
    model: ParallelModel,
    packs: PackedDataset,
    loader: PackLoader | StreamLoader,
    mesh: Mesh,
    this_ranks_part: Callable[[ThdBatch], ThdBatch],
    must_stop: Callable[[], bool],
) -> float | None:
    """Mean over all label tokens of the packs; ranks that run short of packs get empty ones. Every rank calls it.

    `must_stop` is asked after every batch, on all ranks; None when it said so.
    """
    model.module.eval()
    loss_sum = torch.zeros((), device=mesh.device)
    num_label_tokens = 0
    for batch in validation_batches(packs, loader.shape, loader.dp_rank, loader.config):
        thd = to_thd(batch)
        loss_sum += model(this_ranks_part(thd))
        num_label_tokens += thd.num_label_tokens
        if must_stop():
            model.module.train()
            return None
    model.module.train()
    count = mesh.sum(torch.tensor(num_label_tokens)).item() / mesh.shape.cp
    return mesh.sum(loss_sum).item() / max(count, 1)
