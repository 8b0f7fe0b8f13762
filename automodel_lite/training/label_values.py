"""Values per label that a model without gradients computes once, kept as per-token columns beside the token cache.

`reference_log_probs` of the start model are what preference losses compare with; `teacher_ids` and `teacher_log_probs`
are a teacher's likeliest tokens. The model runs over packs on the mesh of the run. Every value goes to the place of its
token in the flat rows, so the columns fit any packs and any mesh. What is finished survives a stop: the same command
goes on where it was.

    <cache>/values/<name>-<key>/log_probs.npy, ...      the key: rows, weights, what is computed
    <...>.part/progress.json                            packs that are done, while it is being made
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from automodel_lite.data.cache import cache_root, entry_folder
from automodel_lite.data.feeding.order import BatchShape, assign_to_ranks
from automodel_lite.data.feeding.source import PackSource
from automodel_lite.data.packing.packs import EMPTY_PACK, PackedDataset, Packer, packed_sequence_thd_collater
from automodel_lite.data.tokens.token_rows import CONTENT_HASH, Rows, TokenRows
from automodel_lite.errors import ConfigError
from automodel_lite.launched import launched
from automodel_lite.models.distillation import DistillTopK, top_k_of
from automodel_lite.models.fused_head import RowFunction
from automodel_lite.models.layers import local
from automodel_lite.models.loss import LossInputs, LossOutput, PlainLoss
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.progress import Progress
from automodel_lite.thd import COLUMNS, ThdBatch, to_thd
from automodel_lite.training.build import BuiltModel

SAVE_EVERY_S = 60.0
Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Wanted:
    """What is computed.

    name      of the folder, and part of its key
    function  (logits [r, V], labels [r]) -> values [r, K]
    columns   name -> (dtype, number of values per token), which lie side by side in K
    """

    name: str
    function: RowFunction
    columns: Mapping[str, tuple[str, int]]


def log_prob_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """[r, 1], log-probabilities of the labels."""
    return -torch.nn.functional.cross_entropy(logits, labels, reduction="none")[:, None]


REFERENCE = Wanted("reference", log_prob_rows, {"reference_log_probs": ("float32", 1)})


class _Recorder(PlainLoss):
    """Keeps values and places of its rows in place of a loss."""

    columns = frozenset(COLUMNS)

    def __init__(self, function: RowFunction) -> None:
        self.function = function

    def example_columns(self, batch: ThdBatch) -> dict[str, Tensor]:
        return {"row_place": torch.full_like(batch.labels, -1)}

    def __call__(self, inputs: LossInputs) -> LossOutput:
        values = inputs.rows(self.function, inputs.labels_R)
        return LossOutput(values.sum(), {"values": values, "places": inputs.columns["row_place"]})


def with_values(data: PackSource, built: BuiltModel, mesh: Mesh, cache_dir: str | None) -> PackSource:
    """The data with the columns that the loss asks for beside those of the rows: log-probabilities of the reference,
    which is the model as it is now, and a teacher's likeliest tokens, which recipes/score.py has stored.

    Raises ConfigError for a teacher that has not been asked. Every rank calls it.
    """
    loss = built.model.loss_model.loss
    if loss.needs_reference:
        identity = f"{weights_sum(built)} {built.model.compute_dtype}"
        data = data.with_columns(
            lambda name, rows: label_values(
                Values(REFERENCE, name, rows, data.packer, identity, cache_dir), built, mesh
            )
        )
    if isinstance(loss, DistillTopK):
        scores = likeliest(loss)
        return data.with_columns(
            lambda name, rows: Values(scores, name, rows, data.packer, teacher_identity(loss), cache_dir).stored()
        )
    return data


def likeliest(loss: DistillTopK) -> Wanted:
    """What recipes/score.py computes. Log-probabilities in fp16 take as much room as in bf16 and are 8 times finer."""
    k = loss.top_k
    return Wanted(f"top_{k}", top_k_of(k), {"teacher_ids": ("int32", k), "teacher_log_probs": ("float16", k)})


def teacher_identity(loss: DistillTopK) -> str:
    """Its name, and what can be seen of its files: others are another teacher."""
    folder = Path(loss.teacher)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    return " ".join([loss.teacher, *(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files)])


@dataclass(frozen=True)
class Values:
    """Columns of one set of rows in the cache: what, of which rows in packs of which size, by which model."""

    wanted: Wanted
    name: str  # of the set
    rows: Rows
    packer: Packer
    identity: str  # of the model
    cache_dir: str | None

    @property
    def folder(self) -> Path:
        packer = self.packer
        key = {
            "rows": _content(self.rows.flat),
            "model": self.identity,
            "packs": f"{packer.packed_sequence_size} {packer.strategy.name} {packer.overlong}",
            "columns": json.dumps({column: list(shape) for column, shape in self.wanted.columns.items()}),
        }
        return entry_folder(cache_root(self.cache_dir), "values", f"{self.wanted.name}-{self.name}", key)

    def packs(self) -> PackedDataset:
        """All packs, whatever sample of them an epoch takes."""
        packer = copy(self.packer)
        packer.max_packs = None
        return packer.packs(self.rows, packer.plan(self.rows.lengths))

    def stored(self) -> Columns:
        """[tokens of the flat rows] or [tokens, K], mapped; raises ConfigError where the cache has none."""
        if not self.folder.is_dir():
            raise ConfigError(
                f"the cache has no {self.wanted.name} values of the set {self.name} for these rows, packs and teacher: "
                "run recipes/score.py with the same arguments first."
            )
        return {column: np.load(self.folder / f"{column}.npy", mmap_mode="r") for column in self.wanted.columns}


def label_values(values: Values, built: BuiltModel, mesh: Mesh) -> Columns:
    """The columns, computed where the cache has none. Every rank calls it.

    Tokens that no pack holds (over-long documents that are dropped) have values of 0.
    """
    if not all(_of_all_ranks(values.folder.is_dir(), mesh)):
        _compute(values.wanted, values.packs(), built, mesh, values.folder)
    return values.stored()


def _content(rows: TokenRows) -> str:
    if rows.folder is not None:
        return (rows.folder / CONTENT_HASH).read_text()
    digest = hashlib.sha256(np.ascontiguousarray(rows.offsets).data)
    for values in (rows.input_ids, rows.labels):
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def weights_sum(built: BuiltModel) -> str:
    """A hash of all weights but an adapter's, the same on any mesh: sums of their bits as whole numbers, which no order
    of adding changes.
    """
    digest = hashlib.sha256()
    whole_numbers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for name, parameter in built.model.loss_model.named_parameters():
        if built.adapter and parameter.requires_grad:
            continue
        held = local(parameter.detach()).contiguous()
        bits = held.view(whole_numbers[held.element_size()]).sum(dtype=torch.int64)
        if isinstance(parameter, DTensor):
            placements = [Partial() if isinstance(p, Shard) else Replicate() for p in parameter.placements]
            on_mesh = bits.to(parameter.device_mesh.device_type)
            bits = DTensor.from_local(on_mesh, parameter.device_mesh, placements).full_tensor()
        digest.update(f"{name} {tuple(parameter.shape)} {int(bits)}".encode())
    return digest.hexdigest()[:16]


def _compute(wanted: Wanted, packs: PackedDataset, built: BuiltModel, mesh: Mesh, folder: Path) -> None:
    part, writes = folder.with_name(f"{folder.name}.part"), launched("LOCAL_RANK", 0) == 0
    progress_file = part / "progress.json"
    done = json.loads(progress_file.read_text())["packs"] if progress_file.is_file() else 0
    everywhere = _of_all_ranks(done, mesh)
    done = min(everywhere)  # nodes with caches of their own may have come to different places
    arrays: dict[str, np.ndarray] = {}
    if writes:
        part.mkdir(parents=True, exist_ok=True)
        num_tokens = len(packs.rows.flat.input_ids)
        for column, (dtype, width) in wanted.columns.items():
            shape = (num_tokens, width) if width > 1 else (num_tokens,)
            path = part / f"{column}.npy"
            if done:
                arrays[column] = np.lib.format.open_memmap(path, mode="r+")
            else:
                arrays[column] = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    saved = time.monotonic()
    with Progress(f"computing {wanted.name}", len(packs), "packs") as progress:
        for num_packs, places, values in _values(wanted, packs, built, mesh, done):
            progress.add(num_packs)
            done += num_packs
            if not writes:
                continue
            start = 0
            for column, (_, width) in wanted.columns.items():
                own = values[:, start : start + width]
                arrays[column][places] = own if width > 1 else own[:, 0]
                start += width
            if time.monotonic() - saved > SAVE_EVERY_S:
                for array in arrays.values():
                    array.flush()  # type: ignore[attr-defined]
                progress_file.write_text(json.dumps({"packs": done}))
                saved = time.monotonic()
    if writes:
        for array in arrays.values():
            array.flush()  # type: ignore[attr-defined]
        progress_file.unlink(missing_ok=True)
        try:
            os.rename(part, folder)
        except OSError:  # another node of a shared file system was first
            shutil.rmtree(part, ignore_errors=True)
    mesh.barrier()


def _of_all_ranks(own: Any, mesh: Mesh) -> list[Any]:
    gathered = [own] * mesh.shape.world_size
    if mesh.root is not None:
        dist.all_gather_object(gathered, own)
    return gathered


@torch.no_grad()
def _values(
    wanted: Wanted, packs: PackedDataset, built: BuiltModel, mesh: Mesh, done: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(packs, places of their labels in the flat rows, values [R, K]) of all ranks, forward by forward."""
    model, exchange = built.model, built.plan.parts.mesh.cp_exchange
    loss_model = model.loss_model
    places = np.arange(len(packs.rows.flat.input_ids))
    placed = PackedDataset(packs.rows.with_columns({"row_place": places}), packs.plan, packs.padding_idx)
    size = built.plan.parts.training.micro_batch_size
    shape = BatchShape(size * mesh.shape.dp, size, mesh.shape.dp)
    kept, teacher = loss_model.loss, loss_model._teacher
    loss_model.loss, loss_model._teacher = _Recorder(wanted.function), ()
    model.module.eval()
    try:
        for dealt in assign_to_ranks(np.arange(done, len(packs)), shape):
            batch = packed_sequence_thd_collater(placed.__getitems__(dealt[mesh.dp_rank].tolist()))
            whole = to_thd(batch, loss_model.takes_mixers)
            model(cp_shard(whole, mesh.cp, exchange).to(mesh.device))
            own = tuple(loss_model.parts[name].cpu().numpy() for name in ("places", "values"))
            places, values = (np.concatenate(parts) for parts in zip(*_of_all_ranks(own, mesh)))
            yield int((dealt != EMPTY_PACK).sum()), places, values
    finally:
        loss_model.loss, loss_model._teacher = kept, teacher
        model.free_gathered()
        model.module.train()
