"""Liger's Triton kernel for head and loss in one (the package liger-kernel, CUDA)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
from torch import Tensor

from automodel_lite.models.loss import LinearCrossEntropy, LossShape, in_compute_dtype
from automodel_lite.thd import IGNORE_INDEX


@dataclass(frozen=True)
class LigerLinearCrossEntropy(LinearCrossEntropy):
    """The same sum as `FusedLinearCrossEntropy`; the gradient of the head is accumulated in fp32.

    Its kernel reads the number of labels off the device, once a micro-batch (liger-kernel 0.6.2 to 0.8.5): the host
    waits there, which `FusedLinearCrossEntropy` never does.
    """

    def __call__(
        self,
        hidden_RC: Tensor,
        weight_VC: Tensor,
        labels_R: Tensor,
        softcap: float | None,
        weights_R: Tensor | None = None,
    ) -> Tensor:
        assert weights_R is None  # its kernel has none
        if not len(labels_R):  # the kernel's grid would be empty
            return hidden_RC.float().sum() + weight_VC.float().sum() * 0
        kernel = LigerFusedLinearCrossEntropyLoss(
            ignore_index=IGNORE_INDEX, reduction="sum", softcap=softcap, accum_dtype=torch.float32
        )
        hidden_RC, weight_VC = in_compute_dtype(hidden_RC, weight_VC)
        with torch.autocast(hidden_RC.device.type, enabled=False):
            loss: Tensor = kernel(weight_VC, hidden_RC, labels_R)
        return loss.float()

    def logits_bytes(self, shape: LossShape) -> float:
        """The gradient takes the place of the logits; a chunk's share of the head's gradient is made apart."""
        rows = rows_at_once(shape.num_tokens, shape.vocab_size, shape.hidden_size)
        return rows * shape.vocab_size * shape.compute_bytes + 2 * shape.head_gradient_bytes


def rows_at_once(num_tokens: float, vocab_size: int, hidden_size: int) -> int:
    """Rows of logits that the kernel has at one time: about as much memory as its input (read in the source of
    liger-kernel 0.6.4 and 0.8.5).
    """
    least = math.ceil(num_tokens / math.ceil(vocab_size / hidden_size))
    return int(min(num_tokens, 2 ** math.ceil(math.log2(max(least, 1)))))
