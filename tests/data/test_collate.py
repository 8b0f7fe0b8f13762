"""The collater of the recipe, and its face in nemo_api: literal examples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from automodel_lite.data.packing import packs as collate
from automodel_lite.nemo_api import collaters

Collater = Callable[[list[dict[str, Any]]], dict[str, Any]]


@pytest.fixture(params=[collate, collaters], ids=["recipe", "nemo_api"])
def collater(request: pytest.FixtureRequest) -> Collater:
    return request.param.packed_sequence_thd_collater


def pack(seq_lens: list[int], seq_lens_padded: list[int]) -> dict[str, Any]:
    total = sum(seq_lens_padded)
    return {
        "input_ids": list(range(total)),
        "labels": list(range(total)),
        "position_ids": list(range(total)),
        "seq_lens": seq_lens,
        "seq_lens_padded": seq_lens_padded,
    }


def test_thd_collater_stacks_packs_and_fills_lengths(collater: Collater) -> None:
    batch = collater([pack([3, 2], [4, 2]) | {"other": 1}, pack([6], [6])])
    assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (2, 6)
    assert batch["seq_lens"].tolist() == [[3, 2], [6, -1000]]
    assert batch["seq_lens_padded"].tolist() == [[4, 2], [6, -1000]]
    assert batch["qkv_format"] == "thd"
    assert set(batch) == {"input_ids", "labels", "position_ids", "seq_lens", "seq_lens_padded", "qkv_format"}


def test_thd_collater_of_nothing_is_empty(collater: Collater) -> None:
    assert collater([]) == {}


def test_thd_collater_refuses_packs_of_unequal_length(collater: Collater) -> None:
    with pytest.raises(ValueError, match="must have one length"):
        collater([pack([3], [4]), pack([6], [6])])


def test_the_face_makes_each_loose_row_a_document() -> None:
    rows = [
        {"input_ids": [1, 2, 3], "labels": [2, 3, -100], "___PAD_TOKEN_IDS___": {"input_ids": 9}},
        {"input_ids": [4, 5, 0, 0, 0], "labels": [5, -100, -100, -100, -100], "attention_mask": [1, 1, 0, 0, 0]},
    ]
    before = copy.deepcopy(rows)
    batch = collaters.packed_sequence_thd_collater(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9, 9], [4, 5, 0, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, -100, -100, -100], [5, -100, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert batch["seq_lens"].tolist() == [[3], [2]]
    assert batch["seq_lens_padded"].tolist() == [[5], [5]]
    assert rows == before
