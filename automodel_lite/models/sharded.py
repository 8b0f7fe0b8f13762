"""Weights that each rank reads for its own shards only: nothing ever holds the whole of a loaded
model.

    meta device -> `spread` (adapters, tensor and expert parallelism, FSDP) -> DTensors without
    memory -> parts of them

Reading is transformers' own: its `from_pretrained` slices every file along the placements of the
parameters that it meets, renames and fuses weights on the way, and casts each to the dtype of its
parameter.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import core_model_loading, modeling_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.distributed import DistributedConfig
from transformers.distributed.sharding_utils import DtensorShardOperation

from automodel_lite.models.checkpoints import converting_exactly, replaced

Spread = Callable[[transformers.PreTrainedModel], None]
"""Shards a model on the meta device, in place."""


class CannotReadSlicesError(Exception):
    """This family's checkpoints fuse or split weights along the dim that is sharded."""


def load_shards(load: Callable[..., Any], *, spread: Spread, device: torch.device) -> Any:
    """Calls `load(**more)`, which is `from_pretrained`, with its model sharded by `spread` before
    weights are read.

    device  holds the shards: the mesh's, or the host under mesh.cpu_offload

    Raises CannotReadSlicesError before anything is read.
    """

    def shard(
        cls: type, model: transformers.PreTrainedModel, *of_the_engine: object
    ) -> transformers.PreTrainedModel:
        # Does each converter make this rank's part of a weight of this rank's parts of the
        # checkpoint's? Parameters are sharded over dim 0; the engine hands experts of their own
        # files to the ranks that hold them.
        converters = (
            x for x in get_model_conversion_mapping(model) if isinstance(x, WeightConverter)
        )
        for step in (step for converter in converters for step in converter.operations):
            if not (
                step.dim == 0
                if isinstance(step, MergeModulelist)
                else isinstance(step, Concatenate) and step.dim > 0
            ):
                raise CannotReadSlicesError
        # before FSDP, which then gathers and reduces them once
        model.tie_weights(recompute_mapping=False)
        spread(model)
        return model

    def open_rows(path: str, **options: Any) -> Any:
        return ShardReader(path) if "backend" in options else safe_open(path, **options)

    # Hooks for one call: the engine offers no way to shard a model by other means than its own
    # between the moment when it is described and the moment when its weights are read.
    with contextlib.ExitStack() as hooks:
        hooks.enter_context(converting_exactly())
        for owner, name, function in (
            (transformers.PreTrainedModel, "maybe_distribute_model", classmethod(shard)),
            (modeling_utils, "safe_open", open_rows),
            (modeling_utils, "_dtensor_from_local_like", partial(hold_shard, device)),
            (core_model_loading, "_dtensor_from_local_like", partial(hold_shard, device)),
        ):
            hooks.enter_context(replaced(owner, name, function))
        # the engine itself shards nothing
        loaded = load(distributed_config=DistributedConfig(tp_size=1, fsdp_size=1))
    # The config that was passed for the hooks' sake would be exported with the model.
    model = loaded[0]
    del model.config.distributed_config
    return loaded


def hold_shard(device: torch.device, local: Tensor, ref: DTensor) -> DTensor:
    """Wraps this rank's part of `ref`, on `device`. `DTensor.from_local`, which transformers calls,
    moves it to the device of the mesh: the GPU that mesh.cpu_offload finds too small.
    """
    return DTensor(local.to(device).contiguous(), ref._spec, requires_grad=local.requires_grad)


class ShardReader:
    """A safetensors file of which nothing is read but the rows that are asked for. The library
    itself reads the whole tensor (`pread`), so that every rank would read the whole checkpoint, or
    maps the file (`mmap`): its pages count as memory of the process until it is closed.
    """

    def __init__(self, path: str) -> None:
        # checks the file, knows shapes and dtypes
        self._path = path
        self._checked = safe_open(path, framework="pt")
        self.keys = self._checked.keys
        self.__exit__ = self._checked.__exit__
        # The format: 8 bytes with the header's length, the header as JSON, then the tensors, row by
        # row.
        with open(path, "rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(num_bytes))
        self._starts = {
            name: 8 + num_bytes + header[name]["data_offsets"][0] for name in self.keys()
        }

    def get_slice(self, name: str) -> Any:
        """Returns what indexes the tensor `name`, as safetensors' own does."""
        known = self._checked.get_slice(name)
        return RowSlice(self._path, self._starts[name], known) if known.get_shape() else known


class RowSlice:
    """What safetensors' `get_slice` gives: indexed, it is a tensor."""

    def __init__(self, path: str, start: int, known: Any) -> None:
        self._path = path
        self._start = start
        self._known = known
        self.get_shape = known.get_shape
        self.get_dtype = known.get_dtype

    def __getitem__(self, index: Any) -> Tensor:
        rows, *rest = index if isinstance(index, tuple) else (index,)
        shape = self.get_shape()
        empty = self._known[0:0]  # a slice of no rows reads nothing
        first, end, _ = rows.indices(shape[0]) if isinstance(rows, slice) else (0, shape[0], 1)
        row_bytes = math.prod(shape[1:]) * empty.itemsize
        num_bytes = max(end - first, 0) * row_bytes
        read = np.fromfile(self._path, np.uint8, num_bytes, offset=self._start + first * row_bytes)
        if len(read) < num_bytes:
            raise SafetensorError(f"{self._path} is {num_bytes - len(read)} bytes short")
        values = (
            torch.from_numpy(read).view(empty.dtype).view(-1, *shape[1:]) if num_bytes else empty
        )
        inside = (slice(None), *rest)
        return values[inside].contiguous()


@torch.no_grad()
def keep_part(shard: Tensor, whole: Tensor) -> None:
    """Copies this rank's part of `whole` into its shard, or all of it where nothing is sharded."""
    if not isinstance(shard, DTensor):
        shard.copy_(whole)
        return
    part: Any = DtensorShardOperation(shard).shard_tensor(whole)
    shard.to_local().copy_(part)
