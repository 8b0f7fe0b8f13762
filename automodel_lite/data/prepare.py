"""How many steps of how many packs: the arithmetic of a run, before it starts.

Sizes that have to divide one another, checked together before data is read: every problem is said at once.

From files to packs: everything that happens to data before a process group or a model exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from automodel_lite.attention.spec import config_value
from automodel_lite.config.components import build, build_with
from automodel_lite.config.schema import Config, TrainingConfig
from automodel_lite.data.documents import Documents
from automodel_lite.data.loader import BatchShape, PackLoader, epoch_order, steps_per_epoch
from automodel_lite.data.packing.balance import deal, pack_costs
from automodel_lite.data.packing.packer import Packer
from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.data.packing.report import PackingReport, packing_report
from automodel_lite.data.stream_loader import StreamLoader, TokenStream
from automodel_lite.data.streaming import StreamingDataset
from automodel_lite.data.tokenize import Job, TokenizedData, tokenize_documents, tokenize_validation
from automodel_lite.errors import ConfigError
from automodel_lite.flops import CostModel
from automodel_lite.parallel.mesh import Mesh, MeshShape, mesh_shape


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


def check_sizes(config: Config, num_processes: int) -> tuple[MeshShape, BatchShape]:
    """The mesh and the batches of this many processes; raises one ConfigError with a line a problem."""
    problems = []
    shape = batches = None
    try:
        shape = mesh_shape(config.mesh, num_processes)
        batches = batch_shape(config.training, shape.dp)
    except ConfigError as error:
        problems.append(str(error))
    try:
        build_with(config.packed_sequence, cp_size=config.mesh.cp)
    except ConfigError as error:
        problems.append(str(error))
    if shape is None or batches is None or problems:
        raise ConfigError("\n".join(problems))
    return shape, batches


def check_positions(longest: int, model_config: PretrainedConfig) -> None:
    """Raises ConfigError when a document has more tokens than the model has positions (each document starts at 0)."""
    limit = config_value(model_config.get_text_config(), "max_position_embeddings")
    if limit is not None and longest > limit:
        raise ConfigError(
            f"the longest document has {longest} tokens, the model max_position_embeddings={limit}: set "
            f"packed_sequence.packed_sequence_size={limit} (packed_sequence.overlong drops, truncates or splits longer "
            "ones), or scale the model's positions by model.config."
        )


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
