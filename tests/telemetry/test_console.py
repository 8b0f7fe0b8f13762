"""What the screen shows of a run: the start block, a row per logged step, validation; nothing of other ranks."""

from __future__ import annotations

import os
import pty
from contextlib import redirect_stdout
from typing import Any

import pytest

from automodel_lite.telemetry.console import Console
from automodel_lite.telemetry.metrics import StepMetrics


def test_lines_of_the_start_block_wrap_at_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal, redirect_stdout(terminal):
        Console(False).say("memory", "weights 3.4 MiB, " * 8)
        terminal.flush()
        shown = os.read(leader, 4096).decode()
    os.close(leader)
    lines = [line.rstrip("\r") for line in shown.strip().splitlines()]
    assert len(lines) == 3
    assert max(map(len, lines)) <= 60
    assert lines[1].startswith(" " * 11 + "MiB, weights")


def test_a_log_keeps_its_lines_whole(capsys: pytest.CaptureFixture[str]) -> None:
    Console(False).say("memory", "weights 3.4 MiB, " * 8)
    assert capsys.readouterr().out.count("\n") == 1


def test_the_start_block_is_kept_for_run_json(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(False)
    console.show([("data", "4 documents\n2 of them cut"), ("model", "llama")])
    console.show([("memory", "")])
    assert (
        capsys.readouterr().out
        == "data       4 documents\n           2 of them cut\nmodel      llama\nmemory     \n"
    )
    assert console.lines == [
        ("data", "4 documents\n2 of them cut"),
        ("model", "llama"),
        ("memory", ""),
    ]


def test_commands_are_lines_to_copy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    Console(False).commands("next", ["python a.py " + "x=1 " * 60, "HF_TOKEN=hf_secret b"])
    assert (
        capsys.readouterr().out
        == f"next       python a.py {'x=1 ' * 60}\n           HF_TOKEN=<HF_TOKEN> b\n"
    )


def of_step(step: int, **known: Any) -> StepMetrics:
    rates = {
        "tokens_per_s": 12345.6,
        "label_tokens_per_s": 1.0,
        "slots_per_s": 1.0,
        "tflops_per_s": 1.0,
    }
    counts = {"epoch": 0, "num_tokens": 99, "num_label_tokens": 40.0, "fill_frac": 0.987}
    times = {"step_s": 1.0, "data_wait_s": 0.0, "eta_s": 3725.0, "time_s": {}, "memory_gib": 2.34}
    return StepMetrics(
        step,
        loss=1.5,
        grad_norm=0.25,
        lr=1e-3,
        **{"mfu_frac": None, **rates, **counts, **times, **known},
    )


def test_rows_stand_below_their_heads(capsys: pytest.CaptureFixture[str]) -> None:
    """The heads come again after 25 rows; utilization where the device's peak is known, parts of the loss behind."""
    console = Console(False)
    for step in range(1, 27):
        console.step(of_step(step))
    heads, first, *rest = capsys.readouterr().out.splitlines()
    assert heads == "   step      loss        lr  grad norm  tokens/s   fill   memory      ETA"
    assert first == "      1    1.5000  1.00e-03      0.250    12,346  98.7%   2.3GiB  1:02:05"
    assert [number for number, line in enumerate(rest) if line == heads] == [24]
    Console(False).step(of_step(7, mfu_frac=0.4321, parts={"kl": 0.5}))
    heads, row = capsys.readouterr().out.splitlines()
    assert heads.endswith("      ETA    MFU")
    assert row.endswith("  1:02:05  43.2%  kl 0.5")


def test_a_line_per_set_of_validation(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {"val_loss/easy": 0.5, "val_accuracy/easy": 0.875, "val_loss/held_out": 1.25}
    Console(False).validation(30, numbers, [("2 + 2?", "4")])
    assert capsys.readouterr().out.splitlines() == [
        "     30    0.5000  validation (easy)  accuracy 0.875",
        "     30    1.2500  validation (held_out)",
        "         2 + 2?",
        "         -> 4",
    ]


def test_other_ranks_are_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    other = Console()
    other.show([("data", "x")])
    other.commands("next", ["x"])
    other.step(of_step(1))
    other.validation(1, {"val_loss/easy": 0.5}, [])
    assert capsys.readouterr().out == ""
    assert other.lines == [("data", "x")]
    monkeypatch.setenv("RANK", "0")
    Console().print("x")
    assert capsys.readouterr().out == "x\n"
