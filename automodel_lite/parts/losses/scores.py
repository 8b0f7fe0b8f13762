"""Losses of a score head: what is true of a whole document, read at its last token.

    pack      d o c 0 │ d o c 1 │ padding
    labels    _ _ _ 2 │ _ _ _ 0 │ _ _        the class of each document, at its last token

A document has one label, so a loss per label is one per document. The head is a product of the
last hidden state with a matrix of a row per score: logits of labeled rows are its scores.

Legend: R rows that carry a label, K scores, N documents, P pairs (as long as N).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_lite.classes import Classes
from automodel_lite.config.rules import Range
from automodel_lite.errors import ConfigError
from automodel_lite.evaluation.measures import calibration_error, macro_f1, pearson
from automodel_lite.models.loss import Loss, LossInputs, LossOutput
from automodel_lite.parts.losses.preference import PairedLoss


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
class ClassifyKnown(Classify):
    """What documents are labeled, once the labels have been read."""

    classes: Classes

    def truths(self, inputs: LossInputs) -> Tensor:
        """Returns what the scores of each document should say, [R, 1] or [R, K]."""
        return inputs.labels_R[:, None]

    def rows_to_judge(self, inputs: LossInputs) -> Tensor:
        """Returns weight, scores and truth of each document, fp64 [R, 1 + K + 1 or 1 + 2 K]."""
        parts = [self.weights(inputs)[:, None], scores_of(inputs), self.truths(inputs)]
        # on the host, as not every device knows fp64
        return torch.cat([part.cpu().double() for part in parts], 1)

    def judge(self, rows: Sequence[np.ndarray]) -> dict[str, float]:
        """Returns the measures of all documents."""
        found = np.concatenate(rows) if rows else np.zeros((0, 0))
        if not len(found):
            return {}
        num_scores = self.classes.num_scores
        return self.measures(found[:, 1 : 1 + num_scores], found[:, 1 + num_scores :], found[:, 0])

    def measures(
        self, scores: np.ndarray, truths: np.ndarray, weights: np.ndarray
    ) -> dict[str, float]:
        """Returns what the scores [N, K] of documents are worth beside their truths."""
        return {}


@dataclass(frozen=True, kw_only=True)
class ClassifyOne(ClassifyKnown):
    """One class per document."""

    unit: ClassVar[str] = "nats per document"

    def __call__(self, inputs: LossInputs) -> LossOutput:
        scores_RK = scores_of(inputs)
        weights_R = self.weights(inputs)
        losses_R = F.cross_entropy(
            scores_RK, inputs.labels_R, reduction="none", label_smoothing=self.label_smoothing
        )
        is_right_R = scores_RK.argmax(1) == inputs.labels_R
        accuracy = (is_right_R * weights_R).sum().detach()
        return LossOutput((losses_R * weights_R).sum(), {"accuracy": accuracy})

    def measures(
        self, scores: np.ndarray, truths: np.ndarray, weights: np.ndarray
    ) -> dict[str, float]:
        """Returns the macro F1 over the classes that documents have or are given, and the expected
        calibration error.
        """
        probs = np.exp(scores - scores.max(1, keepdims=True))
        probs /= probs.sum(1, keepdims=True)
        places = np.arange(scores.shape[1])
        is_given = scores.argmax(1)[:, None] == places
        is_right = scores.argmax(1) == truths[:, 0]
        return {
            "f1": macro_f1(is_given, truths == places, weights),
            "ece": calibration_error(probs.max(1), is_right, weights),
        }


@dataclass(frozen=True, kw_only=True)
class ClassifyMany(ClassifyKnown):
    """Any number of classes per document, each with a probability of its own."""

    unit: ClassVar[str] = "nats per document and class"

    # Filled at the first batch: thousands of sets would be written down again for each one.
    _tables: dict[torch.device, Tensor] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def truths(self, inputs: LossInputs) -> Tensor:
        """Returns 1 for the classes of each document, [R, K]."""
        device = inputs.labels_R.device
        if device not in self._tables:
            table_SK = torch.zeros(max(1, len(self.classes.sets)), len(self.classes.names))
            for number, members in enumerate(self.classes.sets):
                table_SK[number, list(members)] = 1.0
            self._tables[device] = table_SK.to(device)
        return self._tables[device][inputs.labels_R]

    def __call__(self, inputs: LossInputs) -> LossOutput:
        scores_RK = scores_of(inputs)
        truths_RK = self.truths(inputs).to(scores_RK.dtype)
        weights_R = self.weights(inputs)
        losses_RK = F.binary_cross_entropy_with_logits(scores_RK, truths_RK, reduction="none")
        losses_R = losses_RK.mean(1)
        is_right_R = ((scores_RK > 0) == truths_RK.bool()).all(1)
        accuracy = (is_right_R * weights_R).sum().detach()
        return LossOutput((losses_R * weights_R).sum(), {"accuracy": accuracy})

    def measures(
        self, scores: np.ndarray, truths: np.ndarray, weights: np.ndarray
    ) -> dict[str, float]:
        """Returns the macro F1 over the classes that documents have or are given."""
        return {"f1": macro_f1(scores > 0, truths > 0, weights)}


@dataclass(frozen=True, kw_only=True)
class Regression(ClassifyKnown):
    """A number per document."""

    unit: ClassVar[str] = "squared error per document"
    required: ClassVar[frozenset[str]] = frozenset({"targets"})

    def __call__(self, inputs: LossInputs) -> LossOutput:
        errors_R = scores_of(inputs)[:, 0] - inputs.columns["targets"]
        weights_R = self.weights(inputs)
        parts = {"absolute_error": (errors_R.abs() * weights_R).sum().detach()}
        return LossOutput((errors_R.square() * weights_R).sum(), parts)

    def truths(self, inputs: LossInputs) -> Tensor:
        """Returns the numbers, [R, 1]."""
        return inputs.columns["targets"][:, None]

    def measures(
        self, scores: np.ndarray, truths: np.ndarray, weights: np.ndarray
    ) -> dict[str, float]:
        """Returns Pearson's correlation."""
        return {"pearson": pearson(scores[:, 0], truths[:, 0], weights)}


_KINDS = {"one": ClassifyOne, "many": ClassifyMany, "number": Regression}


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
