"""The least recomputation that fits is found by counting, and a CPU is not asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError
from automodel_lite.extras.plan import recompute
from automodel_lite.extras.plan.by_layers import layer_pattern, simulate_by_layers
from automodel_lite.extras.plan.capacity import usable
from automodel_lite.extras.plan.recompute import LADDER, choose_recomputation, least_recomputation
from automodel_lite.parallel.mesh import MeshShape
from automodel_lite.training.decide import decide_layout, with_fsdp_where_copies_do_not_fit
from automodel_lite.training.settings import Decided, build_parts, with_recomputation
from tests.ranks import in_a_process
from tests.runs import composed
from tests.tiers import rarely


def planned(preset: str, gpus: int, *overrides: str) -> Decided:
    config = check_config(composed(preset, "dataset.path=any", "optimizer.lr=1e-4", *overrides))
    parts = build_parts(replace(config, attention={}))
    return decide_layout(
        replace(parts, attention=None),
        parts.model.resolve_model_config({}),
        MeshShape(1, gpus, 1),
        torch.device("cpu"),
    )


def auto(plan: Decided) -> Decided:
    return replace(with_recomputation(plan, "auto", 1), dtype=torch.bfloat16)


@pytest.mark.system
@pytest.mark.parametrize(
    ("gigabytes", "wish", "is_resharded"),
    [(80, "auto", "auto"), (141, "auto", False), (141, "true", True)],
)
def test_weights_stay_gathered_where_they_fit(
    gigabytes: int, wish: str, is_resharded: bool | str
) -> None:
    plan = auto(planned("llama3_1_8b", 8, f"advanced.reshard_after_forward={wish}"))
    parts, reason = choose_recomputation(plan, gigabytes * 10**9, None)
    assert parts.training.activation_checkpointing == "none"
    assert parts.advanced.reshard_after_forward == is_resharded
    assert ("weights stay gathered" in reason) == (is_resharded is False)
    assert reason.startswith("none: the least that fits, ") == (is_resharded is not False)


def test_one_gpu_takes_fsdp_where_copies_of_the_weights_do_not_fit() -> None:
    """8.03 B weights with masters and moments in fp32 are 120 GiB, their copies in bf16 15 more."""
    alone = auto(planned("llama3_1_8b", 1))
    assert alone.strategy == "none"
    small = with_fsdp_where_copies_do_not_fit(alone, None, 141 * 10**9)
    assert (small.strategy, small.mesh.strategy) == ("fsdp", "fsdp")
    assert with_fsdp_where_copies_do_not_fit(alone, None, 192 * 10**9) is alone
    frozen = with_fsdp_where_copies_do_not_fit(alone, 10**7, 80 * 10**9)
    assert frozen is alone  # an adapter's copies are small


def test_compiled_layers_are_all_recomputed_selectively_or_none() -> None:
    """The partitioner's budget is one for all graphs."""
    asked = ("training.compile=true", "training.activation_checkpointing=selective")
    assert planned("llama3_1_8b", 8, *asked).training.activation_checkpointing == "selective"
    with pytest.raises(ConfigError, match="every_layers=1"):
        planned("llama3_1_8b", 8, *asked, "advanced.recompute_every_layers=2")


def _count_rungs(gigabytes: int) -> None:
    plan = auto(planned("llama3_1_8b", 8))
    capacity, pattern = usable(gigabytes * 10**9), layer_pattern(plan.config)
    found = least_recomputation(plan, capacity, pattern)
    assert found is not None
    parts, step = found
    assert step.peak <= capacity
    rung = (parts.training.activation_checkpointing, parts.advanced.recompute_every_layers)
    less = with_recomputation(plan, *LADDER[LADDER.index(rung) - 1])
    assert simulate_by_layers(less, plan.config, plan.shape, pattern).peak > capacity


@pytest.mark.system
@pytest.mark.parametrize("gigabytes", [24, *rarely(40, 48)])
def test_the_rung_before_the_chosen_one_does_not_fit(gigabytes: int, tmp_path: Path) -> None:
    """In a process of its own, as a run counts: tensors of other tests are not in it."""
    code, screen = in_a_process(_count_rungs, tmp_path, gigabytes)
    assert code == 0, screen


def test_what_fits_nothing_is_offloaded_as_far_as_possible() -> None:
    plan = auto(planned("llama3_1_8b", 8))
    parts, reason = choose_recomputation(plan, 16 * 10**9, None)
    assert parts.training.activation_checkpointing == "offload"
    assert "may still need more" in reason


def test_small_models_and_cpus_are_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        recompute, "simulate_by_layers", lambda *_: pytest.fail("a step was simulated")
    )
    plan = auto(planned("qwen3_0_6b", 8, "packed_sequence.packed_sequence_size=2048"))
    parts, reason = choose_recomputation(plan, 80 * 10**9, None)
    assert parts.training.activation_checkpointing == "none"
    assert reason.startswith("none, weights stay gathered: all that is kept is about ")
    decided = decide_layout(plan, plan.config, plan.shape, torch.device("cpu"))
    assert decided.training.activation_checkpointing == "none"


def test_gpus_of_one_kind_agree() -> None:
    """An H100 reports 85.0e9 bytes, less where some are kept by the driver."""
    assert usable(85_000_000_000) == usable(84_900_000_000) == 80 * 10**9 - (3 << 30)
