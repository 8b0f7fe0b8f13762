"""A layer whose keys travel in a ring, beside one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.test_exchange import layer_errors
from tests.ranks import run_ranks


@pytest.mark.parametrize("changes", [{"softcap": 1.5}, {"window": 7}], ids=str)
@pytest.mark.parametrize("cp", [2, 4])
def test_a_ring_with_a_softcap_or_a_window_equals_one_process(
    cp: int, changes: dict[str, Any]
) -> None:
    for errors in run_ranks(layer_errors, cp, "ring", False, 2, changes):
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.slow
def test_a_ring_of_eight_equals_one_process() -> None:
    for errors in run_ranks(layer_errors, 8, "ring", False, 2, {}):
        assert max(errors.values()) < 1e-12, errors
