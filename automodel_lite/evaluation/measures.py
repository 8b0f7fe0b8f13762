"""How good predicted classes, probabilities and numbers are, of weighted documents or questions."""

from __future__ import annotations

import numpy as np

NUM_BINS = 15
"""Of confidences, for the calibration error: as in Guo et al., 2017 (arXiv:1706.04599)."""


def calibration_error(confidences: np.ndarray, is_right: np.ndarray, weights: np.ndarray) -> float:
    """Returns the expected calibration error, 0..1: over bins of the likeliest class's probability,
    how far its mean is from the share that is right. All are [N].
    """
    # a bin holds its upper edge
    bins = (np.ceil(confidences * NUM_BINS).astype(np.int64) - 1).clip(0, NUM_BINS - 1)
    gaps = np.bincount(bins, weights * (confidences - is_right), NUM_BINS)
    return float(np.abs(gaps).sum() / (weights.sum() or 1))


def macro_f1(is_given: np.ndarray, is_true: np.ndarray, weights: np.ndarray) -> float:
    """Returns the mean F1 over the classes that are true or given somewhere; of [N, K] flags."""
    right_K = weights @ (is_given & is_true)
    total_K = weights @ is_given + weights @ is_true
    is_there_K = total_K > 0
    return (
        float((2 * right_K[is_there_K] / total_K[is_there_K]).mean()) if is_there_K.any() else 0.0
    )


def pearson(predicted: np.ndarray, true: np.ndarray, weights: np.ndarray) -> float:
    """Returns Pearson's correlation of numbers [N]; 0 where one of them does not vary."""
    shares = weights / (weights.sum() or 1)
    x = predicted - shares @ predicted
    y = true - shares @ true
    spread = (shares @ x**2) * (shares @ y**2)
    return float((shares @ (x * y)) / spread**0.5) if spread > 0 else 0.0
