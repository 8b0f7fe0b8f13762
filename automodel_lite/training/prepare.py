"""From files to packs: everything that happens to data before a process group or a model exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from automodel_lite.config import Config, build, build_with
from automodel_lite.datasets.documents import Documents
from automodel_lite.datasets.tokenize import TokenizedData, tokenize_documents
from automodel_lite.distributed.mesh import MeshShape
from automodel_lite.errors import ConfigError
from automodel_lite.packing.balance import CostModel, deal, pack_costs
from automodel_lite.packing.packer import Packer
from automodel_lite.packing.packs import PackedDataset
from automodel_lite.packing.report import PackingReport, packing_report
from automodel_lite.training.pack_order import BatchShape, epoch_order


@dataclass(frozen=True)
class PreparedData:
    """Documents, their tokens, and the packs of every epoch."""

    documents: Documents
    tokenizer: PreTrainedTokenizerFast
    tokens: TokenizedData
    packer: Packer
    packs_of: Callable[[int], PackedDataset]  # epoch -> packs
    val_packs: dict[str, PackedDataset]

    def order_of(
        self, epoch: int, config: Config, shape: BatchShape, costs: CostModel
    ) -> tuple[PackedDataset, np.ndarray]:
        """The packs of an epoch and the order in which they are consumed: shuffled, then dealt by their cost."""
        packs = self.packs_of(epoch)
        order = epoch_order(len(packs), config.seed, epoch, config.dataloader.shuffle)
        dealt = deal(
            pack_costs(packs.plan, self.tokens.train.lengths, costs)[order],
            self.packer.balance,
            ranks=shape.dp_size,
            micro_steps=shape.micro_steps,
            micro_batch_size=shape.micro_batch_size,
            seed=config.seed,
        )
        return packs, order[dealt]

    def report(self, shape: BatchShape, costs: CostModel) -> PackingReport:
        """What the packs of the first epoch cost and gain."""
        return packing_report(
            self.packs_of(0).plan,
            self.tokens.train.lengths,
            cost_model=costs,
            balance=self.packer.balance,
            ranks=shape.dp_size,
            micro_steps=shape.micro_steps,
            micro_batch_size=shape.micro_batch_size,
        )

    def fingerprint(self, shape: BatchShape) -> dict[str, Any]:
        """What the order of the data follows from, for checkpoints: other values are other data."""
        by_window = f"window, {shape.dp_size} data-parallel ranks x {shape.micro_batch_size}"
        return {
            "tokens": self.tokens.fingerprint,
            "packs": self.packs_of(0).plan.fingerprint(),
            "dealt": by_window if self.packer.balance == "window" else "the same on every layout",
        }


def prepare_data(config: Config, shape: MeshShape) -> PreparedData:
    """documents -> tokenizer -> token rows (cached, once a node) -> pack plan -> packs read lazily."""
    packer: Packer = build_with(config.packed_sequence, seed=config.seed, cp_size=shape.cp)  # first: it checks sizes
    documents: Documents = build(config.dataset)
    tokenizer = build_with(config.tokenizer, documents=documents, cache_dir=config.cache_dir)
    tokens = tokenize_documents(documents, tokenizer, cache_dir=config.cache_dir, **asdict(config.tokenize))

    @lru_cache(maxsize=2)
    def packs_of(epoch: int) -> PackedDataset:
        if epoch and not packer.repack_each_epoch:
            return packs_of(0)
        return packer.packs(tokens.train, packer.plan(tokens.train.lengths, epoch))

    val_packs = {name: packer.packs(rows, packer.plan(rows.lengths)) for name, rows in tokens.val.items()}
    return PreparedData(documents, tokenizer, tokens, packer, packs_of, val_packs)


def check_same_data(saved: dict[str, Any], now: dict[str, Any], accept_changes: bool) -> None:
    """Raises ConfigError when a checkpoint's position does not mean the same documents any more."""
    if saved != now and not accept_changes:
        changed = ", ".join(f"{key}: was {saved[key]}, now {now[key]}" for key in saved if saved[key] != now.get(key))
        raise ConfigError(
            f"the data changed since the checkpoint was written ({changed}): bring the old files or settings back, "
            "start a new run with name=..., or continue on the new data with checkpoint.accept_changes=true."
        )
