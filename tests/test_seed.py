from __future__ import annotations

import numpy as np
import pytest

from automodel_lite.seed import seeded_order


def test_a_known_order() -> None:
    assert seeded_order(10, 0, 0).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]


def test_orders_are_permutations_and_differ_by_seed_and_epoch() -> None:
    orders = [seeded_order(1000, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(order.tolist()) == list(range(1000)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert abs(np.corrcoef(orders[0], np.arange(1000))[0, 1]) < 0.1


def test_blocks_do_not_show() -> None:
    order = seeded_order((1 << 20) + 5, 3, 0)
    assert np.bincount(order).tolist() == [1] * len(order)


def test_longest_first() -> None:
    lengths = np.array([3, 9, 3, 3, 9, 1])
    order = seeded_order(len(lengths), 0, 0, lengths, 9)
    assert lengths[order].tolist() == [9, 9, 3, 3, 3, 1]
    assert (
        len({tuple(seeded_order(len(lengths), seed, 0, lengths, 9).tolist()) for seed in range(20)})
        > 6
    )


@pytest.mark.parametrize("n", [0, 1])
def test_nothing_to_order(n: int) -> None:
    assert seeded_order(n, 0, 0).tolist() == list(range(n))


def test_too_many_for_one_key() -> None:
    with pytest.raises(ValueError, match="are too many for one plan"):
        seeded_order(2, 0, 0, np.array([1, 2]), 1 << 57)
