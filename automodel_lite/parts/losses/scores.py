"""Losses of a score head: what is true of a whole document, read at its last token.

    pack      d o c 0 │ d o c 1 │ padding
    labels    _ _ _ 2 │ _ _ _ 0 │ _ _        the class of each document, at its last token

A document has one label, so a loss per label is one per document. The head is a product of the
last hidden state with a matrix of a row per score: logits of labeled rows are its scores.

Legend: R rows that carry a label, K scores, N documents, P pairs (as long as N).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_lite.classes import Classes
from automodel_lite.config.rules import Range
from automodel_lite.errors import ConfigError
from automodel_lite.models.loss import Loss, LossInputs, LossOutput
from automodel_lite.parts.losses.preference import PairedLoss

NUM_BINS = 15
"""Of confidences, for the calibration error: as in Guo et al., 2017 (arXiv:1706.04599)."""


class ScoreLoss(Loss):
    """A loss of the scores of documents."""

    head = "score"


@dataclass(frozen=True)
class Classify(ScoreLoss):
    """What documents are labeled: cross-entropy of one class, binary cross-entropy of several
    classes (the mean over them), the squared error of a number; the mean over documents, by their
    weights. As transformers computes them.
    """

    columns: ClassVar[frozenset[str]] = frozenset({"loss_weights", "targets"})
    separates_rows: ClassVar[bool] = True

    # share of the probability that is spread over all classes (one class per document)
    label_smoothing: Annotated[float, Range(0, below=1)] = 0.0

    def of_classes(self, classes: Classes | None) -> Loss:
        if classes is None:
            raise ConfigError(
                "loss=classify learns the labels of documents, and the data have none",
                key="dataset.format",
                cure="set dataset.format=labeled (columns text, label); of pairs of answers, train "
                "with --config-name reward",
            )
        if self.label_smoothing and classes.kind != "one":
            raise ConfigError(
                f"loss.label_smoothing={self.label_smoothing} is of one class per document, and the"
                " labels are others",
                key="loss.label_smoothing",
                cure="leave it out",
            )
        return _KINDS[classes.kind](**vars(self), classes=classes)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Computes what a plan needs, which does not know the labels: one class per document."""
        return LossOutput(F.cross_entropy(scores_of(inputs), inputs.labels_R, reduction="sum"), {})

    def weights(self, inputs: LossInputs) -> Tensor:
        """Returns what each document counts, [R]."""
        weights_R = inputs.columns.get("loss_weights")
        if weights_R is None:
            return torch.ones(len(inputs.labels_R), device=inputs.labels_R.device)
        return weights_R


def scores_of(inputs: LossInputs) -> Tensor:
    """Returns the scores of documents, fp32 [R, K], with gradients."""
    return inputs.rows(lambda scores: scores)


@dataclass(frozen=True, kw_only=True)
class ClassifyOne(Classify):
    """One class per document."""

    classes: Classes

    def __call__(self, inputs: LossInputs) -> LossOutput:
        scores_RK = scores_of(inputs)
        weights_R = self.weights(inputs)
        losses_R = F.cross_entropy(
            scores_RK, inputs.labels_R, reduction="none", label_smoothing=self.label_smoothing
        )
        is_right_R = scores_RK.argmax(1) == inputs.labels_R
        accuracy = (is_right_R * weights_R).sum().detach()
        return LossOutput((losses_R * weights_R).sum(), {"accuracy": accuracy})

    def held_out_sums(self, inputs: LossInputs) -> dict[str, Tensor]:
        """Counts of each class [3, K] (right, predicted, true), and of each bin of confidence
        [3, bins] (documents, their confidence, those that are right).
        """
        probs_RK = scores_of(inputs).softmax(1)
        weights_R = self.weights(inputs).to(probs_RK.dtype)
        confidence_R, predicted_R = probs_RK.max(1)
        is_right_R = predicted_R == inputs.labels_R
        counts_3K = probs_RK.new_zeros(3, probs_RK.shape[1])
        counts_3K[0].index_add_(0, inputs.labels_R, weights_R * is_right_R)
        counts_3K[1].index_add_(0, predicted_R, weights_R)
        counts_3K[2].index_add_(0, inputs.labels_R, weights_R)
        # a bin holds its upper edge
        bin_R = (confidence_R * NUM_BINS).ceil().long().sub(1).clamp(0, NUM_BINS - 1)
        bins_3B = probs_RK.new_zeros(3, NUM_BINS)
        of_bins = (torch.ones_like(confidence_R), confidence_R, is_right_R)
        for row, values_R in enumerate(of_bins):
            bins_3B[row].index_add_(0, bin_R, weights_R * values_R)
        return {"class_counts": counts_3K, "confidence_bins": bins_3B}

    def held_out_measures(self, sums: Mapping[str, Tensor], num_items: float) -> dict[str, float]:
        """Returns the macro F1 over the classes that documents have or are given, and the expected
        calibration error.
        """
        confidence_gap_B = (sums["confidence_bins"][1] - sums["confidence_bins"][2]).abs()
        return {
            "f1": _macro_f1(sums["class_counts"]),
            "ece": float(confidence_gap_B.sum()) / (num_items or 1),
        }


