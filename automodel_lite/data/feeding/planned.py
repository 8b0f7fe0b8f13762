"""Packs of documents whose lengths are known: those of every epoch are planned beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from automodel_lite.columns import COLUMNS
from automodel_lite.config.schema import Config, TokenizeConfig, TrainingConfig
from automodel_lite.config.sizes import ceil_div, fitted_batch_size, round_up
from automodel_lite.data.cache import cache_root
from automodel_lite.data.feeding.feed import read_batches
from automodel_lite.data.feeding.order import (
    BatchShape,
    assign_packs,
    assign_to_ranks,
    balance_steps,
    epoch_order,
    pack_costs,
    plan_imbalance,
    step_edges,
)
from automodel_lite.data.feeding.source import (
    Cursor,
    HostStep,
    PackSource,
    Reading,
    TrainingPlan,
    adapted,
)
from automodel_lite.data.packing.packs import PackedDataset, Packer
from automodel_lite.data.packing.plan import PackPlan
from automodel_lite.data.packing.report import PackingReport, packing_report
from automodel_lite.data.reading.documents import Documents
from automodel_lite.data.tokens.findings import limit_exceeded
from automodel_lite.data.tokens.token_rows import (
    DocumentReader,
    RowCounts,
    TokenizedData,
    members_of,
)
from automodel_lite.data.tokens.tokenize import job_of, tokenize_documents
from automodel_lite.data.tokens.tokenizer import padding_id
from automodel_lite.errors import ConfigError, DataError, counted
from automodel_lite.models.flops import CostModel
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.prefix_trees import find_nodes
from automodel_lite.tensors import cumulative


def check_masked(
    name: str, plan: PackPlan, counts: Mapping[str, RowCounts], settings: TokenizeConfig
) -> None:
    """Raises DataError when too many documents train nothing once they are cut, those that never
    did included.
    """
    own = sum(
        (count for key, count in counts.items() if key == name or key.endswith(f"/{name}")),
        RowCounts(),
    )
    num_bad = own.num_bad + own.num_empty + own.num_fully_masked + plan.counts.masked_documents
    num_documents = max(own.num_documents, plan.counts.documents)
    if too_many := limit_exceeded(num_bad, num_documents, settings):
        raise DataError(
            f"{name}: {counted(plan.counts.masked_documents, 'document', 'has', of=num_documents)} "
            "nothing trained on within "
            f"packed_sequence.packed_sequence_size={plan.packed_sequence_size}: their prompts "
            f"alone fill a pack; {too_many}. Raise the size, or set packed_sequence.overlong=split."
        )


FEWEST_STEPS = 10  # of a run whose length is given by epochs
_SMALL_SET = 10_000  # documents that are read three times


def epochs_of(config: TrainingConfig, num_documents: int) -> tuple[int, str]:
    """(epochs, why): those that are set, else three of a small set and one of a large."""
    if config.num_epochs is not None:
        return config.num_epochs, ""
    is_small = num_documents < _SMALL_SET
    why = (
        f" (training.num_epochs=null: {'under' if is_small else 'at least'} {_SMALL_SET:,} "
        "documents)"
    )
    return (3 if is_small else 1), why


def _documents_of_packs(plan: PackPlan) -> np.ndarray:
    """Returns the documents that begin in each pack, int64 [packs]: one that is cut counts once."""
    begins = np.ones(len(plan.doc_ids), np.int64) if plan.starts is None else plan.starts == 0
    until = np.concatenate([np.zeros(1, np.int64), np.cumsum(begins, dtype=np.int64)])
    return until[plan.offsets[1:]] - until[plan.offsets[:-1]]


def document_kind(documents: Documents) -> str:
    """Returns the kind of a dataset, or of all in a mixture; "other" where they differ."""
    kinds = {dataset.kind for dataset in members_of(documents).values()}
    return kinds.pop() if len(kinds) == 1 else "other"


@dataclass(frozen=True)
class PlannedPacks(PackSource):
    """Planned packs.

    packs_of        epoch -> its packs
    seed            of the order of packs
    step_documents  documents of a step, whose packs follow from them; None: `shape` has its packs
    """

    tokens: TokenizedData
    packs_of: Callable[[int], PackedDataset]
    seed: int
    step_documents: int | None = None

    @classmethod
    def prepare(
        cls, config: Config, documents: Documents, packer: Packer, batches: BatchShape
    ) -> PlannedPacks:
        """Tokenizes the documents and plans their packs; raises ConfigError and DataError."""
        # 1. Tokenize, as the kind of the documents asks for.
        job = job_of(config, documents, packer.tree, packer.packed_sequence_size)
        reading = adapted(config, Reading(documents, job, packer))
        documents = reading.documents
        job = reading.job
        kind = document_kind(documents)
        packer = reading.packer.for_document_kind(kind, padding_id(job.tokenizer))
        tokens = tokenize_documents(documents, job, config.cache_dir)

        # 2. Plan the packs of an epoch when it begins, and keep two: the next epoch is read ahead.
        # Where an epoch has the same documents in the same packs, its plan is that of the first.
        root = cache_root(config.cache_dir)

        @lru_cache(maxsize=2)
        def packs_of(epoch: int) -> PackedDataset:
            if epoch and not packer.repack_each_epoch and not tokens.drawn:
                return packs_of(0)
            rows = tokens.train
            fingerprint = tokens.fingerprint
            if tokens.drawn:  # of a mixture
                if epoch:
                    rows = tokens.drawn(epoch)
                fingerprint += f" epoch {epoch}"
            return packer.packs(rows, epoch, (root, fingerprint))

        # 3. Refuse packs that have lost too much to their size.
        val_packs = {name: packer.packs(rows) for name, rows in tokens.val.items()}
        sets = {"train": packs_of(0)} | {f"val/{name}": packs for name, packs in val_packs.items()}
        for name, packs in sets.items():
            counts = packs.plan.counts
            if counts.dropped_tokens:
                packer.check_dropped(counts.dropped_tokens, counts.tokens, name, packs.rows.lengths)
            if counts.masked_documents:
                check_masked(name, packs.plan, tokens.counts, job.settings)

        # 4. Settle how many packs a step has, now that their number is known.
        size = batches.global_batch_size
        smallest = batches.micro_batch_size * batches.dp_size
        (epochs, _) = epochs_of(config.training, len(tokens.train))
        step_documents = config.training.global_batch_documents
        if step_documents:
            # Each step has its own number of packs: the mean stands for all of them.
            steps = len(step_edges(_documents_of_packs(packs_of(0).plan), step_documents)) - 1
            mean = ceil_div(len(packs_of(0)), max(1, steps))
            batches = replace(batches, global_batch_size=round_up(max(1, mean), smallest))
        elif config.training.global_batch_size == "auto" and config.training.max_steps is None:
            # Few documents are few packs: more steps are worth more than larger ones.
            batches = replace(
                batches,
                global_batch_size=fitted_batch_size(smallest, size, len(packs_of(0)), epochs),
            )

        # 5. Find the longest document of a pack. Of a mixture, a later epoch may draw another one.
        longest = int(packs_of(0).plan.piece_lengths(tokens.train.row_lengths).max(initial=0))
        if tokens.drawn:
            longest = min(tokens.longest, packer.packed_sequence_size)
        return cls(
            documents=documents,
            job=job,
            packer=packer,
            val_packs=val_packs,
            notes=tokens.notes,
            shape=batches,
            dataloader=config.dataloader,
            has_trees=any(counts.num_trees for counts in tokens.counts.values()),
            longest=longest,
            tokens=tokens,
            packs_of=packs_of,
            seed=config.seed,
            step_documents=step_documents,
        )

    def with_columns(
        self, columns_of: Callable[[str, DocumentReader], Mapping[str, np.ndarray]]
    ) -> PlannedPacks:
        def same_packs(packs: PackedDataset, rows: DocumentReader) -> PackedDataset:
            same = copy(packs)
            same.rows = rows
            return same

        sets = {"train": self.packs_of(0), **self.val_packs}
        rows = {
            name: packs.rows.with_columns(columns_of(name, packs.rows))
            for name, packs in sets.items()
        }
        train = rows.pop("train")
        packs_of = lru_cache(maxsize=2)(lambda epoch: same_packs(self.packs_of(epoch), train))
        val_packs = {name: same_packs(sets[name], of_set) for name, of_set in rows.items()}
        return replace(
            self, tokens=replace(self.tokens, train=train), packs_of=packs_of, val_packs=val_packs
        )

    @property
    def held_out(self) -> Mapping[str, PackedDataset]:
        return self.val_packs or {"all": self.packs_of(0)}

    @property
    def planned(self) -> PlannedPacks:
        return self

    @property
    def columns(self) -> set[str]:
        return {
            name for name in self.packs_of(0)[0] if name in COLUMNS and COLUMNS[name].is_optional
        }

    @property
    def counts(self) -> dict[str, int]:
        groups: dict[str, Any] = {f"data/{name}": x for name, x in self.tokens.counts.items()}
        groups["packing"] = self.packs_of(0).plan.counts
        return {f"{group}/{key}": n for group, x in groups.items() for key, n in asdict(x).items()}

    def plan(self, config: TrainingConfig) -> TrainingPlan:
        """The first of max_steps and num_epochs that is reached; raises ConfigError when the epochs
        are too short.
        """
        size = self.shape.global_batch_size
        first = self._num_steps(0)
        num_epochs, why = epochs_of(config, len(self.tokens.train))
        if config.max_steps is not None and config.num_epochs is None:
            return TrainingPlan(config.max_steps, first, self.shape)
        steps = sum(self._num_steps(epoch) for epoch in range(num_epochs))
        # a number of steps that somebody typed is meant; epochs of few documents end within the
        # warm-up, "finished"
        if config.max_steps is None and steps < FEWEST_STEPS and not config.allow_few_steps:
            needed = ceil_div(FEWEST_STEPS * num_epochs, max(1, steps))
            suggestions = [f"training.num_epochs={needed}", "training.allow_few_steps=true"]
            smallest = self.shape.micro_batch_size * self.shape.dp_size
            if size > smallest and not self.step_documents:
                suggestions.insert(0, f"training.global_batch_size={smallest}")
            packs = len(self.packs_of(0))
            made = counted(packs, "pack", "makes")
            of_each = str(size)
            if self.step_documents:
                of_each = counted(self.step_documents, "document")
            raise ConfigError(
                f"{made} {counted(steps, 'step')} of {of_each} in "
                f"{counted(num_epochs, 'epoch')}{why}, too few to learn from: set "
                f"{' or '.join(suggestions)}."
            )
        return TrainingPlan(min(steps, config.max_steps or steps), first, self.shape)

    def _num_steps(self, epoch: int) -> int:
        """Returns the steps of an epoch; the short last one counts."""
        packs = self.packs_of(epoch)
        if self.step_documents:
            return len(step_edges(_documents_of_packs(packs.plan), self.step_documents)) - 1
        return ceil_div(len(packs), self.shape.global_batch_size)

    def steps(self, cursor: Cursor, mesh: Mesh, costs: CostModel) -> Iterator[HostStep]:
        while True:
            epoch = cursor.epoch
            packs = self.packs_of(epoch)

            # 1. Order the packs of the epoch: shuffled, then distributed over the ranks by cost.
            order = epoch_order(len(packs), self.seed, epoch, self.dataloader.shuffle)
            rows = packs.rows
            costs_of_packs = pack_costs(
                packs.plan, rows.lengths, costs, rows.row_lengths, packs.tower_flops()
            )[order]
            # The whole epoch is ordered, wherever the cursor is: a run that continues has the order
            # of one that never stopped.
            if self.step_documents:
                documents = _documents_of_packs(packs.plan)[order]
                edges = step_edges(documents, self.step_documents).tolist()
                places = balance_steps(costs_of_packs, self.packer.balance, self.shape, edges)
                edges = [cursor.packs, *(edge for edge in edges if edge > cursor.packs)]
            else:
                places = assign_packs(costs_of_packs, self.packer.balance, self.shape, self.seed)
                size = self.shape.global_batch_size
                edges = [*range(cursor.packs, len(order), size), len(order)]
            order = order[places]
            del costs_of_packs  # of many packs, as large as their order

            # 2. Lay out the steps behind the cursor, and let workers read this rank's share ahead.
            spans = [*pairwise(edges)]
            steps = [assign_to_ranks(order[start:stop], self.shape) for start, stop in spans]
            batches = iter(read_batches(packs, steps, mesh.dp_rank, self.dataloader))

            # 3. Yield the steps, each with the cursor behind it: a checkpoint has the cursor of the
            # last finished step, so what workers have read ahead is read again.
            for (start, stop), step in zip(spans, steps):
                began = time.perf_counter()
                micro_batches = [next(batches) for _ in range(len(step))]
                waited_s = time.perf_counter() - began
                # The end of an epoch has one name: (next epoch, 0).
                is_last = stop >= len(order)
                cursor = Cursor(epoch + 1, 0) if is_last else Cursor(epoch, stop)
                yield HostStep(micro_batches, order[start:stop].tolist(), epoch, cursor, waited_s)

            # 4. Go on to the next epoch, also from a cursor behind the end of this one, whose packs
            # have become fewer: it makes no step.
            cursor = Cursor(epoch + 1, 0)

    def report(self, costs: CostModel | None = None) -> PackingReport:
        packs = self.packs_of(0)
        plan = packs.plan
        rows = self.tokens.train
        lengths = rows.lengths
        balance = self.packer.balance
        imbalance = plan_imbalance(
            plan, lengths, costs, balance, self.shape, rows.row_lengths, packs.tower_flops()
        )
        return packing_report(plan, lengths, balance, imbalance, self.shape.micro_batch_size)

    def lengths(self) -> dict[str, list[float]]:
        lengths = self.tokens.train.lengths
        longest = max(1, int(lengths.max()))
        counts, edges = np.histogram(lengths, bins=min(40, longest), range=(0, longest))
        packs = self.packs_of(0)
        pieces = packs.plan.piece_lengths(lengths)[packs.plan.offsets[0] : packs.plan.offsets[1]]
        found = {
            "edges": edges.round(1).tolist(),
            "documents": counts.tolist(),
            "pack": pieces.tolist(),
        }
        if not self.has_trees:
            return found
        pack = packs[0]
        nodes = find_nodes(
            cumulative(pack["seq_lens_padded"]), pack["position_ids"], pack["seq_lens"]
        )
        if nodes is None:
            return found
        # Of trees, stretches of keys that are seen by the same queries, and where these end.
        # without the padding at its tail
        num_real = int(pack["seq_lens_padded"][pack["seq_lens"] > 0].sum())
        until, widths = (
            x.tolist() for x in nodes.until[:num_real].unique_consecutive(return_counts=True)
        )
        return found | {"pack": widths, "until": until}

    def fingerprint(self) -> dict[str, Any]:
        by_window = (
            f"window, {self.shape.dp_size} data-parallel ranks x {self.shape.micro_batch_size}"
        )
        return {
            "documents": len(self.tokens.train),
            "tokens": int(self.tokens.train.lengths.sum()),
            "content": self.tokens.fingerprint,
            "packs": self.packs_of(0).plan.fingerprint(),
            "dealt": by_window if self.packer.balance == "window" else "the same on every layout",
        }
