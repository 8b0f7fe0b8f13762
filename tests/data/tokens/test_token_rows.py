"""Flat rows on disk and in memory; a column that is declared once travels with them to the batch."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from automodel_lite.columns import COLUMNS, Column
from automodel_lite.data.packing.packs import PackedDataset, Packer
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.tokens.token_rows import (
    RowsWriter,
    TokenizedDocuments,
    flatten,
    load_rows,
    next_token_labels,
)
from automodel_lite.nemo_api.collaters import packed_sequence_thd_collater
from automodel_lite.parts.datasets.stream_packing import PackStream
from tests.data.tokens.given import HELLO, HI, chats, tokenized

TWO = [
    {"input_ids": [1, 2, 3], "labels": [2, 3, -100], "weights": [0.5, 1.0, 0.0]},
    {"input_ids": [4, 5], "labels": [5, -100], "weights": [2.0, 0.0]},
]


@pytest.fixture
def _weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLUMNS, "weights", Column("float32", "float32", -1.0, is_optional=False))


@pytest.mark.usefixtures("_weights")
def test_a_new_column_is_written_packed_and_collated(tmp_path: Path) -> None:
    writer = RowsWriter(tmp_path)
    for row in TWO:
        writer.append(
            {name: np.array(values) for name, values in row.items()},
            np.array([len(row["input_ids"])]),
        )
    writer.close()
    rows = load_rows(tmp_path)
    assert rows[1]["weights"].tolist() == [2.0, 0.0]
    packs = PackedDataset(rows, plan_packs(rows.lengths, 8, strategy="next_fit", slot_multiple=4))
    batch = packed_sequence_thd_collater([packs[0], packs[0]])
    assert batch["weights"].dtype == torch.float32
    assert batch["weights"].tolist() == [[0.5, 1.0, 0.0, -1.0, 2.0, 0.0, -1.0, -1.0]] * 2
    assert torch.equal(
        packed_sequence_thd_collater(packs.__getitems__([0, 0]))["weights"], batch["weights"]
    )


@pytest.mark.usefixtures("_weights")
def test_a_new_column_of_a_stream_is_packed_and_cut() -> None:
    pack = next(
        PackStream(lambda start: ([row] for row in TWO[start:]), Packer(2, overlong="truncate"))
    )
    assert pack["weights"].tolist() == [0.5, 1.0]


@pytest.mark.usefixtures("_weights")
@pytest.mark.parametrize("packed", [True, False], ids=["packs", "loose rows"])
def test_rows_without_the_column_get_its_padding(packed: bool) -> None:
    plain = [{name: row[name] for name in ("input_ids", "labels")} for row in TWO]
    strategy = "next_fit" if packed else "none"
    packs = PackedDataset(flatten(plain), plan_packs([3, 2], 6, strategy=strategy))
    weights = packed_sequence_thd_collater(packs.__getitems__(range(len(packs))))["weights"]
    assert weights.dtype == torch.float32
    assert set(weights.flatten().tolist()) == {-1.0}


_ = -100


def as_lists(rows: TokenizedDocuments) -> list[tuple[list[int], list[int]]]:
    return [(rows[i]["input_ids"].tolist(), rows[i]["labels"].tolist()) for i in range(len(rows))]


@pytest.mark.parametrize(
    ("input_ids", "trained", "lengths", "labels"),
    [
        ([1, 2, 3], [0, 1, 1], [3], [2, 3, _]),
        ([1, 2, 3, 4, 5], [0, 1, 1, 1, 1], [3, 2], [2, 3, _, 5, _]),
        ([1, 2, 3], [1, 0, 1], [3], [_, 3, _]),
        ([1, 2], [1, 1], [0, 1, 0, 1, 0], [_, _]),
        ([], [], [], []),
    ],
    ids=[
        "one document",
        "no target crosses",
        "first token is nobody's target",
        "short and empty",
        "nothing",
    ],
)
def test_next_token_labels(input_ids: list, trained: list, lengths: list, labels: list) -> None:
    found = next_token_labels(
        np.array(input_ids, np.int32), np.array(trained, bool), np.array(lengths, np.int64)
    )
    assert found.tolist() == labels


def test_rows_travel_as_a_path(tmp_path: Path) -> None:
    rows = tokenized(chats([HI, HELLO] * 500), tmp_path).train
    pickled = pickle.dumps(rows)
    assert len(pickled) < 500
    assert as_lists(pickle.loads(pickled)) == as_lists(rows)


def test_rows_cannot_be_written_to(tmp_path: Path) -> None:
    rows = tokenized(chats([HI, HELLO]), tmp_path).train
    with pytest.raises(ValueError, match="read-only"):
        rows[0]["labels"][0] = 3
