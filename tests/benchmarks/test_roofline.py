"""Counted operations against arithmetic, on a model small enough to check by hand."""

from __future__ import annotations

import pytest

from benchmarks.roofline import Ceilings, Job, counted, seconds, step

TINY = (64, 3, 4, 2, 96, 128)  # hidden, layers, heads, kv heads, inner, vocabulary


def products(job: Job, num_layers: int) -> float:
    return sum(flops for name, flops, _ in counted(job, num_layers) if name in ("mm", "addmm", "bmm"))


def test_a_layer_multiplies_its_weights_three_times() -> None:
    """64 x 16 x (2 * 4 + 2 * 2) of attention and 3 * 64 * 96 of the MLP; 6 FLOPs per weight and token, 8 recomputed, but
    for the layer's last product, whose result nobody needs again.
    """
    weights = 64 * 16 * 12 + 3 * 64 * 96
    for recomputes, each in ((False, 6), (True, 8)):
        job = Job("tiny", TINY, 256, 1, "", recomputes=recomputes)
        layer = products(job, 2) - products(job, 1)
        spared = 2 * 64 * 96 * 256 if recomputes else 0
        assert layer == pytest.approx(each * weights * 256 - spared, rel=0.01)  # and the rotation's angles


def test_a_faster_card_is_faster_and_fusing_never_slower() -> None:
    job = Job("tiny", TINY, 256, 8, "")
    slow, fast = (step(job, Ceilings(flops, 3e12, 3e11)) for flops in (1e14, 1e15))
    assert slow["eager"] > fast["eager"]
    assert slow["fused"] <= slow["eager"]
    assert slow["useful_flops"] == fast["useful_flops"]
    assert seconds([("mm", 1e15, 3e12), ("mul", 0.0, 6e12)], Ceilings(1e15, 3e12, 1.0), False) == pytest.approx(3.0)
