"""Liger's Triton kernel for head and loss in one (the package liger-kernel, CUDA)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
from torch import Tensor

from automodel_lite.models.fused_head import in_compute_dtype
from automodel_lite.models.loss import LossInputs, LossOutput, PlainLoss
from automodel_lite.thd import IGNORE_INDEX


@dataclass(frozen=True)
class LigerLinearCrossEntropy(PlainLoss):
    """The same sum as `FusedLinearCrossEntropy`; the gradient of the head is accumulated in fp32.

    Its kernel reads the number of labels off the device, once a micro-batch (liger-kernel 0.6.2 to 0.8.5): the host
    waits there, which `FusedLinearCrossEntropy` never does.
    """

    columns = frozenset()  # its kernel has no weights

    def __call__(self, inputs: LossInputs) -> LossOutput:
        assert inputs.head.weight_VC is not None
        hidden_RC, weight_VC = in_compute_dtype(inputs.head.rows, inputs.head.weight_VC)
        if not len(inputs.labels_R):  # the kernel's grid would be empty
            return LossOutput(hidden_RC.float().sum() + weight_VC.float().sum() * 0, {})
        kernel = LigerFusedLinearCrossEntropyLoss(
            ignore_index=IGNORE_INDEX, reduction="sum", softcap=inputs.head.softcap, accum_dtype=torch.float32
        )
        with torch.autocast(hidden_RC.device.type, enabled=False):
            loss: Tensor = kernel(weight_VC, hidden_RC, inputs.labels_R)
        return LossOutput(loss.float(), {})
