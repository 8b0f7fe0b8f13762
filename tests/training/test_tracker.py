"""What a rank of a simulated world holds, computes and sends, on operations small enough to count by hand."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from automodel_lite.extras.plan.tracker import GPU, MemoryTracker, Message, Operation, gpu_tensors
from automodel_lite.parallel.mesh import AXES, MeshShape
from automodel_lite.parts.kernels.varlen import VarlenAttention
from automodel_lite.thd import AttentionOptions, Segments

ALONE = MeshShape(1, 1, 1)
BF16 = torch.bfloat16
KIB = 1024  # bytes of a [16, 16] in fp32


@contextmanager
def tracked(
    shape: MeshShape = ALONE, routed: int = 0, tells_layers: bool = False
) -> Iterator[MemoryTracker]:
    with (
        FakeTensorMode(),
        MemoryTracker(shape, routed, vocab_size=512, tells_layers=tells_layers) as held,
    ):
        yield held


def ones(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*sizes, dtype=dtype, device=GPU)


def test_a_storage_counts_until_it_is_freed() -> None:
    with tracked() as held:
        weight = ones(16, 16)
        assert held.now == KIB
        parts = [weight.view(-1), weight[:4], weight.t()]
        assert held.now == KIB  # the same memory
        held.enter("forward")
        hidden = weight + weight
        logits = hidden @ ones(512, 16).t()
        assert held.now == (1 + 1 + 32) * KIB  # the other matrix is gone
        del logits
        assert held.now == 2 * KIB
        del weight
        assert held.now == 2 * KIB  # a view is left
        del parts
        assert held.now == KIB
    assert held.peaks == {"load": KIB, "forward": 66 * KIB}
    assert held.at_peak() == {"activations": 33 * KIB, "logits": 32 * KIB, "weights": KIB}
    assert next(iter(held.at_peak())) == "activations"  # the largest first


def test_kinds_are_those_of_the_phase() -> None:
    with tracked() as held:
        kept = []
        for phase in ("load", "optimizer", "forward", "backward", "save", "export"):
            held.enter(phase)
            kept.append(ones(16, 16))
        held.enter("forward")
        # collectives gather into memory that is not written yet
        kept.append(torch.empty(16, 16, device=GPU))
    names = ["weights", "optimizer states", "activations", "gradients and recomputed activations"]
    names += ["states to save", "weights to export", "gathered weights and gradients"]
    assert held.at_peak() == dict.fromkeys(names, KIB)


def test_the_host_is_not_counted() -> None:
    with tracked() as held:
        on_host, on_gpu = torch.ones(16, 16, device="cpu"), ones(16, 16)
        assert gpu_tensors({"a": [on_host, (on_gpu, 3)], "b": None}) == [on_gpu]
        held.enter("forward")
        on_host.add_(1)
        assert held.now == KIB
        assert not held.work["update"]


def test_memory_that_is_resized_to_nothing_is_freed() -> None:
    """As FSDP frees a gathered parameter, whose tensor stays."""
    with tracked() as held:
        gathered = ones(16, 16)
        held.resized(gathered.untyped_storage()._cdata, 0)
        assert held.now == 0
        held.resized(gathered.untyped_storage()._cdata, KIB)
        assert (held.now, held.peaks["load"]) == (KIB, KIB)
        held.resized(12345, 7)  # of the host
        assert held.now == KIB
        gone = weakref.ref(gathered.untyped_storage())
        del gathered
        assert gone() is None
        assert held.now == 0


def test_layers_are_told_apart_and_phases_forgotten() -> None:
    with tracked(tells_layers=True) as held:
        kept = ones(16, 16)
        held.enter("optimizer")
        kept.add(1)
        held.forget("optimizer")
        assert (dict(held.peaks), held.work["update"]) == ({"load": KIB}, {})
        held.enter("backward", 3)
        kept.add(1)
        held.enter("backward", 2)
    assert held.peaks == {"load": KIB, "backward 3": 2 * KIB, "backward 2": KIB}


def worked(what: Any) -> Operation:
    """The one kernel that `what` starts."""
    with tracked() as held:
        given = what()
        held.enter("forward")
        given()
    ((one, times),) = held.work["update"].items()
    assert times == 1
    assert isinstance(one, Operation)
    return one


def product() -> Any:
    a, b = ones(8, 16), ones(16, 4)
    return lambda: a @ b


def look_up() -> Any:
    table, ids = ones(1000, 4), ones(3, dtype=torch.int64)
    return lambda: torch.nn.functional.embedding(ids, table)


def attention() -> Any:
    """One document of 64 tokens, two heads of 8 channels; a query sees 16 keys. Beside them the kernel touches sums,
    ends, and the state of dropout."""
    q, k, cu = ones(64, 2, 8, dtype=BF16), ones(64, 2, 8, dtype=BF16), ones(2, dtype=torch.int32)
    segments, options = Segments(cu, cu, 64, 64), AttentionOptions(0.3, window=16)
    return lambda: VarlenAttention()(q, k, k, segments, options)


def addition() -> Any:
    a = ones(16, 16)
    return lambda: a.add_(1)


@pytest.mark.parametrize(
    ("what", "found"),
    [
        (product, Operation("product", 2 * 8 * 16 * 4, 4 * (8 * 16 + 16 * 4 + 8 * 4))),
        # the rows are read and written, not the table
        (look_up, Operation("other", 0, 2 * 4 * 3 * 4)),
        (
            attention,
            Operation(
                "attention",
                4 * 64 * 2 * 8,
                2 * 4 * 64 * 2 * 8 + 4 * 2 * 64 + 2 * 4 * 2 + 16,
                window=16,
            ),
        ),
        (addition, Operation("other", 0, 2 * KIB)),
    ],
    ids=["product", "look-up", "attention", "in place"],
)
def test_what_a_kernel_does(what: Any, found: Operation) -> None:
    assert worked(what) == found


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x[3:], lambda x: x.expand(2, 16, 16), lambda x: x.detach()]
)
def test_a_view_is_no_work(view: Any) -> None:
    with tracked() as held:
        x = ones(16, 16)
        held.enter("forward")
        view(x)
        assert not held.work["update"]


def test_work_belongs_to_the_part_of_the_step() -> None:
    with tracked() as held:
        x = ones(16, 16)
        for phase, part in (
            ("forward", "micro"),
            ("backward", "last"),
            ("backward", "last"),
            ("optimizer", "update"),
        ):
            held.part = part
            held.enter(phase)
            x.add_(1)
        held.enter("save")
        x.add_(1)
    assert {part: list(work.values()) for part, work in held.work.items()} == {
        "micro": [1],
        "last": [2],
        "update": [1],
    }


@contextmanager
def world(shape: MeshShape) -> Iterator[Any]:
    """Rank 0 of a process group in which nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shape.world_size)
    try:
        sizes = (shape.dp_replicate, shape.dp_shard, shape.cp, shape.tp)
        yield init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    finally:
        dist.destroy_process_group()


