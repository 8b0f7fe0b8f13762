"""Labels of token rows: one convention for all rows, found where there are labels, compared everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.errors import DataError

_ = -100
MASKED = {"input_ids": [5, 6, 7], "labels": [_, _, _]}
ALIGNED = {"input_ids": [5, 6, 7, 8], "labels": [_, 7, 8, _]}
UNSHIFTED = {"input_ids": [5, 6, 7, 8], "labels": [_, _, 7, 8]}
LOSS_MASK = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}


def rows_of(path: Path, *rows: dict[str, Any], **options: Any) -> Any:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FilesDataset(str(path), **options)


@pytest.mark.parametrize("late", [UNSHIFTED, LOSS_MASK, {**LOSS_MASK, "loss_mask": [0, 0, 0, 1]}])
def test_the_convention_is_that_of_rows_with_labels(tmp_path: Path, late: dict[str, Any]) -> None:
    """30 rows without a label say nothing of the rows behind them."""
    dataset = rows_of(tmp_path / "a.jsonl", *[MASKED] * 30, late)
    assert "labels unshifted" in dataset.description
    trained = dataset.train[30]["labels"].tolist()
    assert trained in ([_, 7, 8, _], [_, _, 8, _])


@pytest.mark.parametrize(
    ("first", "late"), [(UNSHIFTED, ALIGNED), (ALIGNED, UNSHIFTED), (ALIGNED, LOSS_MASK)]
)
def test_a_mix_is_refused_with_its_place(
    tmp_path: Path, first: dict[str, Any], late: dict[str, Any]
) -> None:
    dataset = rows_of(tmp_path / "a.jsonl", *[first] * 30, MASKED, late)
    assert (dataset.train[29]["labels"] == [_, 7, 8, _]).all()
    assert (dataset.train[30]["labels"] == _).all()
    with pytest.raises(
        DataError, match=r"^a.jsonl:32: of 2 labels .* and the labels of other rows are"
    ):
        dataset.train[31]
    meant = rows_of(tmp_path / "b.jsonl", first, late, labels="aligned").train
    assert len(meant[1]["labels"]) == 4


def test_rows_that_fit_both_do_not_decide(tmp_path: Path) -> None:
    same = {"input_ids": [5, 5, 5], "labels": [_, 5, 5]}
    assert "unshifted" in rows_of(tmp_path / "a.jsonl", same, UNSHIFTED).description
    assert "next-token aligned" in rows_of(tmp_path / "b.jsonl", same, ALIGNED).description


def test_a_row_may_end_on_the_target_of_a_token_that_was_cut(tmp_path: Path) -> None:
    """ids[:-1] and ids[1:] of a document: the last label is nowhere among the ids."""
    cut = {"input_ids": [5, 6, 7], "labels": [6, 7, 8]}
    assert rows_of(tmp_path / "a.jsonl", cut).train[0]["labels"].tolist() == [6, 7, 8]


def test_labels_of_no_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"^a.jsonl:1: of 2 labels 0 are the next token and 0 the token itself: all"
    ):
        rows_of(tmp_path / "a.jsonl", {"input_ids": [1, 2], "labels": [9, 9]})
