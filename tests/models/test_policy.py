"""Losses of policies through a training client against their textbook forms: plain transformers in fp64, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from automodel_lite import TrainingClient
from automodel_lite.models.loss import FusedLinearCrossEntropy, Loss
from automodel_lite.parts.losses.policy import (
    Cispo,
    Dro,
    Gspo,
    ImportanceSampling,
    PolicyLoss,
    Ppo,
    advantages_of,
)
from tests.attention.families import VOCAB, build
from tests.attention.hybrids import HYBRIDS, build_hybrid
from tests.ranks import run_ranks

Row = dict[str, Any]
Truth = tuple[float, float, int, dict[str, np.ndarray], list[np.ndarray]]
FAMILIES = ("llama", "qwen3_moe", "qwen3_5_text")
LOSSES: dict[str, Loss] = {
    "cross-entropy": FusedLinearCrossEntropy(),
    "importance sampling": ImportanceSampling(truncation=1.1),
    "ppo": Ppo(clip_low=0.2, clip_high=0.28),
    "grpo": Ppo(average="rows", kl=0.1, truncation=0),
    "dr grpo": Ppo(average="constant", constant_length=50.0, kl=0.1, kl_kind="k1"),
    "gspo": Gspo(clip_low=0.01, clip_high=0.02, average="rows"),
    "cispo": Cispo(clip_high=0.1, kl=0.2, kl_kind="k2"),
    "dro": Dro(beta=0.3),
}
OVER_RANKS = (
    "importance sampling",
    "grpo",
    "gspo",
)  # a sum over labels, over rows, and a ratio of rows
LAYOUTS = {
    "ddp": ["mesh.strategy=ddp"],
    "fsdp": ["mesh.dp_shard=2"],
    "cp": ["mesh.cp=2"],
    "tp": ["mesh.tp=2"],
}


def save_model(family: str, folder: Path) -> str:
    """A tiny model with a tokenizer of one word per id."""
    torch.manual_seed(0)
    lm = build_hybrid(family) if family in HYBRIDS else build(family)
    lm.save_pretrained(folder)
    save_tokenizer(folder, VOCAB)
    return str(folder)


def save_tokenizer(folder: Path, num_words: int) -> None:
    """One of a word for each id."""
    words = {f"w{number}": number for number in range(num_words)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="w1", pad_token="w0"
    ).save_pretrained(folder)


@dataclass(frozen=True)
class Case:
    folder: str
    truths: dict[str, Truth]


def case_of(family: str, path: Path, names: tuple[str, ...]) -> Case:
    folder, groups = save_model(family, path), make_groups()
    return Case(folder, truths(folder, names, groups))


def make_groups() -> list[list[Row]]:
    """Groups of rows that share a prompt; two rows of one are equal, two share their answer's beginning."""
    draw = np.random.default_rng(5)
    groups = []
    for num_prompt, num_rows in ((70, 4), (66, 3), (9, 2)):
        prompt, group = draw.integers(2, VOCAB, num_prompt).tolist(), []
        for number in range(num_rows):
            answer = draw.integers(2, VOCAB, int(draw.integers(3, 20))).tolist()
            advantage = float(draw.normal())
            if number == 1:  # begins as the row before, and is as good
                answer[:2], advantage = (
                    group[0]["input_ids"][num_prompt : num_prompt + 2],
                    group[0]["advantages"][-2],
                )
            group.append(row_of(prompt, answer, advantage, draw))
        groups.append([*group, dict(group[0])])
    return groups


def row_of(
    prompt: list[int], answer: list[int], advantage: float, draw: np.random.Generator
) -> Row:
    before, length = len(prompt) - 1, len(answer)

    def at_labels(values: Any, padding: float = 0.0) -> list[float]:
        return [*[padding] * before, *values, padding]

    # near the log-probability of an untrained model
    old = draw.normal(-4.9, 0.3, length).round(3)
    return {
        "input_ids": prompt + answer,
        "labels": [-100] * before + answer + [-100],
        "advantages": at_labels([advantage] * length),
        "old_log_probs": at_labels(old),
        "sampler_log_probs": at_labels(old + draw.normal(0, 0.2, length)),
        "reference_log_probs": at_labels(draw.normal(-4.9, 0.3, length)),
    }


def columns_of(loss: Loss, groups: list[list[Row]]) -> list[list[Row]]:
    used = loss.columns | {"input_ids", "labels"}
    return [[{k: v for k, v in row.items() if k in used} for row in group] for group in groups]


def textbook(loss: Loss, row: Row, new: Tensor) -> tuple[Tensor, int]:
    """The loss of one row from the log-probabilities of its labels, and what it counts."""
    is_label = torch.tensor(row["labels"]) != -100
    advantage, old, sampler, reference = (
        torch.tensor(row[name], dtype=torch.float64)[is_label]
        for name in ("advantages", "old_log_probs", "sampler_log_probs", "reference_log_probs")
    )
    if not isinstance(loss, PolicyLoss):
        return -new.sum(), len(new)
    ratio = (new - old).exp()
    if isinstance(loss, Ppo):
        if isinstance(loss, Gspo):
            ratio = (new - old).mean().exp().expand_as(new)
        clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
        values = -torch.minimum(ratio * advantage, clipped * advantage)
    elif isinstance(loss, Cispo):
        values = -ratio.detach().clamp(1 - loss.clip_low, 1 + loss.clip_high) * advantage * new
    elif isinstance(loss, Dro):
        values = -(new * advantage - loss.beta / 2 * (new - old) ** 2)
    else:
        values = -ratio * advantage
    if loss.truncation:
        log_weight = (old - sampler).mean() if isinstance(loss, Gspo) else old - sampler
        values = values * log_weight.exp().clamp(max=loss.truncation)
    x = new - reference
    values = values + loss.kl * {"k1": x, "k2": x**2 / 2, "k3": (-x).exp() - 1 + x}[loss.kl_kind]
    if loss.average == "labels":
        return values.sum(), len(new)
    return values.sum() / (len(new) if loss.average == "rows" else loss.constant_length), 1


