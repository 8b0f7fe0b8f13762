"""Which rank reads which pack, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from automodel_lite.data.feeding.order import BatchShape, assign_to_ranks, epoch_order
from automodel_lite.data.packing.packs import EMPTY_PACK


def test_a_step_is_dealt_to_ranks_and_micro_batches() -> None:
    dealt = assign_to_ranks(np.array([4, 1, 8, 5]), BatchShape(4, 1, 2))
    assert dealt.tolist() == [[[4], [1]], [[8], [5]]]
    assert dealt[:, 1].tolist() == [[1], [5]]


def test_a_short_last_step_is_filled_with_empty_packs() -> None:
    dealt = assign_to_ranks(np.array([3, 6, 9]), BatchShape(8, 2, 2))
    assert dealt.tolist() == [[[3, 6], [9, EMPTY_PACK]]]


@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 1), (1, 4), (2, 2), (3, 2)])
def test_global_batches_do_not_depend_on_the_layout(micro: int, dp: int) -> None:
    order = epoch_order(50, seed=3, epoch=1, shuffle=True)
    shape = BatchShape(12, micro, dp)
    steps = [assign_to_ranks(order[i : i + 12], shape) for i in range(0, 50, 12)]
    read = [sorted(p for p in step.ravel().tolist() if p != EMPTY_PACK) for step in steps]
    assert read == [sorted(order[i : i + 12].tolist()) for i in range(0, 50, 12)]


def test_each_epoch_has_its_own_order_and_each_seed_too() -> None:
    first, again, second, other = (epoch_order(100, *key, True).tolist() for key in [(0, 0), (0, 0), (0, 1), (1, 0)])
    assert first == again
    assert first != second != other != first
    assert sorted(second) == list(range(100))
    assert epoch_order(4, 0, 5, shuffle=False).tolist() == [0, 1, 2, 3]
