"""The exported folder in an engine that shares no code with transformers: `make test-serving` installs it."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from automodel_lite.tools.load_generator import load_generator
from recipes import export_hf
from tests.runs import train

mlx_lm = pytest.importorskip("mlx_lm", reason="installed by `make test-serving`")
pytestmark = pytest.mark.slow
QUESTIONS = ["What is the capital of Peru?", "What is 3 plus 4?", "Hi"]
QUICK = ["training.val_every_steps=0", "checkpoint.every_steps=0", "lr_scheduler.warmup_steps=5"]


def answers_of_mlx(folder: Path) -> list[str]:
    """The likeliest tokens, by mlx-lm's own reader, model and chat template."""
    from mlx.core import array
    from mlx_lm.generate import generate_step

    model, tokenizer = mlx_lm.load(str(folder))
    answers = []
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )
        tokens = []
        for token, _ in islice(generate_step(array(prompt), model, max_tokens=24), 24):
            if int(token) in tokenizer.eos_token_ids:
                break
            tokens.append(int(token))
        answers.append(tokenizer.decode(tokens))
    return answers


def answers_of_ours(folder: Path) -> list[str]:
    generator = load_generator(str(folder), on_cpu=True)
    return [
        generator.answers([[{"role": "user", "content": text}]], max_new_tokens=24)[0]
        for text in QUESTIONS
    ]


def test_mlx_answers_as_transformers(tmp_path: Path):
    whole, adapted = tmp_path / "whole", tmp_path / "adapted"
    train("smoke", whole, *QUICK, "training.max_steps=60")
    expected = answers_of_ours(whole / "hf")
    assert all(text.startswith("The ") for text in expected)
    assert answers_of_mlx(whole / "hf") == expected
    base = [
        "model=pretrained",
        f"model.pretrained={whole}/hf",
        "peft=lora",
        "peft.r=8",
        "optimizer.lr=0.01",
    ]
    train("smoke", adapted, *QUICK, *base, "training.max_steps=20")
    assert export_hf.main([str(adapted)]) == 0
    merged = answers_of_ours(adapted / "adapter")
    assert merged != expected
    assert answers_of_mlx(adapted / "hf") == merged
