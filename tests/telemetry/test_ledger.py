"""The chain of ledger.jsonl: what is changed in it is found, and a continued run goes on with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_lite.errors import ConfigError
from automodel_lite.run.nonfinite import StepOutcome
from automodel_lite.telemetry.ledger import Ledger, chained, last_line, read_ledger, step_row
from automodel_lite.telemetry.metrics import Counts, StepResult

COUNTS = Counts(num_tokens=8, num_label_tokens=4, num_slots=8, num_pairs=20.0)


def row(step: int, packs: list[int], loss_sum: float) -> dict[str, Any]:
    outcome = StepOutcome(torch.tensor(loss_sum), torch.tensor(0.1))
    return step_row(step, packs, StepResult(outcome, 1e-3, COUNTS), outcome.read())


def written(folder: Path, *losses: float) -> Ledger:
    ledger = Ledger(folder / "ledger.jsonl", is_silent=False, say=print)
    ledger.open(0, "", None, {"ranks": 1})
    for step, loss in enumerate(losses, start=1):
        ledger.add_step(row(step, [9, 2], loss))
    ledger.close()
    return ledger


def test_a_line_has_the_numbers_of_its_step(tmp_path: Path) -> None:
    ledger = written(tmp_path, 8.0, 6.0)
    rows = [line.row for line in read_ledger(tmp_path / "ledger.jsonl")]
    assert rows[0] == {"start": 0, "ranks": 1}
    assert rows[2] == {
        "step": 2,
        "packs": [2, 9],
        "labels": 4,
        "loss": 1.5,
        "norm": 0.10000000149011612,
        "rate": 0.001,
    }
    assert last_line(tmp_path / "ledger.jsonl") == (2, ledger.head)


def test_the_chain_is_a_hash_over_the_one_before_and_the_line() -> None:
    line, chain = chained({"step": 1, "loss": 0.5}, "ab")
    assert line == f'{{"step": 1, "loss": 0.5, "chain": "{chain}"}}\n'
    # sha256 of the text 'ab\n{"step": 1, "loss": 0.5'
    assert chain == "08dac5a5e3e2075a4baee30b6245cbee182c0478afe3530768335dba446d2045"


def changed(lines: list[str]) -> list[str]:
    return [lines[0], lines[1].replace("2.0", "2.5"), *lines[2:]]


def without_one(lines: list[str]) -> list[str]:
    return [*lines[:2], *lines[3:]]


def exchanged(lines: list[str]) -> list[str]:
    return [lines[0], lines[2], lines[1], lines[3]]


def added(lines: list[str]) -> list[str]:
    return [*lines, json.dumps({"step": 4, "chain": "0" * 64}) + "\n"]


@pytest.mark.parametrize("tamper", [changed, without_one, exchanged, added])
def test_a_line_that_was_changed_is_found(
    tmp_path: Path, tamper: Callable[[list[str]], list[str]]
) -> None:
    written(tmp_path, 8.0, 6.0, 4.0)
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(tamper(path.read_text().splitlines(keepends=True))))
    with pytest.raises(ConfigError, match="does not follow from the one before it"):
        read_ledger(path)


def test_a_torn_line_is_no_line(tmp_path: Path) -> None:
    ledger = written(tmp_path, 8.0)
    path = tmp_path / "ledger.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "pa')
    assert last_line(path) == (1, ledger.head)


def test_a_continued_run_drops_the_steps_that_come_again(tmp_path: Path) -> None:
    written(tmp_path, 8.0, 6.0, 4.0)
    path = tmp_path / "ledger.jsonl"
    head = read_ledger(path)[2].chain
    ledger = Ledger(path, is_silent=False, say=print)
    ledger.open(2, head, None, {"ranks": 2})
    ledger.add_step(row(3, [1], 5.0))
    ledger.close()
    lines = read_ledger(path)
    assert [line.row.get("step", line.row.get("start")) for line in lines] == [0, 1, 2, 2, 3]
    assert lines[-1].row["loss"] == 1.25


def test_a_ledger_that_is_not_the_checkpoints_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, 8.0, 6.0)
    ledger = Ledger(tmp_path / "ledger.jsonl", is_silent=False, say=print)
    ledger.open(2, "f" * 64, None, {"ranks": 1})
    ledger.close()
    assert "the ledger begins anew at step 2" in capsys.readouterr().out
    assert [line.row["start"] for line in read_ledger(tmp_path / "ledger.jsonl")] == [2]
