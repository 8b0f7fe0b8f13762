"""Losses of policies against TRL's GRPOTrainer, padded, in fp32: the same rows, loss and gradients.

`make test-trl` runs it in an environment that has TRL.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_lite import TrainingClient
from automodel_lite.parts.losses.policy import (
    Cispo,
    Gspo,
    ImportanceSampling,
    Ppo,
    advantages_of,
)
from tests.clients import open_client
from tests.models.test_policy import Row, columns_of, gradients, make_groups, save_model
from tests.test_client_teachers import save_teacher

pytestmark = pytest.mark.slow
trl = pytest.importorskip("trl", reason="make test-trl has it")
import datasets  # noqa: E402

CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "grpo": (
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
        Ppo(average="rows", kl=0.1),
    ),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, Ppo(clip_high=0.28)),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "max_completion_length": 50},
        Ppo(average="constant", constant_length=50.0),
    ),
    "gspo": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.01,
            "epsilon_high": 0.02,
        },
        Gspo(clip_low=0.01, clip_high=0.02, average="rows"),
    ),
    # TRL's epsilon_high is the largest ratio, not its distance from 1
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.1}, Cispo(clip_high=0.1)),
}


def padded(groups: list[list[Row]]) -> dict[str, Tensor]:
    """The rows as TRL's trainer has them: prompts filled up on the left, answers on the right."""
    rows = [row for group in groups for row in group]
    starts = [next(i for i, label in enumerate(row["labels"]) if label != -100) + 1 for row in rows]
    ids = [row["input_ids"] for row in rows]
    most_prompt = max(starts)
    most_answer = max(len(x) - start for x, start in zip(ids, starts))

    def left(values: list[Any]) -> list[Any]:
        return [0] * (most_prompt - len(values)) + values

    def right(values: list[Any]) -> list[Any]:
        return values + [0] * (most_answer - len(values))

    made = {
        "prompt_ids": [left(x[:start]) for x, start in zip(ids, starts)],
        "prompt_mask": [left([1] * start) for start in starts],
        "completion_ids": [right(x[start:]) for x, start in zip(ids, starts)],
        "completion_mask": [right([1] * (len(x) - start)) for x, start in zip(ids, starts)],
        "advantages": [row["advantages"][start - 1] for row, start in zip(rows, starts)],
    }
    for theirs, ours in (
        ("old_per_token_logps", "old_log_probs"),
        ("ref_per_token_logps", "reference_log_probs"),
    ):
        made[theirs] = [right(row[ours][start - 1 : -1]) for row, start in zip(rows, starts)]
    tensors = {name: torch.tensor(values) for name, values in made.items()}
    return tensors | {"num_items_in_batch": tensors["completion_mask"].sum()}


def trainer_of(folder: str, to: Path, **settings: Any) -> Any:
    """TRL's trainer, whose rewards and samples are never asked for."""
    arguments = trl.GRPOConfig(
        output_dir=str(to),
        per_device_train_batch_size=4,
        num_generations=4,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        **settings,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": "w2 w3"}] * 4),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_trls(name: str, tmp_path: Path) -> None:
    settings, loss = CASES[name]
    folder, groups = save_model("llama", tmp_path / "model"), make_groups()
    theirs = trainer_of(folder, tmp_path / "trl", **settings)
    theirs.current_gradient_accumulation_steps = 1
    theirs.args.steps_per_generation = 1
    theirs.model.train()
    value = theirs._compute_loss(theirs.model, padded(groups))
    value.backward()
    wanted = {n: p.grad for n, p in theirs.model.named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    overrides = ("packed_sequence.packed_sequence_size=256", "training.num_threads=1")
    with TrainingClient(
        "policy", f"model.pretrained={folder}", f"output_dir={tmp_path / 'run'}", *overrides
    ) as client:
        rows = [
            [{k: v for k, v in row.items() if k != "sampler_log_probs"} for row in group]
            for group in columns_of(loss, groups)
        ]
        out = client.forward_backward(rows, loss)
        got = gradients(client)
    assert out.loss / out.num_items == pytest.approx(float(value), abs=1e-5)
    off = max(float((got[n] / out.num_items - grad).abs().max()) for n, grad in wanted.items())
    assert off / largest < 1e-5


def test_advantages_are_trls() -> None:
    """Its own lines on the same rewards: groups of 4, their mean and their deviation."""
    rewards = torch.tensor([[1.0, 0.0, 0.5, 1.0], [0.0, 0.0, 2.0, 0.25]])
    wanted = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    groups = ["a"] * 4 + ["b"] * 4
    assert advantages_of(rewards.flatten(), groups).tolist() == pytest.approx(
        wanted.flatten().tolist(), rel=1e-5
    )


def test_distillation_on_own_words_is_trls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against its IWOPDTrainer's loss, whose weights of the beginning are off (`iw_opd_gamma=0`)."""
    from trl.experimental.iw_opd import IWOPDTrainer

    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    import own_words

    student = save_model("llama", tmp_path / "student")
    teacher = save_teacher(tmp_path / "teacher")
    prompts = [([5, 6, 7, first], {teacher: 1.0}) for first in (8, 9)]
    with open_client(student, tmp_path / "run") as client:
        how = {"num_samples": 3, "max_new_tokens": 6, "stop": []}
        groups = own_words.score(client, prompts, seed=0, **how)
        out = client.forward_backward(groups, ImportanceSampling())
        got = gradients(client)
    rows = [row for group in groups for row in group]
    ids = torch.tensor([row["input_ids"] for row in rows])
    answers = torch.tensor([row["labels"][3:] for row in rows])
    lm, frozen = (AutoModelForCausalLM.from_pretrained(x).eval() for x in (student, teacher))
    with torch.no_grad():
        of_teacher = torch.log_softmax(frozen(ids).logits[:, 3:], -1)
    settings = {"temperature": 1.0, "iw_opd_gamma": 0.0, "iw_opd_epsilon": 1e-8}
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    theirs = SimpleNamespace(**settings, model=lm, _metrics=metrics)
    value = IWOPDTrainer._compute_iw_opd_loss(
        theirs,
        lm(ids).logits[:, 3:],
        answers,
        answers,
        of_teacher.gather(-1, answers[..., None])[..., 0],
    )
    value.backward()
    # our value is of ratios that are 1, and theirs of log-probabilities: gradients compare
    mean = sum(float(row["advantages"].sum()) for row in rows) / out.num_items
    assert metrics["eval"]["iw_opd/mean_advantage"] == [pytest.approx(mean, abs=1e-5)]
    wanted = {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    off = max(float((got[n] / out.num_items - grad).abs().max()) for n, grad in wanted.items())
    assert off / largest < 1e-5
