"""From files to packs: everything that happens to data before a process group or a model exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from automodel_lite.config import Config, build
from automodel_lite.datasets.tokenize import TokenizedData, tokenize_documents
from automodel_lite.distributed.mesh import MeshShape
from automodel_lite.packing.packer import Packer
from automodel_lite.packing.packs import PackedDataset
from automodel_lite.packing.report import PackingReport


@dataclass(frozen=True)
class PreparedData:
    """Documents, their tokens, and the packs of every epoch."""

    documents: Any
    tokenizer: Any
    tokens: TokenizedData
    packer: Packer
    packs_of: Callable[[int], PackedDataset]  # epoch -> packs
    val_packs: dict[str, PackedDataset]
    report: PackingReport  # of epoch 0
    fingerprint: dict[str, Any]  # what the order of the data follows from


def prepare_data(config: Config, shape: MeshShape) -> PreparedData:
    """documents -> tokenizer -> token rows (cached, once a node) -> pack plan -> packs read lazily."""
    documents = build(config.dataset)
    tokenizer = build(config.tokenizer, documents=documents, pretrained=config.model["pretrained"], cache_dir=config.cache_dir)
    tokens = tokenize_documents(documents, tokenizer, train_on=config.train_on, cache_dir=config.cache_dir)
    packer = build(config.packed_sequence, seed=config.seed, cp_size=shape.cp, padding_idx=tokenizer.pad_token_id or 0)

    @lru_cache(maxsize=2)
    def packs_of(epoch: int) -> PackedDataset:
        if epoch and not packer.repack_each_epoch:
            return packs_of(0)
        return packer.packs(tokens.train, packer.plan(tokens.train.lengths, epoch))

    val_packs = {name: packer.packs(rows, packer.plan(rows.lengths, 0)) for name, rows in tokens.val.items()}
    return PreparedData(documents, tokenizer, tokens, packer, packs_of, val_packs, packer.report(packs_of(0).plan, tokens.train.lengths))
