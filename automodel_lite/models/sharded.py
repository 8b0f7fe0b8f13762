"""Weights that each rank reads, or draws, for its own shards only: nothing ever holds the whole model.

    meta device -> `spread` (adapters, tensor and expert parallelism, FSDP) -> DTensors without memory -> parts of them

Reading is transformers' own: its `from_pretrained` slices every file along the placements of the parameters that it
meets, renames and fuses weights on the way, and casts each to the dtype of its parameter.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import modeling_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter
from transformers.distributed import DistributedConfig
from transformers.distributed.sharding_utils import DtensorShardOperation

from automodel_lite.errors import ConfigError

Spread = Callable[[transformers.PreTrainedModel], None]
"""Shards a model on the meta device, in place."""


class CannotReadSlicesError(Exception):
    """This family's checkpoints fuse or split weights along the dim that is sharded."""


def load_shards(load: Callable[..., Any], spread: Spread) -> Any:
    """`load(**more)`, a call of `from_pretrained`, with its model sharded by `spread` before weights are read.

    Raises CannotReadSlicesError before anything is read, ConfigError for weights that are tied in the config only.
    """
    tied: list[tuple[str, str]] = []

    def shard(cls: type, model: transformers.PreTrainedModel, *of_the_engine: object) -> transformers.PreTrainedModel:
        if any(not _keeps_slices(converter) for converter in get_model_conversion_mapping(model)):
            raise CannotReadSlicesError
        model.tie_weights(recompute_mapping=False)  # before FSDP, which then gathers and reduces them once
        tied.extend(model.all_tied_weights_keys.items())
        spread(model)
        return model

    hooks = _replaced(transformers.PreTrainedModel, "maybe_distribute_model", classmethod(shard))
    with hooks, _replaced(modeling_utils, "safe_open", _open_rows):
        loaded = load(distributed_config=DistributedConfig())  # of one rank: the engine itself shards nothing
    model = loaded[0]
    del model.config.distributed_config
    for one, other in tied:
        if model.get_parameter(one) is not model.get_parameter(other):
            raise ConfigError(
                f"the config ties {one} to {other}, and the checkpoint has different values for them: set "
                "model.config.tie_word_embeddings=false."
            )
    return loaded


class RowFile:
    """A safetensors file of which nothing is read but the rows that are asked for. The library itself reads the whole
    tensor (`pread`), so that every rank would read the whole checkpoint, or maps the file (`mmap`): its pages count as
    memory of the process until it is closed.
    """

    def __init__(self, path: str) -> None:
        self._checked = safe_open(path, framework="pt")  # nothing is read through it but names, shapes and dtypes
        self._path, self._file = path, os.open(path, os.O_RDONLY)
        num_bytes = int.from_bytes(os.pread(self._file, 8, 0), "little")
        header = json.loads(os.pread(self._file, num_bytes, 8))
        self.starts = {name: 8 + num_bytes + header[name]["data_offsets"][0] for name in self.keys()}

    def keys(self) -> list[str]:
        names: list[str] = self._checked.keys()
        return names

    def get_slice(self, name: str) -> Any:
        known = self._checked.get_slice(name)
        return Rows(self, self.starts[name], known) if known.get_shape() else known

    def read(self, start: int, values: Tensor) -> None:
        """Fills `values`, which are contiguous."""
        buffer: Any = values.view(-1).view(torch.uint8).numpy()
        rest = memoryview(buffer)
        while rest:
            num_read = os.preadv(self._file, [rest], start)
            if not num_read:
                raise SafetensorError(f"{self._path} ends at byte {start}")
            start, rest = start + num_read, rest[num_read:]

    def __exit__(self, *error: object) -> None:
        os.close(self._file)
        self._checked.__exit__(*error)


class Rows:
    """What safetensors' `get_slice` gives: indexed, it is a tensor."""

    def __init__(self, file: RowFile, start: int, known: Any) -> None:
        self._file, self._start, self._known = file, start, known
        self.get_shape, self.get_dtype = known.get_shape, known.get_dtype

    def __getitem__(self, index: Any) -> Tensor:
        rows, *rest = index if isinstance(index, tuple) else (index,)
        shape = self.get_shape()
        first, end, step = rows.indices(shape[0]) if isinstance(rows, slice) else (0, shape[0], 1)
        assert step == 1
        values: Tensor = self._known[0:0].new_empty([max(end - first, 0), *shape[1:]])
        if values.numel():
            self._file.read(self._start + first * values[0].nbytes, values)
        inside = (slice(None), *rest)
        return values[inside].contiguous() if rest else values


