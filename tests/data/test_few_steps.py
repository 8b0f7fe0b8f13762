"""A first job of few documents: enough steps to learn, or a sentence with the overrides to paste."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.data.prepare import build_packer, check_sizes, prepare_data
from automodel_lite.errors import ConfigError


def plan_of(folder: Path, *overrides: str) -> tuple[int, int]:
    """(steps, packs per step) of 60 chats of some 40 tokens."""
    row = {"messages": [{"role": "user", "content": "Name a city."}, {"role": "assistant", "content": "Paris. " * 4}]}
    (folder / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 60)
    chosen = ["model=llama_smoke", "tokenizer=bpe", f"dataset.path={folder}/chats.jsonl", f"cache_dir={folder}/cache"]
    config = check_config(compose_config("finetune", [*chosen, "name=x", *overrides]))
    data = prepare_data(config, check_sizes(config, 1), build_packer(config))
    plan = data.plan(config.training)
    return plan.max_steps, plan.shape.global_batch_size


def test_small_sets_get_three_epochs_and_small_steps(tmp_path: Path) -> None:
    steps, packs = plan_of(tmp_path, "packed_sequence.packed_sequence_size=64")
    assert steps >= 50
    assert packs < 8


def test_too_few_steps_are_an_error_with_the_cure(tmp_path: Path) -> None:
    whole = ["packed_sequence.packed_sequence_size=4096"]
    with pytest.raises(
        ConfigError, match=r"1 packs are 3 steps of 1 in 3 epochs \(.*under 10,000 documents\), too few"
    ):
        plan_of(tmp_path, *whole)
    with pytest.raises(ConfigError, match=r"training.global_batch_size=1 or training.num_epochs=10 or training.allow"):
        plan_of(tmp_path, *whole, "training.global_batch_size=8", "training.num_epochs=1")
    assert plan_of(tmp_path, *whole, "training.num_epochs=10") == (10, 1)
    assert plan_of(tmp_path, *whole, "training.allow_few_steps=true") == (3, 1)
    assert plan_of(tmp_path, *whole, "training.max_steps=4") == (4, 8)
