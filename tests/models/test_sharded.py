"""Parts of a model that ranks hold, where a mesh of GPUs is described and none is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from automodel_lite.models.sharded import hold_shard


@pytest.fixture
def gpus() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield DeviceMesh("cuda", [0, 1], mesh_dim_names=("dp_shard",), _init_backend=False)
    finally:
        dist.destroy_process_group()


def test_an_offloaded_shard_stays_on_the_host(gpus: DeviceMesh) -> None:
    """Under mesh.cpu_offload; transformers' `DTensor.from_local` goes to the mesh's device."""
    spec = DTensorSpec(gpus, (Shard(0),), TensorMeta(torch.Size([5, 4]), (4, 1), torch.float32))
    ref = DTensor(torch.empty(2, 4, device="meta"), spec, requires_grad=True)
    read = torch.randn(4, 2).t()
    held = hold_shard(torch.device("cpu"), read, ref)
    assert (held.shape, held.device_mesh, held.placements) == (ref.shape, gpus, (Shard(0),))
    assert held.to_local().device == torch.device("cpu")
    assert held.to_local().is_contiguous()
    assert torch.equal(held.to_local(), read)
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda|nvidia"):
            DTensor.from_local(read, gpus, (Shard(0),), run_check=False)
