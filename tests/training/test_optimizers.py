"""Steps that the device may skip, clipped on the way, over each rank's own shards; moments of 8 bits."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from automodel_lite.training.low_bit_optim import adamw_8bit, block_of, codebook, decoded, encoded
from automodel_lite.training.optimizers import adamw, apply_gradients
from tests.ranks import run_ranks
from tests.run.small_run import losses, train, train_on

MAKERS = {"adamw": adamw, "adamw unfused": lambda m, lr: adamw(m, lr, fused=False), "adamw_8bit": adamw_8bit}


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
@pytest.mark.parametrize(("max_norm", "scale"), [(1.0, 100.0), (1.0, 1e-6), (0.0, 1.0)], ids=["cut", "small", "never"])
def test_clipping_on_the_way_is_clipping_before(maker: str, max_norm: float, scale: float) -> None:
    ours, theirs = model_with_gradients(scale), model_with_gradients(scale)
    norm = apply_gradients(MAKERS[maker](ours, lr=1e-2), ours.parameters(), torch.tensor(1.0), max_norm)
    want = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or math.inf)
    MAKERS[maker](theirs, lr=1e-2).step()
    torch.testing.assert_close(norm, want)
    for one, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------------------------------------------- shards
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


@pytest.mark.parametrize(("maker", "replicas"), [("adamw", 1), ("adamw_8bit", 1), ("adamw", 2)])
def test_steps_on_shards_are_those_on_whole_tensors(maker: str, replicas: int) -> None:
    """96 and 64 rows over 4 ranks; norms over hybrid shards count replicas once."""
    worst = max(rank[0] for rank in run_ranks(_sharded_steps, 4, maker, replicas))
    assert worst < (2e-6 if maker == "adamw" else 1e-3)  # a moment on the edge of two codes may go either way


# ------------------------------------------------------------------------------------------------------------- 8 bits
def test_codes_are_the_nearest_values() -> None:
    for is_signed in (True, False):
        book = codebook(is_signed, torch.device("cpu"))
        assert len(book) == 256
        assert (book.diff() > 0).all()
        values = torch.randn(6, 512) if is_signed else torch.rand(6, 512)
        codes, scales = encoded(values, torch.Size([6, 2]), book)
        blocks = values.view(6, 2, 256)
        assert torch.equal(scales, blocks.abs().amax(-1))
        nearest = (blocks / scales[..., None]).unsqueeze(-1).sub(book).abs().argmin(-1).view(6, 512)
        assert torch.equal(codes.long(), nearest)
        assert (decoded(codes, scales, book) - values).abs().max() < 0.05 * values.abs().max()


def test_blocks_lie_inside_of_rows() -> None:
    assert [block_of(shape, 256) for shape in [(128, 4096), (64, 576), (4096,), (64, 100), (8, 256)]] == [
        256,
        64,
        0,
        0,  # gcd 4
        0,  # 2,048 values
    ]


def test_8_bit_moments_train_as_fp32_ones_do() -> None:
    eight, full = model_with_gradients(), model_with_gradients()
    makers = {"eight": (eight, adamw_8bit(eight, lr=3e-3)), "full": (full, adamw(full, lr=3e-3))}
    ends = {}
    for name, (model, optimizer) in makers.items():
        for number in range(60):
            torch.manual_seed(number % 8)
            x = torch.randn(16, 64)
            optimizer.zero_grad()
            loss = (model(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
        ends[name] = float(loss.detach())
    assert ends["eight"] == pytest.approx(ends["full"], rel=0.05)


def test_the_state_loads_into_another_optimizer() -> None:
    model = model_with_gradients()
    optimizer = adamw_8bit(model, lr=1e-2)
    optimizer.step()
    twin = copy.deepcopy(model)
    other = adamw_8bit(twin, lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(state_of(model, optimizer), state_of(twin, other)))


def test_a_run_with_8_bit_moments_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Saved on the way, on one process; on two ranks the same run goes on from their shards."""
    options = ["optimizer=adamw_8bit", "optimizer.lr=0.01", "training.log_every_steps=1"]
    assert train(tmp_path / "whole", *options)[0] == 0
    assert train(tmp_path / "cut", *options, term_at=4)[0] == 75
    code, screen = train(tmp_path / "cut", *options)
    assert code == 0, screen
    assert "continues from step_00000004" in screen
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert train(tmp_path / "wider", *options, term_at=4)[0] == 75
    code, screen = train_on(2, tmp_path / "wider", *options, "checkpoint.accept_changes=true")
    assert code == 0, screen
    for step, (loss, _) in losses(tmp_path / "wider").items():
        assert loss == pytest.approx(losses(tmp_path / "whole")[step][0], rel=1e-3)