def test_messages_know_their_axes_and_how_far_they_go() -> None:
    """16 ranks: replicas are 8 apart, shards 2, and the two ranks of cp neighbors."""
    shape = MeshShape(2, 4, 2)
    with world(shape) as mesh, tracked(shape) as held:
        held.enter("forward")
        x, four = ones(16, 16), ones(4, 16, 16)
        dist.all_reduce(x, group=mesh.get_group("cp"))
        dist.all_gather_into_tensor(four, x, group=mesh.get_group("dp_shard"))
        held.is_parallel = True
        dist.reduce_scatter_tensor(x, four, group=mesh.get_group("dp_shard"))
        dist.all_reduce(x, group=mesh.get_group("dp_replicate"))
        dist.all_reduce(x)
        held.enter("save")
        dist.all_reduce(x)  # of a checkpoint: not of a step
    sent = [one for one in held.work["update"] if isinstance(one, Message)]
    assert sent == [
        Message("cp", 2, False, 2 * KIB // 2),  # reduced and gathered: each half goes out twice
        Message("dp_shard", 7, False, 3 * KIB),
        Message("dp_shard", 7, True, 3 * KIB),
        Message("dp_replicate", 9, True, KIB),
        Message("dp_replicate x dp_shard x cp", 16, True, 2 * KIB * 15 // 16),
    ]


def test_the_tokens_of_experts_are_known_beforehand() -> None:
    """Expert parallelism reads from the device how many come; a fake device has no numbers."""
    with tracked(routed=48):
        assert int(ones(1).long()) == 48
