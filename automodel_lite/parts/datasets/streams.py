"""A stream as a source of packs: its documents become token rows, and these packs, while they are
trained on.

Shards take turns: pack k of the stream is the next pack of shard k % num_shards, or empty once that
shard has ended. Rank r of W reads the shards r, r + W, …, so its packs are every W-th pack of the
stream, and the global batches depend neither on the number of ranks nor on workers. The position is
the state of every shard, taken behind the last pack that was trained on; what workers have read
ahead is not in it. Streams are the hub's, generators, and files too large to be prepared first.

    documents   0 1 2 3 4 5 6 7 8 …        num_shards 4
    shard 1       1       5       9 …      on rank 0 of one, on rank 1 of two, in worker 1 of two …
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from automodel_lite.config.components import CodePath, locate
from automodel_lite.config.rules import PathStr, Range, looks_local
from automodel_lite.config.schema import Config, TrainingConfig
from automodel_lite.config.sizes import round_up
from automodel_lite.data.cache import short_hash
from automodel_lite.data.feeding.feed import FromWorkerError, worker_options
from automodel_lite.data.feeding.order import BatchShape
from automodel_lite.data.feeding.source import (
    Cursor,
    HostStep,
    PackSource,
    Reading,
    TrainingPlan,
    adapted,
)
from automodel_lite.data.packing.packs import PackedDataset, Packer, join_packs
from automodel_lite.data.reading.columns import NormalizedRows, OwnFormat, detect
from automodel_lite.data.reading.documents import DocumentList, DocumentSet, Question
from automodel_lite.data.reading.files import (
    NUM_SNIFFED_ROWS,
    OpenedRows,
    ReadOptions,
    TextUnit,
    ValPath,
    kind_of_documents,
    open_rows,
    open_validation,
    sniff_columns,
)
from automodel_lite.data.reading.paths import KINDS, FileStamp, kind_of
from automodel_lite.data.reading.readers import Placed, RawRows, placed
from automodel_lite.data.reading.tables import without_nulls
from automodel_lite.data.tokens.chunks import DocumentTokenizer, TokenizeJob
from automodel_lite.data.tokens.findings import check_set, limit_exceeded
from automodel_lite.data.tokens.token_rows import flatten
from automodel_lite.data.tokens.tokenize import job_of, tokenization_notes, tokenize_sets
from automodel_lite.data.tokens.tokenizer import padding_id
from automodel_lite.data.tokens.trees import trees_of
from automodel_lite.errors import (
    ConfigError,
    DataError,
    counted,
    explained,
    format_value,
    printable,
)
from automodel_lite.models.flops import CostModel
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parts.datasets.stream_packing import STREAM_COUNTS, PackStream, Row

AHEAD_DOCUMENTS = 16  # tokenized at once; never part of the position
MIN_JUDGED_DOCUMENTS = 200  # before the cap on bad rows counts
NumShards = Annotated[int, Range(1, 100_000)]
NUM_HEAD_DOCUMENTS = 2000  # that a tokenizer is trained on, or that are looked at beforehand


ReadShard = Callable[[int, int, int], Iterator[Placed]]
"""(shard, num_shards, start) -> (place, row) of every row of the shard but the first `start`, again
and again with the same result; a broken row is the error that names it.
"""


@dataclass(frozen=True)
class RawStream:
    """A stream of raw rows that can be read from any place on."""

    name: str
    read: ReadShard = field(compare=False)
    identity: str
    content: str  # the identity without times and places of files


def read_files(rows: RawRows, shard: int, num_shards: int, start: int) -> Iterator[Placed]:
    """Reads local files, in which any row is found at once."""
    return placed(rows, range(shard + start * num_shards, len(rows), num_shards))


def read_hub(
    path: str, name: str | None, split: str, shard: int, num_shards: int, start: int
) -> Iterator[Placed]:
    """Streams a dataset of the hub; files are distributed to shards where there are enough of them,
    else rows are.
    """
    import datasets

    with explained(f"dataset.path={path} cannot be streamed", Exception):
        stream = datasets.load_dataset(path, name, split=split, streaming=True)
    shown = f"{path}/{name}" if name else path
    if stream.num_shards >= num_shards:
        rows = stream.shard(num_shards, shard).skip(start)
        first = start
        step = 1
        shown += f", shard {shard}"
    else:
        first = shard + start * num_shards
        step = num_shards
        rows = islice(stream, first, None, step)
    for number, row in enumerate(rows):
        yield (
            f"{shown}, row {first + number * step + 1}",
            {key: without_nulls(value) for key, value in row.items()},
        )


def read_generator(function: str, shard: int, num_shards: int, start: int) -> Iterator[Placed]:
    """Reads what a function of the user yields: once for every shard, and the same
    rows each time.
    """
    first = shard + start * num_shards
    for number, row in enumerate(
        islice(locate(function.replace(":", "."))(), first, None, num_shards)
    ):
        place = f"{function}[{first + number * num_shards}]"
        yield (
            place,
            row
            if isinstance(row, dict)
            else DataError(f"{place}: a row must be a dict, not {row!r:.40}."),
        )


@dataclass
class StreamingDataset:
    """Documents of a stream.

    A configuration may name a generator when the command line allows its package,
    `security.allow_targets`. A run may continue on another number of ranks as long as num_shards
    stays. Streams that cannot be entered in the middle (generators, hub datasets of few files) are
    read from the start by each shard.
    """

    path: PathStr | Sequence[PathStr] | None = None  # files or a hub name; or use generator
    # package.module:function that yields the same rows on every call
    generator: CodePath | None = None
    name: str | None = None  # subset (configuration) of a hub dataset, or of a folder's
    split: str = "train"  # of a hub dataset
    # null = detected from the columns; or a _target_, a function of a raw row
    format: str | OwnFormat | None = None
    # canonical name -> column, {question: Frage, answer: Antwort}
    columns: Mapping[str, str] | None = None
    val_path: ValPath | None = None  # validation files, or several sets by name
    # a multiple of data-parallel ranks x dataloader.num_workers; fixed for the run
    num_shards: NumShards = 8
    encoding: str = "utf-8"  # of text, JSON and CSV files; cp1252 for what Excel and Windows write
    text_unit: TextUnit = "file"  # file | paragraph | line: what a document is in a .txt file

    stream: RawStream = field(init=False)
    val: dict[str, DocumentSet] = field(init=False)
    kind: str = field(init=False)
    questions: list[Question] = field(init=False, default_factory=list)
    description: str = field(init=False)
    identity: str = field(init=False)
    content: str = field(init=False)
    notes: Sequence[str] = field(init=False, default=())
    opened: OpenedRows | None = field(init=False, default=None, repr=False)  # None: not files

    def __post_init__(self) -> None:
        options = ReadOptions(self.encoding, self.text_unit)
        val_sources = open_validation(self.val_path, self.split, options)
        self.stream = self._open(
            options, [one for opened in val_sources.values() for one in opened.files]
        )
        options.check_files([*val_sources.values(), *filter(None, [self.opened])])
        first = list(islice(self.stream.read(0, 1, 0), NUM_SNIFFED_ROWS))
        columns = sniff_columns(first, f"{self.stream.name}: the stream")
        self._detected = detect(columns, self.format, self.columns)
        self.kind = kind_of_documents(self._detected, map(self._document, first))
        if self.kind == "tokens":
            raise ConfigError(
                f"{self.stream.name} contains token ids, but streams are tokenized during "
                "training: use dataset=files."
            )
        self.val = {
            name: NormalizedRows(self.view_held_out(one), self._detected, range(len(one.rows)))
            for name, one in val_sources.items()
        }
        shown = f"{self.stream.name}: a stream in {self.num_shards} shards"
        self.description = "; ".join([f"{shown}, {self._detected.description}", *self.notes])
        read_as = (
            f"{self._detected.format.name}{self._detected.source}; {dict(self._detected.renames)}; "
            f"num_shards={self.num_shards}"
        )
        val = "; ".join(f"{name}: {one.identity}" for name, one in val_sources.items())
        self.content = f"stream({self.stream.content}; {read_as})"
        self.identity = f"stream({self.stream.identity}; {read_as}; {val}; {options})"

    def view(self, opened: OpenedRows) -> RawRows:
        """Returns the rows of files; a subclass's own may be other ones."""
        return opened.rows

    def view_held_out(self, opened: OpenedRows) -> RawRows:
        """Returns the rows of files of validation."""
        return opened.rows

    def read(self, shard: int, start: int) -> Iterator[Placed]:
        """Yields every document of a shard but the first `start`."""
        return map(self._document, self.stream.read(shard, self.num_shards, start))

    def head(self, num_documents: int) -> list[Placed]:
        """Returns the first documents of all shards, as they lie in the stream."""
        return list(map(self._document, islice(self.stream.read(0, 1, 0), num_documents)))

    @cached_property
    def train(self) -> DocumentList:
        """Returns the first documents, for whoever wants to look at some (training a tokenizer on
        them).
        """
        documents = [
            document
            for _, document in self.head(NUM_HEAD_DOCUMENTS)
            if not isinstance(document, DataError)
        ]
        return DocumentList(documents, self.name or "")

    def packs(self, config: Config, packer: Packer, batches: BatchShape) -> StreamedPacks:
        """See `PackingDataset`."""
        return StreamedPacks.prepare(config, self, packer, batches)

    def _document(self, one: Placed) -> Placed:
        place, row = one
        if isinstance(row, DataError):
            return place, row
        try:
            return place, self._detected.document(row, place)
        except DataError as error:
            return place, error

    def _open(self, options: ReadOptions, held_out: Sequence[FileStamp]) -> RawStream:
        if (self.path is None) == (self.generator is None):
            raise ConfigError("dataset.path and dataset.generator: set exactly one of them.")
        if self.generator is not None:
            # the split is that of a validation set on the hub, too
            if self.name or (self.split != "train" and self.val_path is None):
                named = f"name={self.name}" if self.name else f"split={self.split}"
                raise ConfigError(
                    f"dataset.{named} is of a hub dataset, and dataset.generator={self.generator} "
                    "yields its own rows: leave it out."
                )
            return RawStream(
                self.generator,
                partial(read_generator, self.generator),
                self.generator,
                self.generator,
            )
        assert self.path is not None
        if isinstance(self.path, str) and not (
            looks_local(self.path) or kind_of(Path(self.path)) in KINDS
        ):
            shown = f"{self.path}/{self.name}" if self.name else self.path
            identity = f"{shown} {self.split}"
            return RawStream(
                shown, partial(read_hub, self.path, self.name, self.split), identity, identity
            )
        source = open_rows(self.path, self.name, self.split, "dataset.path", options, held_out)
        self.notes = source.notes
        self.opened = source
        contents = ", ".join(
            f"{printable(one.path.name)} {one.size} {one.content}" for one in source.files
        )
        read = partial(read_files, self.view(source))
        return RawStream(
            source.description, read, source.identity, f"{contents}, split {self.split}"
        )


