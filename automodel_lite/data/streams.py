"""A stream as a source of packs: its documents become token rows, and these packs, while they are trained on.

Shards take turns: pack k of the stream is the next pack of shard k % num_shards, or empty once that shard has ended.
Rank r of W reads the shards r, r + W, …, so its packs are every W-th pack of the stream, and the global batches depend
neither on the number of ranks nor on workers. The position is the state of every shard, taken behind the last pack
that was trained on; what workers have read ahead is not in it.

The documents of a shard become packs in one pass: no lengths known ahead, a bounded number of documents in memory.

    packs = PackStream(lambda start: islice(documents(), start, None), Packer(packed_sequence_size=4096))
    for pack in packs:              as PackedDataset gives them
        state = packs.state_dict()  {"cursor": 5310, "piece": 0, "waiting": [[5297, 0], [5301, 0], [5308, 0]], ...}
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from automodel_lite.config.schema import Config, TrainingConfig
from automodel_lite.data.cache import short_hash
from automodel_lite.data.documents import Document, Documents
from automodel_lite.data.encode import Encoder, Renderer, Rendering
from automodel_lite.data.files import StreamingDataset
from automodel_lite.data.loader import BatchShape, Cursor, PackSource, StepBatches, TrainingPlan, worker_options
from automodel_lite.data.packing.histogram import LOOKAHEAD, ExactFiller
from automodel_lite.data.packing.packs import PackedDataset, Packer, lay_out, packed_sequence_thd_collater
from automodel_lite.data.token_rows import flatten
from automodel_lite.data.tokenize import Job, job_of, tokenize_validation
from automodel_lite.data.tokenizer import padding_id
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.models.flops import CostModel
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.thd import COLUMNS, IGNORE_INDEX

AHEAD_DOCUMENTS = 16  # tokenized at once; never part of the position
MIN_JUDGED_DOCUMENTS = 200  # before the cap on bad rows counts
Row = dict[str, np.ndarray]


Place = tuple[int, int]  # number of a document in the stream, and of a row of it


class PackStream(torch.utils.data.IterableDataset):
    """Iterates over packs of exact_fill, documents in the order of the stream, shifted by about ten places.

    read(start): the documents from number `start` on, the same ones at every call; each is a list of the rows
    {"input_ids", "labels"} that were made of it (none, where nothing of it is trained on). At most `lookahead` rows
    wait for a fitting pack. `state_dict` after a pack holds how many documents were read and the places of the rows
    that wait; `load_state_dict` reads these again and goes on with the next pack. `num_dropped` counts over-long rows,
    `num_empty` documents without a row. Raises ConfigError for settings that cannot work, DataError for a document
    that cannot.
    """

    def __init__(self, read: Callable[[int], Iterable[list[Row]]], packer: Packer, lookahead: int = LOOKAHEAD):
        if packer.overlong == "split":
            raise ConfigError(
                "packed_sequence.overlong='split' does not work on a stream: use one of drop, truncate, error."
            )
        self.read = read
        self.packer = packer
        self.lookahead = lookahead
        self.num_dropped = self.num_empty = 0
        self.load_state_dict({"cursor": 0, "piece": 0, "waiting": [], "num_dropped": 0, "num_empty": 0})

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        rows = flatten(self._held.pop(number)[1] for number in next(self._packs))
        starts, lengths = rows.offsets[:-1], np.diff(rows.offsets)
        return lay_out(rows, starts, lengths, *self.packer.layout)

    def state_dict(self) -> dict[str, Any]:
        """{"cursor": documents read, "piece": rows read of the one behind, "waiting": [document, row] of those that are
        in no pack yet, "num_dropped", "num_empty"}.
        """
        waiting = [list(self._held[number][0]) for number, _ in self._packs.waiting]
        cursor, piece = self._cursor
        counts = {"num_dropped": self.num_dropped, "num_empty": self.num_empty}
        return {"cursor": cursor, "piece": piece, "waiting": waiting, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cursor = (state["cursor"], state["piece"])
        self._held: dict[int, tuple[Place, Row]] = {}  # by arrival: document and row in the stream, tokens
        self._arrived = 0
        wanted = {(number, piece) for number, piece in state["waiting"]}
        if wanted:
            first, last = min(wanted)[0], max(wanted)[0]
            for number, rows in enumerate(self.read(first), start=first):
                for piece, row in enumerate(rows):
                    if (number, piece) in wanted:
                        self._hold((number, piece), row)
                if number >= last:
                    break
        self.num_empty = state["num_empty"]
        self.num_dropped = state["num_dropped"]
        slots = [(number, self._slots(document)) for number, (_, document) in self._held.items()]
        self._packs = ExactFiller(
            self._arriving(*self._cursor),
            self.packer.packed_sequence_size // self.packer.slot_multiple,
            lookahead=self.lookahead,
            first_id=self._arrived,
            waiting=slots,
        )

    def _arriving(self, start: int, num_seen: int) -> Iterator[int]:
        """The slots of the rows from document `start` on, of which `num_seen` rows were read before."""
        for number, rows in enumerate(self.read(start), start=start):
            self.num_empty += not rows
            for piece, row in enumerate(rows[num_seen:], start=num_seen):
                self._cursor = (number, piece + 1) if piece + 1 < len(rows) else (number + 1, 0)
                if self._hold((number, piece), row):
                    yield self._slots(self._held[self._arrived - 1][1])
            self._cursor, num_seen = (number + 1, 0), 0

    def _hold(self, place: Place, row: dict[str, Any]) -> bool:
        """Keeps the row for a pack; False when it is dropped."""
        number, size, overlong = place[0], self.packer.packed_sequence_size, self.packer.overlong
        columns = {name: np.asarray(row[name]) for name in COLUMNS if name in row}
        input_ids, labels = columns["input_ids"], columns["labels"]
        if len(input_ids) != len(labels) or not len(input_ids):
            raise DataError(
                f"document {number} has {len(input_ids)} input_ids and {len(labels)} labels: both must be equal, of "
                "at least 1 token."
            )
        if len(input_ids) > size:
            if overlong == "error":
                raise DataError(
                    f"document {number} has {len(input_ids)} tokens, over packed_sequence.packed_sequence_size={size}: "
                    "raise it, or set packed_sequence.overlong to drop or truncate."
                )
            if overlong == "drop":
                self.num_dropped += 1
                return False
            columns = {name: values[:size] for name, values in columns.items()}
        self._held[self._arrived] = (place, columns)
        self._arrived += 1
        return True

    def _slots(self, document: Row) -> int:
        return -(-len(document["input_ids"]) // self.packer.slot_multiple)


@dataclass(frozen=True)
class TokenStream:
    """Reads shards of a stream as rows."""

    dataset: StreamingDataset
    job: Job

    def read(self, shard: int, start: int) -> Iterator[list[Row]]:
        """The rows of every document of a shard but the first `start`: one, several (chats whose template rewrites
        earlier turns) or none (nothing is trained on, or a bad row that is skipped).

        Raises:
            DataError: a bad row with `on_bad_row=error`, or more unusable documents than `max_bad_frac`.
        """
        num_read = num_unusable = 0
        documents = self.dataset.read(shard, start)
        while chunk := list(islice(documents, AHEAD_DOCUMENTS)):
            for rows in self._rows([self._renderings(place, document) for place, document in chunk]):
                num_read, num_unusable = num_read + 1, num_unusable + (not rows)
                yield rows
            max_bad_frac = self.job.settings.max_bad_frac
            if num_read >= MIN_JUDGED_DOCUMENTS and num_unusable > max_bad_frac * num_read:
                raise DataError(
                    f"{self.dataset.stream.name}, shard {shard}: {num_unusable:,} of {num_read:,} documents are bad, "
                    f"empty or without a trained token; max_bad_frac={max_bad_frac} allows "
                    f"{int(max_bad_frac * num_read):,}."
                )

    @cached_property
    def _renderer(self) -> Renderer:
        return self.job.renderer()

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self.job.tokenizer)

    def _renderings(self, place: str, document: Document | DataError) -> list[Rendering]:
        try:
            if isinstance(document, DataError):
                raise document
            return self._renderer.renderings(document)
        except DataError as error:
            if self.job.settings.on_bad_row == "error":
                raise error if error is document else DataError(f"{place}: {error}") from error
            return []

    def _rows(self, renderings: list[list[Rendering]]) -> Iterator[list[Row]]:
        encoded = self._encoder.encode([rendering for of_document in renderings for rendering in of_document])
        ends = np.cumsum(encoded.lengths)[:-1]
        rows = zip(np.split(encoded.input_ids, ends), np.split(encoded.labels, ends))
        for of_document in renderings:
            own = islice(rows, len(of_document))
            yield [{"input_ids": ids, "labels": labels} for ids, labels in own if (labels != IGNORE_INDEX).any()]


Pack = dict[str, Any]
ShardState = dict[str, Any]
Turn = tuple[int, Pack | None, ShardState | None]  # shard, its next pack and its state behind it; None: it has ended


@dataclass(frozen=True)
class StreamedPacks(PackSource):
    """Packs of a stream, which is tokenized and packed while it is trained on and begins again when it ends.

    Raises ConfigError when the shards cannot be shared out evenly to the processes that read them.
    """

    tokens: TokenStream

    @classmethod
    def prepared(cls, config: Config, documents: Any, packer: Packer, batches: BatchShape) -> StreamedPacks:
        job = job_of(replace(config, tokenize=replace(config.tokenize, num_shards=1)), documents)
        packer = packer.padded_with(padding_id(job.tokenizer))
        val, notes = tokenize_validation(documents, job, config.cache_dir)
        val_packs = {name: packer.packs(rows, packer.plan(rows.lengths)) for name, rows in val.items()}
        facts = (documents, job.tokenizer, packer, val_packs, notes, batches, config.dataloader)
        return cls(*facts, TokenStream(documents, job))

    @classmethod
    def tokenize_shard(cls, config: Config, documents: Documents) -> NoReturn:
        raise ConfigError(f"tokenize.shard={config.tokenize.shard}: a stream is tokenized while it is trained on.")

    def __post_init__(self) -> None:
        readers = self.shape.dp_size * max(1, self.dataloader.num_workers)
        if self._num_shards % readers:
            raise ConfigError(
                f"dataset.num_shards={self._num_shards} must be a multiple of {readers} ({self.shape.dp_size} "
                f"data-parallel ranks x dataloader.num_workers={self.dataloader.num_workers}): use "
                f"{-(-self._num_shards // readers) * readers}."
            )

    @property
    def held_out(self) -> Mapping[str, PackedDataset]:
        if not self.val_packs:
            raise ConfigError("a stream has no end to evaluate: set dataset.val_path, or dataset=files.")
        return self.val_packs

    @property
    def _num_shards(self) -> int:
        return self.tokens.dataset.num_shards

    @property
    def longest(self) -> int:
        return self.packer.packed_sequence_size  # at most

    def plan(self, config: TrainingConfig) -> TrainingPlan:
        """Raises ConfigError when max_steps is not set."""
        if config.max_steps is None:
            raise ConfigError(
                "training.max_steps=null: the length of a stream is unknown, so set the number of steps, for "
                f"instance training.max_steps=1000 ({1000 * self.shape.global_batch_size:,} packs)."
            )
        return TrainingPlan(config.max_steps, None, self.shape)

    def fingerprint(self) -> dict[str, Any]:
        packer = self.packer
        packs = f"{packer.packed_sequence_size} {packer.overlong} {packer.slot_multiple}"
        return {"tokens": short_hash(self.documents.identity), "packs": packs}

    def steps(self, cursor: Cursor, mesh: Mesh, costs: CostModel) -> Iterator[StepBatches]:
        """The costs of packs are not used: they are not known together.

        Raises:
            DataError: the stream ends without a pack.
        """
        while True:
            num_steps = 0
            for batches in self._epoch(cursor, mesh):
                num_steps += 1
                yield batches
            if not num_steps and not cursor.packs:
                raise DataError(
                    f"{self.tokens.dataset.stream.name}: the stream ends without a document that fits a pack."
                )
            cursor = Cursor(cursor.epoch + 1)

    def left_out(self, cursor: Cursor, mesh: Mesh) -> dict[str, int]:
        """Documents left out of this epoch so far, over all ranks: over-long ones, and those that train nothing."""
        own = [s for shard, s in (cursor.shards or {}).items() if int(shard) % self.shape.dp_size == mesh.dp_rank]
        counts = [sum(state[name] for state in own) for name in ("num_dropped", "num_empty")]
        dropped, empty = (mesh.sum(torch.tensor(counts)) // mesh.shape.cp).tolist()
        return {"stream/num_dropped": dropped, "stream/num_empty": empty}

    def _epoch(self, cursor: Cursor, mesh: Mesh) -> Iterator[StepBatches]:
        per_step, size = self.shape.global_batch_size // self.shape.dp_size, self.shape.micro_batch_size
        turns = self._turns(cursor, mesh.dp_rank)
        states = dict(cursor.shards or {})
        for step in itertools.count():
            began = time.perf_counter()
            taken = [next(turns, None) for _ in range(per_step)]
            packs = [turn[1] if turn is not None else None for turn in taken]
            batches = [self._collate(packs[i : i + size]) for i in range(0, per_step, size)]
            num_packs = mesh.sum(torch.tensor([sum(pack is not None for pack in packs)]))
            wait_s = time.perf_counter() - began
            if not num_packs.item():  # the same on all ranks, so all end the epoch at this step
                return
            states |= {str(turn[0]): turn[2] for turn in taken if turn is not None and turn[2] is not None}
            num_taken = cursor.packs + (step + 1) * self.shape.global_batch_size
            yield StepBatches(batches, [], cursor.epoch, Cursor(cursor.epoch, num_taken, dict(states)), wait_s)

    def _turns(self, cursor: Cursor, dp_rank: int) -> Iterator[Turn | None]:
        """This rank's turns from `cursor` on; None for a shard that has ended."""
        own = range(dp_rank, self._num_shards, self.shape.dp_size)
        first = cursor.packs // self.shape.dp_size % len(own)
        shards = [*own[first:], *own[:first]]
        states = {shard: (cursor.shards or {})[str(shard)] for shard in own if str(shard) in (cursor.shards or {})}
        turns = ShardTurns(self.tokens, self.packer, shards, states)
        options = worker_options(self.dataloader)
        read = iter(StatefulDataLoader(turns, batch_size=None, collate_fn=lambda turn: turn, **options))
        ahead = next(read, None)
        for shard in itertools.cycle(shards):
            if ahead is None:
                return
            if ahead[0] != shard:  # the worker that reads this shard has nothing left
                yield None
                continue
            yield ahead
            ahead = next(read, None)

    def _collate(self, packs: list[Pack | None]) -> dict[str, Any]:
        none = np.zeros(0, np.int64)
        empty = lay_out(flatten([]), none, none, *self.packer.layout)
        batch = packed_sequence_thd_collater([empty if pack is None else pack for pack in packs])
        pins = self.dataloader.pin_memory and torch.cuda.is_available()
        return {k: v.pin_memory() if pins and isinstance(v, torch.Tensor) else v for k, v in batch.items()}


class ShardTurns(IterableDataset):
    """The packs of some shards in turns; in a worker, of the worker's part of them.

    A shard that has ended gives None in its turn, until all have ended.
    """

    def __init__(self, tokens: TokenStream, packer: Packer, shards: list[int], states: dict[int, ShardState]):
        self.tokens, self.packer, self.shards, self.states = tokens, packer, shards, states

    def __iter__(self) -> Iterator[Turn]:
        worker = get_worker_info()
        shards = self.shards[worker.id :: worker.num_workers] if worker else self.shards
        streams = {shard: self._packs(shard) for shard in shards}
        alive = set(shards)
        while alive:
            for shard in shards:
                pack = next(streams[shard], None) if shard in alive else None
                if pack is None:
                    alive.discard(shard)
                yield shard, pack, None if pack is None else streams[shard].state_dict()

    def _packs(self, shard: int) -> PackStream:
        packs = PackStream(partial(self.tokens.read, shard), self.packer)
        if shard in self.states:
            packs.load_state_dict(self.states[shard])
        return packs
