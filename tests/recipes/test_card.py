"""The preset of a published card (docs/qwen3_8b_card.md): its settings, its plan, its schedule."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from automodel_lite.config.check import check_config
from automodel_lite.config.components import build
from automodel_lite.data.feeding.order import BatchShape
from automodel_lite.data.prepare import batch_shape, build_packer, prepare_data
from tests.runs import composed

PRESET = "qwen3_8b_tulu3"
PEAK = 5e-6


def test_the_settings_are_the_cards() -> None:
    config = check_config(composed(PRESET))
    assert batch_shape(config.training, 4) == BatchShape(8, 1, 4)
    assert config.training.max_steps == 100
    packed = config.packed_sequence
    assert (packed["packed_sequence_size"], packed["overlong"]) == (8192, "truncate")
    assert 100 * 8 * packed["packed_sequence_size"] == 6_553_600
    optimizer = config.optimizer
    assert (optimizer["lr"], optimizer["betas"], optimizer["eps"]) == (PEAK, [0.9, 0.95], 1e-8)
    assert optimizer["weight_decay"] == 0.033
    assert config.training.max_grad_norm == 1.0
    assert config.dataset["max_documents"] == 10_000


def of_the_card(step: int) -> float:
    """Megatron-Core's rate of a step, counted from 1: after as many steps as were taken before."""
    taken = step - 1
    if taken < 10:
        return PEAK * taken / 10
    return PEAK * 0.5 * (1 + math.cos(math.pi * (taken - 10) / 90))


def test_rates_are_the_cards_behind_the_warm_up() -> None:
    config = check_config(composed(PRESET))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler = build(config.lr_scheduler, optimizer, max_steps=100)
    rates = []
    for _ in range(100):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[10:] == pytest.approx([of_the_card(step) for step in range(11, 101)], rel=1e-9)
    for step in range(1, 11):  # as the page says
        assert rates[step - 1] == pytest.approx(of_the_card(step) + PEAK / 10)


def test_the_plan_is_100_steps_of_8_packs(tmp_path: Path) -> None:
    """With chats and a tokenizer of our own in place of those of the hub."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": "ab " * n},
                {"role": "assistant", "content": "c " * n},
            ]
        }
        for n in range(1, 41)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = [f"dataset.path={path}", f"cache_dir={tmp_path / 'cache'}", "tokenizer=bpe"]
    config = check_config(composed(PRESET, *places, "tokenizer.vocab_size=300"))
    data = prepare_data(config, batch_shape(config.training, 4), build_packer(config))
    plan = data.plan(config.training)
    assert (plan.max_steps, data.shape.global_batch_size) == (100, 8)
    assert data.planned is not None
    fill = data.planned.packs_of(0).plan.counts
    assert fill.documents == 40
