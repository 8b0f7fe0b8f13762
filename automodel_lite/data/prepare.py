"""From files to packs: everything that happens to data before a process group or a model exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from automodel_lite.config.components import build, build_with
from automodel_lite.config.schema import Config, TrainingConfig
from automodel_lite.data.documents import Documents
from automodel_lite.data.loader import PackLoader
from automodel_lite.data.pack_order import BatchShape, epoch_order
from automodel_lite.data.packing.balance import deal, pack_costs
from automodel_lite.data.packing.packer import Packer
from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.data.packing.report import PackingReport, packing_report
from automodel_lite.data.plan import TrainingPlan, stream_plan, training_plan
from automodel_lite.data.stream_loader import StreamLoader
from automodel_lite.data.streaming import StreamingDataset
from automodel_lite.data.token_stream import TokenStream
from automodel_lite.data.tokenize import TokenizedData, tokenize_documents, tokenize_validation
from automodel_lite.data.tokenize_chunks import Job
from automodel_lite.errors import ConfigError
from automodel_lite.flops import CostModel
from automodel_lite.parallel.mesh import Mesh, MeshShape


@dataclass(frozen=True)
class PreparedData:
    """Documents, their tokens, and the packs of every epoch."""

    documents: Documents
    tokenizer: PreTrainedTokenizerFast
    tokens: TokenizedData
    packer: Packer
    packs_of: Callable[[int], PackedDataset]  # epoch -> packs
    val_packs: dict[str, PackedDataset]

    @property
    def notes(self) -> tuple[str, ...]:
        """What tokenising did, a line a set."""
        return self.tokens.notes

    @property
    def counts(self) -> dict[str, int]:
        """What was read and left out, set by set, for metrics.jsonl."""
        counts = {f"data/{name}/{key}": n for name, c in self.tokens.counts.items() for key, n in asdict(c).items()}
        return counts | {f"packing/{key}": n for key, n in asdict(self.packs_of(0).plan.counts).items()}

    @property
    def longest(self) -> int:
        """Tokens of the longest document (or piece of one) in the packs."""
        return int(self.packs_of(0).plan.piece_lengths(self.tokens.train.lengths).max(initial=0))

    def plan(self, config: TrainingConfig, shape: BatchShape) -> TrainingPlan:
        return training_plan(config, self.packs_of, shape)

    def loader(self, config: Config, shape: BatchShape, mesh: Mesh, costs: CostModel) -> PackLoader:
        order_of = partial(self.order_of, config=config, shape=shape, costs=costs)
        return PackLoader(order_of, shape, mesh.dp_rank, config.dataloader)

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

    def lengths(self) -> dict[str, list[float]]:
        """For drawing: documents in equal bins of length, and the lengths in one pack of the first epoch."""
        lengths = self.tokens.train.lengths
        longest = max(1, int(lengths.max()))
        counts, edges = np.histogram(lengths, bins=min(40, longest), range=(0, longest))
        plan = self.packs_of(0).plan
        pieces = plan.piece_lengths(lengths)[plan.offsets[0] : plan.offsets[1]]
        return {"edges": edges.round(1).tolist(), "documents": counts.tolist(), "pack": pieces.tolist()}

    def fingerprint(self, shape: BatchShape) -> dict[str, Any]:
        """What the order of the data follows from, for checkpoints: other values are other data."""
        by_window = f"window, {shape.dp_size} data-parallel ranks x {shape.micro_batch_size}"
        return {
            "documents": len(self.tokens.train),
            "tokens": int(self.tokens.train.lengths.sum()),
            "content": self.tokens.fingerprint,
            "packs": self.packs_of(0).plan.fingerprint(),
            "dealt": by_window if self.packer.balance == "window" else "the same on every layout",
        }


@dataclass(frozen=True)
class StreamedData:
    """A stream, tokenised and packed while it is trained on; only its validation sets are prepared."""

    documents: StreamingDataset
    tokenizer: PreTrainedTokenizerFast
    tokens: TokenStream
    packer: Packer
    val_packs: dict[str, PackedDataset]
    notes: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        return {}  # of a stream they are in its position, and grow with it

    @property
    def longest(self) -> int:
        return self.packer.packed_sequence_size  # at most

    def plan(self, config: TrainingConfig, shape: BatchShape) -> TrainingPlan:
        return stream_plan(config, shape)

    def loader(self, config: Config, shape: BatchShape, mesh: Mesh, costs: CostModel) -> StreamLoader:
        return StreamLoader(self.tokens, self.packer, shape, mesh, config.dataloader)

    def report(self, shape: BatchShape, costs: CostModel) -> None:
        """Nothing is known before the stream is read."""

    def fingerprint(self, shape: BatchShape) -> dict[str, Any]:
        """What the packs of the stream follow from."""
        packer = self.packer
        packs = f"{packer.packed_sequence_size} {packer.overlong} {packer.slot_multiple}"
        return {"tokens": self.documents.identity, "packs": packs}


def prepare_data(config: Config, shape: MeshShape) -> PreparedData | StreamedData:
    """documents -> tokenizer -> token rows (cached, once a node) -> pack plan -> packs read lazily."""
    packer: Packer = build_with(config.packed_sequence, cp_size=shape.cp)  # first: it checks sizes
    documents: Documents | StreamingDataset = build(config.dataset)
    tokenizer = build_with(config.tokenizer, documents=documents, cache_dir=config.cache_dir)
    if isinstance(documents, StreamingDataset):
        return _prepare_stream(config, documents, tokenizer, packer)
    return _prepare_packs(config, documents, tokenizer, packer)


def prepare_first_documents(config: Config, shape: MeshShape) -> PreparedData:
    """`prepare_data` for looking at it: of a stream, the first documents as if they were all."""
    data = prepare_data(config, shape)
    if isinstance(data, PreparedData):
        return data
    return _prepare_packs(config, data.documents, data.tokenizer, data.packer)


def _prepare_packs(
    config: Config, documents: Documents, tokenizer: PreTrainedTokenizerFast, packer: Packer
) -> PreparedData:
    tokens = tokenize_documents(documents, tokenizer, cache_dir=config.cache_dir, **asdict(config.tokenize))

    @lru_cache(maxsize=2)
    def packs_of(epoch: int) -> PackedDataset:
        if epoch and not packer.repack_each_epoch:
            return packs_of(0)
        return packer.packs(tokens.train, packer.plan(tokens.train.lengths, epoch))

    val_packs = {name: packer.packs(rows, packer.plan(rows.lengths)) for name, rows in tokens.val.items()}
    return PreparedData(documents, tokenizer, tokens, packer, packs_of, val_packs)


def _prepare_stream(
    config: Config, stream: StreamingDataset, tokenizer: PreTrainedTokenizerFast, packer: Packer
) -> StreamedData:
    job = Job(tokenizer, **asdict(config.tokenize))
    val, notes = tokenize_validation(stream, job, config.cache_dir)
    val_packs = {name: packer.packs(rows, packer.plan(rows.lengths)) for name, rows in val.items()}
    return StreamedData(stream, tokenizer, TokenStream(stream, job), packer, val_packs, notes)


def check_same_data(saved: dict[str, Any], now: dict[str, Any], accept_changes: bool) -> None:
    """Raises ConfigError when a checkpoint's position does not mean the same documents any more."""
    if saved != now and not accept_changes:
        changed = ", ".join(f"{key}: was {saved[key]}, now {now[key]}" for key in saved if saved[key] != now.get(key))
        raise ConfigError(
            f"the data changed since the checkpoint was written ({changed}): bring the old files or settings back, "
            "start a new run with name=..., or continue on the new data with checkpoint.accept_changes=true."
        )
