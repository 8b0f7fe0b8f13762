"""Contestants in processes of their own take turns."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import pytest

from benchmarks.peers_cpu import CONTESTANTS, Contestant, main


@pytest.mark.slow
def test_contestants_take_turns_and_one_that_fails_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(0)
    rows = [
        {k: " ".join(f"w{draw.randrange(4000)}" for _ in range(40)) for k in ("question", "answer")}
        for _ in range(400)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setitem(CONTESTANTS, "broken", Contestant("no_such_module"))
    monkeypatch.setitem(CONTESTANTS, "again", Contestant("recipe", "training.log_every_steps=2"))
    monkeypatch.chdir(tmp_path)
    cores = os.sched_getaffinity(0)
    names = ["recipe", "again", "broken"]
    sizes = ["--shape", "tiny", "--steps", "2", "--warmup-steps", "1"]
    rates = main(["--data", data.name, *sizes, "--only", *names])
    assert rates.keys() == set(names)
    assert rates.pop("broken") == []
    assert all(
        len(of_steps) == 2 and all(0 < rate < math.inf for rate in of_steps)
        for of_steps in rates.values()
    )
    assert os.sched_getaffinity(0) == cores
    printed = capsys.readouterr()
    assert "| broken | failed |" in printed.out
    assert "no_such_module" in printed.err
