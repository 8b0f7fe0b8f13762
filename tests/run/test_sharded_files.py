"""Where each part of a sharded tensor is, and what a save of a thousand ranks costs the first of them."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"

from automodel_lite.compat import StridedShard
from automodel_lite.run import checkpoint_folder
from automodel_lite.run.sharded_files import (
    BrokenCheckpointError,
    Layout,
    index_text,
    own_parts,
    read_index,
    read_tensors,
    write_parts,
)
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("layout", "wanted", "parts"),
    [
        (Layout("float32", [7], 3), [(0, 7)], [(3, [(0, 7)])]),
        (Layout("float32", []), [], [(0, [])]),
        # 10 rows over 4 ranks: 3, 3, 3, 1
        (Layout("float32", [10], 0, [[4, 1, 0]]), [(2, 4)], [(0, [(0, 3)]), (1, [(3, 6)])]),
        (Layout("float32", [10], 0, [[4, 1, 0]]), [(9, 10)], [(3, [(9, 10)])]),
        # 2 rows over 4 ranks: two have none
        (Layout("float32", [2], 0, [[4, 1, 0]]), [(0, 2)], [(0, [(0, 1)]), (1, [(1, 2)])]),
        # rows over every second rank from rank 1 on, columns over neighbors
        (Layout("float32", [4, 6], 4, [[2, 2, 0], [2, 1, 1]]), [(1, 2), (2, 4)], [(4, [(0, 2), (0, 3)]), (5, [(0, 2), (3, 6)])]),
        # the same dim twice
        (Layout("float32", [8], 0, [[2, 2, 0], [2, 1, 0]]), [(3, 5)], [(1, [(2, 4)]), (2, [(4, 6)])]),
    ],
    ids=["whole", "scalar", "uneven", "last", "empty", "two_dims", "twice"],
)  # fmt: skip
def test_parts_that_overlap(layout: Layout, wanted: list, parts: list) -> None:
    assert list(layout.parts(wanted)) == parts


def _round_trip(rank: int, world_size: int, folder: str) -> tuple[list[str], bool]:
    """Saves tensors of several layouts, one of them on meshes side by side; reads them cut in other ways."""
    mesh, others = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")),
        init_device_mesh("cpu", (4,)),
    )
    whole = {
        name: torch.randn(5, 6, generator=torch.Generator().manual_seed(i))
        for i, name in enumerate("vwxyz")
    }
    # two fused matrices, each of which "b" cuts
    whole["zz"] = torch.randn(6, 8, generator=torch.Generator().manual_seed(9))
    # two experts on four ranks: two ranks have none
    whole["u"] = torch.randn(2, 6)[:, :6].copy_(whole["v"][:2])
    cuts = {
        "u": (others, [Shard(0)]),
        "v": (mesh, [Replicate(), Shard(0)]),
        "w": (mesh, [Replicate(), Shard(1)]),
        "x": (mesh, [Shard(1), Shard(0)]),
        "y": (mesh["a"], [Shard(0)]),
        "zz": (mesh, [Shard(0), StridedShard(1, split_factor=2)]),
    }
    tensors = {
        "z": whole["z"],
        **{name: distribute_tensor(whole[name], *cut) for name, cut in cuts.items()},
    }
    mine, layouts = own_parts(tensors, rank, world_size)
    write_parts(Path(folder), rank, mine)
    if rank == 0:
        Path(folder, "index.json").write_text(index_text(layouts))
    dist.barrier()
    fresh = {
        name: distribute_tensor(
            torch.zeros_like(value), others, [Shard(number % 2 if len(value) > 2 else 0)]
        )
        for number, (name, value) in enumerate(whole.items())
    }
    index = read_index(Path(folder))
    read_tensors(Path(folder), index, fresh)
    again = distribute_tensor(torch.zeros(6, 8), *cuts["zz"])
    read_tensors(Path(folder), index, {"zz": again})
    assert torch.equal(again.to_local(), tensors["zz"].to_local())
    return sorted(mine), all(
        torch.equal(tensor.full_tensor(), whole[name]) for name, tensor in fresh.items()
    )


def test_any_layout_is_read_into_any_other(tmp_path: Path) -> None:
    keys, equal = zip(*run_ranks(_round_trip, 4, str(tmp_path)))
    assert equal == (True,) * 4
    # w by its first replica, v by its second; u and x by all that have some; y by the mesh of rank 0 alone
    assert keys == (
        ["u@0,0", "w@0,0", "x@0,0", "y@0,0", "zz@0,0", "zz@0,4"],
        ["u@1,0", "w@0,3", "x@3,0", "z@0,0", "zz@0,2", "zz@0,6"],
        ["v@0,0", "x@0,3", "y@3,0", "zz@3,0", "zz@3,4"],
        ["v@3,0", "x@3,3", "zz@3,2", "zz@3,6"],
    )


def test_a_file_is_the_one_that_safetensors_writes(tmp_path: Path) -> None:
    numbers = torch.randn(4, 6)
    parts = {
        "columns@0,3": numbers[:, 3:],
        "transposed@0,0": numbers.t(),
        "every other@0": numbers[0, ::2],
        "number@": torch.tensor(7.0),
        "wie für@0": numbers[1],
        "double@0": numbers.double(),
        "half@0": numbers.bfloat16(),
        "fp8@0": numbers.to(torch.float8_e4m3fn),
        "bytes@0": torch.arange(5, dtype=torch.uint8),
        "bools@0": numbers > 0,
        "long@0": torch.tensor([1 << 40]),
        "none@0": torch.tensor([math.nan]),
    }
    name, digests = write_parts(tmp_path, 3, parts) or ("", {})
    assert name == "rank_00003.safetensors"
    written = (tmp_path / name).read_bytes()
    theirs = save({key: part.contiguous() for key, part in parts.items()})
    assert _header_and_rest(written) == _header_and_rest(theirs)
    sha256 = hashlib.sha256(written).hexdigest()
    assert digests == {"crc32": f"{zlib.crc32(written):08x}", "sha256": sha256}
    with safe_open(tmp_path / name, "pt") as file:
        assert file.get_tensor("wie für@0").equal(numbers[1])


def _header_and_rest(file: bytes) -> tuple[list, bytes]:
    """Its tensors in their order, with the places of their bytes; these begin where 8 divides, as doubles must."""
    end = 8 + int.from_bytes(file[:8], "little")
    assert end % 8 == 0
    return list(json.loads(file[8:end]).items()), file[end:]


def test_one_part_at_a_time_is_copied(tmp_path: Path) -> None:
    """Of 8 parts of 48 MiB that cannot be written as they lie: a rank's share may be as large as the host's memory."""
    parts = {f"part{at}@0": torch.ones(1).expand(12 << 20) for at in range(8)}
    before, held, is_over = _own_mib(), [0.0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            held.append(_own_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    write_parts(tmp_path, 0, parts)
    is_over.set()
    watcher.join()
    assert len(held) > 10
    assert max(held) - before < 90


def _own_mib() -> float:
    """Memory of this process that is not of files."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 2**10


