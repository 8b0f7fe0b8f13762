from __future__ import annotations

import numpy as np
import pytest

from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.errors import ConfigError
from tests.data.packing.brute_force import fewest_packs

pytest.importorskip("scipy")


def test_small_cases_are_packed_optimally() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        size = int(rng.integers(8, 40))
        lengths = rng.integers(size // 5, size // 2 + 1, 9).tolist()
        plan = plan_packs(lengths, size, strategy="global", column_generation=True)
        assert sorted(plan.doc_ids.tolist()) == list(range(9))
        assert plan.tokens_per_pack.max() <= size
        assert plan.lower_bound <= len(plan) == fewest_packs(lengths, size)


def test_a_narrow_mix_comes_near_its_bound() -> None:
    lengths = np.clip(np.random.default_rng(0).normal(70, 12, 5_000).astype(int), 1, 205)
    plan = plan_packs(lengths, 205, strategy="global", column_generation=True)
    assert np.bincount(plan.doc_ids).tolist() == [1] * 5_000
    assert plan.tokens_per_pack.max() <= 205
    assert plan.lower_bound > -(-lengths.sum() // 205)
    assert len(plan) <= 1.003 * plan.lower_bound
    assert plan.note.startswith("column generation: ")


def test_too_many_distinct_lengths() -> None:
    with pytest.raises(ConfigError, match="is for at most 2000 distinct lengths and there are 3000: set it to false"):
        plan_packs(np.arange(1, 3001), 4096, strategy="global", column_generation=True)
