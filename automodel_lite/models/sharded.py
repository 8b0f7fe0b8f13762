"""Weights that each rank reads, or draws, for its own shards only: nothing ever holds the whole model.

    meta device -> `spread` (adapters, tensor and expert parallelism, FSDP) -> DTensors without memory -> parts of them

Reading is transformers' own: its `from_pretrained` slices every file along the placements of the parameters that it
meets, renames and fuses weights on the way, and casts each to the dtype of its parameter.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import core_model_loading, modeling_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter
from transformers.distributed import DistributedConfig
from transformers.distributed.sharding_utils import DtensorShardOperation

from automodel_lite.errors import ConfigError
from automodel_lite.models.checkpoints import converting_exactly, replaced
from automodel_lite.seed import derive_seed

Spread = Callable[[transformers.PreTrainedModel], None]
"""Shards a model on the meta device, in place."""


class CannotReadSlicesError(Exception):
    """This family's checkpoints fuse or split weights along the dim that is sharded."""


def load_shards(load: Callable[..., Any], spread: Spread, device: torch.device) -> Any:
    """Calls `load(**more)`, which is `from_pretrained`, with its model sharded by `spread` before weights are read.

    device  holds the shards: the mesh's, or the host under mesh.cpu_offload

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

    # Hooks for one call: the engine offers no way to shard a model by other means than its own between the moment when
    # it is described and the moment when its weights are read.
    with contextlib.ExitStack() as hooks:
        hooks.enter_context(converting_exactly())
        for owner, name, function in (
            (transformers.PreTrainedModel, "maybe_distribute_model", classmethod(shard)),
            (modeling_utils, "safe_open", _open_rows),
            (modeling_utils, "_dtensor_from_local_like", partial(hold_shard, device)),
            (core_model_loading, "_dtensor_from_local_like", partial(hold_shard, device)),
        ):
            hooks.enter_context(replaced(owner, name, function))
        loaded = load(distributed_config=DistributedConfig(tp_size=1, fsdp_size=1))  # the engine itself shards nothing
    # The config that was passed for the hooks' sake would be exported with the model.
    model = loaded[0]
    del model.config.distributed_config
    for one, other in tied:
        if model.get_parameter(one) is not model.get_parameter(other):
            raise ConfigError(
                f"the config ties {one} to {other}, and the checkpoint has different values for them: set "
                "model.config.tie_word_embeddings=false."
            )
    return loaded


def hold_shard(device: torch.device, local: Tensor, ref: DTensor) -> DTensor:
    """Wraps this rank's part of `ref`, on `device`. `DTensor.from_local`, which transformers calls, moves it to the
    device of the mesh: the GPU that mesh.cpu_offload finds too small.
    """
    return DTensor(local.to(device).contiguous(), ref._spec, requires_grad=local.requires_grad)


class RowFile:
    """A safetensors file of which nothing is read but the rows that are asked for. The library itself reads the whole
    tensor (`pread`), so that every rank would read the whole checkpoint, or maps the file (`mmap`): its pages count as
    memory of the process until it is closed.
    """

    def __init__(self, path: str) -> None:
        self._checked = safe_open(path, framework="pt")  # nothing is read through it but names, shapes and dtypes
        self._path, self._file = path, os.open(path, os.O_RDONLY)
        num_bytes = int.from_bytes(os.pread(self._file, 8, 0), "little")
        # The format: 8 bytes with the header's length, the header as JSON, then the tensors, row by row.
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
        # One read may give less than it was asked for: 2 GiB at most on Linux, less on network disks.
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
        # A slice of no rows gives the dtype without reading anything.
        values: Tensor = self._known[0:0].new_empty([max(end - first, 0), *shape[1:]])
        if values.numel():
            self._file.read(self._start + first * values[0].nbytes, values)
        inside = (slice(None), *rest)
        return values[inside].contiguous() if rest else values


def _open_rows(path: str, **options: Any) -> Any:
    """Opens a file in place of `safe_open`, where the engine is about to slice."""
    return RowFile(path) if "backend" in options else safe_open(path, **options)


def draw_shards(
    make: Callable[[], transformers.PreTrainedModel], spread: Spread, device: torch.device
) -> transformers.PreTrainedModel:
    """Builds a model from scratch; its random numbers are those that `draw_whole(make)` gives, whatever the layout.

    Every rank goes through the tensors in the order of a single process, one at a time, and keeps its parts of them. Of
    a large one it draws no other parts.
    """
    model, later = describe_shards(make, spread, device)
    model.to_empty(device=device)
    with torch.no_grad():
        for draw in later:
            draw()
    return model


def draw_whole(make: Callable[[], transformers.PreTrainedModel]) -> transformers.PreTrainedModel:
    """Calls `make()`, which builds a model from scratch, on one process."""
    with _SeededDraws():
        return make()


def describe_shards(
    make: Callable[[], transformers.PreTrainedModel], spread: Spread, device: torch.device
) -> tuple[transformers.PreTrainedModel, list[Callable[[], None]]]:
    """Returns the model, sharded and without memory, and what draws its numbers once it has some."""
    later: list[Callable[[], None]] = []
    written: set[int] = set()

    def initialize(model: transformers.PreTrainedModel) -> None:
        later.append(partial(_initialize, model, model, device, written))
        model.tie_weights(recompute_mapping=False)

    with (
        replaced(transformers.PreTrainedModel, "init_weights", initialize),
        _PostponedDraws(later),
        torch.device("meta"),
    ):
        model = make()
    spread(model)
    return model, later


LARGE, BLOCK = 1 << 20, 1 << 16
"""Elements: a weight of at least LARGE is drawn in blocks, each with a seed of its own, so that any part of it can be
drawn alone. Its one number of torch's generator is the seed that theirs are derived from.
"""


def _is_draw(func: Any, args: tuple[Any, ...]) -> bool:
    """Does it fill a tensor with random numbers?"""
    return torch.Tag.nondeterministic_seeded in func.tags and bool(args) and isinstance(args[0], Tensor)


def _draw(func: Any, target: Tensor, part: range, *args: Any, **kwargs: Any) -> None:
    """Fills a tensor with random numbers; of a large one the blocks that hold `part`, and no others."""
    is_in_blocks = target.numel() >= LARGE and target.is_contiguous() and func._schema.is_mutable
    if not is_in_blocks or kwargs.get("generator") is not None:
        func(target, *args, **kwargs)
        return
    # One number of the shared generator, whichever part is drawn: ranks stay in step though they draw different parts.
    seed = int(torch.empty((), dtype=torch.int64).random_())
    flat = target.view(-1)
    # Whole blocks: the first and the last may reach beyond the part, so that every rank fills a block alike.
    for start in range(part.start // BLOCK * BLOCK, part.stop, BLOCK):
        generator = torch.Generator().manual_seed(derive_seed(seed, start))
        func(flat[start : start + BLOCK], *args, **{**kwargs, "generator": generator})


class _PostponedDraws(TorchDispatchMode):
    """Random numbers that a constructor draws on the meta device: drawn later, and thrown away as a constructor's
    always are, so that those that follow are the same.
    """

    def __init__(self, later: list[Callable[[], None]]) -> None:
        super().__init__()
        self.later = later

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_draw(func, args):
            like, *rest = args
            self.later.append(
                lambda: _draw(func, torch.empty_like(like, device="cpu"), range(0), *rest, **(kwargs or {}))
            )
        return result


class _ReadsWholeError(Exception):
    """A rule reads a weight that is drawn in part."""


class _SeededDraws(TorchDispatchMode):
    """Random numbers inside: large tensors in blocks; of those in `parts`, by the place of their memory, only a part;
    and of sharded ones, which a rule meets when it reaches from a layer into its children, what this rank holds.

    Raises _ReadsWholeError where a tensor of `parts` is read, as by an orthogonal initialization, or by a truncated
    normal distribution that draws its outliers again. Views and writes in place are of each row by itself.
    """

    def __init__(self, parts: dict[int, range] | None = None) -> None:
        super().__init__()
        self.parts = parts or {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_draw(func, args) and isinstance(args[0], DTensor):
            whole = torch.empty(args[0].shape, dtype=torch.float32)
            _draw(func, whole, _part_of(args[0]), *args[1:], **kwargs)
            keep_part(args[0], whole)
            return args[0]
        if _is_draw(func, args) and func._schema.is_mutable:
            part = self._part(args[0])
            _draw(func, args[0], range(args[0].numel()) if part is None else part, *args[1:], **kwargs)
            return args[0]
        # What is written in place may be drawn in part; what is read must be whole.
        read = args[1:] if func._schema.is_mutable else () if func.is_view else args
        if any(self._part(x) is not None for x in tree_leaves((read, kwargs)) if isinstance(x, Tensor)):
            raise _ReadsWholeError
        return func(*args, **kwargs)

    def _part(self, tensor: Tensor) -> range | None:
        return self.parts.get(tensor.untyped_storage().data_ptr()) if self.parts else None


def _initialize(
    module: nn.Module, owner: transformers.PreTrainedModel, device: torch.device, written: set[int]
) -> None:
    """Initializes as `PreTrainedModel.initialize_weights` does: children first, each by the rule of the model that it
    belongs to.
    """
    if getattr(module, "_is_hf_initialized", False):
        return
    # Children first, as in transformers: a rule may overwrite what its children have drawn.
    for child in module.children():
        _initialize(child, child if isinstance(child, transformers.PreTrainedModel) else owner, device, written)
    # If a rule turns out to read what it has drawn, it begins again from the same state with whole weights, which is
    # what one process draws.
    before = torch.get_rng_state()
    try:
        with _whole_parameters(module, written) as parts, _SeededDraws(parts):
            owner._initialize_weights(module)
    except _ReadsWholeError:
        torch.set_rng_state(before)
        with _whole_parameters(module, written), _SeededDraws():
            owner._initialize_weights(module)


@contextlib.contextmanager
def _whole_parameters(module: nn.Module, written: set[int]) -> Iterator[dict[int, range]]:
    """Makes the module's own parameters whole inside; then each shard gets its part of them. A tied weight keeps what
    its first module gave it. Yields, by the place of their memory, which elements of large ones are needed: the others
    take no memory until they are written.
    """
    shards: dict[str, Any] = {name: p for name, p in module._parameters.items() if isinstance(p, DTensor)}
    parts = {}
    for name, shard in shards.items():
        whole = torch.empty(shard.shape, dtype=torch.float32)  # drawn as a single process draws it, then cast
        module._parameters[name] = nn.Parameter(whole, shard.requires_grad)
        if len(part := _part_of(shard)) < whole.numel() and whole.numel() >= LARGE:
            parts[whole.untyped_storage().data_ptr()] = part
    drawn: dict[str, Any] = {}
    try:
        yield parts
        drawn = {name: module._parameters[name] for name in shards}
    finally:
        module._parameters.update(shards)
    for name, shard in shards.items():
        if id(shard) not in written:
            keep_part(shard, drawn[name].detach())
            written.add(id(shard))


def _part_of(shard: DTensor) -> range:
    """Elements of the whole, counted row by row, that this rank holds; all where they are not one piece."""
    # Only a single cut of dim 0 is one piece of memory; for anything else (tensor parallelism, replicas of strided
    # shards) the whole is drawn, and the part copied.
    cuts = [placement for placement in shard.placements if not placement.is_replicate()]
    row = math.prod(shard.shape[1:])
    if len(cuts) == 1 and type(cuts[0]) is Shard and cuts[0].dim == 0:
        sizes, offsets = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
        return range(offsets[0] * row, (offsets[0] + sizes[0]) * row)
    return range(shard.numel())


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
