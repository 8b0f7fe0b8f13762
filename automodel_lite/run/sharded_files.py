"""Sharded tensors on disk: a safetensors file of each rank, and an index from which every rank
knows where a part is.

    tensors/
        index.json              {"version": 2, "tensors": {name: {"dtype", "shape", "first",
                                "axes"}}}
        rank_00000.safetensors  what rank 0 wrote, key `name@offset`
        rank_00001.safetensors

A part is a box of a global tensor. Which rank holds which box follows from how the tensor is cut
(`Layout`), so ranks exchange no plan and the index has one entry per tensor, whatever the number of
ranks (torch.distributed.checkpoint plans on rank 0, 41 us per tensor and rank). A reader on any
number of ranks takes what overlaps its own boxes.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from automodel_lite.compat import StridedShard
from automodel_lite.config.sizes import ceil_div
from automodel_lite.models.layers import local
from automodel_lite.run import durable

INDEX = "index.json"
_VERSION = 2
Box = list[tuple[int, int]]
"""Start and end in each dim."""


class BrokenCheckpointError(ValueError):
    """A checkpoint that cannot be loaded, and why."""


class OtherTensorsError(BrokenCheckpointError):
    """A checkpoint of another model or optimizer."""


@dataclass(frozen=True)
class Layout:
    """How the ranks hold a tensor: the part with the coordinates (c, ...) is in the file of rank
    `first` + c x stride + ... .

    axes   [size, stride, dim] of each axis of the mesh that cuts the tensor, in this order, as
           `torch.chunk` does
    fused  [dim, number] of matrices that lie side by side, [gate | up]: tensor parallelism cuts
           each of them, so that a rank holds as many boxes
    """

    dtype: str
    shape: list[int]
    first: int = 0
    axes: Sequence[Sequence[int]] = ()
    fused: Sequence[int] = (0, 1)

    def parts(self, wanted: Box) -> Iterator[tuple[int, Box]]:
        """Yields (rank, its box) of each part that overlaps the wanted box."""
        found = [(self.first, box) for box in _matrices(self.shape, *self.fused)]
        for size, stride, dim in self.axes:
            cuts = []
            for rank, box in found:
                (start, end) = box[dim]
                (low, high) = wanted[dim]
                length = max(1, ceil_div(end - start, size))
                # only what overlaps is visited: a thousand ranks times a thousand tensors would
                # take seconds
                for c in range(
                    max(0, (low - start) // length),
                    min(size, ceil_div(min(high, end) - start, length)),
                ):
                    cuts.append((rank + c * stride, _cut(box, dim, size, c)))
            found = cuts
        yield from found


def own_parts(
    tensors: Mapping[str, Tensor], rank: int, world_size: int
) -> tuple[dict[str, Tensor], dict[str, Layout]]:
    """Returns what this rank writes, by its key, and the layouts of all tensors as rank 0 sees
    them.

    Of replicas one is written: the first tensor's by the first ranks that hold it, the next one's
    by others.
    """
    mine: dict[str, Tensor] = {}
    layouts: dict[str, Layout] = {}
    for replica, name in enumerate(sorted(tensors)):
        tensor = tensors[name]
        cuts = list[list[int]]()
        first = replica % world_size
        is_mine = first == rank
        if isinstance(tensor, DTensor):
            # of meshes side by side (tensor parallelism replicates norms) the one that rank 0 is in
            # writes
            first = int(_ranks_of(tensor.device_mesh).flatten()[0])
            is_mine = first == 0
        for size, stride, dim, coordinate in _axes(tensor):
            if dim is not None:
                cuts.append([size, stride, dim])
                continue
            replica, place = divmod(replica, size)
            first += place * stride
            is_mine &= coordinate == place
        fused = _fused(tensor)
        layouts[name] = Layout(_name(tensor.dtype), list(tensor.shape), first, cuts, fused)
        for box, part in _boxes(tensor, *fused) if is_mine else ():
            mine[_key(name, box)] = part
    return mine, layouts


def _axes(tensor: Tensor) -> Iterator[tuple[int, int, int | None, int]]:
    """Yields (size, stride in ranks, dim or None for replicas, own coordinate) of each axis of the
    tensor's mesh, in the order in which they cut it: FSDP cuts what tensor parallelism has cut,
    although its axis comes first.
    """
    if not isinstance(tensor, DTensor):
        return
    ranks = _ranks_of(tensor.device_mesh)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    placements = tensor.placements
    # False sorts first
    for axis in sorted(range(ranks.ndim), key=lambda at: isinstance(placements[at], StridedShard)):
        # between ranks that differ in this coordinate alone; the sum of none is 0
        stride = int(ranks.diff(dim=axis).flatten()[:1].sum())
        placement = placements[axis]
        dim = placement.dim if isinstance(placement, (Shard, StridedShard)) else None
        yield ranks.shape[axis], stride, dim, coordinate[axis]


def _fused(tensor: Tensor) -> tuple[int, int]:
    """Returns the dim and the number of fused matrices that are cut one by one; (0, 1) without."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    for placement in placements:
        # else FSDP's, of what tensor parallelism has cut in the same dim
        if isinstance(placement, StridedShard) and Shard(placement.dim) not in placements:
            return placement.dim, placement.split_factor
    return 0, 1


@cache  # torch computes it anew each time: a millisecond of each tensor
def _ranks_of(mesh: DeviceMesh) -> Tensor:
    return mesh.mesh


