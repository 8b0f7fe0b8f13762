"""Plans fit, are in the order of the whole simulation, and what does not fit is said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError
from automodel_lite.extras.plan.capacity import usable
from automodel_lite.extras.plan.planner import (
    GPUS,
    Job,
    Layout,
    Outcome,
    make_plans,
    possible,
    priced,
)
from automodel_lite.extras.plan.simulation import Simulation, simulate
from automodel_lite.extras.plan.tracker import Message, Operation
from automodel_lite.extras.short_models import with_layers
from automodel_lite.parallel.mesh import MeshShape
from automodel_lite.training.settings import RunParts, build_parts
from recipes.plan import as_json, calibrated, coarse_text, fits, overrides_of
from tests.runs import composed


def parts_of(more: Sequence[str] = ()) -> RunParts:
    config = check_config(composed("qwen3_0_6b", "dataset.path=any", "optimizer.lr=1e-4", *more))
    return build_parts(replace(config, attention={}))


def job_of(gigabytes: float = 24, gpus: int = 2, layers: int = 10) -> Job:
    config = with_layers(parts_of().model.resolve_model_config({}), layers)
    gpu = replace(GPUS["rtx4090-24"], gigabytes=gigabytes)
    lengths = np.array([1000, 3000])
    return Job(parts_of(), config, gpu, gpus, 1, lengths, lengths)


@cache
def outcome() -> Outcome:
    """Of four layers, which are simulated whole; those of a longer model are told from them."""
    return make_plans(job_of(gigabytes=12, layers=4), most=2)


def test_plans_fit_and_the_best_is_first() -> None:
    plans, capacity = outcome().plans, usable(12 * 10**9)
    assert len(plans) >= 2
    rates = [plan.tokens_per_s_per_gpu for plan in plans]
    assert rates == sorted(rates, reverse=True)
    assert all(plan.step.peak <= capacity for plan in plans)
    assert plans[0].step.peaks["export"] > 0  # simulated as a whole


@pytest.mark.parametrize(("packs", "in_turns"), [(40, 4), (48, 4)])
def test_rows_of_micro_batches_in_turns_travel_under_products(packs: int, in_turns: int) -> None:
    """Of 5 micro-batches 4 take turns, of 6 too; each has a second of products, and half of one of messages."""
    job = replace(job_of(gpus=8), gpu=replace(GPUS["h100-80"], latency_s=0.0))
    work = {
        Operation("product", job.gpu.flops, 0.0): 1,
        Message("dp_shard", 8, False, round(job.gpu.node_bytes_per_s / 100)): 50,
    }
    step = Simulation(0, 0, 0, {}, {}, {"micro": work, "last": {}, "update": {}})
    layout = Layout(MeshShape(1, 8, 1, 1, 8), 1, packs)
    seconds = []
    for overlap in ("false", "true"):
        parts = parts_of([f"mesh.ep_overlap={overlap}", "mesh.ep=2"])
        seconds.append(priced(job, layout, parts, step).seconds)
    num_before_last = packs // 8 - 1
    assert [one["products"] for one in seconds] == [num_before_last] * 2
    assert seconds[0]["exchange"] == pytest.approx(num_before_last * 0.5)
    assert seconds[1]["exchange"] == pytest.approx((num_before_last - in_turns) * 0.5)
    # at the begin nothing is computed yet: one of ten layers
    assert seconds[1]["links"] == pytest.approx(in_turns * 0.05)


@pytest.mark.slow
def test_whole_simulations_agree_in_memory_and_order() -> None:
    job, seconds = job_of(), []
    for plan in make_plans(job, most=2).plans:
        whole = simulate(plan.parts, job.config, plan.layout.shape)
        assert plan.step.peak == pytest.approx(whole.peak, rel=0.03)
        of_whole = priced(job, plan.layout, plan.parts, whole)
        # counts may be negative
        assert plan.seconds["update"] == pytest.approx(of_whole.seconds["update"], rel=0.01)
        seconds.append(of_whole.step_s / plan.layout.global_batch)
        assert seconds[-1] == pytest.approx(
            plan.step_s / plan.layout.global_batch, rel=0.03
        )  # a last pattern may be cut
    assert seconds == sorted(seconds)


def test_the_command_of_a_plan_is_a_configuration() -> None:
    plan = outcome().plans[0]
    parts = parts_of(overrides_of(plan))
    assert parts.mesh.dp_shard == plan.layout.shape.dp_shard
    assert parts.training.activation_checkpointing in ("none", "full", "offload")
    assert json.loads(json.dumps(as_json(plan)))["peak_bytes"] == plan.step.peak


@pytest.mark.system
def test_frozen_weights_have_no_states() -> None:
    """A LoRA whose model would not fit with gradients and moments was left out before it was counted."""
    job = replace(
        job_of(gigabytes=7, gpus=1), parts=parts_of(["peft=lora", "training.global_batch_size=1"])
    )
    (plan,) = make_plans(job, most=1).plans
    # Their gradients are not computed either: counted, they made the share of the peak rate 3 / 2 of what it is.
    assert job.flops.per_token == pytest.approx(job_of().flops.per_token * 2 / 3)
    assert 0 < plan.mfu < 1


def test_nothing_fits_a_gpu_that_is_too_small() -> None:
    found = make_plans(job_of(gigabytes=5), most=2)
    assert found.plans == []
    assert found.lost["memory"] > 0


@pytest.mark.parametrize(
    "gigabytes",
    [
        pytest.param(6, marks=pytest.mark.slow),
        pytest.param(8, marks=pytest.mark.slow),
        pytest.param(10, marks=pytest.mark.system),
    ],
)
def test_a_world_fits_where_a_plan_of_it_does(gigabytes: int) -> None:
    """On two ranks, in micro-batches of one pack or of two; each further layout takes ten seconds."""
    job = replace(job_of(gigabytes=gigabytes), parts=parts_of(["training.global_batch_size=4"]))
    assert fits(job) == bool(make_plans(job, most=1).plans) == (gigabytes > 6)


@pytest.mark.parametrize(
    ("gigabytes", "verdict"), [(24, "likely fits"), (7, "hardly fits"), (4, "no: does not fit")]
)
def test_a_verdict_before_anything_is_simulated(gigabytes: float, verdict: str) -> None:
    assert f"by arithmetic: {verdict}; " in coarse_text(job_of(gigabytes=gigabytes))


def test_a_query_sees_half_of_its_document() -> None:
    job = job_of()
    assert job.visible(None) == (1000 * 1001 + 3000 * 3001) / 2 / 4000
    assert job.visible(1) == 1.0


def test_a_query_of_a_tree_sees_its_row_alone() -> None:
    """Two answers of 1,000 tokens behind a prompt of 1,000: 3,000 tokens, in rows of 2,000."""
    job = replace(job_of(), lengths=np.array([3000]), paths=np.array([2000]))
    assert job.visible(None) == 2001 / 2


def test_layouts_divide_what_they_share() -> None:
    job = job_of(gpus=8)
    layouts = list(possible(job))
    assert {one.shape.world_size for one in layouts} == {8}
    assert all(one.global_batch % (one.micro_batch * one.shape.dp) == 0 for one in layouts)
    assert {one.global_batch for one in layouts} == {8}
    assert Layout(MeshShape(1, 4, 2), 2, 8).micro_steps == 1


def test_rates_of_a_calibration(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(
        '{"bf16_tflops": 600, "memory_tb_per_s": 3.0, "link_gb_per_s": null, "latency_s": 1e-5}'
    )
    gpu = calibrated(GPUS["h100-80"], path)
    assert (gpu.flops, gpu.bytes_per_s, gpu.latency_s) == (600e12, 3e12, 1e-5)
    assert gpu.source.startswith("measured, ")
    path.write_text("{}")
    with pytest.raises(ConfigError, match="it has neither bf16_tflops"):
        calibrated(gpu, path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"--calibration .*Expecting property name.*: give the"):
        calibrated(gpu, path)
    for text, reason in {
        "[1]": "no object with names and values: give the",
        "[" * 5000: "(maximum recursion depth exceeded|Expecting value)",
        '{"bf16_tflops": "fast"}': "bf16_tflops is fast, and must be a number",
        '{"flops": [1]}': r"flops is \[1\], and must be a number",
    }.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"--calibration .*{reason}"):
            calibrated(gpu, path)
