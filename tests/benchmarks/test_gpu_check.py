"""The GPU check's smoke plan, on the CPU: every part runs, resumes and ends in the table."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from benchmarks import gpu_check
from benchmarks.gpu.recipe import idle_frac, kernel_spans
from benchmarks.gpu.steps import Variant, measure, padded_batches
from benchmarks.gpu.table import last_words

STEPS = [part for part in gpu_check.smoke_plan() if part.call == "steps.measure"]


@pytest.mark.parametrize("part", STEPS, ids=lambda part: part.name)
def test_every_way_to_step_sees_the_same_loss(part: gpu_check.Part) -> None:
    torch.set_num_threads(1)
    result = measure(part.arguments["settings"], "cpu", None, 100.0)
    assert result["tokens_per_s"] > 0
    assert result["mean_loss"] == pytest.approx(math.log(512), abs=0.15)
    assert result["loss"] == part.arguments["settings"].get("loss", "fused")  # which loss, not what it came to


def test_all_steps_are_variants_and_all_calls_exist() -> None:
    for part in gpu_check.full_plan() + gpu_check.smoke_plan():
        if part.call == "steps.measure":
            assert Variant(**part.arguments["settings"]).steps > 0
        module, name = part.call.split(".")
        assert name in dir(__import__(f"benchmarks.gpu.{module}", fromlist=[name]))


def test_sorted_batches_waste_less() -> None:
    def waste(attention: str) -> float:
        batches = padded_batches(Variant("tiny", 8192, attention=attention), lengths_of_chats())
        taken = [next(batches) for _ in range(64)]
        return 1 - sum(map(sum, taken)) / sum(len(batch) * max(batch) for batch in taken)

    assert waste("sorted") < 0.15 < 0.5 < waste("padded")


def lengths_of_chats() -> Any:
    from benchmarks.gpu.steps import lengths

    return lengths("chat", 8192)


def test_idle_time_is_what_no_span_covers() -> None:
    assert idle_frac([(0, 4), (2, 5), (6, 10)]) == pytest.approx(0.1)
    assert idle_frac([(0, 10), (2, 3)]) == 0


def test_launches_and_annotations_are_no_kernels() -> None:
    """A host that launches all the time would hide a GPU that stands idle."""

    def event(start: int, end: int, device: DeviceType, is_annotation: bool = False) -> FunctionEvent:
        options: Any = {"device_type": device, "is_user_annotation": is_annotation}
        return FunctionEvent(0, "any", 0, start, end, **options)

    gpu, cpu = DeviceType.CUDA, DeviceType.CPU
    events = [event(6, 10, gpu), event(0, 9, cpu), event(0, 4, gpu), event(0, 10, gpu, is_annotation=True)]
    assert kernel_spans(events) == [(0, 4), (6, 10)]


def test_a_call_goes_on_where_the_last_one_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.jsonl"
    shared = ["--plan", "smoke", "--device", "cpu", "--out", str(out)]
    assert gpu_check.main([*shared, "--only", "step-packed"]) == 0
    assert "- step-mask: not asked for" in capsys.readouterr().out
    assert gpu_check.main([*shared, "--minutes", "0"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["verdict"] for row in rows if row["part"] == "step-packed"] == ["pass"]  # not again
    assert {row["verdict"] for row in rows if row["part"] != "step-packed"} <= {"no time", "missing"}
    screen = capsys.readouterr().out
    assert "| step-packed |" in screen
    assert "- step-mask: no time was left" in screen


def test_the_wheels_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--list-wheels"]) == 0
    assert "hydra-core==1.3.8\n" in capsys.readouterr().out


def test_what_it_cannot_do_without_is_asked_for_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None if name in ("hydra", "xxhash", "trl") else name)
    assert gpu_check.main(["--plan", "smoke", "--device", "cpu"]) == 2
    assert capsys.readouterr().out == "Nothing was checked; first: pip install hydra-core==1.3.8 xxhash\n"


def test_a_part_that_fails_shows_its_error_and_one_cut_short_by_the_call_is_no_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = argparse.Namespace(out=tmp_path / "results.jsonl", device="cpu", plan="smoke")
    part = gpu_check.Part("no such part", "machine.imports", 60)
    found = gpu_check.run_apart(part, arguments, time.monotonic() + 60)
    assert found["verdict"] == "FAIL"
    assert last_words(found["why"]).endswith("StopIteration")
    slow = gpu_check.smoke_plan()[0]
    assert gpu_check.run_apart(replace(slow, limit_s=0.1), arguments, time.monotonic() + 60)["verdict"] == "timeout"
    monkeypatch.setattr(gpu_check, "LEAST_S", 0)
    assert gpu_check.run_apart(slow, arguments, time.monotonic() + 0.1)["verdict"] == "no time"


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_check.main([]) == 0
    assert "SKIPPED: no CUDA device here" in capsys.readouterr().out


@pytest.mark.slow
def test_the_smoke_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = gpu_check.main(["--plan", "smoke", "--device", "cpu", "--out", str(tmp_path / "results.jsonl")])
    screen = capsys.readouterr().out
    assert code == 0, screen
    assert "recipe-1b reaches" in screen
