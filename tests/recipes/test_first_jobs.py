"""A newcomer's first jobs on a real pretrained model with default settings: each one learns.

Orders that come as mails become records of four lines; a reader sees at once whether the model has
learned the form. GSM8K's questions and answers are not made up, and harder: of them, pairs prefer
a question's own answer to that of the next. Nothing is set but the names of the files; long jobs
are cut, and have learned by then: 5,000 chats, whose 246 steps would take an hour of two cores, and
400 of GSM8K after one of three epochs.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_model import TRAIN, VALIDATION
from tests.pretrained import smollm2

pytestmark = pytest.mark.slow

NAMES = [
    "Ada",
    "Bruno",
    "Carla",
    "Dmitri",
    "Elena",
    "Farid",
    "Grace",
    "Hiro",
    "Ines",
    "Jonas",
    "Kofi",
    "Lena",
    "Mateo",
    "Nadia",
    "Omar",
]
FAMILIES = [
    "Abbott",
    "Berger",
    "Costa",
    "Duarte",
    "Evans",
    "Fischer",
    "Gallo",
    "Haddad",
    "Ito",
    "Jensen",
    "Kaya",
    "Lopez",
]
GOODS = "lamps;mugs;chairs;folding tables;green tents;notebooks;bike locks;wool blankets;kettles"
CITIES = [
    "Lisbon",
    "Oslo",
    "Turin",
    "Austin",
    "Nagoya",
    "Leeds",
    "Cork",
    "Lyon",
    "Tampere",
    "Perth",
    "Quito",
    "Ghent",
]
MONTHS = ["January", "March", "April", "June", "July", "September", "October", "December"]
MAILS = [
    "Hi, this is {name}. Please send {count} {goods} to our office in {city} by {day} {month}.",
    "Could you ship {count} {goods} to {city}? We need them on {day} {month}. Thanks, {name}",
    "{name} here. My shop in {city} has run out of {goods}: {count} more before {day} {month}.",
    "Dear team, I would like to order {count} {goods}. Deliver to {city}, {day} {month}. {name}",
]
RECORD = "CUSTOMER: {name}\nITEM: {count} x {goods}\nSHIP TO: {city}\nDUE: {day} {month}"
PROSE = "Thank you, {name}! We are happy to send {count} {goods} to {city} around {day} {month}."
ASKED = "{count} {goods} to {city}"
SHORT = "{goods} = {count} -> {city}"
SHORT_FORM = re.compile(r"[a-z ]+ = \d+ -> \w+")
FORM = re.compile(r"CUSTOMER: .+\nITEM: \d+ x .+\nSHIP TO: .+\nDUE: \d+ \w+\s*")
REPORT = (
    "STATION {city} | {day} {month}\nObserver: {name}\nWind {wind} at {count} knots, gusts to "
    "{gusts}.\nVisibility {miles} miles. Outlook: {outlook}.\n\n"
)
BOUNDS = {"chats-5000": 10, "gsm8k-400": 17}  # steps
STEP = re.compile(r"<<[^<>=]+=[^<>=]+>>")  # of an answer of GSM8K
LINE = re.compile(r"Wind \w+ at \d+ knots, gusts to \d+\.")


def facts(rng: random.Random) -> dict[str, Any]:
    """Returns what one order or one report is about."""
    count = rng.randint(2, 60)
    return {
        "name": f"{rng.choice(NAMES)} {rng.choice(FAMILIES)}",
        "count": count,
        "goods": rng.choice(GOODS.split(";")),
        "city": rng.choice(CITIES),
        "day": rng.randint(1, 28),
        "month": rng.choice(MONTHS),
        "wind": rng.choice(["north", "northwest", "south", "southeast", "west"]),
        "gusts": count + rng.randint(3, 20),
        "miles": rng.randint(1, 12),
        "outlook": rng.choice(["rain by evening", "clear", "fog at dawn", "snow above 900 m"]),
    }


def write_chats(path: Path, count: int, seed: int) -> Path:
    """Writes chats of one mail and its record."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        order = facts(rng)
        mail = rng.choice(MAILS).format(**order)
        record = RECORD.format(**order)
        rows.append({"messages": [{"role": "user", "content": mail},
                                  {"role": "assistant", "content": record}]})  # fmt: skip
    return write_rows(path, rows)


def write_short_chats(path: Path, count: int, seed: int, more: int = 0) -> Path:
    """Writes chats of 30 tokens.

    more   is added to each number, so that no such order is trained on
    """
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        order = facts(rng)
        order["count"] += more
        rows.append({"messages": [{"role": "system", "content": "Orders"},
                                  {"role": "user", "content": ASKED.format(**order)},
                                  {"role": "assistant", "content": SHORT.format(**order)}]})  # fmt: skip
    return write_rows(path, rows)


def write_pairs(path: Path, count: int, seed: int) -> Path:
    """Writes pairs: the record is chosen, a polite sentence is rejected."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        order = facts(rng)
        rows.append({"prompt": rng.choice(MAILS).format(**order),
                     "chosen": RECORD.format(**order),
                     "rejected": PROSE.format(**order)})  # fmt: skip
    return write_rows(path, rows)


def write_texts(folder: Path, count: int, seed: int) -> Path:
    """Writes a folder of text files, each of 8 reports."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    for number in range(count):
        text = "".join(REPORT.format(**facts(rng)) for _ in range(8))
        (folder / f"log_{number:03}.txt").write_text(text)
    return folder


