from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.data.packing.packs import (
    EMPTY_PACK,
    PackedDataset,
    Packer,
    join_packs,
    pack_size_for_coverage,
)
from automodel_lite.data.packing.plan import padding_segments, plan_packs
from automodel_lite.data.tokens.token_rows import (
    DocumentReader,
    TokenizedDocuments,
    flatten,
    load_rows,
)
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.nemo_api.collaters import packed_sequence_thd_collater
from tests.runs import config_of

TWO = [
    {"input_ids": [1, 2, 3], "labels": [2, 3, -100]},
    {"input_ids": [4, 5, 6, 7, 8], "labels": [5, 6, 7, 8, -100]},
]
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
        {
            "input_ids": [0, 0],
            "labels": [-100, -100],
            "position_ids": [0, 1],
            "seq_lens": [0],
            "seq_lens_padded": [2],
        },
    ]


def test_pieces_of_documents() -> None:
    packs = PackedDataset(
        flatten(TWO), plan_packs([3, 5], 4, strategy="next_fit", overlong="split")
    )
    assert [pack["input_ids"].tolist() for pack in packs] == [
        [1, 2, 3, 0],
        [4, 5, 6, 7],
        [8, 0, 0, 0],
    ]
    # the target of position 3 is known, though in another piece
    assert packs[1]["labels"].tolist() == [5, 6, 7, 8]
    cut = PackedDataset(
        flatten(TWO), plan_packs([3, 5], 4, strategy="next_fit", overlong="truncate")
    )
    assert [pack["input_ids"].tolist() for pack in cut] == [[1, 2, 3, 0], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    "labels", [[2, 3, -100], [-100, 3, -100], [2, 3, 4]], ids=["all", "prompt", "no end"]
)
def test_lists_become_int32(labels: list[int]) -> None:
    flat = flatten(
        [{"input_ids": [1, 2, 2**31 - 1], "labels": labels}, {"input_ids": [], "labels": []}]
    )
    assert flat.columns["input_ids"].tolist() == [1, 2, 2**31 - 1]
    assert flat.columns["labels"].tolist() == labels
    assert (flat.columns["input_ids"].dtype, flat.columns["labels"].dtype) == (np.int32, np.int32)
    assert flat.offsets.tolist() == [0, 3, 3]


def test_ids_over_int32() -> None:
    with pytest.raises(OverflowError):
        flatten([{"input_ids": [2**31], "labels": [1]}])