def plain(lm: Any, row: Row) -> Tensor:
    """Log-probabilities of the labels."""
    logits = lm(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0]
    labels = torch.tensor(row["labels"])
    return logits.log_softmax(-1)[labels != -100].gather(1, labels[labels != -100][:, None])[:, 0]


def truths(folder: str, names: tuple[str, ...], groups: list[list[Row]]) -> dict[str, Truth]:
    """Of each loss: its value, the sum of what rows add to it by size, what it counts, gradients and log-probabilities of plain
    transformers in fp64. All losses are of the same forward passes, a row at a time.
    """
    lm = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    rows = [row for group in groups for row in group]
    found = [plain(lm, row) for row in rows]
    log_probs = [x.detach().numpy() for x in found]
    by_name = {}
    for name in names:
        values, counted = zip(*(textbook(LOSSES[name], row, x) for row, x in zip(rows, found)))
        total = torch.stack(values).sum()
        lm.zero_grad()
        total.backward(retain_graph=True)
        by_name[name] = (
            total.item(),
            sum(abs(value.item()) for value in values),
            sum(counted),
            {n: p.grad.numpy().copy() for n, p in lm.named_parameters() if p.grad is not None},
            log_probs,
        )
    return by_name


def gradients(client: TrainingClient) -> dict[str, Tensor]:
    named = client.engine.model.loss_model.lm.named_parameters()
    grads = {name: p.grad for name, p in named if p.grad is not None}
    return {
        n: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for n, g in grads.items()
    }


def errors(rank: int, world: int, case: Case, *overrides: str) -> dict[str, list[float]]:
    """Of each loss, as rows and as trees: differences of loss, gradients and log-probabilities from the truth."""
    found, groups = {}, make_groups()
    settings = (
        f"model.pretrained={case.folder}",
        "packed_sequence.packed_sequence_size=256",
        "training.num_threads=1",
    )
    labels = [np.array(row["labels"]) != -100 for group in groups for row in group]
    with TrainingClient("policy", *settings, *overrides) as client:
        for name, (total, size, num_items, wanted, log_probs) in case.truths.items():
            largest = max(float(np.abs(grad).max()) for grad in wanted.values())
            trees = columns_of(LOSSES[name], groups)
            for how, given in {
                "rows": [row for group in trees for row in group],
                "trees": trees,
            }.items():
                out = client.forward_backward(given, LOSSES[name])
                got = gradients(client)
                client.zero_grad()
                assert out.num_items == num_items
                assert [x.nonzero()[0].tolist() for x in out.log_probs] == [
                    x.nonzero()[0].tolist() for x in labels
                ]
                of_labels = (x[x != 0] for x in out.log_probs)
                found[f"{name}, {how}"] = [
                    abs(out.loss - total) / size,
                    max(float(np.abs(grad.numpy() - wanted[n]).max()) for n, grad in got.items())
                    / largest,
                    max(float(np.abs(x - want).max()) for x, want in zip(of_labels, log_probs)),
                ]
    return found


def check(found: dict[str, list[float]], names: tuple[str, ...]) -> None:
    assert len(found) == 2 * len(names)
    for name, differences in found.items():
        assert max(differences) < 2e-4, (name, differences)  # fp32 beside fp64: 1.5e-5


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("dr_grpo", [1.0, -1.0, 0.0, 2.0, -2.0, 0.0]),
        ("leave_one_out", [1.5, -1.5, 0.0, 4.0, -4.0, 0.0]),
        ("grpo", [1 / 1.0001, -1 / 1.0001, 0.0, 2 / (8**0.5 + 1e-4), -2 / (8**0.5 + 1e-4), 0.0]),
    ],
)
def test_rewards_are_compared_inside_their_group(kind: Any, expected: list[float]) -> None:
    rewards, groups = [3.0, 1.0, 2.0, 5.0, 1.0, 7.0], ["q", "q", "q", "r", "r", "alone"]
    assert advantages_of(rewards, groups, kind).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rewards", "sentence"),
    [
        ([1.0, 1.0], "all advantages are 0 and there is nothing to learn"),
        ([1.0, float("nan")], "row 1: its reward is nan"),
    ],
)
def test_rewards_that_teach_nothing(rewards: list[float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        advantages_of(rewards, ["q", "q"])


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.system if name == "qwen3_moe" else ())
        for name in FAMILIES
    ],
)
def test_each_loss_is_its_textbook_form(family: str, tmp_path: Path) -> None:
    check(errors(0, 1, case_of(family, tmp_path, tuple(LOSSES))), tuple(LOSSES))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "cp" else pytest.mark.system) for name in LAYOUTS],
)
@pytest.mark.parametrize("family", ["llama"])
def test_two_ranks_are_one(
    family: str, layout: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = case_of(family, tmp_path_factory.mktemp("model"), OVER_RANKS)
    for found in run_ranks(errors, 2, case, *LAYOUTS[layout]):
        check(found, OVER_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_loss_on_two_ranks(
    family: str, layout: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = case_of(family, tmp_path_factory.mktemp("model"), tuple(LOSSES))
    for found in run_ranks(errors, 2, case, *LAYOUTS[layout]):
        check(found, tuple(LOSSES))
