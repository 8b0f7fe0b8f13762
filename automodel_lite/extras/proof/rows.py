"""The rows of a proof, small ones first. Each is a function of the shared `Work` that returns what
it saw; what it expects and by which rule stands beside it in `ROWS`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from automodel_lite.extras.proof import data, packers, plain
from automodel_lite.extras.proof.work import (
    Curve,
    MissingError,
    Seen,
    Work,
    curve_of,
    environment,
    farthest,
)
from automodel_lite.telemetry.ledger import NAME

LIMIT = 1e-5  # relative, of every loss of a curve in fp32
TINY = [
    "training.precision=fp32",
    "training.num_threads=1",
    "training.val_every_steps=0",
    "training.log_every_steps=10",
    "training.global_batch_size=8",
    "training.num_epochs=null",
    "checkpoint.every_steps=0",
    "checkpoint.export_hf=false",
    "optimizer.lr=1e-3",
    "lr_scheduler.warmup_steps=5",
    "report=false",
]
SMALL_MODEL = ["model=llama_smoke", "tokenizer=bpe", "tokenizer.vocab_size=300"]
HYBRIDS = {
    "conv": ["model_type=lfm2", "layer_types=[conv,full_attention]", "full_attn_idxs=[1]"],
    "delta": [
        "model_type=qwen3_next",
        "layer_types=[linear_attention,full_attention]",
        "head_dim=8",
        "linear_num_value_heads=4",
        "linear_num_key_heads=2",
        "linear_key_head_dim=8",
        "linear_value_head_dim=8",
        "decoder_sparse_step=4",
        "mlp_only_layers=[0,1]",
        "num_experts=0",
    ],
}


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    name: str
    what: str
    expected: str
    rule: str
    look: Callable[[Work], Seen]


def of_curves(curve: Curve, other: Curve, limit: float = LIMIT) -> Seen:
    """Compares two curves."""
    distance, step = farthest(curve, other)
    last = max(curve)
    losses = f"loss {curve[1][0]:.4f} → {curve[last][0]:.4f}"
    text = f"{distance:.0e} at most, in step {step} of {last}; {losses}"
    return Seen(text, distance <= limit)


# -------------------------------------------- one process and several
def layout(
    kind: str, nproc: int, overrides: list[str], work: Work, prepare: Callable[[Work], list[str]]
) -> Seen:
    """Trains alone, once for all layouts of a kind, and again on `nproc` ranks."""
    preset, *settings = prepare(work)
    settings = [preset, *TINY, f"training.max_steps={work.steps}", *settings]
    curve = curve_of(work.train_once(f"alone-{kind}", *settings))
    name = f"{kind}-{'-'.join([str(nproc), *overrides])}".replace("=", "").replace(".", "-")
    return of_curves(curve, work.train(name, *settings, *overrides, nproc=nproc))


def text_settings(work: Work) -> list[str]:
    return ["smoke", "packed_sequence.slot_multiple=16"]


def on_rows(preset: str, rows: Path, pack_size: int, *more: str) -> list[str]:
    """Returns a preset on a file of rows, in packs that two ranks of context parallelism can cut
    as one process has them.
    """
    return [
        preset,
        f"dataset.path={rows}",
        f"packed_sequence.packed_sequence_size={pack_size}",
        "packed_sequence.slot_multiple=4",
        *more,
    ]


def base_model(work: Work) -> str:
    """Returns the setting that starts from a tiny model, which is trained once, on questions."""
    base = [*TINY, "checkpoint.export_hf=true", "training.max_steps=10"]
    return f"model.pretrained={work.train_once('base', 'smoke', *base) / 'hf'}"


def lora_settings(work: Work) -> list[str]:
    rows = data.answered_prompts(work.folder / "answered.jsonl")
    return on_rows("lora", rows, 512, base_model(work))


def hybrid_settings(kind: str, work: Work) -> list[str]:
    family = [f"model.config.{text}" for text in HYBRIDS[kind]]
    return ["smoke", "packed_sequence.slot_multiple=16", *family]


def tree_settings(work: Work) -> list[str]:
    rows = data.answered_prompts(work.folder / "answered.jsonl")
    steps = ["training.global_batch_size=32", "training.allow_few_steps=true"]
    return on_rows("finetune", rows, 1024, *SMALL_MODEL, *steps)


def pair_settings(work: Work) -> list[str]:
    return on_rows("dpo", data.pairs(work.folder / "pairs.jsonl"), 512, *SMALL_MODEL)


def policy_settings(work: Work) -> list[str]:
    return on_rows("policy", data.sampled(work.folder / "sampled.jsonl"), 256, base_model(work))


def image_settings(work: Work) -> list[str]:
    folder = data.easy_vqa(work)
    model = f"model.pretrained={folder / 'model'}"
    return on_rows("finetune", folder / "vqa.jsonl", 256, "dataset=images", model)


def trees_against_rows(work: Work) -> Seen:
    """Every step holds all rows, so that both ways compute the same steps."""
    preset, *settings = tree_settings(work)
    settings = [*TINY, f"training.max_steps={work.steps}", *settings]
    settings.append("training.global_batch_size=64")
    trees = work.train("trees", preset, *settings, "packed_sequence.tree=auto")
    rows = work.train("rows", preset, *settings, "packed_sequence.tree=off")
    seen = of_curves(rows, trees)
    tokens = [packers.tokens_of(work.folder / "runs" / name) for name in ("trees", "rows")]
    factor = tokens[1] / tokens[0]
    saved = f"{tokens[0]:,} tokens per step instead of {tokens[1]:,} ({factor:.1f} ×)"
    return Seen(f"{seen.text}; {saved}", bool(seen.passed) and factor > 1)


# -------------------------------------------- the record of a run
def ledger(work: Work) -> Seen:
    """Replays a step, then changes a digit."""
    steps = ["training.max_steps=6", "checkpoint.every_steps=2", "checkpoint.keep_last=9"]
    work.train("ledger", "smoke", *TINY, *steps)
    run = work.folder / "runs" / "ledger"
    said = work.run("verify", str(run), "--replay", "4")
    is_same = "same bits" in said
    path = run / NAME
    path.write_text(path.read_text().replace('"labels": ', '"labels": 1', 1))
    found = "does not follow" in work.run("verify", str(run), is_expected=(1,))
    replayed = "step 4 replayed to the same bits" if is_same else "step 4 differs"
    return Seen(f"{replayed}; a changed digit is {'' if found else 'not '}found", is_same and found)


def killed(work: Work, num_kills: int = 10) -> Seen:
    """Kills a run ten times, continues it on other worlds, and compares every step."""
    steps = max(work.steps, 2 * num_kills + 4)
    settings = [*TINY, *text_settings(work)[1:], f"training.max_steps={steps}"]
    settings += ["checkpoint.every_steps=2"]
    whole = work.train("uninterrupted", "smoke", *settings)
    folder = work.fresh("killed")
    worlds = [[], ["--nproc", "2"], ["--nproc", "2", "mesh.cp=2"]]
    kills = 0
    for number in range(4 * num_kills):
        line = ["train", *worlds[number % 3], *work.settings("killed", "smoke", *settings)]
        if kills == num_kills:
            work.run(*line)
            break
        kills += _killed_behind(line, folder, at=(kills + 1) * steps // (num_kills + 1))
    seen = of_curves(whole, curve_of(folder))
    return Seen(f"{kills} kills; {seen.text}", bool(seen.passed) and kills == num_kills)


def _killed_behind(line: list[str], folder: Path, at: int) -> int:
    """Starts a training and kills all of its processes once it has recorded step `at`; returns 1
    where it was killed.
    """
    started = subprocess.Popen(
        [sys.executable, "-m", "automodel_lite", *line],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
        start_new_session=True,
    )
    end = time.monotonic() + 600
    mark = f'{{"step": {at}, '
    while started.poll() is None and time.monotonic() < end:
        ledger_file = folder / NAME
        if ledger_file.is_file() and mark in ledger_file.read_text():
            break
        time.sleep(0.02)
    if started.poll() is not None:
        return 0
    # ranks have sessions of their own: all are found before the first of them is gone
    for pid in [*_descendants(started.pid), started.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    started.wait()
    return 1


def _descendants(ancestor: int) -> list[int]:
    """Returns the processes that a process has started, and those that they have."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    pending = [ancestor]
    while pending:
        children = parents.get(pending.pop(), [])
        found += children
        pending += children
    return found


