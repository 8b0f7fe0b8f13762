"""Thousands of drawn cases against one rule: the right result, or a sentence; never a traceback, a hang or a signal."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

from automodel_lite.errors import ConfigError, DataError

MAX_S = 60
# the same cases everywhere, until another seed is asked for
SEED = int(os.environ.get("PROPERTY_SEED", "1"))


class Hang(BaseException):
    """A case took over a minute."""


@contextmanager
def within_a_minute() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang(f"over {MAX_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, MAX_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def explore(
    strategy: SearchStrategy, attempt: Callable[[Any], None], num_cases: int
) -> Counter[str]:
    """Draws cases; counts those that went right and those that were answered by a sentence.

    Anything else that `attempt` raises is a failure: hypothesis shrinks it, and prints the smallest case.
    """
    counts: Counter[str] = Counter()

    @seed(SEED)
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(case: Any) -> None:
        with within_a_minute():
            try:
                attempt(case)
            except (ConfigError, DataError) as error:
                check_sentence(str(error))
                counts["sentence"] += 1
            else:
                counts["right"] += 1

    print(f"PROPERTY_SEED={SEED}")
    one()
    print(f"{sum(counts.values()):,} cases: {dict(counts)}")
    return counts


def check_sentence(text: str) -> None:
    """A message for a person: some words, no traceback, nothing that cannot be printed, not a page."""
    assert len(text.split()) >= 3, text
    assert "Traceback" not in text
    assert text.encode()
    assert len(text) < 20_000
