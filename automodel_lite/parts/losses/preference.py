"""Losses of preference pairs: a chosen and a rejected answer to one prompt, in one pack.

The per-token column `answers` says which answer a label belongs to: 1 the chosen, 2 the rejected, 0
none. Both lie in one document (a tree whose branches they are) or in two, the chosen one first.
Log-probabilities are summed over an answer across chunks of the head and over the ranks that share
a document; what follows is arithmetic on one value per pair. Such a loss is divided by the pairs of
the whole optimizer step.

    documents   chosen 0 │ rejected 0 │ chosen 1 │ rejected 1 │ padding
    pair of it      0          0          1          1          1

Legend: R rows that carry a label, N documents, P pairs (as long as N: the number is not known
without waiting for the device; pairs that are not there have no labels and count 0).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_lite.columns import CHOSEN, REJECTED
from automodel_lite.config.rules import Only, Range
from automodel_lite.models.loss import Loss, LossInputs, LossOutput
from automodel_lite.thd import ThdBatch

Share = Annotated[float, Range(0, 1_000_000)]


class Answers(NamedTuple):
    """Sums over one answer of each pair, [P]: log-probabilities, those of the reference (0
    without), label tokens.
    """

    log_prob: Tensor
    reference: Tensor
    num_tokens: Tensor

    def mean(self) -> Answers:
        """Returns the log-probabilities per token."""
        num_tokens = self.num_tokens.clamp(min=1)
        return Answers(self.log_prob / num_tokens, self.reference / num_tokens, num_tokens)


class PairedLoss(Loss):
    """A value per pair of answers."""

    required = frozenset({"answers"})
    needs_documents = True
    unit = "per pair"

    def num_items(self, batch: ThdBatch) -> float:
        """Counts the pairs of the stream."""
        if "answers" not in batch.columns:  # a pack of padding alone
            return 0
        # A tree counts once, and so does a pair of two documents: its chosen answer is in one of
        # them.
        document_T = torch.repeat_interleave(batch.cu_seqlens_padded.diff())
        return len(document_T[batch.columns["answers"] == CHOSEN].unique())

    def pairs(
        self, inputs: LossInputs, values_RK: Tensor
    ) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Sums values over the chosen and over the rejected answers, [P, K + 1] each, behind them
        the number of their labels; and what makes this rank's share of a sum over pairs of [P].
        """
        # Sums over the answers of this micro-batch; gradients are those of this rank's rows.
        answers_R = inputs.columns["answers"]
        values_RK = torch.cat([values_RK, torch.ones_like(values_RK[:, :1])], 1)
        is_answer = [
            (answers_R == which).to(values_RK.dtype)[:, None] for which in (CHOSEN, REJECTED)
        ]
        sums_N2K = inputs.per_document(torch.cat([values_RK * own for own in is_answer], 1))
        # A document with a chosen answer begins a pair; the rejected one is in it, or in the next
        # document.
        num_values = values_RK.shape[1]
        pair_N = ((sums_N2K[:, num_values - 1] > 0).cumsum(0) - 1).clamp(min=0)
        sums_P2K = torch.zeros_like(sums_N2K).index_add(0, pair_N, sums_N2K)
        chosen_PK, rejected_PK = sums_P2K.split(num_values, 1)
        # As many places as documents, so that no number has to be read from the device; most have
        # no pair.
        exists_P = (chosen_PK[:, -1] > 0) & (rejected_PK[:, -1] > 0)

        def total(values_P: Tensor) -> Tensor:
            return inputs.share(torch.where(exists_P, values_P, 0.0).sum())

        return chosen_PK, rejected_PK, total


