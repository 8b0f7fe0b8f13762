"""One plan per host: mapped by all processes, equal to the plan that each would have made."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automodel_lite.data.packing import packs
from automodel_lite.data.packing.packs import Packer
from automodel_lite.data.packing.plan import PackPlan
from automodel_lite.data.tokens.token_rows import TokenizedDocuments, flatten

CASES: dict[str, dict[str, Any]] = {
    "exact_fill": {},
    "dropped": {"overlong": "drop", "strategy": "best_fit"},
    "split": {"overlong": "split"},
    "wrapped": {"strategy": "wrapped"},
    "sample": {"max_packs": 3, "slot_multiple": 4},
}


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> TokenizedDocuments:
    """40 documents of 3 to 42 tokens, as if they were many."""
    monkeypatch.setattr(packs, "SHARED_FROM", 2)
    lengths = np.random.default_rng(0).integers(3, 43, 40)
    return flatten({"input_ids": np.arange(n), "labels": np.arange(n)} for n in lengths)


def bases(array: np.ndarray) -> Iterator[Any]:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
        yield base


def same(one: PackPlan, other: PackPlan) -> bool:
    return all(np.array_equal(value, vars(other)[name]) for name, value in vars(one).items())


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_the_one_that_each_rank_would_make(
    case: str, rows: TokenizedDocuments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packer = Packer(32, **CASES[case])
    own = packer.packs(rows).plan
    made = packer.packs(rows, 0, (tmp_path, "these rows")).plan
    assert same(made, own)
    assert made.fingerprint() == own.fingerprint()
    # another process finds it, and its arrays are pages of the file
    monkeypatch.setattr(packs, "plan_packs", None)
    found = packer.packs(rows, 0, (tmp_path, "these rows")).plan
    assert same(found, own)
    assert any(isinstance(base, mmap.mmap) for base in bases(found.doc_ids))


def test_other_rows_settings_and_few_documents_have_their_own_plans(
    rows: TokenizedDocuments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for packer, identity in ((Packer(64), "a"), (Packer(64), "b"), (Packer(64, seed=1), "a")):
        packer.packs(rows, 0, (tmp_path, identity))
    assert len([*(tmp_path / "plans").glob("plan-*[0-9a-f]/")]) == 3
    monkeypatch.setattr(packs, "SHARED_FROM", 41)
    Packer(128).packs(rows, 0, (tmp_path, "a"))
    assert len([*(tmp_path / "plans").glob("plan-*[0-9a-f]/")]) == 3
