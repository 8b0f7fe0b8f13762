"""Steps that the device may skip, clipped on the way, over each rank's own shards; small moments and weights; Muon."""

from __future__ import annotations

import copy
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.fx.experimental.proxy_tensor import make_fx

from automodel_lite.errors import ConfigError
from automodel_lite.extras.plan.fake_world import fake_world
from automodel_lite.graphs import compiled_graphs, strict_graphs
from automodel_lite.models.layers import local
from automodel_lite.parallel.mesh import MeshShape
from automodel_lite.parts.optimizers import adamw as optimizers
from automodel_lite.parts.optimizers.adamw import (
    adamw,
    codebook,
    decoded,
    encoded,
    moments_of,
    random_bits,
    rounded,
    seeds_of,
)
from automodel_lite.parts.optimizers.muon import muon
from automodel_lite.training.optimizers import apply_gradients
from tests.ranks import run_ranks
from tests.runs import losses_by_step, train_on, train_quick

pytestmark = pytest.mark.numbers

adamw_8bit, adamw_bf16 = partial(adamw, moments="8bit"), partial(adamw, moments="bf16")


MAKERS = {
    "adamw": adamw,
    "adamw of torch, unfused": lambda m, lr: torch.optim.AdamW(
        optimizers.param_groups(m, 0.01), lr=lr, betas=(0.9, 0.95), fused=False
    ),
    "adamw_8bit": adamw_8bit,
    "adamw_bf16": adamw_bf16,
    "muon": muon,
}


def model_with_gradients(scale: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64))
    (model(torch.randn(8, 64)).square().sum() * scale).backward()
    return model


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *states)]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_nonfinite_step_changes_nothing(maker: str, where: str) -> None:
    model = model_with_gradients()
    optimizer = MAKERS[maker](model, lr=1e-2)
    finite, nan = torch.tensor(1.0), torch.tensor(math.nan)
    apply_gradients(optimizer, model.parameters(), finite, 1.0)
    before = state_of(model, optimizer)
    gradient = model[2].weight.grad
    assert gradient is not None
    kept = gradient[3, 5].clone()
    if where == "gradient":
        gradient[3, 5] = math.inf
    norm = apply_gradients(optimizer, model.parameters(), nan if where == "loss" else finite, 1.0)
    assert math.isinf(norm) == (where == "gradient")
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(model, optimizer)))
    gradient[3, 5] = kept
    apply_gradients(optimizer, model.parameters(), finite, 1.0)
    assert not torch.equal(before[0], state_of(model, optimizer)[0])


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("max_norm", "scale"), [(1.0, 100.0), (1.0, 1e-6), (0.0, 1.0)], ids=["cut", "small", "never"]
)
def test_clipping_on_the_way_is_clipping_before(maker: str, max_norm: float, scale: float) -> None:
    ours, theirs = model_with_gradients(scale), model_with_gradients(scale)
    norm = apply_gradients(
        MAKERS[maker](ours, lr=1e-2), ours.parameters(), torch.tensor(1.0), max_norm
    )
    want = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or math.inf)
    MAKERS[maker](theirs, lr=1e-2).step()
    torch.testing.assert_close(norm, want)
    for one, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def _sharded_steps(rank: int, world_size: int, maker: str, replicas: int) -> list[Any]:
    """Three steps on shards, hybrid ones with `replicas` > 1 -> whole parameters, norms."""
    model, twin = model_with_gradients(), model_with_gradients()
    shape, names = (replicas, world_size // replicas), ("replicate", "shard")
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    ours, theirs = MAKERS[maker](model, lr=1e-2), MAKERS[maker](twin, lr=1e-2)
    worst = 0.0
    for number in range(3):
        norms = []
        for module, optimizer in ((model, ours), (twin, theirs)):
            torch.manual_seed(number)
            optimizer.zero_grad()
            module(torch.randn(8, 64)).square().sum().backward()
            norms.append(apply_gradients(optimizer, module.parameters(), torch.tensor(1.0), 0.5))
        worst = max(worst, float((norms[0] / norms[1] - 1).abs()))
    whole = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(whole, twin.parameters())))
    return [worst]


@pytest.mark.parametrize(
    ("maker", "replicas"), [("adamw", 1), ("adamw_8bit", 1), ("adamw", 2), ("adamw_bf16", 2)]
)
def test_steps_on_shards_are_those_on_whole_tensors(maker: str, replicas: int) -> None:
    """96 and 64 rows over 4 ranks; norms over hybrid shards count replicas once."""
    worst = max(rank[0] for rank in run_ranks(_sharded_steps, 4, maker, replicas))
    # adamw: ten times what three instruction sets show; a moment of few bits on the edge of two values may go either way
    assert worst < (3e-6 if maker == "adamw" else 1e-3)


