"""Sharded tensors on disk without pickle: what torch.distributed.checkpoint plans, as safetensors and one JSON index.

    tensors/
        index.json              {"tensors": {name: {"dtype", "shape", "chunks": [{"offset", "shape", "file"}]}}}
        rank_00000.safetensors  the chunks that rank 0 owned, key `name@offset`
        rank_00001.safetensors

A chunk is a box of a global tensor; a reader on any number of ranks takes the parts of the boxes that overlap its own.

Where tensor parallelism and FSDP cut the same dim, a rank has rows here and there, which are not a box: those shards
travel to where they lie together before they are written, and back after they are read.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.futures import Future

from automodel_lite.run import durable

INDEX = "index.json"


class BrokenCheckpointError(Exception):
    """A checkpoint that cannot be loaded, and why."""


class ShardWriter(StorageWriter):
    """Writes this rank's chunks into one safetensors file and reads them back; the coordinator writes the index.

    checksums   of the files that were written, on the coordinator
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.checksums: dict[str, str] = {}
        self.file = f"rank_{rank:05d}.safetensors"

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        sizes = []
        for item in plan.items:
            assert item.type != WriteItemType.BYTE_IO, f"{item.index.fqn} is not a tensor"
            tensor = _own_storage(planner.resolve_data(item))
            tensors[_key(item.index.fqn, item.index.offset)] = tensor
            sizes.append((item.index, tensor.nbytes))
        path = self.folder / self.file
        try:
            save_file(tensors, path)
        except SafetensorError as error:
            raise OSError(f"{path.name} could not be written: {error}") from None
        durable.sync(path)
        _check_written(path, tensors)
        crc32 = durable.checksum(path)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index, num_bytes, storage_data=(self.file, crc32)) for index, num_bytes in sizes])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {result.index: result.storage_data for of_rank in results for result in of_rank}
        self.checksums = dict(written.values())
        files = {index: file for index, (file, _) in written.items()}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            tensors[name] = {
                "dtype": str(tensor.properties.dtype).removeprefix("torch."),
                "shape": list(tensor.size),
                "chunks": [
                    {
                        "offset": list(chunk.offsets),
                        "shape": list(chunk.sizes),
                        "file": files[MetadataIndex(name, chunk.offsets)],
                    }
                    for chunk in tensor.chunks
                ],
            }
        durable.write_file(self.folder / INDEX, json.dumps({"version": 1, "tensors": tensors}))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class ShardReader(StorageReader):
    """Reads the parts of the chunks that this rank needs, whichever ranks wrote them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
        tensors: dict[str, Any] = {}
        files: dict[MetadataIndex, str] = {}
        for name, entry in index["tensors"].items():
            chunks = [ChunkStorageMetadata(torch.Size(c["offset"]), torch.Size(c["shape"])) for c in entry["chunks"]]
            properties = TensorProperties(dtype=_dtype(entry["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
            for chunk, where in zip(chunks, entry["chunks"]):
                files[MetadataIndex(name, chunk.offsets)] = plain_name(where["file"])
        return Metadata(state_dict_metadata=tensors, storage_data=files)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.files: dict[MetadataIndex, str] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            assert item.type == LoadItemType.TENSOR
            by_file.setdefault(self.files[item.storage_index], []).append(item)
        for name, items in by_file.items():
            with safe_open(self.folder / name, framework="pt") as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_read(file, item))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def check_fits(metadata: Metadata, state: dict[str, Tensor]) -> None:
    """Raises BrokenCheckpointError unless names, shapes and dtypes of the checkpoint are those of the state."""
    saved = {
        name: (tuple(tensor.size), tensor.properties.dtype)
        for name, tensor in metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }
    wanted = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    if missing := sorted(wanted.keys() - saved.keys()):
        raise BrokenCheckpointError(f"{len(missing)} tensors are missing, {missing[0]} first")
    if extra := sorted(saved.keys() - wanted.keys()):
        raise BrokenCheckpointError(f"{len(extra)} tensors are not the model's or the optimizer's, {extra[0]} first")
    for name, want in wanted.items():
        if saved[name] != want:
            raise BrokenCheckpointError(f"{name} is {_describe(*saved[name])}, the run's is {_describe(*want)}")


def check_index(folder: Path) -> None:
    """Raises OSError unless the index can be read and names exactly the chunks that the files hold, in their shapes."""
    try:
        metadata = ShardReader(folder).read_metadata()
        chunks: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
        for index, file in metadata.storage_data.items():
            tensor = metadata.state_dict_metadata[index.fqn]
            assert isinstance(tensor, TensorStorageMetadata)
            shapes = [tuple(chunk.sizes) for chunk in tensor.chunks if chunk.offsets == index.offset]
            chunks.setdefault(file, set()).add((_key(index.fqn, index.offset), shapes[0]))
        for name, wanted in chunks.items():
            with safe_open(folder / name, framework="pt") as file:
                held = {(key, tuple(file.get_slice(key).get_shape())) for key in file.keys()}  # noqa: SIM118
            if held != wanted:
                raise BrokenCheckpointError(f"{name} holds other tensors than the index names")
    except (BrokenCheckpointError, SafetensorError, ValueError, KeyError, TypeError, IndexError) as error:
        raise OSError(errno.EIO, f"{INDEX} cannot be read back: {error}") from None


def _check_written(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raises OSError unless the file holds these tensors, byte by byte (NaN is equal to itself)."""
    with safe_open(path, framework="pt") as file:
        for name, tensor in tensors.items():
            if not torch.equal(_bytes(file.get_tensor(name)), _bytes(tensor)):
                raise OSError(errno.EIO, f"{path.name} does not read back as it was written ({name})")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def plain_name(name: str) -> str:
    """A file name inside the folder; raises BrokenCheckpointError for anything that leads out of it."""
    if name != Path(name).name or name.startswith(".") or "\0" in name:
        raise BrokenCheckpointError(f"the file name {name!r} leads out of the checkpoint")
    return name


def _key(name: str, offset: torch.Size | None) -> str:
    return f"{name}@{','.join(map(str, offset or ()))}"


def _own_storage(tensor: Any) -> Tensor:
    """Contiguous on the CPU with nothing else in its storage, as safetensors requires."""
    here = tensor.detach().cpu().contiguous()
    return here.clone() if here.untyped_storage().nbytes() != here.nbytes else here


def _read(file: Any, item: ReadItem) -> Tensor:
    key = _key(item.storage_index.fqn, item.storage_index.offset)
    box = tuple(slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths))
    part: Tensor = file.get_slice(key)[box] if box else file.get_tensor(key)
    return part


def _dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise BrokenCheckpointError(f"there is no dtype {name!r}")
    return dtype


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def as_boxes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors; copies of those whose shards are not boxes. A collective when there are any."""
    return {name: _box(tensor) for name, tensor in tensors.items()}


@torch.no_grad()
def take_boxes(tensors: Mapping[str, Tensor], boxes: Mapping[str, Tensor]) -> None:
    """Copies what was read into `boxes` back into the tensors that they were made of."""
    for name, tensor in tensors.items():
        box = boxes[name]
        if box is not tensor:
            assert isinstance(tensor, DTensor)
            assert isinstance(box, DTensor)
            tensor.to_local().copy_(box.redistribute(placements=tensor.placements).to_local())


def _box(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor) or not any(isinstance(p, _StridedShard) for p in tensor.placements):
        return tensor
    return tensor.redistribute(
        placements=[Shard(p.dim) if isinstance(p, _StridedShard) else p for p in tensor.placements]
    )
