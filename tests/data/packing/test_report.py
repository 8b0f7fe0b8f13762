from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from automodel_lite.data.feeding.order import BatchShape, plan_imbalance
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.packing.report import packing_report
from automodel_lite.models.flops import CostModel

LENGTHS = [6, 2, 4, 4, 9, 30]


def test_the_numbers_of_six_documents() -> None:
    plan = plan_packs(LENGTHS, 10, strategy="next_fit", slot_multiple=2)
    report = packing_report(plan, LENGTHS)
    # packs of slots: 6 + 2, 4 + 4, 10
    assert (report.documents, report.tokens, report.packs, report.lower_bound_packs) == (
        6,
        55,
        3,
        3,
    )
    assert (report.dropped_documents, report.dropped_tokens) == (1, 30)
    assert report.fill_frac == 25 / 30
    assert (report.slot_padding_tokens, report.tail_padding_tokens) == (1, 4)
    assert (report.documents_per_pack_min, report.documents_per_pack_max) == (1, 2)
    assert (report.longest_tokens, report.median_tokens) == (30, 5)
    assert json.loads(json.dumps(asdict(report)))["fill_frac"] == 25 / 30


def test_padding_for_comparison() -> None:
    lengths = [2, 10] * 500  # batches of 2: 4, 20 or 20 positions
    report = packing_report(plan_packs(lengths, 12), lengths)
    assert report.fill_frac == 1
    assert 0.7 < report.padded_fill_frac < 0.8
    assert report.speedup_over_padding == pytest.approx(1 / report.padded_fill_frac)


def test_balance_before_and_after() -> None:
    lengths = np.random.default_rng(0).integers(1, 1025, 4_000)
    plan = plan_packs(lengths, 1024)
    found = plan_imbalance(plan, lengths, CostModel(1, 0.1), "step", BatchShape(32, 1, dp_size=8))
    report = packing_report(plan, lengths, "step", found)
    assert 1 < report.imbalance_after < report.imbalance_before
    assert packing_report(plan, lengths).imbalance_before is None
    assert (
        plan_imbalance(plan, lengths, CostModel(1, 0.1), "step", BatchShape(32, 1, dp_size=1))
        is None
    )


def test_strategy_none_is_padding() -> None:
    report = packing_report(
        plan_packs([2, 10, 10, 2], 12, strategy="none"), [2, 10, 10, 2], micro_batch_size=4
    )
    assert (report.fill_frac, report.padded_fill_frac, report.speedup_over_padding) == (
        24 / 40,
        24 / 40,
        1,
    )


def test_one_screen() -> None:
    lengths = [*LENGTHS, 1200]
    for arguments in (
        {"overlong": "truncate"},
        {"overlong": "split"},
        {"max_packs": 1},
        {"strategy": "none"},
    ):
        text = str(packing_report(plan_packs(lengths, 20, slot_multiple=2, **arguments), lengths))
        assert len(text.splitlines()) < 15
        assert max(map(len, text.splitlines())) < 110
        assert "7 with 1,255 tokens" in text
    assert "2 over-long documents, 1,230 tokens" in str(
        packing_report(plan_packs(lengths, 20), lengths)
    )
