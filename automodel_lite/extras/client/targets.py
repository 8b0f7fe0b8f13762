"""Several targets of a position, each with a weight: what a distribution over tokens, or a function
of several log-probabilities, is trained on.

    target_ids      [T, K]  -1 where a position has fewer
    target_weights  [T, K]  0 there

Legend: R rows that carry a label, K targets of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from automodel_lite.columns import IGNORE_INDEX, Column
from automodel_lite.models.loss import Loss, LossInputs, LossOutput
from automodel_lite.tensors import at_least_fp32

IDS = "target_ids"
WEIGHTS = "target_weights"
NO_TARGET = -1
CustomLoss = Callable[[list[Tensor]], Tensor | tuple[Tensor, Mapping[str, float]]]


class WeightedTargets(Loss):
    """The sum of -weight * log-probability over the targets of each position; it counts labels."""

    own_columns: ClassVar[Mapping[str, Column]] = {
        IDS: Column("int32", "int64", NO_TARGET),
        WEIGHTS: Column("float32", "float32", 0.0),
    }
    required = frozenset({IDS})

    def __call__(self, inputs: LossInputs) -> LossOutput:
        ids_RK = inputs.columns[IDS]
        log_probs_RK = inputs.rows(target_log_probs, inputs.labels_R, ids_RK)
        # for what records them
        vars(inputs)["target_log_probs"] = log_probs_RK.detach()
        weights_RK = inputs.columns.get(WEIGHTS)
        if weights_RK is None:
            weights_RK = (ids_RK != NO_TARGET).to(log_probs_RK.dtype)
        return LossOutput(-(weights_RK * log_probs_RK).sum(), {})


def target_log_probs(logits: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
    """Returns those of the targets, [r, K], of logits [r, V]; 0 where there is none."""
    log_p = torch.log_softmax(at_least_fp32(logits), -1)
    return torch.where(ids == NO_TARGET, 0.0, log_p.gather(-1, ids.clamp(min=0)))


def with_labels(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row with labels where it has targets; those that it brings must agree."""
    if IDS not in row:
        return dict(row)
    ids = np.asarray(row[IDS])
    if ids.ndim != 2:
        raise ValueError(f"{IDS} must be [positions, targets], and has {ids.ndim} dimensions.")
    # any target shows that the position is trained: the loss reads them all
    labels = np.where((ids != NO_TARGET).any(1), ids.max(1), IGNORE_INDEX)
    return {**row, "labels": labels.tolist()}


def weights_of_gradient(
    rows: Sequence[Mapping[str, Any]], log_probs: Sequence[np.ndarray], loss: CustomLoss
) -> tuple[list[dict[str, Any]], float, dict[str, float]]:
    """Returns rows whose weighted log-probabilities have the gradient of `loss`, its value, and
    what it reports.

    The gradient of f(log p) is that of the sum of (df / d log p) * log p, with the factors held.
    """
    leaves = [torch.from_numpy(x.astype(np.float32)).requires_grad_() for x in log_probs]
    found = loss(leaves)
    value, parts = found if isinstance(found, tuple) else (found, {})
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise TypeError(
            "a custom loss returns a scalar tensor that follows from the log-probabilities it is "
            "given, or (scalar, parts)."
        )
    gradients = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    weighted = []
    for row, gradient, leaf in zip(rows, gradients, leaves):
        own = torch.zeros_like(leaf) if gradient is None else gradient
        column = WEIGHTS if IDS in row else "loss_weights"
        weighted.append({**row, column: (-own).numpy()})
    return weighted, value.item(), {name: float(x) for name, x in parts.items()}
