"""A per-token column that is declared once travels from the rows on disk to the shard of a rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from automodel_lite.data.packing.packs import PackedDataset, Packer, packed_sequence_thd_collater
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.packing.stream import PackStream
from automodel_lite.data.tokens.token_rows import STORED, RowsWriter, flatten, load_rows
from automodel_lite.thd import COLUMNS, Column

TWO = [
    {"input_ids": [1, 2, 3], "labels": [2, 3, -100], "weights": [0.5, 1.0, 0.0]},
    {"input_ids": [4, 5], "labels": [5, -100], "weights": [2.0, 0.0]},
]


@pytest.fixture(autouse=True)
def _weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLUMNS, "weights", Column("float32", "float32", -1.0, is_optional=False))
    monkeypatch.setitem(STORED, "weights", "float32")


def test_a_new_column_is_written_packed_and_collated(tmp_path: Path) -> None:
    writer = RowsWriter(tmp_path)
    for row in TWO:
        writer.append({name: np.array(values) for name, values in row.items()}, np.array([len(row["input_ids"])]))
    writer.close()
    rows = load_rows(tmp_path)
    assert rows[1]["weights"].tolist() == [2.0, 0.0]
    packs = PackedDataset(rows, plan_packs(rows.lengths, 8, strategy="next_fit", slot_multiple=4))
    batch = packed_sequence_thd_collater([packs[0], packs[0]])
    assert batch["weights"].dtype == torch.float32
    assert batch["weights"].tolist() == [[0.5, 1.0, 0.0, -1.0, 2.0, 0.0, -1.0, -1.0]] * 2
    assert torch.equal(packed_sequence_thd_collater(packs.__getitems__([0, 0]))["weights"], batch["weights"])


def test_a_new_column_of_a_stream_is_packed_and_cut() -> None:
    pack = next(PackStream(lambda start: ([row] for row in TWO[start:]), Packer(2, overlong="truncate")))
    assert pack["weights"].tolist() == [0.5, 1.0]


@pytest.mark.parametrize("packed", [True, False], ids=["packs", "loose rows"])
def test_rows_without_the_column_get_its_padding(packed: bool) -> None:
    plain = [{name: row[name] for name in ("input_ids", "labels")} for row in TWO]
    strategy = "next_fit" if packed else "none"
    packs = PackedDataset(flatten(plain), plan_packs([3, 2], 6, strategy=strategy))
    weights = packed_sequence_thd_collater(packs.__getitems__(range(len(packs))))["weights"]
    assert weights.dtype == torch.float32
    assert set(weights.flatten().tolist()) == {-1.0}
