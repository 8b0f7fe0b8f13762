"""How good probabilities of choices are: accuracy, Brier score, calibration error, whole records,
and the temperature that calibrates them.

Legend: N questions, K choices (the most that one has).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from automodel_lite.data.formats.decisions import asked, record_of
from automodel_lite.evaluation.measures import calibration_error

# of temperatures: a set that a model answers without a mistake would have one of 0
COLDEST, HOTTEST = 0.05, 20.0
# of questions; where there are more, each is asked too rarely for numbers of its own
MOST_NAMES = 40


@dataclass(frozen=True)
class Answered:
    """Questions that a model has answered, and what was right.

    numbers    of the questions in the data, int64 [N]
    answers    place of the right choice, int64 [N]
    log_probs  of the choices, fp64 [N, K]; -inf where there is none
    targets    the probabilities that they should have, [N, K]
    weights    of the questions, [N]
    """

    numbers: np.ndarray
    answers: np.ndarray
    log_probs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[np.ndarray]) -> Answered:
        """Joins what forward passes gave, [n, 2 + 2 k] each: number and right place, log-probs,
        and targets times weights. A question that several ranks have computed counts once.
        """
        width = max((part.shape[1] - 2 for part in parts), default=0) // 2
        wide = []
        for part in parts:
            own = (part.shape[1] - 2) // 2
            room = ((0, 0), (0, width - own))
            log_probs = np.pad(part[:, 2 : 2 + own], room, constant_values=-np.inf)
            wide.append(np.hstack([part[:, :2], log_probs, np.pad(part[:, 2 + own :], room)]))
        found = np.concatenate(wide) if wide else np.zeros((0, 2))
        found = found[np.unique(found[:, 0], return_index=True)[1]]
        targets = found[:, 2 + width :]
        weights = targets.sum(1)
        numbers, answers = found[:, :2].astype(np.int64).T
        shares = targets / np.where(weights == 0, 1, weights)[:, None]
        return cls(numbers, answers, found[:, 2 : 2 + width], shares, weights)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, chosen: np.ndarray) -> Answered:
        return Answered(**{name: values[chosen] for name, values in vars(self).items()})

    def known(self) -> Answered:
        """Returns the questions that have an answer."""
        return self[self.weights > 0]

    def probs(self, temperature: float = 1.0) -> np.ndarray:
        """Returns probabilities [N, K]."""
        return softmax(self.log_probs / temperature)

    def metrics(self, temperature: float = 1.0) -> dict[str, float]:
        """Returns `loss`, `accuracy`, `brier` and `ece` at a temperature, by the weights."""
        probs = self.probs(temperature)
        weights = self.weights / (self.weights.sum() or 1)
        is_right = probs.argmax(1) == self.answers
        logs = np.log(np.where(self.targets > 0, probs, 1).clip(1e-300))
        return {
            "loss": float(-(weights @ (self.targets * logs).sum(1))),
            "accuracy": float(weights @ is_right),
            "brier": float(weights @ np.square(probs - self.targets).sum(1)),
            "ece": calibration_error(probs.max(1), is_right, weights),
        }

    def records_right(self) -> float:
        """Returns the share of records all of whose questions are answered rightly."""
        is_wrong = self.log_probs.argmax(1) != self.answers
        _, record = np.unique(record_of(self.numbers), return_inverse=True)
        return float((np.bincount(record, is_wrong) == 0).mean()) if len(self) else 0.0


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns probabilities [N, K]; 0 where a logit is -inf."""
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def fit_temperature(answered: Answered) -> float:
    """Returns the temperature at which the questions' loss is least, between COLDEST and HOTTEST.

    The loss is convex in 1 / temperature: its slope, the mean logit that the model expects less the
    one that is right, rises, and is halved in to 0.
    """
    logits = np.where(np.isfinite(answered.log_probs), answered.log_probs, 0.0)

    def slope(temperature: float) -> float:
        gap = answered.probs(temperature) - answered.targets
        return float(answered.weights @ (gap * logits).sum(1))

    if not len(answered) or slope(COLDEST) <= 0:
        return COLDEST if len(answered) else 1.0
    if slope(HOTTEST) >= 0:
        return HOTTEST
    low, high = np.log([COLDEST, HOTTEST])
    for _ in range(60):
        middle = (low + high) / 2
        if slope(float(np.exp(middle))) > 0:  # too sharp
            low = middle
        else:
            high = middle
    return float(np.exp((low + high) / 2))


def numbers_of(answered: Answered, temperature: float) -> dict[str, Any]:
    """Returns how good answers are, as they are and at a temperature."""
    return {
        "questions": len(answered),
        "records": len(np.unique(record_of(answered.numbers))),
        "records_right": answered.records_right(),
        **answered.metrics(),
        "calibrated": answered.metrics(temperature),
    }


def numbers_by_name(answered: Answered, documents: Any) -> dict[str, Any]:
    """Returns the numbers of the questions of each name; nothing where names are too many."""
    names = np.array([decision.name for decision in asked(answered.numbers.tolist(), documents)])
    counts = Counter(names.tolist())
    if len(counts) > MOST_NAMES:
        return {}
    return {
        name: {"questions": count, **answered[names == name].metrics()}
        for name, count in sorted(counts.items())
    }
