"""Liger's Triton kernel, run by Triton's interpreter on the CPU, against our own fused loss."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPT = """
import torch
from automodel_lite.models.liger import LigerLinearCrossEntropy
from automodel_lite.models.loss import FusedLinearCrossEntropy, Head, LossInputs

def run(loss, rows, hidden, vocabulary, dtype):
    g = torch.Generator().manual_seed(0)
    h = torch.randn(rows, hidden, generator=g).to(dtype).requires_grad_()
    w = (torch.randn(vocabulary, hidden, generator=g) * 0.1).to(dtype).requires_grad_()
    y = torch.randint(0, vocabulary, (rows,), generator=g)
    value = loss(LossInputs(Head(h, w), y)).sum
    (value * 0.01).backward()
    return value.detach(), h.grad, w.grad

for rows, hidden, vocabulary, dtype in [
    (37, 32, 97, torch.float32), (1, 32, 97, torch.float32), (0, 32, 97, torch.float32), (64, 16, 130, torch.bfloat16)
]:
    got = run(LigerLinearCrossEntropy(), rows, hidden, vocabulary, dtype)
    want = run(FusedLinearCrossEntropy(16), rows, hidden, vocabulary, dtype)
    for one, other in zip(got, want):
        limits = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 2e-3}
        torch.testing.assert_close(one, other, **limits)
print("equal")
"""


@pytest.mark.skipif(find_spec("liger_kernel") is None or find_spec("triton") is None, reason="liger-kernel, triton")
def test_liger_is_our_own_loss() -> None:
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.endswith("equal\n"), done.stdout + done.stderr[-2000:]
