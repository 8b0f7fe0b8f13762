"""The rank for which the others wait is found by what each does alone: all of them take the same time for a step."""

from __future__ import annotations

import math
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from automodel_lite.parallel.control import Control
from automodel_lite.parallel.mesh import MeshShape, open_mesh
from automodel_lite.parallel.sharding import fully_shard_model
from automodel_lite.telemetry.stragglers import EVERY_STEPS, Stragglers
from tests.parallel.test_sharding import loss_model, micro_batch
from tests.ranks import run_ranks

CPU = torch.device("cpu")
HOSTS = ["a", "a", "b", "b"]
HELD_UP_S = 0.3


def compared(layer_s: list[float], wait_s: list[float]) -> tuple[dict[str, Any], list[str]]:
    """The row, and what was printed."""
    said: list[str] = []
    stragglers = Stragglers(nn.Identity(), CPU, HOSTS, 0)
    stragglers.compare([*layer_s, *wait_s], EVERY_STEPS, said.append)
    return stragglers.take_row(), said


def test_a_rank_that_computes_slowly_is_named_with_its_host() -> None:
    row, said = compared([0.010, 0.011, 0.013, 0.010], [0.0, 0.0, 0.0, 0.0])
    assert row["ranks/layer_s_slowest"] == "rank 2 on b"
    assert [row[f"ranks/layer_s_{which}"] for which in ("min", "median", "max")] == [
        0.010,
        0.010,
        0.013,
    ]
    assert (
        row["warning"]
        == "step 50: rank 2 on b takes 0.013 s for a layer, most ranks 0.01 s: all ranks wait for it"
    )
    assert said == [f"WARNING: {row['warning']}"]


def test_a_rank_that_waits_for_its_data_is_named() -> None:
    row, _ = compared([0.010, 0.010, 0.010, 0.010], [0.0, 1.0, 0.0, 0.0])
    assert (
        row["warning"]
        == "step 50: rank 1 on a takes 1 s for its data, most ranks 0 s: all ranks wait for it"
    )


@pytest.mark.parametrize(
    "layer_s", [[0.010, 0.0109, 0.010, 0.010], [0.0, 0.0, 0.0, 0.0]], ids=["9 %", "nothing yet"]
)
def test_equal_ranks_are_not_warned_of(layer_s: list[float]) -> None:
    row, said = compared(layer_s, [0.0] * 4)
    assert not said
    assert "warning" not in row


class Event:
    """Of a GPU that is not there: passed or not, at a time in ms."""

    now_ms = 0.0
    passed_ms = math.inf

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.at = Event.now_ms = Event.now_ms + 4.0

    def query(self) -> bool:
        return self.at <= Event.passed_ms

    def elapsed_time(self, later: Event) -> float:
        assert later.query(), "the host would wait for the device"
        return later.at - self.at


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that it has not passed are read 50 steps later."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    layer = nn.Identity()
    stragglers = Stragglers(layer, torch.device("cuda", 0), ["a", "b"], 1)
    for _ in range(3):
        layer(torch.zeros(1))
    with torch.no_grad():  # validation
        layer(torch.zeros(1))
    Event.passed_ms = 10.0  # of 4, 8, 12, 16, 20, 24
    stragglers.wait_s += EVERY_STEPS * 0.5
    assert stragglers.own_times(EVERY_STEPS - 1) == []
    assert stragglers.own_times(EVERY_STEPS) == [0.0, 0.004, 0.0, 0.5]
    assert len(stragglers._marks) == 2


def slow_layer(rank: int, world_size: int) -> tuple[float, dict[str, Any]]:
    """Seconds of this rank's five steps, and what the ranks are compared by; a layer of rank 1 is held up."""
    model = loss_model("llama")
    mesh = open_mesh(MeshShape(1, 2, 1), CPU)
    fully_shard_model(model, mesh, torch.float32)
    layer: Any = model.lm.model.layers[0]
    forward = layer.forward

    def held_up(*args: Any, **options: Any) -> Any:
        time.sleep(HELD_UP_S * rank)
        return forward(*args, **options)

    layer.forward = held_up
    control = Control(dist.group.WORLD)
    stragglers = Stragglers(layer, CPU, control.on_all(socket.gethostname), rank)
    began = time.perf_counter()  # before rank 1 can begin
    control.barrier()
    for _ in range(5):
        model(micro_batch(0, 1)).sum.backward()
    seconds = time.perf_counter() - began
    stragglers.compare(control.start_sum(stragglers.own_times(EVERY_STEPS))(), EVERY_STEPS, print)
    return seconds, stragglers.take_row()


def test_the_slow_one_of_two_ranks_is_found() -> None:
    (own_s, row), (slow_s, same) = run_ranks(slow_layer, 2)
    assert min(own_s, slow_s) > 5 * HELD_UP_S  # rank 0 waits: by their steps the two are equal
    assert row == same
    assert row["ranks/layer_s_slowest"].startswith("rank 1 on ")
    assert row["ranks/layer_s_max"] > HELD_UP_S > row["ranks/layer_s_min"]  # medians of five
    assert "warning" in row