def write_parts(
    folder: Path, rank: int, parts: Mapping[str, Tensor]
) -> tuple[str, durable.Digests] | None:
    """Writes this rank's file and reads it back; returns its name and digests, None when there is
    nothing to write.
    """
    if not parts:
        return None
    path = folder / _file_of(rank)
    digest = durable.Digest()
    with open(path, "wb") as file:
        for content in _contents(parts):
            file.write(content)
            digest.add(content)
            del content  # before the next is there
    durable.sync(path)
    if durable.checksum(path) != digest.result["crc32"]:
        raise OSError(errno.EIO, f"{path.name} does not read back as it was written")
    return path.name, digest.result


def _contents(parts: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yields what `save_file` writes, with one part at a time on the CPU: that one wants all, which
    is 12 bytes of the host's memory per weight trained in fp32.
    """
    # names of dtypes, and the order of the parts, are those that the library gives to empty ones
    empty = {key: torch.empty(0, dtype=part.dtype) for key, part in parts.items()}
    header = json.loads(save(empty)[8:])
    end = 0
    for key, entry in header.items():
        start = end
        end += parts[key].nbytes
        entry |= {"shape": parts[key].shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for key in header:
        yield parts[key].cpu().contiguous().flatten().view(torch.uint8).numpy().data


def index_text(layouts: Mapping[str, Layout]) -> str:
    """Returns the content of index.json."""
    return json.dumps(
        {"version": _VERSION, "tensors": {name: asdict(layout) for name, layout in layouts.items()}}
    )


def read_index(folder: Path) -> dict[str, Layout]:
    """Returns the layouts of what a checkpoint holds."""
    index = durable.read_json(folder / INDEX)
    if index["version"] != _VERSION:
        raise BrokenCheckpointError(
            f"its format is version {index['version']}, and this program reads {_VERSION}"
        )
    for name, entry in index["tensors"].items():
        if "fused" not in entry and "gate_up" in name and any(axis[2] for axis in entry["axes"]):
            raise BrokenCheckpointError(
                f"an older version saved {name} under mesh.tp, its halves mixed up"
            )
    return {name: Layout(**entry) for name, entry in index["tensors"].items()}


@torch.no_grad()
def read_tensors(folder: Path, index: Mapping[str, Layout], tensors: Mapping[str, Tensor]) -> None:
    """Copies this rank's boxes into the tensors, whichever ranks wrote them. No collective."""
    by_file: dict[int, list[tuple[str, Box, Box, Tensor]]] = {}
    for name, tensor in tensors.items():
        for wanted, own in _boxes(tensor, *_fused(tensor)):
            for rank, box in index[name].parts(wanted):
                by_file.setdefault(rank, []).append((name, box, wanted, own))
    # each file is opened once
    for rank, items in by_file.items():
        with safe_open(folder / _file_of(rank), framework="pt") as file:
            for name, box, wanted, own in items:
                overlap = [(max(a, low), min(b, high)) for (a, b), (low, high) in zip(box, wanted)]
                kept = file.get_slice(_key(name, box))
                shape = [end - start for start, end in box]
                if kept.get_shape() != shape:
                    raise BrokenCheckpointError(
                        f"an older version saved {name} under mesh.tp as {kept.get_shape()} where "
                        f"{shape} belong"
                    )
                own[_within(overlap, wanted)].copy_(kept[_within(overlap, box)])


def _within(part: Box, whole: Box) -> tuple[slice, ...]:
    """Returns where a box lies in one that holds it, as an index."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, whole))


def check_fits(index: Mapping[str, Layout], state: Mapping[str, Tensor]) -> None:
    """Raises OtherTensorsError unless names, shapes and dtypes of the checkpoint are those of
    the state.
    """
    saved = {name: f"{layout.dtype} {layout.shape}" for name, layout in index.items()}
    wanted = {name: f"{_name(tensor.dtype)} {list(tensor.shape)}" for name, tensor in state.items()}
    if missing := sorted(wanted.keys() - saved.keys()):
        raise OtherTensorsError(f"{len(missing)} tensors are missing, {missing[0]} first")
    if extra := sorted(saved.keys() - wanted.keys()):
        raise OtherTensorsError(
            f"{len(extra)} tensors are not the model's or the optimizer's, {extra[0]} first"
        )
    for name, want in wanted.items():
        if saved[name] != want:
            raise OtherTensorsError(f"{name} is {saved[name]}, the run's is {want}")


def _boxes(tensor: Tensor, dim: int, number: int) -> Iterator[tuple[Box, Tensor]]:
    """Yields the boxes that this rank holds, each with its values, a view.

    dim, number  of fused matrices (`_fused`)
    """
    values = local(tensor.detach())
    parts = values.chunk(number, dim) if number > 1 else [values]
    for box, part in zip(_matrices(tensor.shape, dim, number), parts):
        for size, _, along, coordinate in _axes(tensor):
            if along is not None:
                box = _cut(box, along, size, coordinate)
        if part.numel():
            yield box, part


def _matrices(shape: Sequence[int], dim: int, number: int) -> list[Box]:
    whole = [(0, length) for length in shape]
    return [_cut(whole, dim, number, place) for place in range(number)]


def _cut(box: Box, dim: int, size: int, number: int) -> Box:
    """Returns a box whose edge in one dim is the chunk of this number."""
    return [_chunk(*edge, size, number) if place == dim else edge for place, edge in enumerate(box)]


def _chunk(start: int, end: int, size: int, number: int) -> tuple[int, int]:
    """Returns what `torch.chunk` into `size` gives as the chunk of this number."""
    length = ceil_div(end - start, size)
    return min(start + number * length, end), min(start + (number + 1) * length, end)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _file_of(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _key(name: str, box: Box) -> str:
    return f"{name}@{','.join(str(start) for start, _ in box)}"
