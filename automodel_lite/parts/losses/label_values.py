"""Values per label that a model without gradients computes once, kept as per-token columns beside
the token cache.

`reference_log_probs` of the start model are what preference losses compare with; `teacher_ids` and
`teacher_log_probs` are a teacher's likeliest tokens. The model runs over packs on the mesh of the
run. Every value goes to the place of its token in the flat rows, so the columns fit any packs and
any mesh. What is finished survives a stop: the same command goes on where it was.

    <cache>/values/<name>-<set>-<key>/log_probs.npy, ...      the key: rows, packs, model, columns
    <...>.part/progress.json                                  packs that are done, while it is being
                                                              made
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from automodel_lite.data.cache import cache_root, entry_folder
from automodel_lite.data.feeding.order import BatchShape, assign_to_ranks
from automodel_lite.data.feeding.source import PackSource
from automodel_lite.data.packing.packs import (
    EMPTY_PACK,
    PackedDataset,
    Packer,
    packed_sequence_thd_collater,
)
from automodel_lite.data.tokens.token_rows import CONTENT_HASH, DocumentReader
from automodel_lite.errors import ConfigError
from automodel_lite.launched import is_first_here
from automodel_lite.models.fused_head import RowFunction
from automodel_lite.models.loss import Loss, check_columns
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parts.losses.distillation import DistillTopK
from automodel_lite.progress import Progress
from automodel_lite.run import durable
from automodel_lite.run.weight_files import model_files
from automodel_lite.thd import to_thd
from automodel_lite.training.build import BuiltModel

SAVE_EVERY_S = 60.0
MADE_HERE = frozenset({"reference_log_probs"}) | DistillTopK.required
Columns = Mapping[str, np.ndarray]


def check_loss(data: PackSource, loss: Loss) -> None:
    """Raises ConfigError for a loss that does not fit the data, before a model is loaded; streams
    are not known yet.
    """
    if data.columns is not None:
        check_columns(loss, {*data.columns, *(loss.required & MADE_HERE)})


def with_values(
    data: PackSource, built: BuiltModel, mesh: Mesh, cache_dir: str | None, seed: int
) -> PackSource:
    """Adds the columns that the loss asks for: log-probabilities of the reference, which is the
    model as it is now, and a teacher's likeliest tokens, which recipes/score.py has stored.

    Raises ConfigError for a teacher that has not been scored. Every rank calls it.
    """
    loss = built.model.loss_model.loss
    if loss.needs_reference:
        reference = reference_values(built, data.packer, cache_dir, seed)
        return data.with_columns(lambda name, rows: reference.computed(name, rows, built, mesh))
    if isinstance(loss, DistillTopK):
        values = teacher_values(loss, data.packer, cache_dir, len(data.tokenizer))
        return data.with_columns(values.stored)
    return data


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

    def folder(self, name: str, rows: DocumentReader) -> Path:
        """Returns where the columns of a set are, or will be."""
        of_rows, packer = rows.flat.folder, self.packer
        assert of_rows is not None  # rows of the token cache
        key = {
            "rows": (of_rows / CONTENT_HASH).read_text(),
            "model": self.model,
            "packs": f"{packer.packed_sequence_size} {packer.strategy} {packer.overlong}",
            "columns": json.dumps({column: list(shape) for column, shape in self.columns.items()}),
        }
        return entry_folder(cache_root(self.cache_dir), "values", f"{self.name}-{name}", key)

    def stored(self, name: str, rows: DocumentReader) -> Columns:
        """Maps the columns, [tokens of the flat rows] or [tokens, K]; raises ConfigError where the
        cache has none.
        """
        folder = self.folder(name, rows)
        if not folder.is_dir():
            raise ConfigError(
                f"the cache has no {self.name} values of the set {name} for these rows, packs and "
                "teacher: run recipes/score.py with the same arguments first."
            )
        return {column: np.load(folder / f"{column}.npy", mmap_mode="r") for column in self.columns}

    def computed(self, name: str, rows: DocumentReader, built: BuiltModel, mesh: Mesh) -> Columns:
        """Maps the columns, after computing what the cache does not have; every rank calls it.

        Tokens that no pack holds (over-long documents that are dropped) have values of 0.
        """
        folder, packer = self.folder(name, rows), copy(self.packer)
        if not all(mesh.gather(folder.is_dir())):
            placed = rows.with_columns({"row_place": np.arange(rows.flat.num_tokens)})
            packer.max_packs = None  # all packs, whatever sample of them an epoch takes
            _compute(self, packer.packs(placed), built, mesh, folder)
        return self.stored(name, rows)


def reference_values(built: BuiltModel, packer: Packer, cache_dir: str | None, seed: int) -> Values:
    """Log-probabilities of the labels by the start model: its files or its seed, and how its
    weights are held.
    """

    def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
        return -torch.nn.functional.cross_entropy(logits, labels, reduction="none")[:, None]

    parts = built.plan.parts
    files = (
        model_files(parts.model.pretrained, str(parts.model.source["revision"]))
        or parts.model.pretrained
    )
    model = (
        f"{files} {built.plan.config.to_json_string()} {seed} {built.model.compute_dtype} "
        f"{parts.training.fp8}"
    )
    model += f" {parts.training.master_weights} {parts.is_quantized}"
    # trained further: the reference is the base with it, as it is now
    if parts.peft and parts.peft.adapter:
        adapter = Path(parts.peft.adapter).expanduser()
        model += f" {model_files(str(adapter / 'adapter')) or model_files(str(adapter))}"
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
    k, files = loss.top_k, model_files(loss.teacher) or loss.teacher
    columns = {"teacher_ids": ("int32", k), "teacher_log_probs": ("float16", k)}
    columns["teacher_rest"] = ("float32", 1)
    function = partial(loss.likeliest, num_ids)
    return Values(f"top_{k}", function, columns, f"{files} {num_ids}", packer, cache_dir)


def _compute(
    values: Values, packs: PackedDataset, built: BuiltModel, mesh: Mesh, folder: Path
) -> None:
    part = folder.with_name(f"{folder.name}.part")
    progress_file, arrays = part / "progress.json", dict[str, np.memmap]()
    done = json.loads(progress_file.read_text())["packs"] if progress_file.is_file() else 0
    if is_first_here():
        part.mkdir(parents=True, exist_ok=True)
        for column, (dtype, width) in values.columns.items():
            shape = (packs.rows.flat.num_tokens, width)[: 2 if width > 1 else 1]
            how = {"mode": "r+"} if done else {"mode": "w+", "dtype": dtype, "shape": shape}
            arrays[column] = np.lib.format.open_memmap(part / f"{column}.npy", **how)

    def save() -> None:
        # Values first: a kill in between leaves a place that is computed again.
        for array in arrays.values():
            array.flush()
        if arrays:
            durable.write_atomically(progress_file, json.dumps({"packs": done}))

    # nodes with caches of their own may have come to different places
    done = min(mesh.gather(done))
    ends, saved = np.cumsum([width for _, width in values.columns.values()]), time.monotonic()
    with Progress(f"computing {values.name}", len(packs), "packs") as progress:
        for num_packs, places, found in _values(values.function, packs, built, mesh, done):
            progress.add(num_packs)
            done += num_packs
            for array, own in zip(arrays.values(), np.split(found, ends[:-1], axis=1)):
                array[places] = own.reshape(-1, *array.shape[1:])
            if time.monotonic() - saved > SAVE_EVERY_S:
                save()
                saved = time.monotonic()
    save()
    if arrays:
        progress_file.unlink()
        try:
            os.rename(part, folder)
        except OSError:  # another node of a shared file system was first
            shutil.rmtree(part, ignore_errors=True)
    mesh.barrier()


@torch.no_grad()
def _values(
    function: RowFunction, packs: PackedDataset, built: BuiltModel, mesh: Mesh, done: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(packs, places of their labels in the flat rows, values [R, K]) of all ranks, forward by
    forward.
    """
    model, exchange = built.model, built.plan.parts.mesh.cp_exchange
    loss_model, size = model.loss_model, built.plan.parts.training.micro_batch_size
    model.module.eval()
    for of_ranks in assign_to_ranks(
        np.arange(done, len(packs)), BatchShape(size * mesh.shape.dp, size, mesh.shape.dp)
    ):
        batch = packed_sequence_thd_collater(packs.__getitems__(of_ranks[mesh.dp_rank].tolist()))
        part = cp_shard(to_thd(batch, loss_model.needs_mixer_metadata), mesh.cp, exchange)
        found = model.values(part.to(mesh.device), function)
        # Rows of several ranks are different tokens, or the same ones with the same values (tp).
        own = part.columns["row_place"][part.label_rows].numpy(), found.cpu().numpy()
        places, values = (np.concatenate(parts) for parts in zip(*mesh.gather(own)))
        yield int((of_ranks != EMPTY_PACK).sum()), places, values
    model.free_gathered()
    model.module.train()