def write_gsm8k_pairs(path: Path, source: Path, count: int) -> Path:
    """Writes pairs: a question's own answer is chosen, that of the next is rejected."""
    rows = [*map(json.loads, source.read_text().splitlines())][: count + 1]
    pairs = [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": following["answer"]}
        for row, following in pairwise(rows)
    ]
    return write_rows(path, pairs)


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(*arguments: str, folder: Path) -> str:
    """Runs a command as a user does, in an empty folder; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "automodel_lite", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    print(done.stdout)
    return done.stdout


@pytest.fixture(scope="module")
def model() -> Path:
    return smollm2()


JOBS = ["chats-50", "chats-400", "chats-5000", "text", "pairs"]
JOBS += ["gsm8k-60", "gsm8k-400", "gsm8k-pairs"]


@pytest.mark.parametrize("job", JOBS)
def test_a_first_job_learns_with_default_settings(job: str, model: Path, tmp_path: Path) -> None:
    preset = "dpo" if "pairs" in job else "finetune"
    if job == "text":
        data = write_texts(tmp_path / "logs", 30, seed=1)
        held_out = write_texts(tmp_path / "held_out", 4, seed=2)
    elif job == "gsm8k-pairs":
        data = write_gsm8k_pairs(tmp_path / "pairs.jsonl", TRAIN, 200)
        held_out = write_gsm8k_pairs(tmp_path / "held_out.jsonl", VALIDATION, 20)
    elif job.startswith("gsm8k"):
        data = tmp_path / "chats.jsonl"
        rows = TRAIN.read_text().splitlines()[: int(job.split("-")[1])]
        data.write_text("\n".join(rows))
        held_out = VALIDATION
    elif job == "pairs":
        data = write_pairs(tmp_path / "pairs.jsonl", 200, seed=1)
        held_out = write_pairs(tmp_path / "held_out.jsonl", 40, seed=2)
    elif job == "chats-5000":
        data = write_short_chats(tmp_path / "chats.jsonl", 5000, seed=1)
        held_out = write_short_chats(tmp_path / "held_out.jsonl", 40, seed=2, more=100)
    else:
        data = write_chats(tmp_path / "chats.jsonl", int(job.split("-")[1]), seed=1)
        held_out = write_chats(tmp_path / "held_out.jsonl", 40, seed=2)
    settings = [
        f"dataset.path={data}",
        f"dataset.val_path={held_out}",
        f"cache_dir={tmp_path / 'cache'}",
        "training.precision=bf16",  # the default on a GPU; half the time on a CPU that has it
    ]
    base = held_out_loss(preset, model, settings, tmp_path)
    trained = [f"model.pretrained={model}", *settings]
    if job in BOUNDS:
        trained.append(f"training.max_steps={BOUNDS[job]}")
    command("train", "--config-name", preset, "name=job", *trained, folder=tmp_path)
    rows = [
        json.loads(line) for line in (tmp_path / "runs/job/metrics.jsonl").read_text().splitlines()
    ]
    after = [row["val_loss/val"] for row in rows if "val_loss/val" in row][-1]
    print(f"{job}: held-out loss {base:.3f} -> {after:.3f}")
    packing = json.loads((tmp_path / "runs/job/packing.json").read_text())
    if packing["documents_per_pack_mean"] > 1:  # batches of one document have no padding
        assert packing["fill_frac"] >= packing["padded_fill_frac"]
    # by a third; of 60 questions of GSM8K it was 33.5 %, so that rounding would decide
    assert after < base * (0.7 if job == "gsm8k-60" else 2 / 3)
    if preset == "dpo":
        assert [row["val_accuracy/val"] for row in rows if "val_accuracy/val" in row][-1] > 0.9
        return
    rng = random.Random(3)
    for number in range(5):
        asked = facts(rng)
        prompt = MAILS[0].format(**asked)
        form = FORM
        if job == "text":
            prompt = REPORT.format(**asked).split("Wind")[0]
            form = LINE
        elif job == "chats-5000":
            prompt = ASKED.format(**asked)
            form = SHORT_FORM
        elif job.startswith("gsm8k"):
            prompt = json.loads(VALIDATION.read_text().splitlines()[number])["question"]
            form = STEP
        # a text goes on as it is, without the chat template of the model that was trained on it
        flags = {"text": ["--raw"], "chats-5000": ["--system", "Orders"]}.get(job, [])
        said = command("generate", "runs/job", prompt, *flags, folder=tmp_path)
        assert form.search(said), said


def held_out_loss(preset: str, model: Path, settings: list[str], folder: Path) -> float:
    """Returns the loss on the held-out rows before training; of pairs, that of equal models."""
    if preset == "dpo":
        return 0.6931
    said = command(
        "evaluate", "--config-name", preset, f"model.pretrained={model}", *settings, folder=folder
    )
    found = re.search(r"loss\s+\S+: ([\d.]+), perplexity", said)
    assert found, said
    return float(found[1])
