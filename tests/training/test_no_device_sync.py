"""The hot path never reads a value off the device: on a GPU every such read would wait for it.

All tensors stand for ones on the device here: a dispatch mode raises on every operation that reads a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.data.feeding.feed import DeviceFeed, DeviceStep
from automodel_lite.run.nonfinite import StepOutcome
from automodel_lite.telemetry.metrics import StepResult
from automodel_lite.training import counted_feed
from recipes import train_ft
from tests.runs import losses_by_step, train_quick

READS = {
    torch.ops.aten._local_scalar_dense.default: "item",
    torch.ops.aten.nonzero.default: "nonzero",
    torch.ops.aten.is_nonzero.default: "bool",
    torch.ops.aten.equal.default: "equal",
    torch.ops.aten.masked_select.default: "masked_select",
    torch.ops.aten._unique2.default: "unique",
}


class NoReads(TorchDispatchMode):
    """Raises on every operation that a GPU would have to be waited for; host work is let through."""

    is_on = False

    def __enter__(self) -> NoReads:
        NoReads.is_on = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        NoReads.is_on = False
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if HostWork.is_running:
            return func(*args, **(kwargs or {}))
        if func in READS:
            raise AssertionError(f"{READS[func]} of a tensor on the device")
        indices = args[1] if func is torch.ops.aten.index.Tensor else []
        if any(i is not None and i.dtype == torch.bool for i in indices):
            raise AssertionError("a boolean mask as index: its number of rows is read")
        return func(*args, **(kwargs or {}))


class HostWork:
    """Host work may read, and the reference kernel, which reads boundaries that a GPU's kernel takes where they are."""

    is_running = False


@pytest.fixture(autouse=True)
def _no_tolist(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU `tolist` and `numpy` read memory without an operation that the mode could see."""
    for name in ("tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, _reading(name, vars(torch._C.TensorBase)[name]))


def _reading(name: str, original: Any) -> Any:
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert HostWork.is_running or not NoReads.is_on, f"{name} of a tensor on the device"
        return original(tensor, *args, **kwargs)

    return read


@contextmanager
def on_the_host() -> Iterator[None]:
    """Around what works on host tensors in a run on a GPU as well: collating, counting, a finished step's numbers."""
    before, HostWork.is_running = HostWork.is_running, True
    try:
        yield
    finally:
        HostWork.is_running = before


class StrictRecipe(train_ft.TrainFinetuneRecipe):
    """Its steps read nothing off the device, but the numbers of steps before."""

    made: ClassVar[list[StepOutcome]] = []
    read_in_steps: ClassVar[list[int]] = []  # of which step, counted from the one under way

    def step(self, ready: DeviceStep) -> StepResult:
        with NoReads():
            return super().step(ready)


@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw",
        "adamw_8bit",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("adamw_bf16", "muon")),
    ],
)
def test_the_steps_of_the_recipe_read_nothing_off_the_device(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, backward, clipping, the flag of non-finite numbers, the optimizer and the message between the ranks."""
    made, ages = StrictRecipe.made, StrictRecipe.read_in_steps
    made.clear()
    ages.clear()

    def numbers(loss_sum: torch.Tensor, grad_norm: torch.Tensor) -> StepOutcome:
        made.append(StepOutcome(loss_sum, grad_norm))
        return made[-1]

    def read(self: StepOutcome) -> tuple[float, float]:
        if NoReads.is_on:
            ages.append(len(made) - 1 - made.index(self))
        with on_the_host():
            return real_read(self)

    real_read = StepOutcome.read
    monkeypatch.setattr(StepOutcome, "read", read)
    monkeypatch.setattr(train_ft, "StepOutcome", numbers)
    for owner, name in (
        (counted_feed, "count_own"),
        (DeviceFeed, "stage"),
        (ReferenceAttention, "__call__"),
    ):
        monkeypatch.setattr(owner, name, on_the_host()(getattr(owner, name)))
    monkeypatch.setattr(train_ft, "TrainFinetuneRecipe", StrictRecipe)
    options = ["training.max_steps=6", "training.log_every_steps=3", "checkpoint.every_steps=0"]
    assert train_quick(tmp_path, *options, f"optimizer={optimizer}", "optimizer.lr=0.01")[0] == 0
    assert len(losses_by_step(tmp_path)) == 3
    # logged, so settled after the step: 1, 3, 6; read one step later, while the next is under way: 2, 4, 5
    assert ages == [1, 1, 1]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.item(),
        lambda x: x[None].tolist(),
        lambda x: bool(x),
        lambda x: x[None][x[None] > 0],
    ],
    ids=["item", "tolist", "bool", "mask"],
)
def test_the_guard_sees_reads(read: Any) -> None:
    x = torch.tensor(1.0)
    with NoReads(), pytest.raises(AssertionError):
        read(x)