class PreferenceLoss(PairedLoss):
    """A value per pair of the log-probabilities of its answers, and plain cross-entropy on the
    chosen answer (its mean per token) where it has a share.
    """

    columns = frozenset({"answers", "reference_log_probs"})
    cross_entropy: Share

    @abstractmethod
    def pair_losses(self, chosen: Answers, rejected: Answers) -> tuple[Tensor, Tensor]:
        """Returns loss and reward margin of each pair, [P] each."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        log_probs_R = inputs.log_probs()
        reference_R = inputs.columns.get("reference_log_probs", torch.zeros_like(log_probs_R))
        values_R2 = torch.stack([log_probs_R, reference_R], 1)
        chosen_P3, rejected_P3, total = self.pairs(inputs, values_R2)
        chosen = Answers(*chosen_P3.unbind(1))
        rejected = Answers(*rejected_P3.unbind(1))
        losses_P, margins_P = self.pair_losses(chosen, rejected)
        if self.cross_entropy:
            losses_P = losses_P - self.cross_entropy * chosen.mean().log_prob
        parts = {
            "reward_margin": margins_P,
            "accuracy": (margins_P > 0).float(),
            "chosen_log_prob": chosen.log_prob,
            "rejected_log_prob": rejected.log_prob,
        }
        if "reference_log_probs" in inputs.columns:
            # log-ratio to the reference of both answers: an estimate on data that are not the
            # model's own
            parts["kl"] = (
                chosen.log_prob - chosen.reference + rejected.log_prob - rejected.reference
            ) / 2
        return LossOutput(
            total(losses_P), {name: total(part.detach()) for name, part in parts.items()}
        )


@dataclass(frozen=True)
class Dpo(PreferenceLoss):
    """Direct preference optimization (arXiv:2305.18290) against the start model.

    kind  sigmoid; ipo (arXiv:2310.12036), of log-probabilities per token; hinge (SLiC,
          arXiv:2305.10425)
    """

    required = frozenset({"answers", "reference_log_probs"})
    needs_reference: ClassVar[bool] = True

    # weight of the distance from the start model
    beta: Annotated[float, Range(1e-6, 1_000_000)] = 0.1
    # probability that a pair is the wrong way round (sigmoid)
    label_smoothing: Annotated[float, Range(0, 0.5), Only("kind", "sigmoid")] = 0.0
    kind: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    cross_entropy: Share = 0.0  # share of plain cross-entropy on the chosen answer

    def pair_losses(self, chosen: Answers, rejected: Answers) -> tuple[Tensor, Tensor]:
        if self.kind == "ipo":
            chosen = chosen.mean()
            rejected = rejected.mean()
        difference_P = (chosen.log_prob - chosen.reference) - (
            rejected.log_prob - rejected.reference
        )
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

    beta: Annotated[float, Range(1e-6, 1_000_000)] = 2.0
    gamma: Annotated[float, Range(0, 1_000_000)] = 1.0  # the margin of rewards that is aimed at
    cross_entropy: Share = 0.0  # share of plain cross-entropy on the chosen answer

    def pair_losses(self, chosen: Answers, rejected: Answers) -> tuple[Tensor, Tensor]:
        margin_P = self.beta * (chosen.mean().log_prob - rejected.mean().log_prob)
        return -F.logsigmoid(margin_P - self.gamma), margin_P


@dataclass(frozen=True)
class OrPo(PreferenceLoss):
    """ORPO (arXiv:2403.07691): cross-entropy on the chosen answer, and its odds against the
    rejected one's.
    """

    beta: Annotated[float, Range(1e-6, 1_000_000)] = 0.1  # weight of the odds
    cross_entropy: Share = 1.0  # share of plain cross-entropy on the chosen answer

    def pair_losses(self, chosen: Answers, rejected: Answers) -> tuple[Tensor, Tensor]:
        def log_odds(answers: Answers) -> Tensor:
            log_p = answers.mean().log_prob
            # those of a pair that is not there are 0: they must not be infinite
            return log_p - torch.log1p(-torch.exp(log_p.clamp(max=-1e-6)))

        log_odds_P = log_odds(chosen) - log_odds(rejected)
        return -self.beta * F.logsigmoid(log_odds_P), self.beta * log_odds_P