@dataclass(frozen=True, kw_only=True)
class ClassifyMany(Classify):
    """Any number of classes per document, each with a probability of its own."""

    classes: Classes

    def truths(self, inputs: LossInputs) -> Tensor:
        """Returns 1 for the classes of each document, [R, K]."""
        table_SK = torch.zeros(max(1, len(self.classes.sets)), len(self.classes.names))
        for number, members in enumerate(self.classes.sets):
            table_SK[number, list(members)] = 1.0
        return table_SK.to(inputs.labels_R.device)[inputs.labels_R]

    def __call__(self, inputs: LossInputs) -> LossOutput:
        scores_RK = scores_of(inputs)
        truths_RK = self.truths(inputs).to(scores_RK.dtype)
        weights_R = self.weights(inputs)
        losses_RK = F.binary_cross_entropy_with_logits(scores_RK, truths_RK, reduction="none")
        losses_R = losses_RK.mean(1)
        is_right_R = ((scores_RK > 0) == truths_RK.bool()).all(1)
        accuracy = (is_right_R * weights_R).sum().detach()
        return LossOutput((losses_R * weights_R).sum(), {"accuracy": accuracy})

    def held_out_sums(self, inputs: LossInputs) -> dict[str, Tensor]:
        """Counts of each class [3, K]: right, predicted, true."""
        scores_RK = scores_of(inputs)
        is_given_RK = (scores_RK > 0).to(scores_RK.dtype)
        truths_RK = self.truths(inputs).to(scores_RK.dtype)
        weights_R1 = self.weights(inputs)[:, None].to(scores_RK.dtype)
        found = (is_given_RK * truths_RK, is_given_RK, truths_RK)
        return {"class_counts": torch.stack([(weights_R1 * one).sum(0) for one in found])}

    def held_out_measures(self, sums: Mapping[str, Tensor], num_items: float) -> dict[str, float]:
        return {"f1": _macro_f1(sums["class_counts"])}


@dataclass(frozen=True, kw_only=True)
class Regression(Classify):
    """A number per document."""

    required: ClassVar[frozenset[str]] = frozenset({"targets"})

    classes: Classes

    def __call__(self, inputs: LossInputs) -> LossOutput:
        errors_R = scores_of(inputs)[:, 0] - inputs.columns["targets"]
        weights_R = self.weights(inputs)
        parts = {"absolute_error": (errors_R.abs() * weights_R).sum().detach()}
        return LossOutput((errors_R.square() * weights_R).sum(), parts)

    def held_out_sums(self, inputs: LossInputs) -> dict[str, Tensor]:
        """Moments [6] of scores x and targets y: 1, x, y, xx, yy, xy."""
        x = scores_of(inputs)[:, 0].double()
        y = inputs.columns["targets"].double()
        weights_R = self.weights(inputs).double()
        moments = (torch.ones_like(x), x, y, x * x, y * y, x * y)
        return {"moments": torch.stack([(weights_R * one).sum() for one in moments])}

    def held_out_measures(self, sums: Mapping[str, Tensor], num_items: float) -> dict[str, float]:
        """Returns Pearson's correlation."""
        n, x, y, xx, yy, xy = sums["moments"].double().tolist()
        spread = (n * xx - x * x) * (n * yy - y * y)
        return {"pearson": (n * xy - x * y) / spread**0.5 if spread > 0 else 0.0}


_KINDS = {"one": ClassifyOne, "many": ClassifyMany, "number": Regression}


def _macro_f1(counts_3K: Tensor) -> float:
    """Returns the mean F1 over the classes that are true or predicted somewhere."""
    right_K, predicted_K, true_K = counts_3K.double().cpu()
    total_K = predicted_K + true_K
    is_there_K = total_K > 0
    f1_K = 2 * right_K[is_there_K] / total_K[is_there_K]
    return float(f1_K.mean()) if len(f1_K) else 0.0


@dataclass(frozen=True)
class Reward(PairedLoss):
    """A reward model by Bradley and Terry: -log sigmoid of how much higher the chosen answer is
    scored than the rejected one, less the pair's margin where the data bring one.
    """

    columns: ClassVar[frozenset[str]] = frozenset({"answers", "margins"})
    head: ClassVar[str] = "score"

    # weight of the squared sum of both scores, which keeps them around 0 (arXiv:2312.09244); 0.01
    # is usual
    center: Annotated[float, Range(0, 1000)] = 0.0

    def of_classes(self, classes: Classes | None) -> Loss:
        if classes is not None:
            raise ConfigError(
                "loss=reward learns which of two answers is better, and the rows have labels",
                key="dataset.format",
                cure="set dataset.format=preference (columns prompt, chosen, rejected), or train "
                "with --config-name classify",
            )
        return self

    def __call__(self, inputs: LossInputs) -> LossOutput:
        scores_R = scores_of(inputs)[:, 0]
        margins_R = inputs.columns.get("margins", torch.zeros_like(scores_R))
        values_R2 = torch.stack([scores_R, margins_R.to(scores_R.dtype)], 1)
        chosen_P3, rejected_P3, total = self.pairs(inputs, values_R2)
        chosen_P, margin_P, _ = chosen_P3.unbind(1)
        rejected_P = rejected_P3[:, 0]
        difference_P = chosen_P - rejected_P
        losses_P = -F.logsigmoid(difference_P - margin_P)
        if self.center:
            losses_P = losses_P + self.center * (chosen_P + rejected_P).square()
        parts = {
            "accuracy": (difference_P > 0).to(scores_R.dtype),
            "reward_margin": difference_P,
            "chosen_reward": chosen_P,
            "rejected_reward": rejected_P,
        }
        return LossOutput(
            total(losses_P), {name: total(part.detach()) for name, part in parts.items()}
        )
