"""Where the packs of a run come from: planned beforehand, or made from a stream while it is trained
on.

The recipe owns the position in the data, which advances with finished steps: what workers have read
ahead is not part of it. Every source offers the same to training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from transformers import PreTrainedTokenizerFast

from automodel_lite.config.schema import Config, DataloaderConfig, TrainingConfig
from automodel_lite.data.feeding.order import BatchShape
from automodel_lite.data.packing.packs import Batch, PackedDataset, Packer
from automodel_lite.data.packing.report import PackingReport
from automodel_lite.data.reading.documents import Documents
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.token_rows import DocumentReader, members_of
from automodel_lite.errors import ConfigError
from automodel_lite.models.flops import CostModel
from automodel_lite.parallel.mesh import Mesh

if TYPE_CHECKING:
    from automodel_lite.data.feeding.planned import PlannedPacks


@dataclass(frozen=True)
class Cursor:
    """Position in the data: packs of `epoch` consumed so far, over all ranks.

    shards: of a stream, the state of each shard (by its number) after the packs that were consumed.
    """

    epoch: int = 0
    packs: int = 0
    shards: dict[str, Any] | None = None

    def gather(self, mesh: Mesh) -> Cursor:
        """Returns the position with the states of all shards, which are spread over the ranks; for
        a checkpoint.
        """
        if self.shards is None or mesh.root is None:
            return self
        # Shards are dealt out by their number, so this rank's copies of the others are out of date.
        own = {}
        for shard, state in self.shards.items():
            if int(shard) % mesh.shape.dp == mesh.dp_rank:
                own[shard] = state
        shards: dict[str, Any] = {}
        for of_rank in mesh.gather(own):
            shards |= of_rank
        return replace(self, shards=shards)


@dataclass(frozen=True)
class HostStep:
    """What one rank reads for one optimizer step."""

    micro_batches: list[Batch]  # packs one behind the other: what `to_thd` takes
    pack_ids: list[int]  # of the whole step, all ranks
    epoch: int
    after: Cursor  # the position once this step is done
    wait_s: float  # how long the trainer waited for it
    # documents of a stream's epoch so far, over all ranks
    left_out: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingPlan:
    """Optimizer steps of the run and of its first epoch."""

    max_steps: int
    steps_per_epoch: int | None  # None: of a stream, not known
    shape: BatchShape

    @property
    def num_epochs(self) -> float | None:
        return None if self.steps_per_epoch is None else self.max_steps / self.steps_per_epoch


@dataclass(frozen=True)
class Reading:
    """How a run reads its documents: tokenized by `job`, packed by `packer`."""

    documents: Documents
    job: TokenizeJob
    packer: Packer


@runtime_checkable
class PackingDataset(Protocol):
    """A dataset whose packs are not planned from lengths, as they are not known: a stream."""

    def packs(self, config: Config, packer: Packer, batches: BatchShape) -> PackSource: ...


@runtime_checkable
class AdaptingDataset(Protocol):
    """A dataset whose documents need more than a tokenizer: images need their processor."""

    def adapt(self, config: Config, reading: Reading) -> Reading:
        """Returns how this dataset is read; raises ConfigError for settings that do not go with
        it.
        """


# A dataset of one's own need not say what it cannot do: whether it can is asked here, once each.
def packing_dataset(documents: Documents) -> PackingDataset | None:
    """Returns a dataset that makes its packs itself; None for one whose documents are packed."""
    return documents if isinstance(documents, PackingDataset) else None


def adapted(config: Config, reading: Reading) -> Reading:
    """Returns how a run reads these documents, with what they ask for beside a tokenizer."""
    documents = reading.documents
    return documents.adapt(config, reading) if isinstance(documents, AdaptingDataset) else reading


def has_adapting(documents: Documents) -> bool:
    """Returns whether a dataset, or one of a mixture, needs more than a tokenizer."""
    return any(isinstance(one, AdaptingDataset) for one in members_of(documents).values())


@dataclass(frozen=True)
class PackSource(ABC):
    """Where the packs of a run come from. A position means the same packs on every number of ranks
    and workers.

    The properties with a body here are those of packs that are not known before the start.
    """

    documents: Documents
    job: TokenizeJob
    packer: Packer
    val_packs: Mapping[str, PackedDataset]
    notes: tuple[str, ...]  # what tokenizing did, a line per set
    shape: BatchShape
    dataloader: DataloaderConfig
    has_trees: bool  # may rows share their beginnings?
    longest: int  # tokens of the longest document (or piece of one) that a pack may hold

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self.job.tokenizer

    @property
    @abstractmethod
    def held_out(self) -> Mapping[str, PackedDataset]:
        """The validation sets, or all documents where there is none; raises ConfigError for a
        stream without one.
        """

    @abstractmethod
    def plan(self, config: TrainingConfig) -> TrainingPlan:
        """Returns how many steps; raises ConfigError when the settings do not say."""

    @abstractmethod
    def steps(self, cursor: Cursor, mesh: Mesh, costs: CostModel) -> Iterator[HostStep]:
        """Yields the steps of this rank that follow `cursor`, without end."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What the order of the data follows from, for checkpoints: other values are other data."""

    def with_columns(
        self, columns_of: Callable[[str, DocumentReader], Mapping[str, np.ndarray]]
    ) -> PackSource:
        """Returns the same packs, whose rows have more columns; columns_of: (name of a set, its
        rows) -> columns.
        """
        raise ConfigError(
            "values per label are computed beforehand, and a stream is not known then: use "
            "dataset=files or images."
        )

    @property
    def planned(self) -> PlannedPacks | None:
        """The packs that were planned beforehand; None for a stream, whose packs are not known."""
        return None

    @property
    def columns(self) -> set[str] | None:
        """Per-token columns beside the labels; None for a stream, whose rows have not been read."""
        return None

    @property
    def counts(self) -> dict[str, int]:
        """Returns what was read and left out, for metrics.jsonl."""
        return {}

    def report(self, costs: CostModel | None = None) -> PackingReport | None:
        """Returns what the packs of the first epoch cost and gain."""
        return None

    def lengths(self) -> dict[str, list[float]]:
        """For drawing: documents in equal bins of length, and the lengths in one pack of the first
        epoch.
        """
        return {}
