"""Layouts of ranks, stops and adapters: the same numbers as one process that runs through."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tests.images.families import draw, write_model
from tests.images.test_exact import images_settings
from tests.runs import losses, train, train_until

FAMILIES = ["qwen3_vl", "idefics3", "gemma3"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few rows have images, so that a step has packs with images and packs without."""
    made = tmp_path_factory.mktemp(request.param)
    lines = []
    for row in range(16):
        asked = [{"type": "text", "text": "abcdefgh"[row % 7 :] + "?"}]
        if row % 4 == 0:
            draw(made / f"{row}.png", 60, 122, seed=row)
            asked.insert(0, {"type": "image", "image": f"{row}.png"})
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "xyz"}]
        lines.append(json.dumps({"messages": messages}))
    (made / "chats.jsonl").write_text("\n".join(lines))
    return write_model(request.param, made)


SLOTS = "packed_sequence.slot_multiple=4"


def settings_of(folder: Path, output: Path) -> list[str]:
    return [
        *images_settings(folder),
        f"output_dir={output}",
        f"cache_dir={folder}/cache",
        "packed_sequence.packed_sequence_size=48",
        "training.global_batch_size=2",
        "training.max_steps=4",
        "training.log_every_steps=1",
        "training.num_threads=1",
        "checkpoint.every_steps=2",
        "checkpoint.export_hf=false",
        "optimizer.lr=0.01",
    ]


def run(folder: Path, output: Path, *more: str, world_size: int = 1) -> list[tuple[float, float]]:
    settings = settings_of(folder, output)
    return losses(train("finetune", output, *settings, *more, world_size=world_size))


@cache
def on_one_rank(folder: Path, trained: str) -> list[tuple[float, float]]:
    return run(folder, folder / f"one-{trained}", trained, SLOTS)


@pytest.mark.system
@pytest.mark.parametrize("how", ["peft=lora", "model.train_towers=true", "mesh.cp=2"])
def test_two_ranks_give_the_numbers_of_one(how: str, folder: Path, tmp_path: Path) -> None:
    """One of the ranks often has a pack without images; a sharded tower runs as often on both."""
    trained = how if how == "peft=lora" else "model.train_towers=true"
    one = on_one_rank(folder, trained)
    two = run(folder, tmp_path / "two", how, trained, SLOTS, world_size=2)
    assert len(one) == 4
    for (loss, norm), (other_loss, other_norm) in zip(one, two, strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert other_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.system
def test_a_run_goes_on_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    how = ["model.train_towers=true", "dataloader.num_workers=2"]
    whole = run(folder, tmp_path / "whole", *how)
    stopped = tmp_path / "stopped"
    code, screen = train_until("finetune", stopped, *settings_of(folder, stopped), *how, stop_at=3)
    assert "saved step_00000003" in screen
    assert code != 0
    assert run(folder, stopped, *how) == whole
    assert len(whole) == 4
