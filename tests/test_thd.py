"""The THD stream of a batch: literal examples, and properties over random documents, of its dict form too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_lite.nemo_api.collaters import packed_sequence_thd_collater
from automodel_lite.nemo_api.thd_utils import process_input_for_thd
from automodel_lite.thd import to_thd


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


def test_to_thd_counts_and_boundaries() -> None:
    batch = batch_of([[3, 2], [5, -1000]], [[4, 2], [6, -1000]], 6)
    batch["labels"][0, 3] = batch["labels"][1, 5] = -100
    thd = to_thd(batch)
    assert thd.cu_seqlens.tolist() == [0, 3, 5, 10]
    assert thd.cu_seqlens_padded.tolist() == [0, 4, 6, 12]
    assert (thd.max_seqlen, thd.num_tokens, thd.num_label_tokens) == (6, 10, 10)
    assert thd.attention.segments.cu_q is thd.attention.segments.cu_k
    assert thd.attention.segments.cu_q.tolist() == [0, 4, 6, 12]
    inputs = thd.model_inputs()
    assert inputs["input_ids"].shape == (1, 12)
    assert inputs["use_cache"] is False
    assert inputs["packed"] is thd


def test_a_moved_batch_keeps_one_tensor_one() -> None:
    moved = to_thd(batch_of([[4]], [[4]], 4)).map_tensors(torch.clone)
    assert moved.attention.segments.cu_q is moved.attention.segments.cu_k


def test_a_model_of_attention_alone_gets_no_rows() -> None:
    thd = to_thd(batch_of([[3, 2]], [[4, 4]], 8), with_mixers=False).map_tensors(torch.clone)
    assert thd.mixers is None
    assert thd.mixers is None


def test_padding_needs_no_position_of_its_own() -> None:
    """A table of learned positions holds the documents' own, and packs may be longer."""
    batch = batch_of([[3, 2]], [[4, 6]], 10) | {
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    }
    assert to_thd(batch).position_ids.tolist() == [0, 1, 2, 0, 0, 1, 0, 0, 0, 0]


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
