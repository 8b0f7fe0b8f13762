"""Losses of answers that are judged one by one: each is desirable or not, and has no rival.

The per-token column `verdicts` says what a label belongs to: 1 a desirable answer, 2 an undesirable
one, 3 the answer of another row to this row's prompt, 0 none. A row's own answer and the mismatched
one lie in one document (a tree whose branches they are) or in two. Such a loss is divided by the
rows of the whole optimizer step.

    documents   prompt 0 ─┬─ answer 0    │ prompt 1 ─┬─ answer 1    │ padding
                          └─ answer of 4 │           └─ answer 0    │

Legend: R rows that carry a label, N documents, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from automodel_lite.columns import DESIRABLE, MISMATCHED, UNDESIRABLE
from automodel_lite.config.rules import Range
from automodel_lite.models.loss import Loss, LossInputs, LossOutput, StepMean, label_log_probs
from automodel_lite.thd import ThdBatch

Weight = Annotated[float, Range(0, 1_000_000)]


@dataclass(frozen=True)
class Kto(Loss):
    """Kahneman-Tversky optimization (arXiv:2402.01306) against the start model.

    The log-ratio of an answer to the start model is compared with a reference point: the mean
    log-ratio of all mismatched answers of the step, at least 0, without gradients.

    kind  kto
          apo_zero: the reference point is 0 (APO-zero of single answers, arXiv:2408.06266), and the
          mismatched answers are ignored
    """

    columns: ClassVar[frozenset[str]] = frozenset({"verdicts", "reference_log_probs"})
    required: ClassVar[frozenset[str]] = frozenset({"verdicts", "reference_log_probs"})
    needs_documents: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True
    unit: ClassVar[str] = "per answer"

    # weight of the distance from the start model
    beta: Annotated[float, Range(1e-6, 1_000_000)] = 0.1
    # what an answer of each kind counts, where there are more of one than of the other
    desirable_weight: Weight = 1.0
    undesirable_weight: Weight = 1.0
    kind: Literal["kto", "apo_zero"] = "kto"

    @property
    def step_mean(self) -> StepMean | None:
        if self.kind == "apo_zero":
            return None
        columns = ("verdicts", "reference_log_probs", "mismatch_shares")
        return StepMean("reference_point", mismatched_log_ratios, columns, least=0.0)

    def prepare(self, batch: ThdBatch) -> ThdBatch:
        """Adds the shares by which the mismatched answers of a step are counted from their labels,
        which context parallelism spreads over ranks.
        """
        if self.kind == "apo_zero" or "verdicts" not in batch.columns:
            return batch
        document_R = documents_of(batch)[batch.label_rows]
        is_mismatched_R = batch.columns["verdicts"][batch.label_rows] == MISMATCHED
        num_labels_N = torch.bincount(document_R[is_mismatched_R], minlength=len(batch.cu_seqlens))
        shares_T = torch.zeros(len(batch.labels))
        shares_T[batch.label_rows] = is_mismatched_R / num_labels_N[document_R].clamp(min=1)
        return replace(batch, columns=batch.columns | {"mismatch_shares": shares_T})

    def num_items(self, batch: ThdBatch) -> float:
        """Counts the rows of the stream."""
        if "verdicts" not in batch.columns:  # a pack of padding alone
            return 0
        verdicts_T = batch.columns["verdicts"]
        is_own_T = (verdicts_T == DESIRABLE) | (verdicts_T == UNDESIRABLE)
        return len(documents_of(batch)[is_own_T].unique())

    def example_columns(self, batch: ThdBatch) -> dict[str, Tensor]:
        """Makes what is made of a stream and of a step, too."""
        made = super().example_columns(batch)
        for name in ("mismatch_shares", "reference_point") if self.step_mean else ():
            made[name] = torch.zeros(len(batch.labels), device=batch.labels.device)
        return made

    def __call__(self, inputs: LossInputs) -> LossOutput:
        # Sums over each row's own answer, [N]; gradients are those of this rank's labels.
        log_probs_R = inputs.log_probs()
        verdicts_R = inputs.columns["verdicts"]
        log_ratios_R = log_probs_R - inputs.columns["reference_log_probs"]
        is_good_R = (verdicts_R == DESIRABLE).to(log_probs_R.dtype)
        is_bad_R = (verdicts_R == UNDESIRABLE).to(log_probs_R.dtype)
        log_ratios_R = log_ratios_R * (is_good_R + is_bad_R)
        sums_N3 = inputs.per_document(torch.stack([log_ratios_R, is_good_R, is_bad_R], 1))
        log_ratio_N, num_good_N, num_bad_N = sums_N3.unbind(1)
        is_good_N = num_good_N > 0
        exists_N = is_good_N | (num_bad_N > 0)
        # A desirable answer should be above the reference point, an undesirable one below it.
        point = log_probs_R.new_zeros(())
        if self.step_mean:
            # of any token: this rank may hold no label of its documents
            assert inputs.batch is not None
            point = (inputs.columns | inputs.batch.columns)["reference_point"][:1].sum()
        margin_N = self.beta * (log_ratio_N - point)
        margin_N = torch.where(is_good_N, margin_N, -margin_N)
        weight_N = torch.where(is_good_N, self.desirable_weight, self.undesirable_weight)
        losses_N = weight_N * (1 - margin_N.sigmoid())

        def total(values_N: Tensor) -> Tensor:
            # documents of mismatched answers alone, and of padding, are none
            return inputs.share(torch.where(exists_N, values_N, 0.0).sum())

        parts = {
            "reward_margin": margin_N,
            "accuracy": (margin_N > 0).to(margin_N.dtype),
            "reference_point": point.expand_as(margin_N),
        }
        return LossOutput(
            total(losses_N), {name: total(part.detach()) for name, part in parts.items()}
        )


def documents_of(batch: ThdBatch) -> Tensor:
    """Returns the documents of the tokens of a whole stream, int64 [T]."""
    return torch.repeat_interleave(batch.cu_seqlens_padded.diff())


def mismatched_log_ratios(
    logits: Tensor, labels: Tensor, verdicts: Tensor, references: Tensor, shares: Tensor
) -> Tensor:
    """Returns the log-ratios of mismatched labels, and their share in their answer, [r, 2]."""
    log_ratios = label_log_probs(logits, labels) - references
    return torch.stack([torch.where(verdicts == MISMATCHED, log_ratios, 0.0), shares], 1)
