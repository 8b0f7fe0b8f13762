"""The GPU benchmark's smoke plan, on the CPU: every variant runs, and all see the same loss at random weights."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.peers_gpu import PLANS, Variant, measure


@pytest.mark.parametrize(
    "settings", PLANS["smoke"], ids=lambda s: f"{s.get('attention', 'packed')}-{s.get('loss', 'fused')}"
)
def test_smoke_plan(settings: dict[str, object]) -> None:
    torch.set_num_threads(1)
    result = measure(Variant(**settings), "cpu")
    assert result["tokens_per_s"] > 0
    assert result["loss"] == pytest.approx(math.log(512), abs=0.15)


def test_all_plans_are_variants() -> None:
    assert all(Variant(**settings).steps > 0 for plan in PLANS.values() for settings in plan)
