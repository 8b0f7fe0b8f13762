"""Packs of the reference API: tokenizing, packing and masks, by literal examples; lazy packs are the same."""

from __future__ import annotations

import copy
import logging
import os

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.tokens.token_rows import flatten
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.nemo_api.packed_sequence import (
    build_block_causal_additive_mask,
    create_block_causal_mask,
    pack_dataset,
    packed_block_causal_mask,
    tokenize_dataset_parallel,
)
from tests.data.packing.test_packs import TWO, documents, samples


class DocumentReader:
    """Tokenizes when read; rows of it are at first without tokens, and it cannot be pickled."""

    def __init__(self, num: int):
        self.num = num
        self.tokenize = lambda i: list(range(i % 5))

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> dict:
        if i == 13_000:
            raise ValueError(f"row {i} is bad")
        return {"input_ids": self.tokenize(i), "number": i, "process": os.getpid()}


@pytest.mark.parametrize(("num", "num_proc"), [(7, 1), (7, 3), (2_501, 2)])
def test_rows_in_order(num: int, num_proc: int) -> None:
    rows = tokenize_dataset_parallel(DocumentReader(num), num_proc)
    assert rows["number"][:] == list(range(num))
    assert rows["input_ids"][:] == [list(range(i % 5)) for i in range(num)]
    assert (os.getpid() in rows["process"][:]) == (num_proc == 1)


def test_processes_draw_no_random_numbers_of_the_caller() -> None:
    torch.manual_seed(0)
    tokenize_dataset_parallel(DocumentReader(7), 2)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3))


def test_the_error_of_a_row() -> None:
    with pytest.raises(ValueError, match="row 13000 is bad"):
        tokenize_dataset_parallel(DocumentReader(13_001), 2)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="num_proc=0 must be at least 1 process"):
        tokenize_dataset_parallel(DocumentReader(3), 0)
    with pytest.raises(DataError, match="there are no rows to tokenize"):
        tokenize_dataset_parallel(DocumentReader(0), 2)


class TestPackDataset:
    """The reference's function, by the examples of its pages."""

    def test_two_documents_in_slots_of_four(self) -> None:
        assert pack_dataset(TWO, "train", 16, cp_size=2)[0] == {
            "input_ids": [1, 2, 3, 0, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0],
            "labels": [
                2,
                3,
                -100,
                -100,
                5,
                6,
                7,
                8,
                -100,
                -100,
                -100,
                -100,
                -100,
                -100,
                -100,
                -100,
            ],
            "position_ids": [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
            "seq_lens": [3, 5],
            "seq_lens_padded": [4, 12],
        }

    def test_a_size_that_is_no_multiple_of_the_slots(self) -> None:
        packs = pack_dataset(TWO, "train", 10, cp_size=2)
        assert packs["seq_lens"][:] == [[3], [5]]
        assert packs["seq_lens_padded"][:] == [[10], [10]]
        assert packs["position_ids"][0] == list(range(10))

    def test_next_fit_in_dataset_order(self) -> None:
        packs = pack_dataset(samples([[1] * 3, [2] * 4, [3] * 5, [4] * 2, [5] * 2]), "train", 8)
        assert packs["seq_lens"][:] == [[3, 4], [5, 2], [2]]
        assert packs["seq_lens_padded"][:] == [[3, 5], [5, 3], [8]]
        assert packs["position_ids"][0] == [0, 1, 2, 0, 1, 2, 3, 4]
        assert packs["input_ids"][0] == [1, 1, 1, 2, 2, 2, 2, 0]

    def test_padding_idx(self) -> None:
        assert pack_dataset(TWO, "train", 6, padding_idx=9)["input_ids"][0] == [1, 2, 3, 9, 9, 9]

    def test_loss_mask_on_copies_of_the_labels(self) -> None:
        rows = [{"input_ids": [1, 2, 3], "labels": [2, 3, 4], "loss_mask": [0, 1, 0]}]
        before = copy.deepcopy(rows)
        for dataset in (rows, datasets.Dataset.from_list(rows)):
            assert pack_dataset(dataset, "train", 4)["labels"][0] == [-100, 3, -100, -100]
        assert rows == before

    def test_other_columns_are_left_out(self) -> None:
        rows = [row | {"loss_weights": [0.5] * len(row["input_ids"])} for row in TWO]
        assert pack_dataset(rows, "train", 8)[:] == pack_dataset(TWO, "train", 8)[:]

    def test_long_samples_are_dropped_and_counted_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            packs = pack_dataset(samples([[1] * 9, [2] * 3, [3] * 10]), "train", 8)
        assert packs["seq_lens"][:] == [[3]]
        assert caplog.messages == ["Dropped 2 samples longer than packed_sequence_size=8."]

    def test_long_samples_raise(self) -> None:
        sentence = r"Dataset sample is too long \(9 > 8\). Please increase `packed_sequence_size`."
        with pytest.raises(ValueError, match=sentence):
            pack_dataset(samples([[2] * 3, [1] * 9]), "train", 8, drop_long_samples=False)

    def test_a_document_too_long_only_for_its_slots_counts_as_long(self) -> None:
        rows = samples([[1] * 10, [2] * 3])
        assert pack_dataset(rows, "train", 10, cp_size=2)["seq_lens"][:] == [[3]]
        with pytest.raises(ValueError, match=r"too long \(12 > 10\)"):
            pack_dataset(rows, "train", 10, cp_size=2, drop_long_samples=False)

    def test_max_packs_takes_the_first(self) -> None:
        packs = pack_dataset(samples([[i] * 5 for i in range(1, 9)]), "train", 8, max_packs=2)
        assert [row[0] for row in packs["input_ids"]] == [1, 2]

    def test_no_pack_at_all(self) -> None:
        for rows in ([], samples([[1] * 9])):
            with pytest.raises(
                ValueError, match="longer than packed_sequence_size=8 and was dropped"
            ):
                pack_dataset(rows, "train", 8)

    def test_max_packs_zero(self) -> None:
        with pytest.raises(ValueError, match="max_packs=0 must be at least 1"):
            pack_dataset(TWO, "train", 8, max_packs=0)

    def test_splits(self, caplog: pytest.LogCaptureFixture) -> None:
        both = datasets.DatasetDict(
            {"train": datasets.Dataset.from_list(TWO[:1]), "val": datasets.Dataset.from_list(TWO)}
        )
        assert pack_dataset(both, "train", 8)["seq_lens"][:] == [[3]]
        assert pack_dataset(both, "val", 8)["seq_lens"][:] == [[3, 5]]
        with pytest.raises(
            ValueError, match="split='test' is not in the dataset: use one of 'train', 'val'"
        ):
            pack_dataset(both, "test", 8)
        assert "test" in caplog.text

    def test_anything_that_has_rows_serves(self) -> None:
        class MapStyle:
            def __len__(self) -> int:
                return 2

            def __getitem__(self, i: int) -> dict:
                if i >= 2:
                    raise IndexError(i)
                return TWO[i]

        tensors = [{name: torch.tensor(value) for name, value in row.items()} for row in TWO]
        arrow = datasets.Dataset.from_list(TWO)
        expected = pack_dataset(TWO, "train", 8)[:]
        for rows in (
            MapStyle(),
            iter(TWO),
            tensors,
            arrow,
            arrow.with_format("torch"),
            arrow.select([0, 1]),
        ):
            assert pack_dataset(rows, "train", 8)[:] == expected
        assert pack_dataset(arrow.select([1, 0]), "train", 8)["seq_lens"][0] == [5, 3]
        doubled = arrow.with_transform(
            lambda rows: {n: [[2 * t for t in r] for r in rows[n]] for n in rows}
        )
        assert pack_dataset(doubled, "train", 8)["input_ids"][0] == [2, 4, 6, 8, 10, 12, 14, 16]

    def test_samples_of_unequal_columns(self) -> None:
        rows = [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2], "labels": [1]}]
        for dataset in (rows, datasets.Dataset.from_list(rows)):
            with pytest.raises(DataError, match="document 1 has 2 input_ids and 1 labels"):
                pack_dataset(dataset, "train", 8)


