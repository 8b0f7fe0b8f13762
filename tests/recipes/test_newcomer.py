"""A newcomer with a folder of 400 chats in a CSV types two commands, and has a model that answers."""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from benchmarks.real_model import ROOT
from tests.forked import warm_python
from tests.pretrained import smollm2
from tests.recipes.test_first_jobs import FORM, MAILS, RECORD, facts
from tests.runs import train_quick


def write_orders(folder: Path, count: int) -> None:
    """Writes mails and their records, as an office keeps them in a table."""
    folder.mkdir()
    rng = random.Random(1)
    with (folder / "orders.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["question", "answer"])
        for _ in range(count):
            order = facts(rng)
            table.writerow([rng.choice(MAILS).format(**order), RECORD.format(**order)])


def typed(folder: Path, *words: str) -> tuple[str, str]:
    """Types a command in a folder; returns what it prints, and what it says beside."""
    done = subprocess.run(
        [warm_python(), "-m", "automodel_lite", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        input="",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout, done.stderr


@pytest.mark.system
def test_two_words_start_a_run_and_the_same_words_continue_it(tmp_path: Path) -> None:
    """A model of one step, which has learned nothing: what the commands do around it."""
    train_quick(tmp_path / "made", "checkpoint.export_hf=true", "training.max_steps=1")
    (tmp_path / "made/hf").rename(tmp_path / "small")
    write_orders(tmp_path / "data", 60)
    settings = [f"cache_dir={tmp_path / 'cache'}", "training.max_steps=12"]
    screen, _ = typed(tmp_path, "train", "small", "data", *settings)
    lines = [line for line in screen.splitlines() if line.startswith(("job", "auto"))]
    assert [line.partition(":")[0] for line in lines] == [
        "job        --config-name finetune",
        "job        name=small-data",
        "job        dataset.val_frac=0.1333",
        "auto       optimizer.lr",
        "auto       packed_sequence.packed_sequence_size",
    ]
    rows = [*map(json.loads, (tmp_path / "runs/small-data/metrics.jsonl").read_text().splitlines())]
    (asked,) = [row for row in rows if "answers" in row]
    assert (asked["answers"], asked["answers_in_form"]) == (8, 0)
    assert "NOTE       only 0 of 8 held-out answers have the form of the data's" in screen
    assert "runs/small-data/hf" in screen

    again, _ = typed(tmp_path, "train", "small", "data", *settings)
    assert "runs/small-data is finished (step 12): nothing to do" in " ".join(again.split())
    _, asks = typed(tmp_path, "generate", "runs/small-data")
    assert "one answer: automodel-lite generate runs/small-data" in asks.replace(
        "python recipes/generate.py", "automodel-lite generate"
    )
    assert any(
        f"the data ask, for instance: {start}" in asks for start in ("Hi,", "Could", "Dear")
    ) or ("here. My shop" in asks)


@pytest.mark.slow
def test_two_commands_make_a_model_that_answers(tmp_path: Path) -> None:
    model = smollm2()
    write_orders(tmp_path / "data", 400)
    # bf16 is the default on a GPU
    bf16 = "training.precision=bf16"
    screen, _ = typed(tmp_path, "train", str(model), "data", bf16)
    assert "NOTE       only" not in screen
    order = facts(random.Random(3))
    said, _ = typed(tmp_path, "generate", f"runs/{model.name}-data", MAILS[0].format(**order))
    assert FORM.search(said), said
    assert order["name"] in said
