"""Losses that learn from a teacher: a frozen second model, or its likeliest tokens stored beside
the data.

    forward   KL(teacher || student)        reverse   KL(student || teacher)
    jsd       beta * KL(teacher || m) + (1 - beta) * KL(student || m),
              m = beta * teacher + (1 - beta) * student
              (generalized Jensen-Shannon divergence, arXiv:2306.13649)

Each is a value per label; both heads are evaluated a chunk of rows at a time. Logits are divided by
the temperature; the divergence is not multiplied by its square.

Legend: R rows that carry a label, V vocabulary, K stored tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_lite.config.rules import Only, PathStr, Range, Size
from automodel_lite.models.loss import (
    NATS_PER_TOKEN,
    Average,
    AveragedLoss,
    LossInputs,
    LossOutput,
)
from automodel_lite.tensors import at_least_fp32
from automodel_lite.thd import ThdBatch

Frac = Annotated[float, Range(0, 1)]
MOST_KNOWN = 1 - 2**-23
"""Probability of the stored tokens, at most: the rest's logarithm stays finite in fp32."""


class DistillationLoss(AveragedLoss):
    """A divergence and a share of plain cross-entropy, per label, times its weight where the data
    bring weights.
    """

    unit = NATS_PER_TOKEN

    cross_entropy: Frac

    def _of_rows(self, inputs: LossInputs, values_R2: Tensor) -> LossOutput:
        """values_R2: divergence and cross-entropy of each row."""
        weights_R = self.label_weights(inputs)
        divergence, plain = (
            (values_R2 if weights_R is None else values_R2 * weights_R[:, None]).sum(0).unbind()
        )
        total = (1 - self.cross_entropy) * divergence + self.cross_entropy * plain
        return LossOutput(total, {"divergence": divergence, "ce": plain})


@dataclass(frozen=True)
class Distill(DistillationLoss):
    """From a frozen second model, `teacher.pretrained`, on the same mesh."""

    needs_teacher = True

    # KL from the teacher, to it, or between both
    kind: Literal["forward", "reverse", "jsd"] = "forward"
    # of jsd: the teacher's share of the mixture
    beta: Annotated[float, Range(above=0, below=1), Only("kind", "jsd")] = 0.5
    temperature: Annotated[float, Range(0.01, 100)] = 1.0  # divides both models' logits
    cross_entropy: Frac = 0.0  # share of plain cross-entropy on the labels
    # over all labels of a step, or over its documents or turns of the mean over each
    average: Average = "labels"

    def __call__(self, inputs: LossInputs) -> LossOutput:
        def both(logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> Tensor:
            # A student's padded vocabulary may be the longer one: the teacher knows nothing of it.
            common = logits[:, : teacher_logits.shape[-1]]
            student, teacher = (
                F.log_softmax(x / self.temperature, -1) for x in (common, teacher_logits)
            )
            return torch.stack(
                [
                    self.divergence(student, teacher),
                    F.cross_entropy(logits, labels, reduction="none"),
                ],
                1,
            )

        return self._of_rows(inputs, inputs.rows_with_teacher(both, inputs.labels_R))

    def divergence(self, student_RV: Tensor, teacher_RV: Tensor) -> Tensor:
        """Returns the divergence [R] of log-probabilities."""
        if self.kind == "forward":
            return _kl(teacher_RV, student_RV)
        if self.kind == "reverse":
            return _kl(student_RV, teacher_RV)
        # log of the mixture, from logarithms: no probability underflows
        mixed_RV = torch.logaddexp(
            teacher_RV + math.log(self.beta), student_RV + math.log(1 - self.beta)
        )
        return self.beta * _kl(teacher_RV, mixed_RV) + (1 - self.beta) * _kl(student_RV, mixed_RV)


def _kl(one_RV: Tensor, other_RV: Tensor) -> Tensor:
    return (one_RV.exp() * (one_RV - other_RV)).sum(-1)


@dataclass(frozen=True)
class DistillTopK(DistillationLoss):
    """Forward KL from stored log-probabilities of the teacher's likeliest tokens,
    recipes/score.py's; all other tokens together are one more class.
    """

    required = frozenset({"teacher_ids", "teacher_log_probs"})
    columns = AveragedLoss.columns | {"teacher_rest"} | required

    teacher: PathStr  # a folder or hub name, as recipes/score.py was given it
    top_k: Size = 64  # tokens stored per label
    cross_entropy: Frac = 0.0  # share of plain cross-entropy on the labels
    # over all labels of a step, or over its documents or turns of the mean over each
    average: Average = "labels"

    @property
    def scored_by(self) -> str:
        return self.teacher

    def __call__(self, inputs: LossInputs) -> LossOutput:
        def both(
            logits: Tensor, labels: Tensor, ids: Tensor, stored: Tensor, rest_of_teacher: Tensor
        ) -> Tensor:
            # Stored in fp16, they sum up to a little more or less than what the rest leaves.
            stored = at_least_fp32(stored)
            log_probs = F.log_softmax(stored, -1) + torch.log1p(-rest_of_teacher)[:, None]
            student = F.log_softmax(logits, -1).gather(-1, ids)
            # All tokens that are not stored are one class.
            rest = torch.log1p(-student.exp().sum(-1).clamp(max=MOST_KNOWN))
            of_rest = torch.xlogy(rest_of_teacher, rest_of_teacher) - rest_of_teacher * rest
            known = (log_probs.exp() * (log_probs - student)).sum(-1)
            return torch.stack(
                [known + of_rest, F.cross_entropy(logits, labels, reduction="none")], 1
            )

        # One value per token is stored without a dim.
        ids_RK, stored_RK = (
            column if column.ndim > 1 else column[:, None]
            for column in map(inputs.columns.__getitem__, ("teacher_ids", "teacher_log_probs"))
        )
        rest_R = inputs.columns.get("teacher_rest")
        if rest_R is None:
            known_R = stored_RK.float().exp().sum(-1)
            rest_R = (1 - known_R).clamp(min=0)
        values_R2 = inputs.rows(both, inputs.labels_R, ids_RK, stored_RK, rest_R)
        return self._of_rows(inputs, values_R2)

    def example_columns(self, batch: ThdBatch) -> dict[str, Tensor]:
        """Makes `top_k` values per token."""
        columns = super().example_columns(batch)
        for name in ("teacher_ids", "teacher_log_probs"):
            columns[name] = columns[name][:, None].repeat(1, self.top_k)
        return columns

    def likeliest(self, num_ids: int, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns what is stored of rows [r, V], fp32 [r, 2 * top_k + 1]: ids (whole up to 2^24),
        log-probabilities, and what they leave to the rest of the `num_ids` that a tokenizer has.
        """
        log_probs = F.log_softmax(logits[:, :num_ids], -1)
        found = log_probs.topk(self.top_k, -1)
        rest = log_probs.exp().scatter(-1, found.indices, 0).sum(-1, keepdim=True)
        return torch.cat([found.indices.to(logits.dtype), found.values, rest], -1)
