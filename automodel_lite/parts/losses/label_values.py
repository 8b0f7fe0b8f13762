"""Values per label that a model without gradients computes once, kept as per-token columns beside
the token cache.

`reference_log_probs` of the start model are what preference losses compare with; `teacher_ids` and
`teacher_log_probs` are a teacher's likeliest tokens. The model runs over packs on the mesh of the
run. Every value goes to the place of its token in the flat rows, so the columns fit any packs and
any mesh. What is finished survives a stop: the same command goes on where it was.

    <cache>/values/<name>-<set>-<key>/log_probs.npy, ...      the key: rows, packs, model, columns
    <...>/key.json                                            size and checksum of every file
    <...>.part/progress.json                                  packs that are done, and their plan,
                                                              while it is being made
    <...>.lock, <...>.owner                                   held by the job that makes it
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex

import numpy as np
from filelock import FileLock, Timeout
from torch import Tensor

from automodel_lite.columns import COLUMNS, IGNORE_INDEX
from automodel_lite.config.schema import Config
from automodel_lite.data.cache import Key, cache_root, entry_folder, find_damage, seal
from automodel_lite.data.feeding.source import PackSource
from automodel_lite.data.packing.packs import PackedDataset, Packer
from automodel_lite.data.tokens.token_rows import (
    CONTENT_HASH,
    PAIRED,
    DocumentReader,
    TokenizedDocuments,
)
from automodel_lite.errors import ConfigError, DataError, counted, explained
from automodel_lite.launched import is_first_here, rank
from automodel_lite.models.fused_head import RowFunction
from automodel_lite.models.loss import Loss, check_columns, label_log_probs
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parts.losses.distillation import DistillTopK
from automodel_lite.progress import Progress, print_above_bars
from automodel_lite.run import durable
from automodel_lite.run.weight_files import adapter_files, model_files
from automodel_lite.training.build import BuiltModel
from automodel_lite.training.engine import Engine

SAVE_EVERY_S = 60.0
PROGRESS = "progress.json"
_BLOCK_TOKENS = 2**24
MADE_HERE = frozenset({"reference_log_probs"}) | DistillTopK.required
Columns = Mapping[str, np.ndarray]


def check_loss(data: PackSource, loss: Loss) -> None:
    """Raises ConfigError for a loss that does not fit the data, before a model is loaded; the
    columns of streams are not known yet.
    """
    if data.columns is None:
        if loss.required & MADE_HERE:
            data.with_columns(lambda of_set, rows: {})  # a stream says why it has none
        return
    made = loss.required & MADE_HERE | loss.derived(data.columns)
    if planned := data.planned:
        for of_set, packs in {"train": planned.packs_of(0), **planned.val_packs}.items():
            _check_whole(of_set, packs.rows)
            if made - data.columns:
                packs.rows.with_columns({})  # what is made belongs to the rows of one set
    check_columns(loss, {*data.columns, *made})
    declared: tuple[Field, ...] = fields(loss) if is_dataclass(loss) else ()
    for setting in declared:
        column = loss.settings_of.get(setting.name)
        value = getattr(loss, setting.name)
        if column and value and value != setting.default and column not in data.columns:
            raise ConfigError(
                f"loss.{setting.name}={value} does nothing, as the rows bring no {column}: add "
                "that column, or leave the setting out."
            )


def _check_whole(of_set: str, rows: DocumentReader) -> None:
    """Raises DataError where some documents bring a column and others do not, and nothing can stand
    in for it: pairs of answers, and what is padded with -inf.
    """
    sources = [source for source in getattr(rows, "sources", [rows]) if len(source)]
    for name in sorted({name for source in sources for name in source[0]}):
        column = COLUMNS[name]
        is_needed = name in PAIRED or (column.padding == -math.inf and not column.of_row)
        if is_needed and any(_lacks(source, name) for source in sources):
            raise DataError(
                f"{of_set}: some documents bring {name}, and others do not: add it to them, or "
                "train on one kind alone."
            )


def _lacks(rows: DocumentReader, name: str) -> bool:
    """Returns whether a label has no value of this column."""
    if name not in rows[0]:
        return True
    if COLUMNS[name].padding != -math.inf:
        return False
    columns = rows.flat.columns
    is_padding = np.asarray(columns[name][:]) == -math.inf
    return bool((is_padding & (np.asarray(columns["labels"]) != IGNORE_INDEX)).any())


def with_values(data: PackSource, engine: Engine, built: BuiltModel, config: Config) -> PackSource:
    """Adds the columns that the loss asks for: log-probabilities of the reference, which is the
    model as it is now, and a teacher's likeliest tokens, which automodel-lite score has stored.

    Raises ConfigError for a teacher that has not been scored. Every rank calls it.
    """
    loss = engine.model.loss_model.loss
    if loss.derived(data.columns or ()):

        def derive(name: str, rows: DocumentReader) -> Columns:
            try:
                return loss.derive(rows.flat.columns, rows.flat.offsets, trains=name == "train")
            except ValueError as error:
                raise DataError(f"{config.dataset.get('path')}, {name}: {error}") from None

        data = data.with_columns(derive)
    if loss.needs_reference:
        reference = reference_values(built, data.packer, config.cache_dir, config.seed)
        if rank() == 0:
            note_unused(data, reference, config)
        return data.with_columns(lambda name, rows: reference.computed(name, rows, engine))
    if isinstance(loss, DistillTopK):
        values = teacher_values(loss, data.packer, config.cache_dir, len(data.tokenizer))
        return data.with_columns(values.stored)
    return data


def note_unused(data: PackSource, reference: Values, config: Config) -> None:
    """Prints that a short run computes the reference of many pairs that it does not train on."""
    planned = data.planned
    if not planned or config.training.max_steps is None:
        return
    packs = planned.packs_of(0)
    used = config.training.max_steps * data.shape.global_batch_size
    if 2 * used < len(packs) and not reference.folder("train", packs.rows).is_dir():
        print_above_bars(
            f"NOTE: the reference of all {len(packs):,} packs is computed first, and "
            f"training.max_steps={config.training.max_steps} trains on {used:,} of them: "
            "dataset.max_documents reads fewer."
        )


@dataclass(frozen=True)
class Values:
    """What is computed for the labels of any set of rows.

    function  (logits [r, V], labels [r]) -> values [r, K]
    columns   name -> (dtype, number of values per token), which lie side by side in K
    model     what its weights follow from
    packer    of the packs that the model sees: other cuts of documents are other values
    """

    name: str
    function: RowFunction
    columns: Mapping[str, tuple[str, int]]
    model: str
    packer: Packer
    cache_dir: str | None

    def __post_init__(self) -> None:
        if self.packer.cuts_documents and self.packer.repack_each_epoch:
            raise ConfigError(
                f"packed_sequence.strategy={self.packer.strategy} with "
                "packed_sequence.repack_each_epoch=true cuts documents elsewhere in each epoch, "
                f"and {self.name} values are those of one cut: set "
                "packed_sequence.repack_each_epoch=false."
            )

    def key(self, rows: DocumentReader) -> Key:
        """Returns what the values of these rows follow from."""
        # of the token cache, whatever columns have come to them since
        of_rows = Path(str(rows.flat.files[0].name)).parent
        packer = self.packer
        cuts = f"{packer.packed_sequence_size} {packer.strategy} {packer.overlong}"
        if packer.cuts_documents:  # where, follows from their order and their slots
            cuts += f" {packer.seed} {packer.slot_multiple}"
        return {
            "rows": (of_rows / CONTENT_HASH).read_text(),
            "model": self.model,
            "packs": cuts,
            "columns": json.dumps({column: list(shape) for column, shape in self.columns.items()}),
            "format": "2",  # a manifest of checksums, and NaN for what was not computed
        }

    def folder(self, name: str, rows: DocumentReader) -> Path:
        """Returns where the columns of a set are, or will be."""
        root = cache_root(self.cache_dir)
        return entry_folder(root, "values", f"{self.name}-{name}", self.key(rows))

    def stored(self, name: str, rows: DocumentReader) -> Columns:
        """Maps the columns, [tokens of the flat rows] or [tokens, K].

        Raises ConfigError where the cache has none, other bytes than were written, or no value of a
        label that a pack holds.
        """
        folder = self.folder(name, rows)
        if not folder.is_dir():
            raise ConfigError(
                f"the cache has no {self.name} values of the set {name} for these rows, packs and "
                "teacher: run automodel-lite score with the same arguments first."
            )
        if damage := find_damage(folder):
            raise ConfigError(
                f"{folder} is damaged ({damage}): run recipes/score.py with the same arguments "
                "again."
            )
        return self._mapped(folder, rows)

    def _mapped(self, folder: Path, rows: DocumentReader) -> Columns:
        columns = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in self.columns}
        if num_missing := self._num_missing(rows, columns):
            raise ConfigError(
                f"{folder} has no value for {counted(num_missing, 'label')}: remove it, and its "
                "values are computed again."
            )
        return columns

    def computed(self, name: str, rows: DocumentReader, engine: Engine) -> Columns:
        """Maps the columns, after computing what the cache does not have; every rank calls it. Of
        several jobs one computes, and the others wait.

        Tokens that no pack holds (over-long documents that are dropped) have none, NaN.
        """
        folder = self.folder(name, rows)
        packer = copy(self.packer)
        mesh = engine.mesh
        if not all(mesh.gather(find_damage(folder) is None)):
            placed = rows.with_columns({"row_place": np.arange(rows.flat.num_tokens)})
            packer.max_packs = None  # all packs, whatever sample of them an epoch takes
            with one_job_at(folder, mesh) as is_writer:
                if not all(mesh.gather(find_damage(folder) is None)):
                    part = Part(self, folder, packer.packs(placed), is_writer)
                    _compute(part, engine)
                    if is_writer:
                        part.finish(f"{self.name}-{name}", self.key(rows))
                mesh.barrier()
        return self._mapped(folder, rows)

    def _num_missing(self, rows: DocumentReader, columns: Columns) -> int:
        """Returns the number of labels in packs that have no value."""
        flat = rows.flat
        places = self._places_without_value(flat, columns)
        if not len(places):
            return 0
        # Those of documents that no pack holds are meant to be missing.
        plan = self.packer.packs(rows).plan
        begins = flat.offsets[plan.doc_ids] + (0 if plan.starts is None else plan.starts)
        ends = flat.offsets[plan.doc_ids + 1]
        if plan.stops is not None:
            ends = flat.offsets[plan.doc_ids] + plan.stops
        order = np.argsort(begins)
        piece = np.searchsorted(begins[order], places, side="right") - 1
        return int(((piece >= 0) & (places < ends[order][piece])).sum())

    def _places_without_value(self, flat: TokenizedDocuments, columns: Columns) -> np.ndarray:
        """Returns where the labels without a value are, int64, ascending."""
        places = [np.zeros(0, np.int64)]
        values = next(columns[name] for name, (dtype, _) in self.columns.items() if "f" in dtype)
        for start in range(0, flat.num_tokens, _BLOCK_TOKENS):
            block = slice(start, start + _BLOCK_TOKENS)
            of_label = np.asarray(values[block]).reshape(-1, values.size // len(values))[:, 0]
            is_missing = np.isnan(of_label) & (flat.columns["labels"][block] != IGNORE_INDEX)
            places.append(start + np.flatnonzero(is_missing))
        return np.concatenate(places)


def reference_values(built: BuiltModel, packer: Packer, cache_dir: str | None, seed: int) -> Values:
    """Log-probabilities of the labels by the start model: its files or its seed, and how its
    weights are held.
    """

    def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
        return label_log_probs(logits, labels)[:, None]

    parts = built.decided
    files = (
        model_files(parts.model.pretrained, str(parts.model.source["revision"]))
        or parts.model.pretrained
    )
    model = (
        f"{files} {parts.config.to_json_string()} {seed} {built.model.compute_dtype} "
        f"{parts.training.fp8}"
    )
    model += f" {parts.training.master_weights} {parts.is_quantized}"
    # trained further: the reference is the base with it, as it is now
    if parts.peft and parts.peft.adapter:
        model += f" {adapter_files(parts.peft.adapter)}"
    return Values(
        "reference", log_probs, {"reference_log_probs": ("float32", 1)}, model, packer, cache_dir
    )


def teacher_values(
    loss: DistillTopK, packer: Packer, cache_dir: str | None, num_ids: int
) -> Values:
    """A teacher's likeliest of the `num_ids` tokens that the tokenizer has: its vocabulary may be
    padded to more than the student's. In fp16 their log-probabilities take as much room as in bf16,
    8 times finer.
    """
    k = loss.top_k
    files = model_files(loss.teacher) or loss.teacher
    columns = {"teacher_ids": ("int32", k), "teacher_log_probs": ("float16", k)}
    columns["teacher_rest"] = ("float32", 1)
    function = partial(loss.likeliest, num_ids)
    return Values(f"top_{k}", function, columns, f"{files} {num_ids}", packer, cache_dir)


@contextmanager
def one_job_at(folder: Path, mesh: Mesh) -> Iterator[bool]:
    """Waits until no other job makes this folder; whether this rank is the one that writes on its
    file system. Ranks go on talking while they wait, so no collective of theirs times out.
    """
    lock = FileLock(f"{folder}.lock")
    owner = Path(f"{folder}.owner")
    job = mesh.gather(token_hex(8))[0]
    with _writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    is_told = False
    try:
        while True:
            if is_first_here():
                with _writing(folder), suppress(Timeout):
                    lock.acquire(timeout=0)
                    owner.write_text(job)
            mesh.barrier()
            # of nodes that share the file system one has the lock, and its note names the job
            if all(mesh.gather(owner.is_file() and owner.read_text() == job)):
                break
            # two jobs of several nodes could each hold the lock of one
            lock.release()
            if not is_told and mesh.rank == 0:
                print(f"waiting for another job, which computes {folder}", flush=True)
            is_told = True
            time.sleep(random.uniform(0.2, 2))
        yield lock.is_locked
    finally:
        lock.release()


def _writing(folder: Path) -> AbstractContextManager[None]:
    """Raises ConfigError for what the disk of the values refuses, which need not name a file."""
    cure = "make room there, or set cache_dir to another folder"
    return explained(f"{folder.parent} cannot be written", cure=cure)


class Part:
    """Columns that are being computed: their files, and how many packs are in them.

    Raises ConfigError where the disk has no room for them.
    """

    def __init__(self, values: Values, folder: Path, packs: PackedDataset, is_writer: bool) -> None:
        self.values = values
        self.folder = folder
        self.packs = packs
        self.path = folder.with_name(f"{folder.name}.part")
        self.arrays = dict[str, np.memmap]()
        # another seed or rounding of lengths makes other packs of the same documents
        self.plan = packs.plan.fingerprint()
        self.done = len(packs)  # packs; those who write nothing wait for nobody
        if is_writer:
            with _writing(folder):
                self._open()

    def _open(self) -> None:
        files = {name: self.path / f"{name}.npy" for name in self.values.columns}
        self.done = 0
        with suppress(OSError, ValueError, KeyError, TypeError):  # else from the beginning
            saved = json.loads((self.path / PROGRESS).read_text())
            if saved["plan"] == self.plan:
                for name, file in files.items():
                    self.arrays[name] = np.lib.format.open_memmap(file, mode="r+")
                self.done = int(saved["packs"])
        if self.done:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        flat = self.packs.rows.flat
        for name, (dtype, width) in self.values.columns.items():
            shape = (flat.num_tokens, width)[: 2 if width > 1 else 1]
            array = np.lib.format.open_memmap(files[name], mode="w+", dtype=dtype, shape=shape)
            # A page that the disk has no room for would end the process by SIGBUS.
            with files[name].open("r+b") as opened:
                os.posix_fallocate(opened.fileno(), 0, files[name].stat().st_size)
            self.arrays[name] = array
            for start in range(0, flat.num_tokens if "f" in dtype else 0, _BLOCK_TOKENS):
                block = slice(start, start + _BLOCK_TOKENS)
                array[block][flat.columns["labels"][block] != IGNORE_INDEX] = np.nan

    def put(self, num_packs: int, places: np.ndarray, found: np.ndarray) -> None:
        """Writes the values [R, K] of further packs to their places."""
        ends = np.cumsum([width for _, width in self.values.columns.values()])
        for array, own in zip(self.arrays.values(), np.split(found, ends[:-1], axis=1)):
            array[places] = own.reshape(-1, *array.shape[1:])
        self.done += num_packs

    def save(self) -> None:
        """Writes values first: a kill in between leaves a place that is computed again."""
        if not self.arrays:
            return
        with _writing(self.folder):
            for array in self.arrays.values():
                array.flush()
            progress = {"packs": self.done, "plan": self.plan}
            durable.write_atomically(self.path / PROGRESS, json.dumps(progress))

    def finish(self, name: str, key: Key) -> None:
        """Gives the columns their checksums and their final place."""
        with _writing(self.folder):
            # What fails here costs no pack again: the progress stays until the values have their
            # place.
            seal(self.path, name, key, without=PROGRESS)
            if self.folder.is_dir():
                # Renamed first: who has the old files open keeps them.
                damaged = self.folder.with_name(f"{self.folder.name}.damaged")
                shutil.rmtree(damaged, ignore_errors=True)
                os.rename(self.folder, damaged)
                shutil.rmtree(damaged, ignore_errors=True)
                print(f"WARNING: {self.folder} was damaged: it is computed again", flush=True)
            os.rename(self.path, self.folder)
        with suppress(OSError):
            (self.folder / PROGRESS).unlink()


def _compute(part: Part, engine: Engine) -> None:
    # nodes with caches of their own may have come to different places
    part.done = min(engine.mesh.gather(part.done))
    values = part.values
    packs = part.packs
    saved = time.monotonic()
    with Progress(f"computing {values.name}", len(packs), "packs") as progress:
        for num_packs, places, found in engine.values(packs, values.function, part.done):
            progress.add(num_packs)
            part.put(num_packs, places, found)
            if time.monotonic() - saved > SAVE_EVERY_S:
                part.save()
                saved = time.monotonic()
    part.save()