def test_another_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"version": 1, "tensors": {}}))
    with pytest.raises(
        BrokenCheckpointError, match="its format is version 1, and this program reads 2"
    ):
        read_index(tmp_path)


def test_a_part_that_is_larger_than_its_place_is_refused(tmp_path: Path) -> None:
    """Scales of 8-bit moments, which tensor parallelism did not cut: the first of them were taken, without a word."""
    write_parts(tmp_path, 0, {"scale@0,0": torch.ones(4, 2)})
    index = {"scale": Layout("float32", [4, 2], 0, [[2, 1, 1]])}
    says = r"an older version saved scale under mesh.tp as \[4, 2\] where \[4, 1\] belong"
    with pytest.raises(BrokenCheckpointError, match=says):
        read_tensors(tmp_path, index, {"scale": torch.zeros(4, 2)})


def test_experts_that_were_saved_with_mixed_halves_are_refused(tmp_path: Path) -> None:
    entry = {"dtype": "float32", "shape": [2, 8, 4], "first": 0, "axes": [[2, 1, 1]]}
    name = "model.layers.0.mlp.experts.gate_up_proj"
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "tensors": {name: entry}}))
    with pytest.raises(
        BrokenCheckpointError, match=r"gate_up_proj under mesh\.tp, its halves mixed"
    ):
        read_index(tmp_path)


def _save_as_rank_0_of_1024(folder: Path) -> tuple[float, int]:
    """CPU seconds of rank 0 for all that grows with the ranks, for the 3 x 291 tensors of an 8B; bytes of the index."""
    mesh = DeviceMesh("cpu", torch.arange(1024).view(2, 512))
    tensors = {}
    for number in range(873):
        size = torch.Size((4096 + 1024 * (number % 4), 4096))
        part = (
            torch.zeros(-(-size[0] // 512), 4096)
            if number % 100 == 0
            else torch.zeros(1).expand(-(-size[0] // 512), 4096)
        )
        tensors[f"model.layers.{number}.mlp.gate_proj.weight"] = DTensor.from_local(
            part, mesh, [Replicate(), Shard(0)], run_check=False, shape=size, stride=(4096, 1)
        )
    began = time.process_time()
    mine, layouts = own_parts(tensors, 0, 1024)
    text = index_text(layouts)
    spent = time.process_time() - began
    assert len(mine) == 437  # every second one is written by the other replica
    temporary = folder / ".tmp-step"
    checkpoint_folder.begin(temporary, 0)
    digests = {}
    for rank in range(1024):
        (temporary / f"tensors/rank_{rank:05d}.safetensors").write_bytes(b"shard")
        digests[f"rank_{rank:05d}.safetensors"] = {"crc32": "0" * 8, "sha256": "0" * 64}
    began = time.process_time()
    texts = {"tensors/index.json": text, "state.json": "{}"}
    checkpoint_folder.complete(temporary, folder / "step_00000001", texts, digests, lambda: None)
    return spent + time.process_time() - began, len(text)


def test_a_save_of_1024_ranks_costs_the_first_2_cpu_seconds(tmp_path: Path) -> None:
    dist.init_process_group("fake", rank=0, world_size=1024)
    try:
        cpu_s, index_bytes = _save_as_rank_0_of_1024(tmp_path)
    finally:
        dist.destroy_process_group()
    print(f"{cpu_s:.2f} CPU-s, index {index_bytes / 1e6:.2f} MB")
    assert cpu_s < 2
    assert index_bytes < 5e6
