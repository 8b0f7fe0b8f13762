from __future__ import annotations

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from automodel_lite.nemo_api.neat_packing import (
    _build_packed_sample,
    greedy_knapsack,
    neat_pack_dataset,
)

ROWS = [
    {"input_ids": [1, 2, 3], "labels": [2, 3, -100]},
    {"input_ids": [4, 5], "labels": [5, -100]},
]


@pytest.mark.parametrize(
    ("lengths", "size", "bins"),
    [
        ([3, 2, 4, 1], 5, [[2, 3], [0, 1]]),
        ([], 5, []),
        ([6, 2], 5, [[1]]),
        ([5, 5], 5, [[0], [1]]),
        ([2, 2, 2], 5, [[0, 1], [2]]),
    ],
)
def test_greedy_knapsack(lengths: list[int], size: int, bins: list[list[int]]) -> None:
    assert greedy_knapsack(lengths, size) == bins


@given(lengths=st.lists(st.integers(1, 30), max_size=60))
def test_greedy_knapsack_agrees_with_the_slow_twin(lengths: list[int]) -> None:
    bins: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > 20:
            continue
        fills = [sum(lengths[j] for j in members) for members in bins]
        if fills and min(fills) + lengths[i] <= 20:
            bins[fills.index(min(fills))].append(i)
        else:
            bins.append([i])
    assert greedy_knapsack(lengths, 20) == bins


def test_neat_rows() -> None:
    assert neat_pack_dataset(ROWS, "train", 6)[0] == {
        "input_ids": [1, 2, 3, 4, 5, 0],
        "labels": [2, 3, -100, 5, -100, -100],
        "attention_mask": [1, 1, 1, 2, 2, 0],
        "position_ids": [0, 1, 2, 0, 1, 0],
    }


def test_build_packed_sample() -> None:
    row = _build_packed_sample(ROWS, 7, 9)
    assert {name: value.tolist() for name, value in row.items()} == {
        "input_ids": [1, 2, 3, 4, 5, 9, 9],
        "labels": [2, 3, -100, 5, -100, -100, -100],
        "attention_mask": [1, 1, 1, 2, 2, 0, 0],
        "position_ids": [0, 1, 2, 0, 1, 0, 0],
    }
    assert all(value.dtype == torch.int64 for value in row.values())


def test_long_samples() -> None:
    sentence = r"Sample is too long \(3 > 2\). Set drop_long_samples=True or increase pack_size."
    with pytest.raises(ValueError, match=sentence):
        neat_pack_dataset(ROWS, "train", 2)
    assert neat_pack_dataset(ROWS, "train", 2, drop_long_samples=True)["input_ids"][:] == [[4, 5]]
    with pytest.raises(ValueError, match=r"No samples remaining after filtering\."):
        neat_pack_dataset(ROWS, "train", 1, drop_long_samples=True)


def test_splits_and_max_packs() -> None:
    both = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS * 3)})
    assert len(neat_pack_dataset(both, "train", 5)) == 3
    assert len(neat_pack_dataset(both, "train", 5, max_packs=2)) == 2
