"""Batches as dicts in THD format: literal examples of the reference pages."""

from __future__ import annotations

import pytest
import torch

from automodel_lite.nemo_api.thd_utils import (
    process_input_for_thd,
    split_batch_into_thd_chunks,
    thd_padding_mask_from_token_ids,
)
from tests.test_thd import batch_of


# ------------------------------------------------------------------------------------------- process_input_for_thd
def test_padding_in_the_middle_keeps_both_boundaries() -> None:
    thd = process_input_for_thd(batch_of([[3, 2], [6, -1000]], [[4, 2], [6, -1000]], 6))
    assert thd["cu_seqlens"].tolist() == [0, 3, 5, 11]
    assert thd["cu_seqlens_padded"].tolist() == [0, 4, 6, 12]
    assert thd["max_seqlen"].tolist() == 6
    assert thd["padding_mask"].tolist() == [False] * 3 + [True] + [False] * 8
    assert thd["input_ids"].tolist() == list(range(1, 13))
    assert thd["labels"].tolist() == list(range(101, 113))
    assert thd["position_ids"].tolist() == [0, 1, 2, 3, 4, 5] * 2
    assert thd["qkv_format"] == "thd"
    assert "seq_lens" not in thd
    assert "seq_lens_padded" not in thd
    assert (
        thd["cu_seqlens"].dtype
        == thd["cu_seqlens_padded"].dtype
        == thd["max_seqlen"].dtype
        == torch.int32
    )


def test_padding_at_the_end_is_absorbed() -> None:
    batch = batch_of([[3]], [[4]], 4) | {"input_ids": torch.tensor([[1, 2, 3, 0]])}
    thd = process_input_for_thd(batch)
    assert thd["cu_seqlens"].tolist() == [0, 4]
    assert "cu_seqlens_padded" not in thd
    assert thd["max_seqlen"].tolist() == 4
    assert thd["padding_mask"].tolist() == [False, False, False, True]


def test_no_padding_has_no_padded_boundaries() -> None:
    thd = process_input_for_thd(batch_of([[2, 2], [4, -1000]], [[2, 2], [4, -1000]], 4))
    assert thd["cu_seqlens"].tolist() == [0, 2, 4, 8]
    assert "cu_seqlens_padded" not in thd
    assert not thd["padding_mask"].any()


def test_padding_is_told_by_place_not_by_token() -> None:
    batch = batch_of([[3]], [[4]], 4) | {"input_ids": torch.tensor([[0, 0, 0, 7]])}
    assert process_input_for_thd(batch)["padding_mask"].tolist() == [False, False, False, True]


def test_the_sentinel_can_be_another() -> None:
    thd = process_input_for_thd(
        batch_of([[2, 2], [4, -1]], [[2, 2], [4, -1]], 4), seq_lens_padding_value=-1
    )
    assert thd["cu_seqlens"].tolist() == [0, 2, 4, 8]


def test_embeddings_mrope_and_other_keys() -> None:
    batch = batch_of([[2], [2]], [[2], [2]], 2)
    batch |= {
        "input_ids": torch.arange(12.0).view(2, 2, 3),
        "position_ids": torch.arange(12).view(3, 2, 2),
        "pixel_values": torch.ones(5, 7),
        "name": "x",
    }
    thd = process_input_for_thd(batch)
    assert thd["input_ids"].shape == (4, 3)
    assert thd["position_ids"].tolist() == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]]
    assert thd["pixel_values"].shape == (5, 7)
    assert thd["name"] == "x"


def test_no_position_ids_stays_none() -> None:
    batch = batch_of([[2]], [[2]], 2) | {"position_ids": None}
    assert process_input_for_thd(batch)["position_ids"] is None


def test_without_seq_lens_the_pad_id_tells() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 9, 9]]),
        "labels": torch.tensor([[6, 7, -100, -100]]),
    }
    thd = process_input_for_thd(batch, padding_token_id=9)
    assert thd["padding_mask"].tolist() == [False, False, True, True]


def test_a_pad_id_inside_the_content_is_refused() -> None:
    with pytest.raises(ValueError, match="padding_token_id=5 also occurs as content"):
        thd_padding_mask_from_token_ids(torch.tensor([5, 1, 5]), 5)


@pytest.mark.parametrize(
    ("seq_lens", "slots"), [([[5]], [[4]]), ([[2, 2]], [[4, -1000]]), ([[2, 2]], [[2, 8]])], ids=str
)
def test_lengths_that_do_not_fit_are_refused(seq_lens: list, slots: list) -> None:
    with pytest.raises(ValueError, match="do not describe 1 row of 4 tokens"):
        process_input_for_thd(batch_of(seq_lens, slots, 4))


# ------------------------------------------------------------------------------------- split_batch_into_thd_chunks
def test_one_chunk_is_the_plain_call() -> None:
    batch = batch_of([[3, 2], [6, -1000]], [[4, 2], [6, -1000]], 6)
    assert split_batch_into_thd_chunks(batch, 1)["cu_seqlens"].tolist() == [0, 3, 5, 11]


def test_chunks_are_stacked() -> None:
    batch = batch_of([[3, 2], [6, -1000]], [[4, 2], [6, -1000]], 6) | {
        "pixels": torch.arange(4).view(2, 2)
    }
    thd = split_batch_into_thd_chunks(batch, 2)
    assert thd["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
    assert thd["cu_seqlens"].tolist() == [[0, 3, 5], [0, 6, -1000]]
    assert thd["cu_seqlens_padded"].tolist() == [[0, 4, 6], [0, 6, -1000]]
    assert thd["max_seqlen"].tolist() == [3, 6]
    assert thd["padding_mask"].shape == (2, 6)
    assert thd["pixels"].tolist() == [[[0, 1]], [[2, 3]]]
    assert thd["qkv_format"] == "thd"


def test_chunks_without_padding_have_no_padded_boundaries() -> None:
    thd = split_batch_into_thd_chunks(batch_of([[4], [4]], [[4], [4]], 4), 2)
    assert thd["cu_seqlens"].tolist() == [[0, 4], [0, 4]]
    assert "cu_seqlens_padded" not in thd


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="num_chunks=2 must divide the 3 rows"):
        split_batch_into_thd_chunks(batch_of([[4]] * 3, [[4]] * 3, 4), 2)
