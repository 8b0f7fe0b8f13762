"""Sizes that divide one another."""

from __future__ import annotations

import pytest

from automodel_lite.config.schema import TrainingConfig
from automodel_lite.config.sizes import fitted_batch_size, global_batch_size_of


@pytest.mark.parametrize(("micro", "dp", "size"), [(1, 1, 8), (1, 16, 16), (2, 3, 6), (4, 1, 8)])
def test_auto_is_eight_packs_or_whole_micro_batches(micro: int, dp: int, size: int) -> None:
    assert (
        global_batch_size_of(TrainingConfig(micro_batch_size=micro, global_batch_size="auto"), dp)
        == size
    )


@pytest.mark.parametrize(
    ("smallest", "packs", "epochs", "size"),
    [(1, 400, 1, 8), (1, 100, 1, 2), (1, 120, 3, 7), (2, 100, 1, 2), (1, 10, 3, 1), (4, 100, 1, 4)],
)
def test_few_packs_get_smaller_batches(smallest: int, packs: int, epochs: int, size: int) -> None:
    assert fitted_batch_size(smallest, 8, packs, epochs) == size
