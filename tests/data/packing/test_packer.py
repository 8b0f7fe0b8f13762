from __future__ import annotations

from collections.abc import Iterable

import pytest

from automodel_lite.data.packing.packs import Packer
from automodel_lite.data.tokens.token_rows import TokenRows, flatten
from automodel_lite.errors import ConfigError
from tests.runs import config_of


def rows_of(lengths: Iterable[int]) -> TokenRows:
    return flatten({"input_ids": [1] * n, "labels": [1] * n} for n in lengths)


def test_plans_and_reads() -> None:
    packs = Packer(packed_sequence_size=8).fitted_to("other", padding_id=5).packs(rows_of([3, 4]))
    assert sorted(packs[0]["input_ids"].tolist()) == [1] * 7 + [5]


@pytest.mark.parametrize(("cp_size", "slot_multiple", "expected"), [(1, None, 1), (2, None, 4), (4, 16, 16), (1, 4, 4)])
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
        ("strategy=best", "strategy=best must be one of exact_fill, best_fit, next_fit, wrapped, none"),
    ],
)
def test_settings_are_checked_with_the_configuration(setting: str, sentence: str, tmp_path) -> None:
    with pytest.raises(ConfigError, match=f"packed_sequence.{sentence}"):
        config_of("smoke", tmp_path, f"packed_sequence.{setting}")
