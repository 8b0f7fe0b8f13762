"""Losses of preference pairs: a chosen and a rejected answer to one prompt, in one pack.

The per-token column `answers` says which answer a label belongs to: 1 the chosen, 2 the rejected, 0 none. Both lie in
one document (a tree whose branches they are) or in two, the chosen one first. Log-probabilities are summed over an
answer across chunks of the head and over the ranks that share a document; what follows is arithmetic on one value per
pair. Such a loss is divided by the pairs of the whole optimizer step.

    documents   chosen 0 │ rejected 0 │ chosen 1 │ rejected 1 │ padding         pair of a document: 0 0 1 1 1

Legend: R rows that carry a label, N documents, P pairs (as long as N: the number is not known without waiting for the
device; pairs that are not there have no labels and count 0).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_lite.config.rules import Range
from automodel_lite.models.loss import Loss, LossInputs, LossOutput
from automodel_lite.thd import CHOSEN, REJECTED, ThdBatch

Share = Annotated[float, Range(0, 1_000_000)]


class Pairs(NamedTuple):
    """Sums over the answers of each pair, [P]: log-probabilities, those of the reference (0 without), label tokens."""

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    num_chosen: Tensor
    num_rejected: Tensor

    @property
    def exists(self) -> Tensor:
        """bool [P]."""
        return (self.num_chosen > 0) & (self.num_rejected > 0)

    def means(self) -> Pairs:
        """The same with log-probabilities per token."""
        chosen, rejected = self.num_chosen.clamp(min=1), self.num_rejected.clamp(min=1)
        of_reference = self.reference_chosen / chosen, self.reference_rejected / rejected
        return Pairs(self.chosen / chosen, self.rejected / rejected, *of_reference, self.num_chosen, self.num_rejected)


def sum_pairs(inputs: LossInputs) -> Pairs:
    """The sums of this micro-batch; their gradients are those of this rank's rows."""
    log_probs_R, answers_R = inputs.log_probs(), inputs.columns["answers"]
    reference_R = inputs.columns.get("reference_log_probs", torch.zeros_like(log_probs_R))
    is_answer = [(answers_R == which).to(log_probs_R.dtype) for which in (CHOSEN, REJECTED)]
    values_R6 = [value * own for value in (log_probs_R, reference_R, torch.ones_like(reference_R)) for own in is_answer]
    sums_N6 = inputs.per_document(torch.stack(values_R6, 1))
    # A document with a chosen answer begins a pair; the rejected one is in it, or in the next document.
    pair_N = ((sums_N6[:, 4] > 0).cumsum(0) - 1).clamp(min=0)
    return Pairs(*torch.zeros_like(sums_N6).index_add(0, pair_N, sums_N6).unbind(1))


