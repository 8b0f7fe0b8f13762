"""A data format and a loss of one's own; their names stand in conf/kd.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from automodel_lite.models.loss import Loss, LossInputs, LossOutput


def dialog(row: Mapping[str, Any]) -> dict[str, Any]:
    """A format: a raw row -> a document. {"dialog": [{"who": "user", "said": "Hi"}, ...]} is a
    chat.

    A mistake in here is an error that names the file and the line.
    """
    return {"messages": [{"role": turn["who"], "content": turn["said"]} for turn in row["dialog"]]}


@dataclass(frozen=True)
class ZLoss(Loss):
    """Cross-entropy, and the squared log-partition that keeps logits small, inside the
    fused head.
    """

    coefficient: float = 1e-4
    columns = frozenset({"loss_weights"})  # per-token columns that it uses: others are refused

    def __call__(self, inputs: LossInputs) -> LossOutput:
        weights_R = inputs.columns.get("loss_weights", 1.0)
        log_z_R = inputs.rows(lambda logits: logits.logsumexp(-1))
        ce, z = -(inputs.log_probs() * weights_R).sum(), (log_z_R.square() * weights_R).sum()
        return LossOutput(ce + self.coefficient * z, {"ce": ce, "z": z})
