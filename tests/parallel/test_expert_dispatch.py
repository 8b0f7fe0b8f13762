"""Rows on their way to experts of other ranks and back, beside transformers' own dispatch: bits, exchanges, waits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_lite.models.layers import FirstRun, decoder_layers, recompute_layers
from automodel_lite.parallel.expert_dispatch import ExpertDispatch
from automodel_lite.parallel.mesh import Mesh, MeshShape, open_mesh
from automodel_lite.parallel.sharding import ParallelModel, parallelize
from tests.parallel.test_sharding import loss_model, micro_batch
from tests.ranks import run_ranks

pytestmark = pytest.mark.numbers

LAYERS = 2


class Exchanges(TorchDispatchMode):
    """Counts the exchanges between ranks of experts, by what they carry."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "alltoall_base" in func.__name__ or "all_to_all_single" in func.__name__:
            sent = next(x for x in args if isinstance(x, Tensor))
            self.found["rows" if sent.is_floating_point() else "counts"] += 1
        return func(*args, **(kwargs or {}))


class HostReads(TorchFunctionMode):
    """Counts the lists made of a tensor's values, for which the host waits on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.lists += (
            func is Tensor.tolist and args[0].ndim == 2
        )  # of sizes; ends of experts have one dim
        return func(*args, **(kwargs or {}))


def build(
    family: str, mesh: Mesh, recomputed: str, is_idle: bool, dtype: torch.dtype
) -> ParallelModel:
    """A model on its mesh. With `is_idle` all tokens go to the first experts: a rank has no token at all."""
    plain = loss_model(family)
    if is_idle:
        for name, parameter in plain.named_parameters():
            if name.endswith("gate.weight"):
                parameter.data.zero_()
    model = parallelize(plain, mesh, "fsdp", dtype)
    recompute_layers(decoder_layers(model.loss_model.lm), recomputed, 1)
    return model


def step(model: ParallelModel, mesh: Mesh) -> dict[str, Tensor]:
    """The losses and this rank's gradients of two micro-batches, unlike on all ranks."""
    found = {}
    for number in range(2):
        batch = micro_batch(mesh.dp_rank * 2 + number, 1)
        with model.accumulate(is_last=number == 1):
            loss = model(batch).sum
            loss.backward()
        found[f"loss {number}"] = loss.detach()
    for name, parameter in model.loss_model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = grad.to_local() if isinstance(grad, DTensor) else grad
    return found


def beside_transformers(
    rank: int,
    world_size: int,
    shape: tuple[int, ...],
    cases: list[tuple[str, str, bool, torch.dtype]],
) -> list[str]:
    """The values that differ in a bit."""
    mesh = open_mesh(MeshShape(*shape), torch.device("cpu"))
    install = ExpertDispatch.install
    differ = []
    for family, recomputed, is_idle, dtype in cases:
        got = step(build(family, mesh, recomputed, is_idle, dtype), mesh)
        ExpertDispatch.install = lambda self: None  # leaves transformers' forward where it is
        want = step(build(family, mesh, recomputed, is_idle, dtype), mesh)
        ExpertDispatch.install = install
        assert got.keys() == want.keys()
        assert any("experts" in name for name in want)
        differ += [
            f"{family} {recomputed} {is_idle} {n}" for n in want if not torch.equal(got[n], want[n])
        ]
    return differ


CASES = [
    ("qwen3_moe", "full", True, torch.float32),
    ("qwen3_moe", "selective", False, torch.bfloat16),
]


@pytest.mark.parametrize(
    "shape",
    [(1, 2, 1, 1, 2), pytest.param((1, 4, 1, 1, 4), marks=pytest.mark.slow)],
    ids=["ep 2", "ep 4"],
)
def test_losses_and_gradients_have_the_bits_of_transformers_dispatch(
    shape: tuple[int, ...],
) -> None:
    assert run_ranks(beside_transformers, shape[1], shape, CASES) == [[]] * shape[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(1, 4, 1, 1, 2), (1, 2, 1, 2, 2), (1, 2, 1, 2, 4), (2, 2, 1, 1, 2)], ids=str
)
def test_losses_and_gradients_have_the_same_bits_with_other_axes(shape: tuple[int, ...]) -> None:
    """Copies of experts; ranks with the same tokens; both; replicas."""
    more = [
        ("qwen3_moe", "none", False, torch.float32),
        ("deepseek_v3_latent", "full", False, torch.float32),
    ]
    assert run_ranks(beside_transformers, 4, shape, [*CASES[1:], *more]) == [[]] * 4


def count_exchanges(rank: int, world_size: int) -> list[tuple[dict[str, int], int]]:
    """The exchanges and reads of a micro-batch: of its forward pass, of its backward pass."""
    mesh = open_mesh(MeshShape(1, 2, 1, 1, 2), torch.device("cpu"))
    found = []
    for recomputed in ("none", "full"):
        model = build("qwen3_moe", mesh, recomputed, False, torch.float32)
        with Exchanges() as sent, HostReads() as read, model.accumulate(is_last=True):
            loss = model(micro_batch(mesh.dp_rank, 1)).sum
        with Exchanges() as sent_back, HostReads() as read_back, model.accumulate(is_last=True):
            loss.backward()
        found += [(dict(sent.found), read.lists), (dict(sent_back.found), read_back.lists)]
    return found


def test_sizes_are_exchanged_and_read_once_whether_layers_are_recomputed_or_not() -> None:
    once = ({"counts": LAYERS, "rows": 2 * LAYERS}, LAYERS)
    plain = ({"rows": 2 * LAYERS}, 0)
    recomputed = ({"rows": 4 * LAYERS}, 0)
    for found in run_ranks(count_exchanges, 2):
        assert found == [once, plain, once, recomputed]


def test_a_second_run_takes_what_the_first_found_in_its_order() -> None:
    run = FirstRun()
    values = iter("abc")
    for _ in range(2):
        run.begin()
        assert [run.take(lambda: next(values)) for _ in range(3)] == ["a", "b", "c"]
