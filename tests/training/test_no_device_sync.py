"""The hot path never reads a value off the device: on a GPU every such read would wait for it.

All tensors stand for ones on the device here: a dispatch mode raises on every operation that reads a value.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_lite.attention.adapter import install
from automodel_lite.attention.reference import ReferenceAttention
from automodel_lite.models.loss import CrossEntropy, FusedLinearCrossEntropy, Loss, LossModel
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.training.optimizers import adamw, clip_gradients
from tests.models.test_layers import pack_of, small_model

READS = {
    torch.ops.aten._local_scalar_dense.default: "item",
    torch.ops.aten.nonzero.default: "nonzero",
    torch.ops.aten.is_nonzero.default: "bool",
    torch.ops.aten.equal.default: "equal",
    torch.ops.aten.masked_select.default: "masked_select",
    torch.ops.aten._unique2.default: "unique",
}


class NoReads(TorchDispatchMode):
    """Raises on every operation that a GPU would have to be waited for; attention on the CPU is let through."""

    is_on = False

    def __enter__(self) -> NoReads:
        NoReads.is_on = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        NoReads.is_on = False
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and not ReadingKernel.is_running:
            raise AssertionError(f"{READS[func]} of a tensor on the device")
        indices = args[1] if func is torch.ops.aten.index.Tensor else []
        if any(i is not None and i.dtype == torch.bool for i in indices):
            raise AssertionError("a boolean mask as index: its number of rows is read")
        return func(*args, **(kwargs or {}))


class ReadingKernel(ReferenceAttention):
    """The reference kernel reads the boundaries; kernels on a GPU take them where they are."""

    is_running = False

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        ReadingKernel.is_running = True
        try:
            return super().__call__(*args, **kwargs)
        finally:
            ReadingKernel.is_running = False


@pytest.fixture(autouse=True)
def _no_tolist(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU `tolist` and `numpy` read memory without an operation that the mode could see."""
    for name in ("tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, _reading(name, vars(torch._C.TensorBase)[name]))


def _reading(name: str, original: Any) -> Any:
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert ReadingKernel.is_running or not NoReads.is_on, f"{name} of a tensor on the device"
        return original(tensor, *args, **kwargs)

    return read


@pytest.mark.parametrize("loss", [CrossEntropy(), FusedLinearCrossEntropy()], ids=["plain", "fused"])
def test_a_step_reads_nothing_off_the_device(loss: Loss) -> None:
    model = small_model()
    install(model.lm, ReadingKernel())
    model = LossModel(model.lm, loss)
    parallel = ParallelModel(model, model, 1, torch.float32, autocasts=False)
    optimizer = adamw(model, lr=1e-3)
    batches = [pack_of(20, 17, 11), pack_of(48)]
    loss_sum = torch.zeros(())
    with NoReads():
        for batch in batches:
            part = parallel(batch)
            (part / 96).backward()
            loss_sum += part.detach()
        clip_gradients(parallel.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "read",
    [lambda x: x.item(), lambda x: x[None].tolist(), lambda x: bool(x), lambda x: x[None][x[None] > 0]],
    ids=["item", "tolist", "bool", "mask"],
)
def test_the_guard_sees_reads(read: Any) -> None:
    x = torch.tensor(1.0)
    with NoReads(), pytest.raises(AssertionError):
        read(x)