def verified(work: Work) -> Seen:
    """Runs `verify` on the built-in data, faults made on purpose included."""
    said = work.run("verify", "--nproc", "2", "--config-name", "smoke", "mesh.cp=2",
                    f"cache_dir={work.folder / 'cache'}", is_expected=(0, 1))  # fmt: skip
    last = said.strip().splitlines()[-1]
    noticed = said.count("noticed")
    return Seen(f"{last}, {noticed} faults noticed", last.startswith("PASS") and noticed >= 3)


def misspelled(work: Work) -> Seen:
    """Types a key with a typo."""
    line = work.settings("typo", "smoke", "training.max_stepz=3")
    said = work.run("train", *line, is_expected=(2,), wants_errors=True)
    told = said.strip().splitlines()[-1]
    return Seen(f"`{told}`", "did you mean training.max_steps?" in told)


# -------------------------------------------- real data, a real model
def pretrained_run(work: Work) -> tuple[Path, Path]:
    """Returns a run of SmolLM2-135M, trained once for its rows, and the model's folder."""
    model = data.smollm2(work)
    settings = [
        "finetune",
        f"model.pretrained={model}",
        f"dataset.path={data.gsm8k()}",
        "packed_sequence.packed_sequence_size=512",
        "packed_sequence.overlong=drop",
        f"training.max_steps={work.real_steps}",
        "training.precision=fp32",
        # as many as plain transformers, which runs in this process, and TRL have
        f"training.num_threads={torch.get_num_threads()}",
        "training.global_batch_size=1",
        "training.num_epochs=null",
        "training.val_every_steps=0",
        "checkpoint.every_steps=0",
        "checkpoint.export_hf=false",
        "optimizer.lr=1e-5",
        "optimizer.weight_decay=0.0",
        "report=false",
    ]
    return work.train_once("smollm2", *settings), model