@settings(deadline=None, max_examples=60)
@given(rows=documents, cp_size=st.sampled_from([1, 2]), size=st.sampled_from([12, 16, 24]))
def test_lazy_packs_equal_materialized_ones(rows, cp_size: int, size: int) -> None:
    flat = flatten(samples(rows))
    plan = plan_packs(
        np.diff(flat.offsets),
        size,
        strategy="next_fit",
        slot_multiple=2 * cp_size if cp_size > 1 else 1,
    )
    lazy = PackedDataset(flat, plan)
    packs = pack_dataset(samples(rows), "train", size, cp_size=cp_size)
    assert len(lazy) == len(packs)
    for one, other in zip(lazy, packs):
        documents_in_pack = len(other["seq_lens"])
        assert one["input_ids"].tolist() == other["input_ids"]
        assert one["labels"].tolist() == other["labels"]
        assert one["seq_lens"].tolist()[:documents_in_pack] == other["seq_lens"]
        assert not one["seq_lens"][documents_in_pack:].any()
        in_slots = sum(one["seq_lens_padded"][:documents_in_pack])
        assert one["position_ids"].tolist()[:in_slots] == other["position_ids"][:in_slots]
        assert sum(one["seq_lens_padded"]) == sum(other["seq_lens_padded"]) == size


TWO_AND_ONE = [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


ALL_CAUSAL = [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("make", [create_block_causal_mask, packed_block_causal_mask])
@pytest.mark.parametrize(
    "seq_lens",
    [[[2, 1], [3]], [torch.tensor([2, 1]), torch.tensor([3])], torch.tensor([[2, 1], [3, 0]])],
    ids=["lists", "tensors", "padded"],
)
def test_block_causal(make, seq_lens) -> None:
    mask = make(seq_lens)
    assert (mask.dtype, mask.shape) == (torch.bool, (2, 1, 3, 3))
    assert mask[:, 0].int().tolist() == [TWO_AND_ONE, ALL_CAUSAL]


def test_rows_of_unequal_sums() -> None:
    with pytest.raises(ValueError, match=r"sum to \[2, 3\] and must have one sum"):
        create_block_causal_mask([[2, 1], [2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_additive(dtype: torch.dtype) -> None:
    mask = build_block_causal_additive_mask(
        torch.tensor([[2, 1], [3, 0]]), seq_length=3, dtype=dtype, device="cpu"
    )
    assert (mask.dtype, mask.shape) == (dtype, (2, 1, 3, 3))
    assert (mask == 0)[:, 0].int().tolist() == [TWO_AND_ONE, ALL_CAUSAL]
    assert mask.unique().tolist() == [torch.finfo(dtype).min, 0]


def test_bad_seq_lens() -> None:
    with pytest.raises(ValueError, match=r"expects a 2D \[B, max_docs\] seq_lens tensor"):
        build_block_causal_additive_mask(
            torch.tensor([2, 1]), seq_length=3, dtype=torch.float32, device="cpu"
        )
    with pytest.raises(ValueError, match="Packed seq_lens rows must each sum to seq_length=4"):
        build_block_causal_additive_mask(
            torch.tensor([[2, 1]]), seq_length=4, dtype=torch.float32, device="cpu"
        )
