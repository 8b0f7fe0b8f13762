"""Trees of documents in whole runs: the same training as their rows, on any layout, resumed, and streamed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.runs import QUICK, train

WORDS = ["ship", "gray", "sea", "harbor", "salt", "corn", "wind", "tide", "mast", "gull", "rope", "sail", "fog", "reef"]


def answered_prompts(path: Path, num_prompts: int = 6) -> Path:
    """Several answers to each of a few long prompts."""
    r = random.Random(0)

    def text(num_words: int) -> str:
        return " ".join(r.choices(WORDS, k=num_words)) + "."

    lines = [{"prompt": text(40), "responses": [text(r.randint(3, 9)) for _ in range(4)]} for _ in range(num_prompts)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def steps(folder: Path, *overrides: str, world_size: int = 1) -> list[dict]:
    return [row for row in train("smoke", folder, *overrides, world_size=world_size) if "loss" in row]


def settings(path: Path, *more: str) -> list[str]:
    sources = [
        "dataset=files",
        "~dataset.num_chats",
        f"dataset.path={path}",
        "tokenizer=bpe",
        "tokenizer.vocab_size=300",
    ]
    size = ["packed_sequence.packed_sequence_size=1024", "training.global_batch_size=64", "training.max_steps=3"]
    return [*QUICK, *sources, "evaluation=none", *size, "training.precision=fp32", "lr_scheduler=constant", *more]


def test_trees_train_as_their_rows(tmp_path: Path) -> None:
    """Every step sees all data: the losses of three steps are those of the rows, of two ranks and of ranks that share."""
    path = answered_prompts(tmp_path / "a.jsonl")
    rows = steps(tmp_path / "off", *settings(path, "packed_sequence.tree=off"))
    trees = steps(tmp_path / "auto", *settings(path))
    shared = steps(tmp_path / "cp", *settings(path, "mesh.cp=2"), world_size=2)
    sharded = steps(tmp_path / "dp", *settings(path, "mesh.dp_shard=2"), world_size=2)
    assert len(rows) == len(trees) == 3
    for run in (trees, shared, sharded):
        for row, want in zip(run, rows):
            assert row["num_label_tokens"] == want["num_label_tokens"]
            assert row["loss"] == pytest.approx(want["loss"], rel=1e-5)
            assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)


def test_a_stream_of_trees(tmp_path: Path) -> None:
    """Documents of a stream become the trees that they are in a file."""
    path = answered_prompts(tmp_path / "a.jsonl", 12)
    stream = ["dataset=streaming", f"dataset.path={path}", "dataset.num_shards=1", "training.max_steps=1"]
    given = [
        x for x in settings(path, "training.global_batch_size=2") if not x.startswith(("dataset", "training.max_steps"))
    ]
    off = steps(tmp_path / "off", *given, *stream, "packed_sequence.tree=off")
    auto = steps(tmp_path / "auto", *given, *stream)
    assert auto[0]["num_label_tokens"] > 1.5 * off[0]["num_label_tokens"]
