"""The average of the weights is torch's AveragedModel, is saved and loaded like a moment, and is what is exported."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.parts.optimizers.adamw import adamw
from automodel_lite.training.ema import WeightAverage
from recipes import export_hf
from tests.runs import losses_by_step, train_on, train_quick

WITH_AVERAGE = ["training.ema_decay=0.8", "checkpoint.export_hf=true", "training.log_every_steps=1"]


def stepped(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, WeightAverage, AveragedModel]:
    """A model after five steps, its average, and torch's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64)).to(dtype)
    optimizer = (
        adamw(model, lr=1e-2) if dtype == torch.float32 else adamw(model, lr=1e-2, moments="bf16")
    )
    average = WeightAverage(optimizer, 0.9)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 64, dtype=dtype)).square().sum().backward()
        optimizer.step()
        theirs.update_parameters(model)
    return model, average, theirs


def parallel(model: nn.Module) -> ParallelModel:
    return ParallelModel(model, model, 1, torch.float32)  # type: ignore[arg-type]


def test_the_average_is_torchs() -> None:
    model, average, theirs = stepped()
    assert not torch.equal(model[0].weight, theirs.module[0].weight)
    with average.applied(parallel(model)):
        for ours, want in zip(model.parameters(), theirs.module.parameters()):
            assert torch.equal(ours, want)


@pytest.fixture
def weights_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters pose as a GPU's: a copy that does not wait is there when an event after it is waited for."""
    under_way: list[Callable[[], object]] = []
    copy_now, empty = torch.Tensor.copy_, torch.empty

    class Event:
        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            for arrive in under_way:
                arrive()
            under_way.clear()

    def copy(
        target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        if not non_blocking:
            return copy_now(target, source)
        under_way.append(partial(copy_now, target, source.clone()))
        return target

    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options)
    )
    monkeypatch.setattr(torch.Tensor, "copy_", copy)


@pytest.mark.usefixtures("weights_on_a_gpu")
def test_the_average_of_a_gpu_is_one_step_behind_until_used() -> None:
    model, average, theirs = stepped()
    behind = [state["ema"].clone() for state in average.optimizer.state.values()]
    with average.applied(parallel(model)):
        for ours, want, before in zip(model.parameters(), theirs.module.parameters(), behind):
            assert torch.equal(ours, want)
            assert not torch.equal(ours, before)


def test_a_model_has_its_own_weights_again() -> None:
    model, average, _ = stepped(torch.bfloat16)
    before = [p.detach().clone() for p in model.parameters()]
    averages = [state["ema"].clone() for state in average.optimizer.state.values()]
    with average.applied(parallel(model)):
        assert not torch.equal(model[0].weight, before[0])
    assert all(torch.equal(p, own) for p, own in zip(model.parameters(), before))
    kept = [state["ema"] for state in average.optimizer.state.values()]
    assert all(torch.equal(one, other) for one, other in zip(kept, averages))
    assert kept[0].dtype == torch.float32


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.system
def test_a_run_averages_resumes_and_exports(tmp_path: Path) -> None:
    """The export at the end, that of the last checkpoint, and those of runs in two parts, the second on two ranks."""
    whole = tmp_path / "whole"
    code, screen = train_quick(whole, *WITH_AVERAGE)
    assert code == 0, screen
    assert "of the weights of about 5 steps (decay 0.8): validated, sampled and exported" in screen
    assert (
        train_quick(tmp_path / "plain", "checkpoint.export_hf=true", "training.log_every_steps=1")[
            0
        ]
        == 0
    )
    # training itself is not averaged
    assert losses_by_step(tmp_path / "plain") == losses_by_step(whole)
    averaged, last = weights_of(whole / "hf"), weights_of(tmp_path / "plain/hf")
    assert max(float((averaged[name] - last[name]).abs().max()) for name in last) > 1e-3
    assert export_hf.main([str(whole), "--to", str(tmp_path / "later")]) == 0
    later = weights_of(tmp_path / "later")
    assert all(torch.equal(later[name], averaged[name]) for name in averaged)
    assert train_quick(tmp_path / "cut", *WITH_AVERAGE, stop_at=4)[0] == 75
    shutil.copytree(tmp_path / "cut", tmp_path / "wider")
    assert train_quick(tmp_path / "cut", *WITH_AVERAGE)[0] == 0
    again = weights_of(tmp_path / "cut/hf")
    assert all(torch.equal(again[name], averaged[name]) for name in averaged)
    code, screen = train_on(2, tmp_path / "wider", *WITH_AVERAGE, "checkpoint.accept_changes=true")
    assert code == 0, screen
    wider = {}
    for file in (tmp_path / "wider/hf").glob("*.safetensors"):
        wider |= load_file(file)
    assert max(float((wider[name] - averaged[name]).abs().max()) for name in averaged) < 1e-4


@pytest.mark.slow
def test_validation_is_of_the_average(tmp_path: Path) -> None:
    """And the steps after it are those of a run without validation: its weights came back, on shards too."""
    import json

    def validations(folder: Path) -> list[float]:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [value for row in rows for key, value in row.items() if key.startswith("val_loss/")]

    options = ["training.log_every_steps=1", "training.val_every_steps=2"]
    assert train_on(2, tmp_path / "averaged", *options, "training.ema_decay=0.8")[0] == 0
    assert train_on(2, tmp_path / "plain", *options)[0] == 0
    assert losses_by_step(tmp_path / "averaged") == losses_by_step(tmp_path / "plain")
    averaged, plain = validations(tmp_path / "averaged"), validations(tmp_path / "plain")
    assert len(averaged) == len(plain) > 0
    # the loss falls, and the average lags behind
    assert all(one > other for one, other in zip(averaged, plain))
