"""From torch 2.15 on, packs meet cuDNN only where it is asked for, and where both boundaries are one object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch.nn.attention import SDPBackend, varlen

from automodel_lite.parts.kernels.varlen import VarlenAttention
from automodel_lite.thd import AttentionOptions, Segments
from tests.gpu_paths.fake.jobs import COMPILED, EAGER, only_on_fake_gpu, train

pytestmark = [
    *only_on_fake_gpu,
    pytest.mark.skipif(
        Version(torch.__version__) < Version("2.15"), reason="before 2.15 torch does not choose"
    ),
]
FLASH = SDPBackend.FLASH_ATTENTION
CUDNN = SDPBackend.CUDNN_ATTENTION
REAL = ExitStack()  # open while torch's own operations run
ASKED = ("attention=varlen", "attention.implementation=cuDNN")
WINDOW = ("model.config.model_type=mistral", "model.config.sliding_window=32")


@pytest.fixture
def chosen() -> Iterator[set[SDPBackend]]:
    """What torch's operations are told to take, forward and backward; neither is run."""
    found: set[SDPBackend] = set()

    def note(q: Tensor, k: Tensor, args: tuple[Any, ...]) -> None:
        # the tree of the isolation probe has more keys than queries: its boundaries are two objects
        if len(q) == len(k):
            # the last of their arguments, left out where it is the default
            found.add(SDPBackend(args[14]) if len(args) > 14 else FLASH)

    def forward(*args: Any) -> Any:
        q, k, *_ = args
        note(q, k, args)
        lse = torch.empty(q.shape[1], q.shape[0], device=q.device)
        return torch.empty_like(q), lse, torch.empty(2, dtype=torch.uint64, device=q.device)

    def backward(*args: Any) -> Any:
        _, q, k, *_ = args
        note(q, k, args)
        return tuple(torch.empty_like(x) for x in args[1:4])

    REAL.close()
    kernels = {varlen._varlen_attn: forward, varlen._varlen_attn_backward: backward}
    for operation, kernel in kernels.items():
        operation.register_kernel("cuda")(kernel)
    try:
        yield found
    finally:
        for operation in kernels:
            REAL.enter_context(operation.set_kernel_enabled("cuda", False))
        torch.backends.cuda.enable_cudnn_sdp(False)


@pytest.mark.parametrize("how", [EAGER, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("overrides", "backend"),
    [((), FLASH), (ASKED, CUDNN), ((*ASKED, *WINDOW), FLASH)],
    ids=["default", "asked for", "window"],
)
def test_what_a_pack_meets(
    overrides: tuple[str, ...],
    backend: SDPBackend,
    how: str,
    tmp_path: Path,
    chosen: set[SDPBackend],
) -> None:
    train(tmp_path / "run", how, *overrides, "training.val_every_steps=0")
    assert chosen == {backend}


def test_other_boundaries_of_the_keys_take_flash_attention(chosen: set[SDPBackend]) -> None:
    """Those of context-parallel ranks: cuDNN would align queries to the first key."""
    kernel = VarlenAttention("cuDNN")
    q, k, v = (torch.empty(256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    cu = torch.tensor([0, 200, 256], dtype=torch.int32).cuda()
    kernel(q, k, v, Segments(cu, cu, 200, 200), AttentionOptions(0.125))
    assert chosen == {CUDNN}
    chosen.clear()
    kernel(q, k, v, Segments(cu, cu.clone(), 200, 200), AttentionOptions(0.125))
    assert chosen == {FLASH}
