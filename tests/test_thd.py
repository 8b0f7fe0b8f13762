"""The THD stream of a batch: literal examples of the reference pages, and properties over random documents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_lite.data.collate import packed_sequence_thd_collater
from automodel_lite.thd import (
    process_input_for_thd,
    split_batch_into_thd_chunks,
    thd_padding_mask_from_token_ids,
    to_thd,
)


def batch_of(seq_lens: list, seq_lens_padded: list, row_length: int) -> dict:
    ids = torch.arange(1, len(seq_lens) * row_length + 1).view(len(seq_lens), row_length)
    return {
        "input_ids": ids,
        "labels": ids + 100,
        "position_ids": torch.arange(row_length).repeat(len(seq_lens), 1),
        "seq_lens": torch.tensor(seq_lens),
        "seq_lens_padded": torch.tensor(seq_lens_padded),
        "qkv_format": "thd",
    }


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
    assert thd["cu_seqlens"].dtype == thd["cu_seqlens_padded"].dtype == thd["max_seqlen"].dtype == torch.int32


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
    thd = process_input_for_thd(batch_of([[2, 2], [4, -1]], [[2, 2], [4, -1]], 4), seq_lens_padding_value=-1)
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
    batch = {"input_ids": torch.tensor([[5, 6, 9, 9]]), "labels": torch.tensor([[6, 7, -100, -100]])}
    thd = process_input_for_thd(batch, padding_token_id=9)
    assert thd["padding_mask"].tolist() == [False, False, True, True]


def test_a_pad_id_inside_the_content_is_refused() -> None:
    with pytest.raises(ValueError, match="padding_token_id=5 also occurs as content"):
        thd_padding_mask_from_token_ids(torch.tensor([5, 1, 5]), 5)


@pytest.mark.parametrize(
    ("seq_lens", "slots"), [([[5]], [[4]]), ([[2, 2]], [[4, -1000]]), ([[2, 2]], [[2, 8]])], ids=str
)
def test_lengths_that_do_not_fit_are_refused(seq_lens: list, slots: list) -> None:
    with pytest.raises(ValueError, match="do not describe 1 rows of 4 tokens"):
        process_input_for_thd(batch_of(seq_lens, slots, 4))


# ------------------------------------------------------------------------------------- split_batch_into_thd_chunks
def test_one_chunk_is_the_plain_call() -> None:
    batch = batch_of([[3, 2], [6, -1000]], [[4, 2], [6, -1000]], 6)
    assert split_batch_into_thd_chunks(batch, 1)["cu_seqlens"].tolist() == [0, 3, 5, 11]


def test_chunks_are_stacked() -> None:
    batch = batch_of([[3, 2], [6, -1000]], [[4, 2], [6, -1000]], 6) | {"pixels": torch.arange(4).view(2, 2)}
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


# ---------------------------------------------------------------------------------------------------------- to_thd
def test_to_thd_counts_and_boundaries() -> None:
    batch = batch_of([[3, 2], [5, -1000]], [[4, 2], [6, -1000]], 6)
    batch["labels"][0, 3] = batch["labels"][1, 5] = -100
    thd = to_thd(batch)
    assert thd.cu_seqlens.tolist() == [0, 3, 5, 10]
    assert thd.cu_seqlens_padded.tolist() == [0, 4, 6, 12]
    assert (thd.max_seqlen, thd.num_tokens, thd.num_label_tokens) == (6, 10, 10)
    assert thd.attention.cu_q is thd.attention.cu_k
    assert thd.attention.cu_q.tolist() == [0, 4, 6, 12]
    inputs = thd.model_inputs()
    assert inputs["input_ids"].shape == (1, 12)
    assert inputs["use_cache"] is False
    assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"]
    assert "cp_exchange" not in inputs


def test_a_moved_batch_keeps_one_tensor_one() -> None:
    moved = to_thd(batch_of([[4]], [[4]], 4)).moved(torch.clone)
    assert moved.attention.cu_q is moved.attention.cu_k


def test_a_row_that_is_not_filled_is_refused() -> None:
    with pytest.raises(ValueError, match="the slots of a row must fill it"):
        to_thd(batch_of([[3], [3]], [[3], [4]], 4))


@st.composite
def rows_of_documents(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, int]]]]:
    """(row length, rows of (real, slot) lengths that fill them)."""
    row_length = draw(st.integers(1, 24))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        row, room = [], row_length
        while room:
            slot = draw(st.integers(1, room))
            row.append((draw(st.integers(0, slot)), slot))
            room -= slot
        rows.append(row)
    return row_length, rows


@settings(max_examples=150, deadline=None)
@given(rows_of_documents())
def test_stream_properties(data: tuple[int, list[list[tuple[int, int]]]]) -> None:
    """Boundaries, masks and counts against a loop over tokens."""
    row_length, rows = data
    samples, is_pad = [], []
    for row in rows:
        ids: list[int] = []
        for real, slot in row:
            ids += [7] * real + [0] * (slot - real)
        is_pad += [token == 0 for token in ids]
        labels = [token or -100 for token in ids]
        samples.append(
            {
                "input_ids": ids,
                "labels": labels,
                "position_ids": [0] * row_length,
                "seq_lens": [real for real, _ in row],
                "seq_lens_padded": [slot for _, slot in row],
            }
        )
    batch = packed_sequence_thd_collater(samples)
    stream, thd = to_thd(batch), process_input_for_thd(batch)
    slots = [slot for row in rows for _, slot in row]
    assert stream.cu_seqlens_padded.diff().tolist() == slots
    assert stream.cu_seqlens.diff().tolist() == [real for row in rows for real, _ in row]
    assert stream.max_seqlen == max(slots)
    assert stream.num_tokens == stream.num_label_tokens == is_pad.count(False)
    assert thd["padding_mask"].tolist() == is_pad
    assert thd.get("cu_seqlens_padded", thd["cu_seqlens"])[-1] == len(is_pad)
