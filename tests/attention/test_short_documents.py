"""Short documents in bf16 on a CPU are attended to in fp32: nearer to the truth than bf16, gradients too."""

import pytest
import torch
from torch import Tensor

from automodel_lite.attention import kernel as reference
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.thd import AttentionOptions, Segments

pytestmark = pytest.mark.numbers


def attended(dtype: torch.dtype, num_kv_heads: int) -> list[Tensor]:
    """Output and gradients of q, k and v, fp32, of documents of 150, 1 and 40 tokens."""
    generator = torch.Generator().manual_seed(0)
    heads = (8, num_kv_heads, num_kv_heads)
    q, k, v = (
        torch.randn(191, h, 32, generator=generator).to(dtype).requires_grad_() for h in heads
    )
    cu = torch.tensor([0, 150, 151, 191], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = ReferenceAttention()(q, k, v, Segments(cu, cu, 150, 150), AttentionOptions(32**-0.5))
    assert out.dtype == dtype
    out.float().square().sum().backward()
    return [t.float().detach() for t in (out, *(x.grad for x in (q, k, v) if x.grad is not None))]


def off(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("num_kv_heads", [8, 2])
def test_fp32_inside_is_no_further_from_the_truth(
    monkeypatch: pytest.MonkeyPatch, num_kv_heads: int
) -> None:
    truth = attended(torch.float32, num_kv_heads)
    fast = off(attended(torch.bfloat16, num_kv_heads), truth)
    monkeypatch.setattr(reference, "SHORT_TOKENS", 0)
    slow = off(attended(torch.bfloat16, num_kv_heads), truth)
    assert fast != slow  # two ways indeed
    assert len(fast) == 4
    for ours, plain in zip(fast, slow, strict=True):
        assert ours <= 1.5 * plain
        assert ours < 3e-2
