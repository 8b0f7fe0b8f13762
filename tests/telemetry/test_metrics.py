import time
from types import SimpleNamespace

import pytest
import torch

from automodel_lite.data.packing.packs import join_packs
from automodel_lite.errors import DataError
from automodel_lite.models.flops import CostModel, StepFlops
from automodel_lite.parallel.mesh import Mesh, MeshShape
from automodel_lite.run.nonfinite import StepOutcome
from automodel_lite.telemetry.metrics import (
    Counts,
    Meter,
    PhaseClock,
    StepResult,
    count_own,
    counts_of,
    peak_flops,
    peak_of,
)
from automodel_lite.thd import to_thd

CPU = torch.device("cpu")
ALONE = Mesh(MeshShape(1, 1, 1), CPU, None)
COSTS = CostModel(per_token=6.0, per_pair=12.0)


def test_counts_of_a_step():
    """Documents of 3 and 2 tokens in a pack of 8: 5 tokens, 8 slots, 6 + 3 pairs."""
    pack = {
        "input_ids": torch.arange(8),
        "labels": torch.tensor([1, 2, -100, 4, -100, -100, -100, -100]),
        "position_ids": torch.tensor([0, 1, 2, 0, 1, 0, 1, 2]),
        "seq_lens": torch.tensor([3, 2, 0]),
        "seq_lens_padded": torch.tensor([3, 2, 3]),
    }
    batch = to_thd(join_packs([pack]))
    assert counts_of(count_own([batch, batch], ALONE, COSTS)) == Counts(10, 6, 16, 18.0, 6)


def test_the_queries_of_a_tree_see_their_paths():
    """A row of 3 tokens and a branch of 2 at its second place, in a slot of 6: 1 + 2 + 3 and 2 + 3 keys."""
    pack = {
        "input_ids": torch.arange(6),
        "labels": torch.tensor([1, 2, -100, 4, -100, -100]),
        "position_ids": torch.tensor([0, 1, 2, 1, 2, 3]),
        "seq_lens": torch.tensor([5]),
        "seq_lens_padded": torch.tensor([6]),
    }
    batch = to_thd(join_packs([pack]))
    assert counts_of(count_own([batch], ALONE, COSTS)).num_pairs == 11
    assert (
        counts_of(
            count_own([batch], ALONE, CostModel(6.0, 12.0, window=2, window_frac=1.0))
        ).num_pairs
        == 9
    )


def test_three_rates_and_useful_flops(monkeypatch: pytest.MonkeyPatch):
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter = Meter(ALONE, StepFlops(10.0, 5.0, COSTS), torch.float32)
    meter.start(5)
    now[0] = 12.0
    meter.stop(
        5, Counts(num_tokens=80, num_label_tokens=40, num_slots=100, num_pairs=200.0), wait_s=0.5
    )
    counts = Counts(80, 40, 100, 200.0)
    row = meter.row(
        StepResult(StepOutcome(torch.tensor(20.0), torch.tensor(1.0)), 1e-3, counts),
        step=5,
        epoch=0,
        max_steps=7,
    )
    assert (row.loss, row.tokens_per_s, row.label_tokens_per_s, row.slots_per_s) == (
        0.5,
        40.0,
        20.0,
        50.0,
    )
    assert row.tflops_per_s == (80 * 10 + 40 * 5 + 200 * 12) / 2 / 1e12
    assert (row.step_s, row.eta_s, row.data_wait_s, row.fill_frac) == (2.0, 4.0, 0.5, 0.8)
    assert "mfu_frac" not in row.as_row()


def test_memory_is_that_of_training_not_of_the_start(monkeypatch: pytest.MonkeyPatch):
    reset: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "Event", lambda enable_timing: SimpleNamespace(record=lambda stream: None)
    )
    gpu = torch.device("cuda", 3)
    Meter(Mesh(MeshShape(1, 1, 1), gpu, None), StepFlops(10.0, 5.0, COSTS), torch.float32)
    assert reset == [gpu]


def test_an_unknown_device_has_no_peak():
    assert peak_flops(CPU, torch.bfloat16) is None
    assert peak_of("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert peak_of("NVIDIA H200 NVL") == 835e12
    assert peak_of("NVIDIA Quadro P400") is None


def test_laps_add_up():
    clock = PhaseClock(CPU)
    clock.lap("data")
    time.sleep(0.02)
    clock.lap("forward")
    time.sleep(0.01)
    clock.lap("backward")
    spent = clock.seconds()
    assert spent["forward"] >= 0.02
    assert spent["backward"] >= 0.01
    assert clock.seconds() == {}


def test_a_step_without_a_label_is_an_error() -> None:
    """It was once trained with a loss of 0, in silence."""
    with pytest.raises(
        DataError, match=r"a step without a label: none of its 80 tokens is trained on"
    ):
        Counts(80, 0, 100, 200.0).divisor  # noqa: B018
    with pytest.raises(DataError, match=r"a step without a label"):
        Counts(80, 40, 100, 200.0, num_items=0).divisor  # noqa: B018
    assert Counts(80, 40, 100, 200.0, num_items=2).divisor == 2