class PreferenceLoss(Loss):
    """A value per pair, and plain cross-entropy on the chosen answer (its mean per token) where it has a share."""

    columns = frozenset({"answers", "reference_log_probs"})
    required = frozenset({"answers"})
    needs_documents = True
    cross_entropy: Share

    @abstractmethod
    def of_pairs(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Loss and reward margin of each pair, [P] each."""

    def num_items(self, batch: ThdBatch) -> float:
        """Pairs of the stream."""
        if "answers" not in batch.columns:  # a pack of padding alone
            return 0
        document_T = torch.repeat_interleave(batch.cu_seqlens_padded.diff())
        return len(document_T[batch.columns["answers"] == CHOSEN].unique())

    def example_columns(self, batch: ThdBatch) -> dict[str, Tensor]:
        """Documents that are chosen and rejected in turns."""
        which = torch.arange(len(batch.cu_seqlens_padded) - 1) % 2 + 1
        answers = which.repeat_interleave(batch.cu_seqlens_padded.diff().cpu())
        return {
            "answers": answers.to(batch.labels.device),
            "reference_log_probs": torch.zeros_like(batch.labels).float(),
        }

    def __call__(self, inputs: LossInputs) -> LossOutput:
        pairs = sum_pairs(inputs)
        exists_P = pairs.exists
        losses_P, margins_P = self.of_pairs(pairs)
        if self.cross_entropy:
            losses_P = losses_P - self.cross_entropy * pairs.means().chosen

        def total(values_P: Tensor) -> Tensor:
            return inputs.share(torch.where(exists_P, values_P, 0.0).sum())

        moved_P = (pairs.chosen - pairs.reference_chosen + pairs.rejected - pairs.reference_rejected) / 2
        parts = {
            "reward_margin": margins_P,
            "accuracy": (margins_P > 0).float(),
            "chosen_log_prob": pairs.chosen,
            "rejected_log_prob": pairs.rejected,
        }
        if "reference_log_probs" in inputs.columns:
            parts["kl"] = (
                moved_P  # log-ratio to the reference of both answers: an estimate on data that are not its own
            )
        return LossOutput(total(losses_P), {name: total(part.detach()) for name, part in parts.items()})


@dataclass(frozen=True)
class Dpo(PreferenceLoss):
    """Direct preference optimization (arXiv:2305.18290) against the start model.

    kind  sigmoid; ipo (arXiv:2310.12036), of log-probabilities per token; hinge (SLiC, arXiv:2305.10425)
    """

    required = frozenset({"answers", "reference_log_probs"})
    needs_reference: ClassVar[bool] = True

    beta: Annotated[float, Range(1e-6, 1e6)] = 0.1  # weight of the distance from the start model
    label_smoothing: Annotated[float, Range(0, 0.5)] = 0.0  # probability that a pair is the wrong way round (sigmoid)
    kind: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    cross_entropy: Share = 0.0  # share of plain cross-entropy on the chosen answer

    def of_pairs(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        means = pairs.means() if self.kind == "ipo" else pairs
        difference_P = (means.chosen - means.reference_chosen) - (means.rejected - means.reference_rejected)
        margin_P = self.beta * difference_P
        if self.kind == "ipo":
            return (difference_P - 1 / (2 * self.beta)).square(), margin_P
        if self.kind == "hinge":
            return torch.relu(1 - margin_P), margin_P
        smoothed_P = -self.label_smoothing * F.logsigmoid(-margin_P)
        return smoothed_P - (1 - self.label_smoothing) * F.logsigmoid(margin_P), margin_P


@dataclass(frozen=True)
class SimPo(PreferenceLoss):
    """SimPO (arXiv:2405.14734): mean log-probabilities, a target margin, no reference."""

    beta: Annotated[float, Range(1e-6, 1e6)] = 2.0
    gamma: Annotated[float, Range(0, 1e6)] = 1.0  # the margin of rewards that is aimed at
    cross_entropy: Share = 0.0  # share of plain cross-entropy on the chosen answer

    def of_pairs(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        means = pairs.means()
        margin_P = self.beta * (means.chosen - means.rejected)
        return -F.logsigmoid(margin_P - self.gamma), margin_P


@dataclass(frozen=True)
class OrPo(PreferenceLoss):
    """ORPO (arXiv:2403.07691): cross-entropy on the chosen answer, and its odds against the rejected one's."""

    beta: Annotated[float, Range(1e-6, 1e6)] = 0.1  # weight of the odds
    cross_entropy: Share = 1.0  # share of plain cross-entropy on the chosen answer

    def of_pairs(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        means = pairs.means()
        # log(1 - p) of mean log-probabilities; those of a pair that is not there are 0, and must not be infinite
        chosen_P, rejected_P = (
            log_p - torch.log1p(-torch.exp(log_p.clamp(max=-1e-6))) for log_p in (means.chosen, means.rejected)
        )
        log_odds_P = chosen_P - rejected_P
        return -self.beta * F.logsigmoid(log_odds_P), self.beta * log_odds_P
