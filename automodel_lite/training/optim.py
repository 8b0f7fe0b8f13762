"""Optimizers, and which parameters decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def adamw(
    model: nn.Module,
    lr: float,
    betas: list[float] | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    fused: bool = True,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter, 2019) over `param_groups`; fused = one kernel for all parameters."""
    beta1, beta2 = betas or (0.9, 0.999)
    return torch.optim.AdamW(param_groups(model, weight_decay), lr=lr, betas=(beta1, beta2), eps=eps, fused=fused)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices decay, vectors (norms, biases, sinks) do not. Frozen parameters are left out.

    Raises ValueError when nothing is trainable.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("no parameter of the model is trainable.")
    decay = [p for p in trainable if p.ndim >= 2]
    keep = [p for p in trainable if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": keep, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scales all gradients so that their norm over all ranks is at most max_norm (0 = never); the norm before that."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm or float("inf"))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
