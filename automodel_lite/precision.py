"""The precision that sums and logits are kept in: fp32, or that of the model where it is wider.

A model in fp64 then has a loss and gradients in fp64, in which exactness can be judged.
"""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """Returns `x` itself where it is fp32 or fp64, else in fp32."""
    return x.to(wide_dtype(x.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns fp64 for fp64, else fp32."""
    return torch.promote_types(dtype, torch.float32)