def beside_transformers(work: Work) -> Seen:
    """Trains SmolLM2-135M here and in plain transformers, on the same tokens."""
    run, model = pretrained_run(work)
    return of_curves(curve_of(run), plain.curve(run, model))


def beside_trl(work: Work) -> Seen:
    """Trains SmolLM2-135M here and in TRL's trainer, on the same tokens."""
    if work.peers is None:
        raise MissingError("TRL (--peers PYTHON of an environment that has it)")
    run, model = pretrained_run(work)
    return of_curves(curve_of(run), plain.trl_curve(work, run, model))


ALONE = "the curve of one process"
CURVE = f"every loss within {LIMIT:.0e} of it, relative, fp32"


def _layout(
    kind: str, what: str, nproc: int, prepare: Callable[[Work], list[str]], *overrides: str
) -> Row:
    name = "-".join([kind, *(text.rpartition(".")[2].replace("=", "") for text in overrides)])
    name = name.replace("strategy", "")
    look = partial(layout, kind, nproc, list(overrides), prepare=prepare)
    return Row(name, f"{what} on {nproc} processes, {' '.join(overrides)}", ALONE, CURVE, look)


_TEXT = ("text", "a tiny Llama")
_CONV = ("hybrid-conv", "short convolutions and attention (LFM2)")
_DELTA = ("hybrid-delta", "gated delta rules and attention (Qwen3-Next)")

ROWS = [
    Row(
        "ledger",
        "every step in a chain of hashes, and one computed again",
        "same bits; a changed digit is found",
        "`verify RUN --replay STEP`",
        ledger,
    ),
    Row(
        "packers",
        "bins of peers' packers and ours: the chats of chitchat-dataset in packs of 2,048",
        "no peer needs fewer bins, and no document is lost",
        "bins counted on the same lengths",
        packers.compare,
    ),
    Row(
        "verify",
        "packed against each document alone, and cp 2, on the built-in data",
        "every check passes, and every fault made on purpose is noticed",
        "`verify`, 1e-5 in fp32",
        verified,
    ),
    Row(
        "typo",
        "a misspelled key",
        "an error that suggests the closest one",
        "exit code 2",
        misspelled,
    ),
    _layout(*_TEXT, 2, text_settings, "mesh.strategy=ddp"),
    _layout(*_TEXT, 2, text_settings, "mesh.strategy=fsdp"),
    _layout(*_TEXT, 2, text_settings, "mesh.tp=2"),
    _layout(*_TEXT, 2, text_settings, "mesh.cp=2"),
    _layout(*_TEXT, 4, text_settings, "mesh.cp=4"),
    _layout(*_TEXT, 8, text_settings, "mesh.cp=8"),
    _layout("lora", "an adapter", 2, lora_settings, "mesh.cp=2"),
    _layout(*_CONV, 2, partial(hybrid_settings, "conv"), "mesh.cp=2"),
    _layout(*_DELTA, 2, partial(hybrid_settings, "delta"), "mesh.cp=2"),
    Row(
        "trees",
        "answers of one prompt as a tree, against each row whole",
        "the curve of the rows, with fewer tokens",
        CURVE,
        trees_against_rows,
    ),
    _layout("trees", "answers of one prompt as a tree", 2, tree_settings, "mesh.cp=2"),
    _layout(
        "images", "questions on the pictures of easy-vqa, Idefics3", 2, image_settings, "mesh.cp=2"
    ),
    _layout("dpo", "preference pairs, DPO", 2, pair_settings, "mesh.cp=2"),
    _layout("policy", "a policy's rows, PPO", 2, policy_settings, "mesh.cp=2"),
    Row(
        "killed",
        "a run killed ten times, continued on 1 process, 2, and 2 with cp 2 in turn",
        "the curve of an uninterrupted run",
        CURVE,
        killed,
    ),
    Row(
        "smollm2",
        "SmolLM2-135M on GSM8K in packs of 512, against each document alone",
        "the curve of plain transformers",
        CURVE,
        beside_transformers,
    ),
    Row(
        "smollm2-trl",
        "the same steps in TRL's SFTTrainer",
        "TRL's curve",
        CURVE,
        beside_trl,
    ),
]
