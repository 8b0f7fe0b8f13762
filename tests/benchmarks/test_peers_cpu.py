"""Contestants in processes of their own take turns."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.loops import numbers_of_batches, padded
from benchmarks.peers_cpu import CONTESTANTS, Contestant, main


def test_sorted_batches_hold_a_packs_tokens_and_little_padding() -> None:
    """Each document once; batches of short documents have as many tokens as those of long ones."""
    lengths = np.random.default_rng(0).integers(20, 400, 500)
    slots = {}
    for is_sorted in (True, False):
        batches = numbers_of_batches(lengths, 10, is_sorted)
        assert sorted(np.concatenate(batches)) == [*range(500)]
        slots[is_sorted] = sum(len(batch) * lengths[batch].max() for batch in batches)
    assert slots[True] < 1.03 * lengths.sum() < 1.5 * lengths.sum() < slots[False]
    sizes = [int(lengths[batch].sum()) for batch in numbers_of_batches(lengths, 10, True)]
    assert max(sizes) < 2048 + 400


def test_padded_rows_are_trained_on_answers_alone() -> None:
    rows = {"input_ids": [[5, 6, 7], [8, 9]], "completion_mask": [[0, 1, 1], [0, 1]]}
    inputs, labels, num_tokens = next(padded(rows, [np.array([1, 0])]))
    assert inputs["input_ids"].tolist() == [[8, 9, 0], [5, 6, 7]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert labels.tolist() == [[-100, 9, -100], [-100, 6, 7]]
    assert num_tokens == 5


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
    names = ["recipe", "again", "bare", "sorted", "broken"]
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
    # as each turn ends: the first is part of the start
    assert printed.out.count("turn ") == 2
    assert "broken failed" in printed.out
    assert "| broken | failed |" in printed.out
    assert "no_such_module" in printed.err
