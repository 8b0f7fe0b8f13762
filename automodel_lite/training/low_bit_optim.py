"""AdamW whose two moments are kept in 8 bits (torchao): 2 bytes a weight instead of 8."""

from __future__ import annotations

from torch import nn
from torchao.optim import AdamW8bit

from automodel_lite.config.rules import Positive
from automodel_lite.training.optimizers import Betas, Eps, Rate, param_groups


def adamw_8bit(
    model: nn.Module,
    lr: Rate,
    betas: Betas | None = None,
    eps: Eps = 1e-8,
    weight_decay: Rate = 0.01,
    block_size: Positive = 256,
) -> AdamW8bit:
    """Dettmers et al., 2022 (arXiv:2110.02861); `block_size` values share one scale. Small tensors stay in fp32."""
    beta1, beta2 = betas or (0.9, 0.999)
    groups = param_groups(model, weight_decay)
    return AdamW8bit(groups, lr=lr, betas=(beta1, beta2), eps=eps, block_size=block_size)
