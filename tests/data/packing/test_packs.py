from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_lite.data.packing.packs import EMPTY_PACK, PackedDataset, packed_sequence_thd_collater
from automodel_lite.data.packing.plan import padding_segments, plan_packs
from automodel_lite.data.tokens.token_rows import Rows, TokenRows, flatten, load_rows
from automodel_lite.errors import DataError
from automodel_lite.thd import IGNORE_INDEX

TWO = [{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, {"input_ids": [4, 5, 6, 7, 8], "labels": [5, 6, 7, 8, -100]}]
documents = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=12), min_size=1, max_size=20)


def samples(rows: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"input_ids": row, "labels": [*row[1:], -100]} for row in rows]


def plain(pack: dict) -> dict[str, list[int]]:
    return {name: value.tolist() for name, value in pack.items()}


def test_the_drawing_of_a_pack() -> None:
    plan = plan_packs([3, 5], 16, strategy="next_fit", slot_multiple=4)
    pack = PackedDataset(flatten(TWO), plan)[0]
    assert plain(pack) == {
        "input_ids": [1, 2, 3, 0, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0],
        "labels": [2, 3, -100, -100, 5, 6, 7, 8, -100, -100, -100, -100, -100, -100, -100, -100],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3],
        "seq_lens": [3, 5, 0],
        "seq_lens_padded": [4, 8, 4],
    }
    assert all(value.dtype == torch.int64 for value in pack.values())


def test_a_long_tail_is_padded_in_bounded_segments() -> None:
    pack = PackedDataset(flatten(TWO), plan_packs([3, 5], 1100, strategy="next_fit"))[0]
    assert pack["seq_lens"].tolist() == [3, 5, 0, 0, 0]
    assert pack["seq_lens_padded"].tolist() == [3, 5, 512, 512, 68]
    assert pack["position_ids"].max() == 511


def test_the_empty_pack() -> None:
    packs = PackedDataset(flatten(TWO), plan_packs([3, 5], 8, slot_multiple=4), padding_idx=7)
    assert plain(packs[EMPTY_PACK]) == {
        "input_ids": [7] * 8,
        "labels": [IGNORE_INDEX] * 8,
        "position_ids": list(range(8)),
        "seq_lens": [0],
        "seq_lens_padded": [8],
    }


def test_strategy_none_gives_rows_of_their_own_length() -> None:
    packs = PackedDataset(flatten(TWO), plan_packs([3, 5], 16, strategy="none", slot_multiple=2))
    assert [plain(packs[i]) for i in (0, EMPTY_PACK)] == [
        {"input_ids": [1, 2, 3, 0], "labels": [2, 3, -100, -100], "position_ids": [0, 1, 2, 3]}
        | {"seq_lens": [3], "seq_lens_padded": [4]},
        {"input_ids": [0, 0], "labels": [-100, -100], "position_ids": [0, 1], "seq_lens": [0], "seq_lens_padded": [2]},
    ]


def test_pieces_of_documents() -> None:
    packs = PackedDataset(flatten(TWO), plan_packs([3, 5], 4, strategy="next_fit", overlong="split"))
    assert [pack["input_ids"].tolist() for pack in packs] == [[1, 2, 3, 0], [4, 5, 6, 7], [8, 0, 0, 0]]
    assert packs[1]["labels"].tolist() == [5, 6, 7, 8]  # the target of position 3 is known, though in another piece
    cut = PackedDataset(flatten(TWO), plan_packs([3, 5], 4, strategy="next_fit", overlong="truncate"))
    assert [pack["input_ids"].tolist() for pack in cut] == [[1, 2, 3, 0], [4, 5, 6, 7]]


@pytest.mark.parametrize("labels", [[2, 3, -100], [-100, 3, -100], [2, 3, 4]], ids=["all", "prompt", "no end"])
def test_lists_become_int32(labels: list[int]) -> None:
    flat = flatten([{"input_ids": [1, 2, 2**31 - 1], "labels": labels}, {"input_ids": [], "labels": []}])
    assert flat.input_ids.tolist() == [1, 2, 2**31 - 1]
    assert flat.labels.tolist() == labels
    assert (flat.input_ids.dtype, flat.labels.dtype) == (np.int32, np.int32)
    assert flat.offsets.tolist() == [0, 3, 3]


def test_ids_over_int32() -> None:
    with pytest.raises(OverflowError):
        flatten([{"input_ids": [2**31], "labels": [1]}])


