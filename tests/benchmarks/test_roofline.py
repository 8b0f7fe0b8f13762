"""Counted operations against arithmetic, on a model small enough to check by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import roofline
from benchmarks.roofline import Ceilings, Job, counted, seconds, step

TINY = (64, 3, 4, 2, 96, 128)  # hidden, layers, heads, kv heads, inner, vocabulary


def products(job: Job, num_layers: int, recomputes: bool) -> float:
    return sum(
        flops
        for name, flops, _ in counted(job, num_layers, recomputes)
        if name in ("mm", "addmm", "bmm")
    )


def test_a_layer_multiplies_its_weights_three_times() -> None:
    """64 x 16 x (2 * 4 + 2 * 2) of attention and 3 * 64 * 96 of the MLP; 6 FLOPs per weight and token, 8 recomputed, but
    for the layer's last product, whose result nobody needs again.
    """
    weights = 64 * 16 * 12 + 3 * 64 * 96
    for recomputes, each in ((False, 6), (True, 8)):
        job = Job("tiny", TINY, 256, 1, "")
        layer = products(job, 2, recomputes) - products(job, 1, recomputes)
        spared = 2 * 64 * 96 * 256 if recomputes else 0
        # and the rotation's angles
        assert layer == pytest.approx(each * weights * 256 - spared, rel=0.01)


def test_a_faster_card_is_faster_and_fusing_never_slower() -> None:
    job = Job("tiny", TINY, 256, 8, "")
    slow, fast = (Ceilings(flops, 3e12, 3e11) for flops in (1e14, 1e15))
    of_slow, of_fast = step(job, slow), step(job, fast)
    assert of_slow["eager"] > of_fast["eager"]
    assert of_slow["fused"] <= of_slow["eager"]
    assert of_slow["useful_flops"] == of_fast["useful_flops"]
    every, none = step(replace(job, recompute_every=1), slow), step(job, slow)
    half = step(replace(job, recompute_every=2), slow)
    assert none["tflop"] < half["tflop"] < every["tflop"]
    assert half["tflop"] - none["tflop"] == pytest.approx((every["tflop"] - none["tflop"]) / 2)
    once = step(replace(job, gathers=1), slow)  # of 3 layers, 2 bytes a weight, 7 of 8 ranks
    assert none["traffic_s"] - once["traffic_s"] == pytest.approx(
        3 * 2 * 7 / 8 * (64 * 16 * 12 + 3 * 64 * 96) / 3e11
    )
    assert step(replace(job, weights="bf16"), slow)["optimizer_s"] < 0.7 * none["optimizer_s"]
    assert seconds(
        [("mm", 1e15, 3e12), ("mul", 0.0, 6e12)], Ceilings(1e15, 3e12, 1.0), False
    ) == pytest.approx(3.0)


def test_the_page_calls_its_bounds_never_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """And shows what was measured elsewhere; its rows aside, it is the text that is written today."""
    names = tuple(f"| {job.name} " for job in roofline.JOBS)
    monkeypatch.setattr(roofline, "JOBS", ())
    written = roofline.page(Ceilings(989e12, 3.35e12, 300e9))
    rows = [line for line in roofline.PAGE.read_text().splitlines() if not line.startswith(names)]
    assert rows == written.splitlines()
    for text in ("**The two bounds are never reached.**", "**14,451**", "**13,011**"):
        assert text in written