def one_pack(
    rows: TokenizedDocuments, pieces: list[tuple[int, int, int]], size: int, multiple: int, pad: int
) -> dict:
    """The slow twin of a pack: token by token; pieces are (document, start, stop)."""
    pack: dict[str, list[int]] = {
        n: [] for n in ("input_ids", "labels", "position_ids", "seq_lens", "seq_lens_padded")
    }
    segments = [
        (i, start, stop, -(-(stop - start) // multiple) * multiple) for i, start, stop in pieces
    ]
    segments += [
        (0, 0, 0, width)
        for width in padding_segments(size - sum(s[-1] for s in segments), multiple)
    ]
    for i, start, stop, slot in segments:
        begin, padding = int(rows.offsets[i]), slot - (stop - start)
        pack["input_ids"] += (
            rows.columns["input_ids"][begin + start : begin + stop].tolist() + [pad] * padding
        )
        pack["labels"] += (
            rows.columns["labels"][begin + start : begin + stop].tolist() + [IGNORE_INDEX] * padding
        )
        pack["position_ids"] += range(slot)
        pack["seq_lens"].append(stop - start)
        pack["seq_lens_padded"].append(slot)
    return pack


class Columns(DocumentReader):
    """Rows that can only be read one by one."""

    def __init__(self, flat: TokenizedDocuments) -> None:
        self.rows_of_all = flat
        self.lengths = self.row_lengths = np.diff(flat.offsets)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        piece = slice(self.rows_of_all.offsets[index], self.rows_of_all.offsets[index + 1])
        return {
            "input_ids": self.rows_of_all.columns["input_ids"][piece],
            "labels": self.rows_of_all.columns["labels"][piece],
        }


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
def test_a_batch_equals_its_packs_token_by_token(
    rows, strategy, multiple, overlong, dtype, indexed, data
) -> None:
    made = flatten(samples(rows))
    flat = TokenizedDocuments(
        {"input_ids": made.columns["input_ids"].astype(dtype), "labels": made.columns["labels"]},
        made.offsets,
    )
    lengths = np.diff(flat.offsets)
    plan = plan_packs(lengths, 8, strategy=strategy, slot_multiple=multiple, overlong=overlong)
    packs = PackedDataset(Columns(flat) if indexed else flat, plan, padding_idx=7)
    asked = data.draw(st.lists(st.integers(EMPTY_PACK, len(plan) - 1), min_size=1, max_size=6))
    starts = np.zeros_like(plan.doc_ids) if plan.starts is None else plan.starts
    stops = lengths[plan.doc_ids] if plan.stops is None else plan.stops
    pieces = list(zip(plan.doc_ids.tolist(), starts.tolist(), stops.tolist()))
    expected = [
        one_pack(
            flat,
            [] if i == EMPTY_PACK else pieces[plan.offsets[i] : plan.offsets[i + 1]],
            8,
            multiple,
            pad=7,
        )
        for i in asked
    ]
    batch = packs.__getitems__(asked)
    assert [plain(pack) for pack in batch] == [plain(packs[i]) for i in asked] == expected
    assert all(value.dtype == torch.int64 for pack in batch for value in pack.values())
    one_by_one = join_packs([packs[i] for i in asked])
    assert {name: values.tolist() for name, values in one_by_one.items()} == {
        name: values.tolist() for name, values in join_packs(batch).items()
    }


def test_a_data_loader_fetches_batches() -> None:
    packs = PackedDataset(flatten(TWO), plan_packs([3, 5], 6, strategy="next_fit"))
    asked = [[0, EMPTY_PACK], [1, 0]]
    for num_workers in (0, 1):
        loader = torch.utils.data.DataLoader(
            packs,
            batch_sampler=asked,
            collate_fn=join_packs,
            num_workers=num_workers,
        )
        batches = list(loader)
        assert batches[1]["input_ids"].tolist() == [4, 5, 6, 7, 8, 0, 1, 2, 3, 0, 0, 0]
        assert batches[0]["seq_lens"].tolist() == [3, 0, 0]
        assert batches[0]["seq_lens_padded"].tolist() == [3, 3, 6]
        collated = packed_sequence_thd_collater(packs.__getitems__(asked[0]))  # type: ignore[arg-type]
        assert collated["seq_lens"].tolist() == [[3, 0], [0, -1000]]
        assert collated["seq_lens_padded"].tolist() == [[3, 3], [6, -1000]]
    assert packs.__getitems__([]).num_segments == []
    with pytest.raises(IndexError, match="pack 2 of 2"):
        packs.__getitems__([0, 2])


@pytest.mark.parametrize("strategy", ["exact_fill", "best_fit", "next_fit", "wrapped"])
@settings(deadline=None, max_examples=30)
@given(rows=documents, seed=st.integers(0, 3))
def test_every_token_is_in_one_pack_with_its_label(strategy: str, rows, seed: int) -> None:
    marked = [[1000 * i + k for k in range(len(row))] for i, row in enumerate(rows, start=1)]
    flat = flatten(samples(marked))
    packs = PackedDataset(
        flat, plan_packs(np.diff(flat.offsets), 12, strategy=strategy, seed=seed, slot_multiple=2)
    )
    pairs = [
        pair
        for pack in packs
        for pair in zip(pack["input_ids"].tolist(), pack["labels"].tolist())
        if pair[0] or pair[1] != IGNORE_INDEX
    ]
    assert sorted(pairs) == sorted(
        zip(flat.columns["input_ids"].tolist(), flat.columns["labels"].tolist())
    )


def test_reads_memory_maps_and_indexes_like_a_list(tmp_path) -> None:
    flat = flatten(TWO)
    for name, array in {**flat.columns, "lengths": flat.lengths, "offsets": flat.offsets}.items():
        values = array.astype(np.int32 if name != "offsets" else np.int64)
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
        TokenizedDocuments({"input_ids": np.arange(8), "labels": np.arange(7)}, np.array([0, 3, 8]))
    both = np.arange(16).reshape(8, 2)
    with pytest.raises(DataError, match="must be contiguous"):
        TokenizedDocuments({"input_ids": both[:, 0], "labels": both[:, 1]}, np.array([0, 3, 8]))


def test_dropping_much_must_be_meant() -> None:
    lengths = np.array([100] * 98 + [900, 1300])
    assert pack_size_for_coverage(lengths) == 1408
    packer = Packer(512)
    with pytest.raises(
        DataError,
        match=r"train: .*=512 would be dropped, with 22% .*_size=1408 \(keeps 99 %\), .*=split",
    ):
        packer.check_dropped(2200, 12000, "train", lengths) or packer.check_dropped(
            2600, 12000, "train", lengths
        )
    packer.check_dropped(2000, 12000, "train", lengths)
    Packer(512, overlong="drop").check_dropped(12000, 12000, "train", lengths)
    assert (
        packer.for_document_kind("text").overlong,
        packer.for_document_kind("messages").overlong,
    ) == ("split", "drop")
    assert Packer(512, overlong="drop").for_document_kind("text").overlong == "drop"


def test_what_stays_whole_is_told_of_no_cut() -> None:
    packer = Packer(512, overlong="error").for_document_kind("preference")
    rows = flatten([{"input_ids": np.arange(600), "labels": np.arange(600)}])
    with pytest.raises(DataError, match=r"raise it, or set packed_sequence.overlong to drop\.$"):
        packer.packs(rows)
    packer = Packer(512).for_document_kind("preference")
    with pytest.raises(DataError, match=r"with 600 tokens: raise it\.$"):
        packer.packs(rows)
    lengths = np.array([100] * 98 + [900, 1300])
    with pytest.raises(DataError, match=r"_size=1408 \(keeps 99 %\), or .*overlong=drop if that"):
        packer.check_dropped(2600, 12000, "train", lengths)


def pack(seq_lens: list[int], seq_lens_padded: list[int]) -> dict[str, Any]:
    total = sum(seq_lens_padded)
    return {
        "input_ids": list(range(total)),
        "labels": list(range(total)),
        "position_ids": list(range(total)),
        "seq_lens": seq_lens,
        "seq_lens_padded": seq_lens_padded,
    }


def test_thd_collater_stacks_packs_and_fills_lengths() -> None:
    batch = packed_sequence_thd_collater([pack([3, 2], [4, 2]) | {"other": 1}, pack([6], [6])])
    assert (
        batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (2, 6)
    )
    assert batch["seq_lens"].tolist() == [[3, 2], [6, -1000]]
    assert batch["seq_lens_padded"].tolist() == [[4, 2], [6, -1000]]
    assert batch["qkv_format"] == "thd"
    assert set(batch) == {
        "input_ids",
        "labels",
        "position_ids",
        "seq_lens",
        "seq_lens_padded",
        "qkv_format",
    }


def test_thd_collater_of_nothing_is_empty() -> None:
    assert packed_sequence_thd_collater([]) == {}


def test_thd_collater_refuses_packs_of_unequal_length() -> None:
    with pytest.raises(ValueError, match="must have one length"):
        packed_sequence_thd_collater([pack([3], [4]), pack([6], [6])])


def test_the_face_makes_each_loose_row_a_document() -> None:
    rows = [
        {"input_ids": [1, 2, 3], "labels": [2, 3, -100], "___PAD_TOKEN_IDS___": {"input_ids": 9}},
        {
            "input_ids": [4, 5, 0, 0, 0],
            "labels": [5, -100, -100, -100, -100],
            "attention_mask": [1, 1, 0, 0, 0],
        },
    ]
    before = copy.deepcopy(rows)
    batch = packed_sequence_thd_collater(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9, 9], [4, 5, 0, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, -100, -100, -100], [5, -100, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert batch["seq_lens"].tolist() == [[3], [2]]
    assert batch["seq_lens_padded"].tolist() == [[5], [5]]
    assert rows == before


def rows_of(lengths: Iterable[int]) -> TokenizedDocuments:
    return flatten({"input_ids": [1] * n, "labels": [1] * n} for n in lengths)


def test_plans_and_reads() -> None:
    packs = (
        Packer(packed_sequence_size=8)
        .for_document_kind("other", padding_id=5)
        .packs(rows_of([3, 4]))
    )
    assert sorted(packs[0]["input_ids"].tolist()) == [1] * 7 + [5]


@pytest.mark.parametrize(
    ("cp_size", "slot_multiple", "expected"), [(1, None, 1), (2, None, 4), (4, 16, 16), (1, 4, 4)]
)
def test_slots(cp_size: int, slot_multiple: int | None, expected: int) -> None:
    packs = Packer(64, slot_multiple=slot_multiple, cp_size=cp_size).packs(rows_of([3, 4]))
    assert packs.plan.slot_multiple == expected


@pytest.mark.parametrize(("repack", "equal"), [(True, False), (False, True)])
def test_epochs(repack: bool, equal: bool) -> None:
    packer, rows = Packer(64, repack_each_epoch=repack, seed=3), rows_of(range(1, 40))
    plans = [packer.packs(rows, epoch).plan.fingerprint() for epoch in (0, 1)]
    assert (plans[0] == plans[1]) == equal


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"packed_sequence_size": 63, "cp_size": 2},
            r"packed_sequence.packed_sequence_size=63 must be a multiple of 4 \(2 \* mesh.cp\): use 64.",
        ),
        (
            {"packed_sequence_size": 63, "slot_multiple": 8},
            r"packed_sequence_size=63 must be a multiple of 8 \(packed_sequence.slot_multiple\): use 64",
        ),
        (
            {"slot_multiple": 6, "cp_size": 2},
            r"slot_multiple=6 must be a multiple of 4 \(2 \* mesh.cp\): use 8, or null.",
        ),
        ({"slot_multiple": 0}, "slot_multiple=0 must be a multiple of 1"),
        ({"strategy": "best"}, "packed_sequence.strategy='best' is unknown: use one of exact_fill"),
    ],
)
def test_bad_settings_are_refused_when_built(arguments, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Packer(**{"packed_sequence_size": 64, **arguments})


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("packed_sequence_size=0", "packed_sequence_size=0 must be at least 1"),
        ("balance=steps", "balance=steps must be one of none, step, window; did you mean step?"),
        ("overlong=keep", "overlong=keep must be one of drop, truncate, split, error"),
        ("tree=on", "tree=on must be one of auto, off, all"),
        ("max_packs=0", "max_packs=0 must be at least 1"),
        (
            "strategy=best",
            "strategy=best must be one of exact_fill, best_fit, next_fit, wrapped, none",
        ),
    ],
)
def test_settings_are_checked_with_the_configuration(setting: str, sentence: str, tmp_path) -> None:
    with pytest.raises(ConfigError, match=f"packed_sequence.{sentence}"):
        config_of("smoke", tmp_path, f"packed_sequence.{setting}")


@pytest.mark.parametrize(
    ("options", "key", "cure"),
    [
        ({"strategy": "none"}, "packed_sequence.strategy", "use exact_fill, best_fit or next_fit"),
        ({"strategy": "wrapped", "overlong": "split"}, "packed_sequence.strategy", "exact_fill"),
        ({"overlong": "truncate"}, "packed_sequence.overlong", "use drop or error"),
    ],
)
def test_what_belongs_together_names_the_one_setting_at_fault(
    options: dict[str, Any], key: str, cure: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        Packer(64, **options).keep_whole("pairs", ("truncate", "split"), together=True)
    assert raised.value.key == key
    assert cure in raised.value.cure
    Packer(64, overlong="error").keep_whole("pairs", ("truncate", "split"), together=True)
