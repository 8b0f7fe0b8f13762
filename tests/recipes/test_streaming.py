"""The recipe on a stream: equal on one and two processes, validated, and resumed where it stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from automodel_lite.errors import ConfigError
from recipes import score
from tests.runs import config_of, losses, train


def stream_of(tmp_path: Path) -> list[str]:
    rows = [{"prompt": f"What is {i}?", "completion": f"It is {i % 7}."} for i in range(90)]
    for name, part in (("a.jsonl", rows), ("b.jsonl", rows[::9])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    return [
        "dataset=streaming",
        f"dataset.path={tmp_path / 'a.jsonl'}",
        f"dataset.val_path={tmp_path / 'b.jsonl'}",
        "dataset.num_shards=4",
        "packed_sequence.packed_sequence_size=64",
        "packed_sequence.overlong=drop",
        "training.max_steps=5",
        "training.global_batch_size=4",
        "training.log_every_steps=1",
        "evaluation=none",
        "checkpoint.every_steps=3",
        "checkpoint.export_hf=false",
        "model=llama_smoke",
    ]


@pytest.mark.system
def test_a_stream_trains_alike_on_one_and_two_processes(tmp_path: Path) -> None:
    stream = stream_of(tmp_path)
    whole = train("llama_packed", tmp_path / "whole", *stream)
    pair = train(
        "llama_packed", tmp_path / "pair", *stream, "dataloader.num_workers=0", world_size=2
    )
    assert [row["num_tokens"] for row in pair if "loss" in row] == [
        row["num_tokens"] for row in whole if "loss" in row
    ]
    torch.testing.assert_close(
        torch.tensor(losses(pair)), torch.tensor(losses(whole)), rtol=1e-4, atol=0
    )
    assert any("val_loss/val" in row for row in whole)


def test_a_stopped_stream_continues_bit_for_bit(tmp_path: Path) -> None:
    stream = stream_of(tmp_path)
    folder = tmp_path / "stopped"
    whole = losses(train("llama_packed", folder, *stream))
    assert len(whole) == 5
    shutil.rmtree(folder / "checkpoints" / "step_00000005")
    (folder / "STATUS.json").unlink()
    assert losses(train("llama_packed", folder, *stream)) == whole


def test_a_stream_needs_a_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"training.max_steps=null: the length of a stream is unknown"
    ):
        train("llama_packed", tmp_path / "run", *stream_of(tmp_path), "training.max_steps=null")


def test_epochs_do_not_end_a_stream(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^training.num_epochs=1 does not end a stream"):
        train("llama_packed", tmp_path / "run", *stream_of(tmp_path), "training.num_epochs=1")


@pytest.mark.parametrize(
    ("setting", "cure"),
    [
        ("strategy=best_fit", "strategy=exact_fill"),
        ("strategy=wrapped", "strategy=exact_fill"),
        ("max_packs=3", "max_packs=null"),
        ("repack_each_epoch=true", "repack_each_epoch=false"),
        ("balance=window", "balance=step"),
    ],
)
def test_packs_that_need_all_lengths_are_refused(setting: str, cure: str, tmp_path: Path) -> None:
    """They were exact_fill's, of all documents, without a word."""
    with pytest.raises(
        ConfigError,
        match=f"^packed_sequence.{setting} needs the lengths of all documents, .*: set "
        f"packed_sequence.{cure}, or use",
    ):
        train("llama_packed", tmp_path / "run", *stream_of(tmp_path), f"packed_sequence.{setting}")


def test_labels_of_a_stream_are_not_scored(tmp_path: Path) -> None:
    teacher = ("loss=distill_topk", f"loss.teacher={tmp_path}")
    with pytest.raises(
        ConfigError, match="when a stream is not known: use dataset=files or images"
    ):
        score.main(config_of("llama_packed", tmp_path / "run", *stream_of(tmp_path), *teacher))