def test_codes_are_the_nearest_values() -> None:
    for is_signed in (True, False):
        book = codebook(is_signed, torch.device("cpu"))
        assert len(book.values) == 256
        assert (book.values.diff() > 0).all()
        values = torch.randn(6, 512) if is_signed else torch.rand(6, 512)
        codes, scales = encoded(values, torch.Size([6, 2]), book)
        blocks = values.view(6, 2, 256)
        assert torch.equal(scales, blocks.abs().amax(-1))
        distances = (blocks / scales[..., None]).unsqueeze(-1).sub(book.values).abs()
        nearest = distances.argmin(-1).view(6, 512)
        assert torch.equal(codes.long(), nearest)
        assert (decoded(codes, scales, book) - values).abs().max() < 0.05 * values.abs().max()


@pytest.mark.same_on_every_cpu
def test_blocks_lie_inside_of_rows() -> None:
    shapes = [(128, 4096), (64, 576), (4096,), (64, 100), (8, 256)]
    assert [moments_of(shape, torch.uint8) for shape in shapes] == [
        (torch.uint8, 256),
        (torch.uint8, 64),
        (torch.float32, 0),
        (torch.float32, 0),  # gcd 4
        (torch.float32, 0),  # 2,048 values
    ]
    assert moments_of((64, 100), torch.bfloat16) == (torch.bfloat16, 0)


@pytest.mark.same_on_every_cpu
def test_scales_lie_where_their_weights_do() -> None:
    """Shards of mesh.cpu_offload lie on another device than their mesh; here fake ones, the other way round."""
    with fake_world(MeshShape(1, 2, 1)):
        layout = init_device_mesh("cpu", (2,)), (Shard(0),)
        with FakeTensorMode(), torch.no_grad():
            described = TensorMeta(torch.Size([64, 256]), (256, 1), torch.float32)
            here = torch.empty(32, 256, device="cuda")
            weight = DTensor(here, DTensorSpec(*layout, described), requires_grad=False)
            scales = optimizers._scales_like(weight, 128)
            assert (local(scales).shape, local(scales).device) == ((32, 2), here.device)


def test_scales_are_cut_as_rows_are() -> None:
    """Tensor parallelism cuts rows, too: a checkpoint kept the scales of half of each row."""
    with fake_world(MeshShape(1, 2, 1)):
        mesh = init_device_mesh("cpu", (2,))
        weight = DTensor.from_local(torch.zeros(3, 4, 256), mesh, [Shard(2)], run_check=False)
        scales = optimizers._scales_like(weight, 256)
        assert (scales.shape, local(scales).shape) == ((3, 4, 2), (3, 4, 1))
        half = DTensor.from_local(torch.zeros(64, 128), mesh, [Shard(1)], run_check=False)
        with pytest.raises(
            ConfigError, match=r"of 256 weights to 128, which are not whole blocks of 256: use opt"
        ):
            optimizers.check_blocks(half, torch.uint8)