Pack = dict[str, Any]
ShardState = dict[str, Any]
# shard, its next pack and its state behind it; None: it has ended
Turn = tuple[int, Pack | None, ShardState | None]


@dataclass(frozen=True)
class StreamedPacks(PackSource):
    """Packs of a stream, which is tokenized and packed while it is trained on and begins again when
    it ends.

    Raises ConfigError when the shards cannot be shared out evenly to the processes that read them.
    """

    documents: StreamingDataset

    @classmethod
    def prepare(
        cls, config: Config, documents: Any, packer: Packer, batches: BatchShape
    ) -> StreamedPacks:
        _check_packing(packer)
        job = job_of(config, documents, packer.tree, packer.packed_sequence_size)
        reading = adapted(config, Reading(documents, job, packer))
        documents = reading.documents
        job = reading.job
        packer = reading.packer.for_document_kind(documents.kind, padding_id(job.tokenizer))
        identity = f"{documents.identity} val"
        val, _, notes = tokenize_sets(
            documents.val, identity, documents.kind, job, config.cache_dir
        )
        # The first documents are judged as a file's are, before a step is taken.
        head = documents.head(MIN_JUDGED_DOCUMENTS)
        chunk = DocumentTokenizer(job).chunk(head)
        name = f"first {len(head):,} documents"
        check_set(name, documents.kind, chunk.found, job.settings, job.tokenizer)
        if packer.overlong == "drop":
            too_long = chunk.lengths[chunk.lengths > packer.packed_sequence_size]
            packer.check_dropped(int(too_long.sum()), int(chunk.lengths.sum()), name, chunk.lengths)
        notes = (f"{name}: {chunk.found.counts}", *tokenization_notes(name, chunk.found), *notes)
        val_packs = {name: packer.packs(rows) for name, rows in val.items()}
        has_trees = packer.tree != "off"
        longest = packer.packed_sequence_size  # at most
        return cls(
            documents, job, packer, val_packs, notes, batches, config.dataloader, has_trees, longest
        )

    def __post_init__(self) -> None:
        readers = self.shape.dp_size * max(1, self.dataloader.num_workers)
        num_shards = self.documents.num_shards
        if num_shards % readers:
            raise ConfigError(
                f"dataset.num_shards={num_shards} must be a multiple of {readers} "
                f"({self.shape.dp_size} data-parallel ranks x "
                f"dataloader.num_workers={self.dataloader.num_workers}): use "
                f"{round_up(num_shards, readers)}, or ranks and workers whose product divides "
                f"{num_shards}, as a run that continues has to."
            )

    @property
    def held_out(self) -> Mapping[str, PackedDataset]:
        if not self.val_packs:
            raise ConfigError(
                "a stream has no end to evaluate: set dataset.val_path, or dataset=files or images."
            )
        return self.val_packs

    def plan(self, config: TrainingConfig) -> TrainingPlan:
        """Raises ConfigError when max_steps is not set, and for epochs."""
        if config.num_epochs is not None:
            raise ConfigError(
                f"training.num_epochs={config.num_epochs} does not end a stream, which begins "
                "again when it ends: set training.num_epochs=null and training.max_steps."
            )
        if config.max_steps is None:
            raise ConfigError(
                "training.max_steps=null: the length of a stream is unknown, so set the number of "
                "steps, for instance training.max_steps=1000 "
                f"({1000 * self.shape.global_batch_size:,} packs)."
            )
        return TrainingPlan(config.max_steps, None, self.shape)

    def fingerprint(self) -> dict[str, Any]:
        packer = self.packer
        packs = f"{packer.packed_sequence_size} {packer.overlong} {packer.slot_multiple}"
        return {"tokens": short_hash(self.documents.content), "packs": packs}

    def steps(self, cursor: Cursor, mesh: Mesh, costs: CostModel) -> Iterator[HostStep]:
        """Yields the steps, whatever their packs cost; raises DataError when the stream ends
        without a pack.
        """
        while True:
            num_steps = 0
            for batches in self._epoch(cursor, mesh):
                num_steps += 1
                yield batches
            if not num_steps and not cursor.packs:
                raise DataError(
                    f"{self.documents.stream.name}: the stream ends without a document that fits a "
                    "pack."
                )
            cursor = Cursor(cursor.epoch + 1)

    def _epoch(self, cursor: Cursor, mesh: Mesh) -> Iterator[HostStep]:
        per_step = self.shape.global_batch_size // self.shape.dp_size
        size = self.shape.micro_batch_size
        turns = self._turns(cursor, mesh.dp_rank)
        empty = self.packer.pack_of(flatten([]))
        states = dict(cursor.shards or {})
        is_judged = False
        for step in itertools.count():
            began = time.perf_counter()
            taken = list(islice(turns, per_step))
            has_ended = len(taken) < per_step
            packs = []
            filled = [empty] * per_step
            for place, turn in enumerate(taken):
                if turn is None:  # of a shard that has ended
                    continue
                shard, pack, state = turn
                if pack is not None:
                    packs.append(pack)
                    filled[place] = pack
                if state is not None:
                    states[str(shard)] = state
            batches = [join_packs(filled[i : i + size]) for i in range(0, per_step, size)]
            # One message for the packs of this step and for what the shards have read until then.
            own = [
                state
                for shard, state in states.items()
                if int(shard) % self.shape.dp_size == mesh.dp_rank
            ]
            counted = [sum(state.get(name, 0) for state in own) for name in STREAM_COUNTS]
            sums = mesh.sum(torch.tensor([len(packs), has_ended, *counted])) // mesh.shape.cp
            wait_s = time.perf_counter() - began
            num_packs, num_ended, *summed = sums.tolist()
            # The same on all ranks, so all end the epoch at this step. A step without a pack is not
            # the end: the shards whose turn it was may be those that have ended.
            is_whole = not num_packs and num_ended == self.shape.dp_size
            counts = dict(zip(STREAM_COUNTS, summed))
            if is_whole or counts["num_documents"] >= MIN_JUDGED_DOCUMENTS:
                found = self._judged(counts)
                if mesh.rank == 0 and (is_whole or not is_judged):
                    print(f"data: {found}", flush=True)
                is_judged = True
            if is_whole:
                return
            if not num_packs:
                continue
            num_taken = cursor.packs + (step + 1) * self.shape.global_batch_size
            after = Cursor(cursor.epoch, num_taken, dict(states))
            left_out = {f"stream/{name}": counts[name] for name in ("num_dropped", "num_empty")}
            yield HostStep(batches, [], cursor.epoch, after, wait_s, left_out)

    def _judged(self, counts: Mapping[str, int]) -> str:
        """Returns `stream.jsonl: 1,200 documents read, ...`; raises DataError when too many cannot
        be trained on.
        """
        name = self.documents.stream.name
        text = (
            f"{name}: {counted(counts['num_documents'], 'document')} read, {counts['num_empty']:,} "
            f"bad, empty or without a trained token, {counts['num_dropped']:,} over-long dropped"
        )
        settings = self.job.settings
        if too_many := limit_exceeded(counts["num_empty"], counts["num_documents"], settings):
            raise DataError(f"{text}; {too_many} bad ones.")
        self.packer.check_dropped(counts["dropped_tokens"], counts["num_tokens"], name)
        return text

    def _turns(self, cursor: Cursor, dp_rank: int) -> Iterator[Turn | None]:
        """This rank's turns from `cursor` on; None for a shard that has ended."""
        own = range(dp_rank, self.documents.num_shards, self.shape.dp_size)
        first = cursor.packs // self.shape.dp_size % len(own)
        shards = [*own[first:], *own[:first]]
        known = cursor.shards or {}
        states = {shard: known[str(shard)] for shard in own if str(shard) in known}
        turns = ShardTurns(self.documents, self.job, self.packer, shards, states)
        options = worker_options(self.dataloader)
        read = iter(
            StatefulDataLoader(turns, batch_size=None, collate_fn=lambda turn: turn, **options)
        )
        ahead = next(read, None)
        for shard in itertools.cycle(shards):
            if ahead is None:
                return
            if ahead[0] != shard:  # the worker that reads this shard has nothing left
                yield None
                continue
            yield ahead
            ahead = next(read, None)


