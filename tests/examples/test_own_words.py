"""Distillation on a model's own words: the advantages of the example, by hand, and that a student learns."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import transformers

from automodel_lite.parts.losses.policy import ImportanceSampling
from tests.clients import open_client
from tests.models.test_policy import gradients, save_model
from tests.test_client_teachers import save_teacher

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[5, 6, 7], [9, 4], list(range(2, 72))]  # the last one's answers are a tree
pytestmark = pytest.mark.numbers


@pytest.fixture
def own_words(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("own_words")


def log_probs_of(lm: transformers.PreTrainedModel, row: dict) -> torch.Tensor:
    """Of all tokens at the labels, [labels, V]."""
    at = torch.tensor(row["labels"]) != -100
    return torch.log_softmax(lm(torch.tensor([row["input_ids"]])).logits[0], -1)[at]


def test_advantages_and_gradients_are_those_of_the_formula(
    own_words: ModuleType, tmp_path: Path
) -> None:
    student = save_model("llama", tmp_path / "student")
    one, two = (save_teacher(tmp_path / name, seed) for name, seed in (("one", 1), ("two", 2)))
    weights = [{one: 1.0}, {two: 2.0}, {one: 3.0, two: 1.0}]
    with open_client(student, tmp_path / "run") as client:
        prompts = list(zip(PROMPTS, weights))
        how = {"num_samples": 3, "max_new_tokens": 5, "stop": []}
        groups = own_words.score(client, prompts, seed=0, discount=0.5, **how)
        out = client.forward_backward(groups, ImportanceSampling())
        got = gradients(client)
    # 3 answers of 5 tokens to each prompt: the prompt of 70 tokens is computed once
    assert out.num_items == 3 * 3 * 5
    assert out.num_tokens < 70 + 9 * (5 + 3)
    read = transformers.AutoModelForCausalLM.from_pretrained
    lms = {name: read(name, dtype=torch.float64) for name in (student, one, two)}
    total = torch.zeros((), dtype=torch.float64)
    for group, teachers in zip(groups, [{one: 1.0}, {two: 1.0}, {one: 0.75, two: 0.25}]):
        for row in group:
            labels = torch.tensor([x for x in row["labels"] if x != -100])[:, None]
            of = {name: log_probs_of(lm, row).gather(1, labels)[:, 0] for name, lm in lms.items()}
            gaps = sum(w * of[x] for x, w in teachers.items()) - of[student]
            wanted = [sum(0.5 ** (u - t) * gaps[u] for u in range(t, 5)) for t in range(5)]
            advantages = torch.stack(wanted).detach()
            np.testing.assert_allclose(row["advantages"][-5:], advantages, atol=1e-4)
            assert not row["advantages"][:-5].any()
            total = total - (advantages * of[student]).sum()
    total.backward()
    parameters = {n: p.grad for n, p in lms[student].named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in parameters.values())
    for name, grad in parameters.items():
        np.testing.assert_allclose(got[name] / largest, grad / largest, atol=1e-4)


@pytest.mark.same_on_every_cpu  # by a fifth, which no rounding decides
def test_a_student_comes_closer_to_its_teachers(own_words: ModuleType, tmp_path: Path) -> None:
    """By the whole divergence at fixed rows, of which no sample is drawn."""
    student = save_model("llama", tmp_path / "student")
    teachers = [save_teacher(tmp_path / name, seed) for name, seed in (("one", 1), ("two", 2))]
    prompts = [([first, 3], {teachers[first % 2]: 1.0}) for first in range(4, 12)]
    read = transformers.AutoModelForCausalLM.from_pretrained
    rows = [{"input_ids": [*ids, 20, 30], "labels": [-100, 20, 30, -100]} for ids, _ in prompts]

    def divergence(folder: str) -> float:
        """KL(student || teacher) per token."""
        lms = {name: read(name) for name in (folder, *teachers)}
        found = []
        with torch.no_grad():
            for (_, of_row), row in zip(prompts, rows):
                (teacher,) = of_row
                own, theirs = (log_probs_of(lms[name], row) for name in (folder, teacher))
                found.append((own.exp() * (own - theirs)).sum(-1))
        return float(torch.cat(found).mean())

    before = divergence(student)
    with open_client(student, tmp_path / "run") as client:
        for step in range(15):
            how = {"num_samples": 16, "max_new_tokens": 2, "stop": []}
            groups = own_words.score(client, prompts, seed=step, **how)
            client.forward_backward(groups, ImportanceSampling())
            client.optim_step(lr=1e-2)
        client.save_weights(tmp_path / "taught")
    assert divergence(str(tmp_path / "taught")) < 0.8 * before


@pytest.mark.slow
def test_a_small_model_learns_from_larger_ones(own_words: ModuleType, tmp_path: Path) -> None:
    overrides = (f"output_dir={tmp_path}", "training.num_threads=1")
    found = own_words.main(*overrides, num_steps=40)
    assert sum(found[35:]) / 5 < 0.7 * sum(found[:5]) / 5
    again = own_words.main(*overrides, num_steps=41)  # goes on from the last save
    assert again[:40] == found


def test_the_page_shows_code_of_the_example() -> None:
    code = "".join((ROOT / "examples/own_words.py").read_text().split())
    page = (ROOT / "docs/cookbook/own_words.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        assert "".join(block.split()) in code
