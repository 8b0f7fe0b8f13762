"""Numbers of answered questions that a reader can check by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from automodel_lite.data.formats.decisions import number_of
from automodel_lite.evaluation.decisions import COLDEST, Answered, fit_temperature

LOG = math.log


def part(
    number: int, place: int, probs: list[float], targets: list[float], weight: float = 1.0
) -> np.ndarray:
    logs = [LOG(p) for p in probs]
    return np.array([[number, place, *logs, *(t * weight for t in targets)]])


TWO_RECORDS = [
    part(number_of(0, 0), 0, [0.8, 0.2], [1, 0]),
    part(number_of(0, 1), 2, [0.5, 0.2, 0.3], [0, 0, 1]),
    part(number_of(4, 0), 1, [0.25, 0.75], [0.5, 0.5], weight=2.0),
]


def test_questions_of_several_widths() -> None:
    found = Answered.of([*TWO_RECORDS, TWO_RECORDS[0]])  # which two ranks have computed
    assert found.numbers.tolist() == [1, 2, 4 * 65536 + 1]
    assert found.probs()[0].tolist() == pytest.approx([0.8, 0.2, 0.0])
    assert found.weights.tolist() == [1, 1, 2]
    numbers = found.metrics()
    assert numbers["accuracy"] == pytest.approx(3 / 4)
    assert numbers["brier"] == pytest.approx((0.08 + (0.25 + 0.04 + 0.49) + 2 * 0.125) / 4)
    soft = -(LOG(0.25) + LOG(0.75)) / 2
    assert numbers["loss"] == pytest.approx((-LOG(0.8) - LOG(0.3) + 2 * soft) / 4)
    # three bins: 0.8 is right, 0.5 is wrong, 0.75 is right
    assert numbers["ece"] == pytest.approx((0.2 + 0.5 + 2 * 0.25) / 4)
    assert found.records_right() == 0.5


def test_confidences_of_one_bin_are_averaged() -> None:
    """Nine of ten are right at 0.9: calibrated, though none of them has an error of 0."""
    rows = [part(i, int(i == 1), [0.92, 0.08], [i != 1, i == 1]) for i in range(1, 11)]
    assert Answered.of(rows).metrics()["ece"] == pytest.approx(0.02)


def test_the_temperature_of_answers_that_are_too_sure() -> None:
    """Right in 3 of 4 at odds of 81: at odds of 3, a fourth of the logarithm, they are calibrated."""
    sure = 81 / 82
    rows = [part(i, int(i == 1), [sure, 1 - sure], [i != 1, i == 1]) for i in range(1, 5)]
    answered = Answered.of(rows)
    assert fit_temperature(answered) == pytest.approx(4.0, rel=1e-9)
    assert answered.metrics(4.0)["ece"] == pytest.approx(0, abs=1e-12)
    assert answered.metrics(4.0)["loss"] < answered.metrics()["loss"]


def test_answers_without_a_mistake_have_a_bound() -> None:
    assert fit_temperature(Answered.of(TWO_RECORDS[:1])) == COLDEST
    assert fit_temperature(Answered.of([])) == 1.0