def _check_packing(packer: Packer) -> None:
    """Raises ConfigError for settings of packs that are planned from the lengths of all
    documents.
    """
    packed = {
        "strategy": (packer.strategy, "exact_fill"),
        "max_packs": (packer.max_packs, None),
        "repack_each_epoch": (packer.repack_each_epoch, False),
        "balance": ("window" if packer.balance == "window" else "step", "step"),
    }
    for key, (asked, works) in packed.items():
        if asked != works:
            raise ConfigError(
                f"packed_sequence.{key}={format_value(asked)} needs the lengths of all documents, "
                "and a stream is packed by exact_fill while it is read: set "
                f"packed_sequence.{key}={format_value(works)}, or use dataset=files or images."
            )


class WorkerError(FromWorkerError, DataError):
    """What a worker cannot read."""


@dataclass
class ShardTurns(IterableDataset):
    """The packs of some shards in turns; in a worker, of the worker's part of them.

    A shard that has ended gives None in its turn, until all have ended.
    """

    dataset: StreamingDataset
    job: TokenizeJob
    packer: Packer
    shards: list[int]
    states: dict[int, ShardState]

    def __iter__(self) -> Iterator[Turn]:
        try:
            yield from self._turns()
        except (ConfigError, DataError) as error:
            raise WorkerError(str(error)) from error

    def _turns(self) -> Iterator[Turn]:
        worker = get_worker_info()
        shards = self.shards[worker.id :: worker.num_workers] if worker else self.shards
        tokenizer = DocumentTokenizer(self.job)
        streams = {
            shard: PackStream(partial(self._rows, tokenizer, shard), self.packer)
            for shard in shards
        }
        for shard in self.states.keys() & streams.keys():
            streams[shard].load_state_dict(self.states[shard])
        alive = set(shards)
        while alive:
            for shard in shards:
                was_alive = shard in alive
                pack = next(streams[shard], None) if was_alive else None
                if pack is None:
                    alive.discard(shard)
                # The state behind the last pack counts what was left out since: a shard may hold no
                # pack at all.
                yield shard, pack, streams[shard].state_dict() if was_alive else None

    def _rows(self, tokenizer: DocumentTokenizer, shard: int, start: int) -> Iterator[list[Row]]:
        """Yields the rows of every document of a shard but the first `start`: one, several (chats
        whose template rewrites earlier turns) or none (nothing is trained on, or a bad row that is
        skipped).
        """
        documents = self.dataset.read(shard, start)
        while ahead := list(islice(documents, AHEAD_DOCUMENTS)):
            chunk = tokenizer.chunk(ahead)
            ends = np.cumsum(chunk.lengths)
            columns = {name: np.split(values, ends[:-1]) for name, values in chunk.columns.items()}
            rows = (
                {name: values[i] for name, values in columns.items()}
                for i in range(len(chunk.lengths))
            )
            for num_rows in chunk.num_rows.tolist():
                of_document = list(islice(rows, num_rows))
                job = self.job
                yield trees_of(of_document, job.tree, job.most_tokens, job.separates)
