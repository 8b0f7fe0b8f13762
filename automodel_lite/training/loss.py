"""The loss: a SUM over the tokens that carry a label, in fp32; the recipe divides by the label tokens of the whole
step.

T tokens of the stream, R rows that carry a label, C model dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_lite.thd import IGNORE_INDEX


@dataclass(frozen=True)
class CrossEntropy:
    """The model's own output head on the labelled rows, then cross-entropy: right for any head; holds [R, V] logits."""

    def __call__(self, logits_RV: Tensor, labels_R: Tensor) -> Tensor:
        return F.cross_entropy(logits_RV.float(), labels_R, reduction="sum", ignore_index=IGNORE_INDEX)


@dataclass(frozen=True)
class FusedLinearCrossEntropy:
    """Head and cross-entropy in one, a chunk of rows at a time: never an [R, V] tensor (see `linear_cross_entropy`)."""

    chunk_tokens: int = 512  # rows of logits that exist at one time

    def __call__(self, hidden_RC: Tensor, weight_VC: Tensor, labels_R: Tensor, softcap: float | None) -> Tensor:
        return linear_cross_entropy(hidden_RC, weight_VC, labels_R, self.chunk_tokens, softcap)


Loss = CrossEntropy | FusedLinearCrossEntropy


def linear_cross_entropy(
    hidden_RC: Tensor, weight_VC: Tensor, labels_R: Tensor, chunk_tokens: int = 512, softcap: float | None = None
) -> Tensor:
    """Sum over rows of cross-entropy(softcap(hidden @ weight.T), label), fp32 scalar.

    Both gradients are made in the forward pass, chunk by chunk, as Liger's kernel does (arXiv:2410.10989), so that the
    backward pass needs no logits. Rows labelled -100 must have been left out. No rows: zero, with zero gradients.
    """
    with torch.autocast(hidden_RC.device.type, enabled=False):
        weight_VC = weight_VC.to(hidden_RC.dtype)  # fp32 masters under autocast
        total: Tensor = _LinearCrossEntropy.apply(hidden_RC, weight_VC, labels_R, chunk_tokens, softcap)
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RC: Tensor, weight_VC: Tensor, labels_R: Tensor, chunk_tokens: int, softcap: float | None
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_RC) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VC, dtype=torch.float32) if needs_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden_RC.device)
        for start in range(0, hidden_RC.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            loss, grad_logits = _chunk_loss(
                hidden_RC[rows] @ weight_VC.t(), labels_R[rows], softcap, needs_hidden or needs_weight
            )
            total += loss
            if grad_hidden is not None:
                torch.mm(grad_logits, weight_VC, out=grad_hidden[rows])
            if grad_weight is not None:
                _accumulate(grad_weight, grad_logits, hidden_RC[rows])
        ctx.save_for_backward(grad_hidden, grad_weight if grad_weight is None else grad_weight.to(weight_VC.dtype))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors  # made for this call alone: scaled in place
        return (
            None if grad_hidden is None else grad_hidden.mul_(grad),
            None if grad_weight is None else grad_weight.mul_(grad),
            None,
            None,
            None,
        )


def _chunk_loss(logits: Tensor, labels: Tensor, softcap: float | None, needs_grad: bool) -> tuple[Tensor, Tensor]:
    """Loss sum of a chunk and d loss / d (uncapped logits) in the logits' dtype."""
    dtype = logits.dtype
    logits = logits.float()
    if softcap is not None:
        logits = torch.tanh(logits.div_(softcap)).mul_(softcap)
    log_norm = logits.logsumexp(1, keepdim=True)
    loss = (log_norm - logits.gather(1, labels[:, None])).sum()
    if not needs_grad:
        return loss, logits
    slope = None if softcap is None else 1 - (logits / softcap) ** 2
    grad = logits.sub_(log_norm).exp_()
    grad.scatter_add_(1, labels[:, None], torch.full_like(log_norm, -1.0))
    return loss, (grad if slope is None else grad.mul_(slope)).to(dtype)


def _accumulate(total_VC: Tensor, grad_RV: Tensor, hidden_RC: Tensor) -> None:
    if grad_RV.dtype == torch.float32:
        total_VC.addmm_(grad_RV.t(), hidden_RC)
    else:
        total_VC += grad_RV.t() @ hidden_RC