def one_pack(rows: TokenRows, pieces: list[tuple[int, int, int]], size: int, multiple: int, pad: int) -> dict:
    """The slow twin of a pack: token by token; pieces are (document, start, stop)."""
    pack: dict[str, list[int]] = {n: [] for n in ("input_ids", "labels", "position_ids", "seq_lens", "seq_lens_padded")}
    segments = [(i, start, stop, -(-(stop - start) // multiple) * multiple) for i, start, stop in pieces]
    segments += [(0, 0, 0, width) for width in padding_segments(size - sum(s[-1] for s in segments), multiple)]
    for i, start, stop, slot in segments:
        begin, padding = int(rows.offsets[i]), slot - (stop - start)
        pack["input_ids"] += rows.input_ids[begin + start : begin + stop].tolist() + [pad] * padding
        pack["labels"] += rows.labels[begin + start : begin + stop].tolist() + [IGNORE_INDEX] * padding
        pack["position_ids"] += range(slot)
        pack["seq_lens"].append(stop - start)
        pack["seq_lens_padded"].append(slot)
    return pack


class Columns(Rows):
    """Rows that can only be read one by one."""

    def __init__(self, flat: TokenRows) -> None:
        self.rows_of_all = flat
        self.lengths = self.row_lengths = np.diff(flat.offsets)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        piece = slice(self.rows_of_all.offsets[index], self.rows_of_all.offsets[index + 1])
        return {"input_ids": self.rows_of_all.input_ids[piece], "labels": self.rows_of_all.labels[piece]}


@settings(deadline=None, max_examples=150)
@given(
    rows=documents,
    strategy=st.sampled_from(["exact_fill", "best_fit", "next_fit", "wrapped"]),
    multiple=st.sampled_from([1, 2, 4]),
    overlong=st.sampled_from(["truncate", "split"]),
    dtype=st.sampled_from([np.int32, np.int64, np.uint16]),
    indexed=st.booleans(),
    data=st.data(),
)
def test_a_batch_equals_its_packs_token_by_token(rows, strategy, multiple, overlong, dtype, indexed, data) -> None:
    made = flatten(samples(rows))
    flat = TokenRows({"input_ids": made.input_ids.astype(dtype), "labels": made.labels}, made.offsets)
    lengths = np.diff(flat.offsets)
    plan = plan_packs(lengths, 8, strategy=strategy, slot_multiple=multiple, overlong=overlong)
    packs = PackedDataset(Columns(flat) if indexed else flat, plan, padding_idx=7)
    asked = data.draw(st.lists(st.integers(EMPTY_PACK, len(plan) - 1), min_size=1, max_size=6))
    starts = np.zeros_like(plan.doc_ids) if plan.starts is None else plan.starts
    stops = lengths[plan.doc_ids] if plan.stops is None else plan.stops
    pieces = list(zip(plan.doc_ids.tolist(), starts.tolist(), stops.tolist()))
    expected = [
        one_pack(flat, [] if i == EMPTY_PACK else pieces[plan.offsets[i] : plan.offsets[i + 1]], 8, multiple, pad=7)
        for i in asked
    ]
    batch = packs.__getitems__(asked)
    assert [plain(pack) for pack in batch] == [plain(packs[i]) for i in asked] == expected
    assert all(value.dtype == torch.int64 for pack in batch for value in pack.values())
    collated = packed_sequence_thd_collater(batch)
    one_by_one = packed_sequence_thd_collater([packs[i] for i in asked])
    assert list(collated) == list(one_by_one)
    for name, values in one_by_one.items():
        same = torch.equal(collated[name], values) if isinstance(values, torch.Tensor) else collated[name] == values
        assert same, name


def test_a_data_loader_fetches_batches() -> None:
    packs = PackedDataset(flatten(TWO), plan_packs([3, 5], 6, strategy="next_fit"))
    asked = [[0, EMPTY_PACK], [1, 0]]
    for num_workers in (0, 1):
        loader = torch.utils.data.DataLoader(
            packs, batch_sampler=asked, collate_fn=packed_sequence_thd_collater, num_workers=num_workers
        )
        batches = list(loader)
        assert batches[1]["input_ids"].tolist() == [[4, 5, 6, 7, 8, 0], [1, 2, 3, 0, 0, 0]]
        assert batches[0]["seq_lens"].tolist() == [[3, 0], [0, -1000]]
        assert batches[0]["seq_lens_padded"].tolist() == [[3, 3], [6, -1000]]
    assert packs.__getitems__([]).num_segments == []
    with pytest.raises(IndexError, match="pack 2 of 2"):
        packs.__getitems__([0, 2])


@pytest.mark.parametrize("strategy", ["exact_fill", "best_fit", "next_fit", "wrapped"])
@settings(deadline=None, max_examples=30)
@given(rows=documents, seed=st.integers(0, 3))
def test_every_token_is_in_one_pack_with_its_label(strategy: str, rows, seed: int) -> None:
    marked = [[1000 * i + k for k in range(len(row))] for i, row in enumerate(rows, start=1)]
    flat = flatten(samples(marked))
    packs = PackedDataset(flat, plan_packs(np.diff(flat.offsets), 12, strategy=strategy, seed=seed, slot_multiple=2))
    pairs = [
        pair
        for pack in packs
        for pair in zip(pack["input_ids"].tolist(), pack["labels"].tolist())
        if pair[0] or pair[1] != IGNORE_INDEX
    ]
    assert sorted(pairs) == sorted(zip(flat.input_ids.tolist(), flat.labels.tolist()))


def test_reads_memory_maps_and_indexes_like_a_list(tmp_path) -> None:
    flat = flatten(TWO)
    for name in ("input_ids", "labels", "lengths", "offsets"):
        values = getattr(flat, name).astype(np.int32 if name != "offsets" else np.int64)
        (tmp_path / f"{name}.bin").write_bytes(values.tobytes())
    mapped = load_rows(tmp_path)
    packs = PackedDataset(mapped, plan_packs([3, 5], 8))
    assert packs[0]["input_ids"].tolist() in ([1, 2, 3, 4, 5, 6, 7, 8], [4, 5, 6, 7, 8, 1, 2, 3])
    for index in (1, -2):
        with pytest.raises(IndexError):
            packs[index]


def test_a_plan_of_other_rows() -> None:
    with pytest.raises(DataError, match="the plan was made for 3 documents and the rows hold 2"):
        PackedDataset(flatten(TWO), plan_packs([3, 5, 1], 8))
    with pytest.raises(DataError, match="the rows hold 8 input_ids and 7 labels for 8 tokens"):
        TokenRows({"input_ids": np.arange(8), "labels": np.arange(7)}, np.array([0, 3, 8]))
    both = np.arange(16).reshape(8, 2)
    with pytest.raises(DataError, match="must be contiguous"):
        TokenRows({"input_ids": both[:, 0], "labels": both[:, 1]}, np.array([0, 3, 8]))
