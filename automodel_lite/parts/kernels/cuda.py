"""What the kernels of GPUs have in common."""

from __future__ import annotations

import torch

from automodel_lite.attention.kernel import AttentionKernel, refuse
from automodel_lite.attention.spec import AttentionSpec


def require_cuda(kernel: AttentionKernel, spec: AttentionSpec, half: bool = True) -> None:
    """Raises ConfigError off CUDA and, with `half`, outside fp16 and bf16."""
    if spec.device.type != "cuda":
        raise refuse(
            kernel, f"device={spec.device}", "it runs on CUDA only, use attention=reference"
        )
    if half and spec.dtype not in (torch.float16, torch.bfloat16):
        cure = "set training.precision=bf16, or use attention=flex or attention=reference"
        raise refuse(kernel, f"dtype={spec.dtype}", cure)
