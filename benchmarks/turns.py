"""Ways to do one thing take turns in one process, so that a slow minute of the machine is slow for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any


def take_turns(
    ways: dict[str, Callable[[], Any]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Returns the CPU seconds of each way in each round, and what each returned last; a round before them warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    results: dict[str, Any] = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            began = time.process_time()
            results[name] = way()
            if number:
                seconds[name].append(time.process_time() - began)
    return seconds, results


def ratio(theirs: list[float], ours: list[float]) -> str:
    """How many times faster: the median of the ratios of the rounds, and the lowest and highest of them.

    >>> ratio([2.0, 4.0, 9.0], [1.0, 1.0, 3.0])
    '3.00 x (2.00 to 4.00)'
    """
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    return f"{median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"
