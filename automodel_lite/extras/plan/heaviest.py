"""The micro-batch by which a step is counted: with the most images, or the most keys of trees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from automodel_lite.data.feeding.planned import PlannedPacks
from automodel_lite.data.packing.packs import join_packs
from automodel_lite.thd import ThdBatch, to_thd
from automodel_lite.training.settings import RunParts

MOST_PACKS = 64
"""Of the first epoch, among which the one with the longest paths is looked for."""


def heaviest_batch(parts: RunParts) -> ThdBatch | None:
    """Returns the micro-batch of the data that a step is counted with; None where plain documents
    stand for it.
    """
    planned = parts.data.planned if parts.data else None
    if not planned:
        return None
    return most_work_of_towers(planned, parts) or most_branched(planned, parts)


def most_branched(data: PlannedPacks, parts: RunParts) -> ThdBatch | None:
    """Returns the micro-batch whose trees have the most keys, every token labeled, with ids of 0;
    None where nothing branches.
    """
    if not data.has_trees:
        return None
    packs = data.packs_of(0)
    size = parts.training.micro_batch_size
    batches = (to_thd(join_packs([packs[i]] * size)) for i in range(min(len(packs), MOST_PACKS)))
    batch = max(batches, key=lambda batch: int(batch.attention.segments.cu_k[-1]))
    ids = torch.zeros_like(batch.input_ids)
    return all_labeled(replace(batch, input_ids=ids, columns={}), parts)


def most_work_of_towers(data: PlannedPacks, parts: RunParts) -> ThdBatch | None:
    """Returns the micro-batch of the first epoch's packs whose images are the most work, every
    token labeled; None where no document has one.
    """
    packs = data.packs_of(0)
    work = np.zeros(len(packs)) + packs.tower_flops()
    if not work.any():
        return None
    most = np.argsort(work, kind="stable")[-parts.training.micro_batch_size :]
    batch = to_thd(packs.__getitems__(most.tolist()).row)
    return all_labeled(batch, parts)


def all_labeled(batch: ThdBatch, parts: RunParts) -> ThdBatch:
    """Returns the batch with a label at each token, and what the loss asks for."""
    ids = torch.zeros_like(batch.input_ids)
    batch = replace(batch, labels=ids, label_rows=torch.arange(len(ids)))
    return replace(batch, columns=batch.columns | parts.loss.example_columns(batch))