def _open_rows(path: str, **options: Any) -> Any:
    """In place of `safe_open`, where the engine is about to slice."""
    return RowFile(path) if "backend" in options else safe_open(path, **options)


def draw_shards(
    make: Callable[[], transformers.PreTrainedModel], spread: Spread, device: torch.device
) -> transformers.PreTrainedModel:
    """A model from scratch; its random numbers are those that `make()` alone gives, whatever the layout.

    Every rank draws all numbers in the order of a single process, one tensor at a time, and keeps those of its shards.
    """
    model, later = described_shards(make, spread, device)
    model.to_empty(device=device)
    with torch.no_grad():
        for draw in later:
            draw()
    return model


def described_shards(
    make: Callable[[], transformers.PreTrainedModel], spread: Spread, device: torch.device
) -> tuple[transformers.PreTrainedModel, list[Callable[[], None]]]:
    """The model, sharded and without memory; and what draws its numbers once it has some."""
    later: list[Callable[[], None]] = []
    written: set[int] = set()

    def initialize(model: transformers.PreTrainedModel) -> None:
        later.append(partial(_initialize, model, model, device, written))
        model.tie_weights(recompute_mapping=False)

    with _replaced(transformers.PreTrainedModel, "init_weights", initialize), _Postponed(later), torch.device("meta"):
        model = make()
    spread(model)
    return model, later


class _Postponed(TorchDispatchMode):
    """Random numbers that a constructor draws on the meta device: drawn later, and thrown away as a constructor's
    always are, so that those that follow are the same.
    """

    def __init__(self, later: list[Callable[[], None]]) -> None:
        super().__init__()
        self.later = later

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and args and isinstance(args[0], Tensor):
            shape, dtype, rest = args[0].shape, args[0].dtype, args[1:]
            self.later.append(lambda: func(torch.empty(shape, dtype=dtype), *rest, **(kwargs or {})))
        return result


def _initialize(
    module: nn.Module, owner: transformers.PreTrainedModel, device: torch.device, written: set[int]
) -> None:
    """As `PreTrainedModel.initialize_weights`: children first, each by the rule of the model that it belongs to."""
    if getattr(module, "_is_hf_initialized", False):
        return
    for child in module.children():
        _initialize(child, child if isinstance(child, transformers.PreTrainedModel) else owner, device, written)
    with _whole_parameters(module, written), _DrawnWhole():
        owner._initialize_weights(module)


@contextlib.contextmanager
def _whole_parameters(module: nn.Module, written: set[int]) -> Iterator[None]:
    """The module's own parameters are whole inside; then each shard gets its part of them. A tied weight keeps what
    its first module gave it.
    """
    shards: dict[str, Any] = {name: p for name, p in module._parameters.items() if isinstance(p, DTensor)}
    for name, shard in shards.items():
        whole = torch.empty(shard.shape, dtype=torch.float32)  # drawn as a single process draws it, then cast
        module._parameters[name] = nn.Parameter(whole, shard.requires_grad)
    yield
    for name, shard in shards.items():
        drawn = module._parameters[name]
        assert drawn is not None
        if id(shard) not in written:
            keep_part(shard, drawn.detach())
            written.add(id(shard))
        module._parameters[name] = shard


class _DrawnWhole(TorchDispatchMode):
    """For rules that reach from a layer into its children, whose parameters are sharded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and args and isinstance(args[0], DTensor):
            keep_part(args[0], func(torch.empty(args[0].shape, dtype=torch.float32), *args[1:], **(kwargs or {})))
            return args[0]
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def keep_part(shard: DTensor, whole: Tensor) -> None:
    """Copies this rank's part of `whole` into its shard."""
    part: Any = DtensorShardOperation(shard).shard_tensor(whole)
    shard.to_local().copy_(part)


def _keeps_slices(conversion: object) -> bool:
    """Does it give this rank's part of a weight when it gets this rank's parts of the checkpoint's weights?"""
    if not isinstance(conversion, WeightConverter):
        return True
    return all(_works_inside_dim_0(operation) for operation in conversion.operations)


def _works_inside_dim_0(operation: ConversionOps) -> bool:
    """Parameters are sharded over dim 0; the engine hands experts of their own files to the ranks that hold them."""
    if isinstance(operation, MergeModulelist):
        return operation.dim == 0
    return isinstance(operation, Concatenate) and operation.dim > 0


@contextlib.contextmanager
def _replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    """transformers has these as methods that a model may override; here all models do, for as long as one is made."""
    inherited = name not in vars(owner)
    original = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
