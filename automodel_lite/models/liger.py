"""Liger's Triton kernel for head and loss in one (the package liger-kernel, CUDA)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
from torch import Tensor

from automodel_lite.models.fused_head import in_compute_dtype
from automodel_lite.models.loss import LossInputs, LossOutput, LossShape, PlainLoss
from automodel_lite.thd import IGNORE_INDEX


@dataclass(frozen=True)
class LigerLinearCrossEntropy(PlainLoss):
    """The same sum as `FusedLinearCrossEntropy`; the gradient of the head is accumulated in fp32.

    Its kernel reads the number of labels off the device, once a micro-batch (liger-kernel 0.6.2 to 0.8.5): the host
    waits there, which `FusedLinearCrossEntropy` never does.
    """

    columns = frozenset()  # its kernel has no weights

    def __call__(self, inputs: LossInputs) -> LossOutput:
        hidden_RC, weight_VC = inputs.head.hidden_RC, inputs.head.weight_VC
        assert hidden_RC is not None
        assert weight_VC is not None
        if not len(inputs.labels_R):  # the kernel's grid would be empty
            return LossOutput(hidden_RC.float().sum() + weight_VC.float().sum() * 0, {})
        kernel = LigerFusedLinearCrossEntropyLoss(
            ignore_index=IGNORE_INDEX, reduction="sum", softcap=inputs.head.softcap, accum_dtype=torch.float32
        )
        hidden_RC, weight_VC = in_compute_dtype(hidden_RC, weight_VC)
        with torch.autocast(hidden_RC.device.type, enabled=False):
            loss: Tensor = kernel(weight_VC, hidden_RC, inputs.labels_R)
        return LossOutput(loss.float(), {})

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