def trained(maker: Any, dtype: torch.dtype, lr: float, steps: int) -> float:
    """The loss after a task that takes small steps."""
    model = model_with_gradients().to(dtype)
    optimizer = maker(model, lr=lr)
    for number in range(steps):
        torch.manual_seed(number % 8)
        x = torch.randn(16, 64)
        optimizer.zero_grad()
        loss = (model(x.to(dtype)).float() - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("maker", [adamw_8bit, adamw_bf16], ids=["8bit", "bf16"])
def test_small_moments_train_as_fp32_ones_do(maker: Any) -> None:
    assert trained(maker, torch.float32, 3e-3, 60) == pytest.approx(
        trained(adamw, torch.float32, 3e-3, 60), rel=0.05
    )


@pytest.mark.parametrize("maker", ["adamw_8bit", "adamw_bf16", "muon"])
def test_the_state_loads_into_another_optimizer(maker: str) -> None:
    model = model_with_gradients()
    optimizer = MAKERS[maker](model, lr=1e-2)
    optimizer.step()
    twin = copy.deepcopy(model)
    other = MAKERS[maker](twin, lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(state_of(model, optimizer), state_of(twin, other)))


BF16 = ("training.master_weights=bf16", "training.precision=bf16")


KINDS = [
    pytest.param(("optimizer=adamw_8bit",), marks=pytest.mark.slow, id="8bit"),
    pytest.param(("optimizer=adamw_bf16", *BF16), id="bf16", marks=pytest.mark.system),
    pytest.param(("optimizer=muon",), id="muon", marks=pytest.mark.system),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_bit_for_bit_and_on_more_ranks(kind: tuple[str, ...], tmp_path: Path) -> None:
    """Saved on the way, on one process; on two ranks the same run goes on from their shards."""
    options = [*kind, "optimizer.lr=0.01", "training.log_every_steps=1"]
    assert train_quick(tmp_path / "whole", *options)[0] == 0
    assert train_quick(tmp_path / "cut", *options, stop_at=4)[0] == 75
    shutil.copytree(tmp_path / "cut", tmp_path / "wider")
    code, screen = train_quick(tmp_path / "cut", *options)
    assert code == 0, screen
    assert "continues from step_00000004" in screen
    assert losses_by_step(tmp_path / "cut") == losses_by_step(tmp_path / "whole")
    code, screen = train_on(2, tmp_path / "wider", *options, "checkpoint.accept_changes=true")
    assert code == 0, screen
    for step, (loss, _) in losses_by_step(tmp_path / "wider").items():
        assert loss == pytest.approx(
            losses_by_step(tmp_path / "whole")[step][0], rel=2e-2 if "bf16" in str(kind) else 1e-3
        )


def one_step(maker: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of one matrix and one vector: a C++ compiler takes 10 s for each of their graphs."""
    model = model_with_gradients()[0].to(dtype)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.to(dtype)
    optimizer = maker(model, lr=1e-2)
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    states = [f"{i}.{name}" for i, state in enumerate(optimizer.state.values()) for name in state]
    return dict(zip([*names, *states], state_of(model, optimizer), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("maker", "dtype"),
    [(adamw_8bit, torch.float32), (adamw_bf16, torch.bfloat16)],
    ids=["8bit", "bf16"],
)
def test_the_kernel_of_a_gpu_is_one_graph_with_the_same_numbers(
    maker: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU steps by the compiled function; a break in its graph is an error."""
    plain = one_step(maker, dtype)
    torch._dynamo.reset()
    monkeypatch.setattr(optimizers, "update", torch.compile(optimizers.update, fullgraph=True))
    for one, other in zip(plain.values(), one_step(maker, dtype).values()):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("maker", [adamw_8bit, adamw_bf16], ids=["8bit", "bf16"])
def test_a_gpu_has_one_graph_for_matrices_of_all_shapes(
    maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """36 parameters, each with a place of its own, and a rate that changes: a graph for matrices,
    and one for what is smaller, which has other moments and does not decay.
    """
    shapes = [(96, 256), (32, 256), (64, 512), (256, 256), (256,), (2, 48, 256)]
    module = nn.ParameterList(
        [nn.Parameter(torch.randn(s).bfloat16()) for _ in range(6) for s in shapes]
    )
    torch._dynamo.reset()
    strict_graphs()
    monkeypatch.setattr(
        optimizers, "update", torch.compile(optimizers.update, fullgraph=True, backend="eager")
    )
    optimizer, before, counted = maker(module, lr=1e-2), compiled_graphs(), []
    for rate in (1e-2, 5e-3):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        counted.append(compiled_graphs() - before)
    assert counted == [2, 2]


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(
    ("shape", "here", "offsets", "runs"),
    [
        ((), (), (), [0]),
        ((12, 8), (6, 8), (6, 0), [48]),
        ((12, 8), (12, 4), (0, 4), [4, 4, 8]),  # columns 4 to 7: a run for each row
        ((12, 8), (3, 4), (3, 4), [28, 4, 8]),
        ((3, 4, 8), (2, 4, 8), (1, 0, 0), [32]),
        ((3, 4, 8), (3, 2, 8), (0, 2, 0), [16, 16, 32]),  # rows of experts: a run for each expert
        ((3, 4, 8), (3, 4, 2), (0, 0, 6), [6, 2, 8]),
    ],
)
def test_where_the_values_of_a_part_lie(
    shape: tuple[int, ...], here: tuple[int, ...], offsets: tuple[int, ...], runs: list[int]
) -> None:
    assert optimizers.runs_of(shape, here, offsets) == runs


def test_rounding_is_up_or_down_with_the_right_chance() -> None:
    """1 + 1/512 lies a quarter of the way from 1 to 1 + 1/128, the next value of bf16."""
    value = torch.full((100, 1000), 1 + 1 / 512)
    place = torch.tensor([0])
    numbers = torch.tensor([0])
    results = [
        rounded(
            value,
            torch.bfloat16,
            partial(random_bits, place, (100, 1000), seeds_of(numbers, torch.tensor([step]))[0]),
            0,
        )
        for step in (1, 2)
    ]
    for result in results:
        assert result.unique().tolist() == [1.0, 1.0078125]
        assert float(result.float().mean()) == pytest.approx(1 + 1 / 512, abs=5e-5)
    assert float((results[0] == results[1]).float().mean()) == pytest.approx(
        0.75**2 + 0.25**2, abs=0.01
    )
    exact = torch.tensor([1.0, -3.5, 0.0])
    assert torch.equal(
        rounded(
            exact, torch.bfloat16, lambda stream: torch.full((3,), 0xFFFF, dtype=torch.int32), 0
        ).float(),
        exact,
    )
    assert (
        float(
            rounded(-value, torch.bfloat16, lambda stream: torch.zeros((), dtype=torch.int32), 0)[
                0, 0
            ]
        )
        == -1.0
    )


def test_a_part_is_rounded_as_it_is_in_the_whole() -> None:
    step = torch.tensor([7.0, 7.0])
    seeds, of_next = seeds_of(torch.tensor([3, 4]), step)
    whole = random_bits(torch.tensor([0]), (12, 8), seeds, 1)
    # rows 4 to 8, and of them columns 2 to 4: runs of 3 values, 8 apart, from the 34th on
    rows = random_bits(torch.tensor([32]), (40,), seeds, 1)
    assert torch.equal(rows.view(5, 8), whole[4:9])
    part = random_bits(torch.tensor([34, 3, 8]), (15,), seeds, 1)
    assert torch.equal(part.view(5, 3), whole[4:9, 2:5])
    assert whole.unique().numel() > 90
    assert not torch.equal(random_bits(torch.tensor([0]), (12, 8), of_next, 1), whole)
    assert not torch.equal(random_bits(torch.tensor([0]), (12, 8), seeds, 2), whole)


@pytest.mark.same_on_every_cpu
def test_no_index_is_cast_to_32_bits() -> None:
    """inductor chooses the width of an index itself, and drops a cast of one: what is cast must be
    a value, which a bitwise operation makes of it.
    """
    place = torch.tensor([34, 3, 8])
    graph = make_fx(lambda seeds: random_bits(place, (5, 3), seeds, 1))(torch.arange(3).int()).graph
    index_operations = ("arange", "add", "mul", "view", "zeros", "_to_copy")
    casts = 0
    for node in graph.nodes:
        if "_to_copy" not in str(node.target) or node.kwargs.get("dtype") != torch.int32:
            continue
        (source,) = node.all_input_nodes
        casts += 1
        is_index = source.meta["val"].dtype == torch.int64 and any(
            name in str(source.target) for name in index_operations
        )
        assert not is_index, f"{node.name} casts {source.name}, an index"
    assert casts == 1


def test_rounding_by_chance_keeps_what_bf16_rounds_away() -> None:
    """400 steps of 1e-5 on weights of 1, the next value of bf16 1/256 away: AdamW moves each by its rate."""
    ends = {}
    for name, dtype, make in (
        ("fp32", torch.float32, adamw),
        ("nearest", torch.bfloat16, adamw),
        ("stochastic", torch.bfloat16, adamw_bf16),
    ):
        weight = nn.Parameter(torch.ones(64, 64, dtype=dtype))
        module = nn.Module()
        module.weight = weight
        optimizer = make(module, lr=1e-5, weight_decay=0.0)
        for _ in range(400):
            weight.grad = torch.full_like(weight, 0.5)
            optimizer.step()
        ends[name] = weight.detach().float().mean().item()
    assert ends["nearest"] == 1.0  # nothing was learned
    assert ends["stochastic"] == pytest.approx(ends["fp32"], abs=2e-4)  # 4,096 draws


@pytest.mark.parametrize(
    "maker",
    [
        pytest.param(adamw_8bit, marks=pytest.mark.slow, id="8bit"),
        pytest.param(adamw_bf16, marks=pytest.mark.system, id="bf16"),
    ],
)
def test_weights_in_bf16_learn_with_small_steps(maker: Any) -> None:
    """At a rate where rounding to the nearest value learns less than half of what fp32 does."""
    start = trained(adamw, torch.float32, 0.0, 8)
    full = start - trained(adamw, torch.float32, 1e-4, 160)
    nearest = start - trained(adamw, torch.bfloat16, 1e-4, 160)
    ours = start - trained(maker, torch.bfloat16, 1e-4, 160)
    assert nearest < 0.5 * full
    assert ours == pytest.approx(full, rel=0.1)


@pytest.mark.same_on_every_cpu
def test_weights_in_bf16_are_refused_where_they_would_not_learn(tmp_path: Path) -> None:
    for options, sentence in (
        (["optimizer=adamw"], "set optimizer=adamw_bf16 or optimizer=adamw_8bit"),
        (["optimizer=muon"], "set optimizer=adamw_bf16 or optimizer=adamw_8bit"),
        (["optimizer=adamw_bf16", "mesh.strategy=ddp"], "use mesh.strategy=fsdp"),
        (
            ["optimizer=adamw_bf16", "training.precision=fp32"],
            "set training.precision=bf16, not fp32",
        ),
    ):
        with pytest.raises(ConfigError, match=sentence):
            train_quick(tmp_path, *BF16, *options)
