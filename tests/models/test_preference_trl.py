"""DPO on packs against TRL's DPOTrainer, padded, in fp32: the same pairs, by its tokenization, loss and training loop.

`make test-trl` runs it in an environment that has TRL.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.columns import CHOSEN, REJECTED
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parts.losses.preference import Dpo
from tests.attention.families import VOCAB
from tests.models.test_preference import batch_of, model_of
from tests.runs import train

pytestmark = pytest.mark.slow
trl = pytest.importorskip("trl", reason="make test-trl has it")
import datasets  # noqa: E402

BETA, STEPS, LR = 0.3, 3, 1e-3
TEMPLATE = (
    "{% for m in messages %}{{ '[U] ' if m.role == 'user' else '[A] ' }}{{ m.content }} [E] {% endfor %}"
    "{% if add_generation_prompt %}[A] {% endif %}"
)
PAIRS = [
    ("w1 w2 w3 w4 w5", "w6 w7", "w8"),
    ("w9 " * 12, "w11 w12 w13 w14", "w15 w16"),
    ("w7", "w3", "w4 w5 w6 w9 w20"),
]
PAIRS += [("w30 w31 w32", "w33 w34 w35", "w36 w37 w38 w39"), ("w40 " * 20, "w41", "w42")]


def turn(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text.strip()}]


ROWS = [
    {"prompt": turn("user", p), "chosen": turn("assistant", c), "rejected": turn("assistant", r)}
    for p, c, r in PAIRS
]


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["[PAD]", "[U]", "[A]", "[E]", *(f"w{i}" for i in range(VOCAB - 4))]
    fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[PAD]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="[PAD]", eos_token="[E]")
    made.chat_template = TEMPLATE
    return made


class Theirs(trl.DPOTrainer):
    """TRL's trainer, every batch of which has all pairs; keeps its losses, and the gradients of the first step."""

    def __init__(self, model: Any, folder: Path, kind: str, **more: Any) -> None:
        arguments = trl.DPOConfig(
            output_dir=str(folder),
            beta=BETA,
            loss_type=[kind],
            per_device_train_batch_size=len(PAIRS),
            per_device_eval_batch_size=1,
            max_steps=STEPS,
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            adam_beta2=0.95,
            max_length=None,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            # not a part of the loss here unless model.router_aux_loss asks for it
            router_aux_loss_coef=0.0 if hasattr(model.config, "output_router_logits") else None,
        )
        data = datasets.Dataset.from_list(ROWS)
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=data,
            eval_dataset=data,
            processing_class=tokenizer(),
            **more,
        )
        self.losses: list[float] = []
        self.first: dict[str, Tensor] = {}

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(model, *args, **kwargs)
        self.losses.append(float(loss))
        if not self.first:
            self.first = {
                n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
            }
        return loss

    @torch.no_grad()
    def loss_of_each_pair(self) -> list[float]:
        self.model.eval()
        found = [
            float(self.compute_loss(self.model, inputs)) for inputs in self.get_eval_dataloader()
        ]
        self.model.train()
        return found


def ours_of(
    example: dict[str, list[int]], reference: Callable[[list[int], list[int]], list[float]]
) -> list[dict]:
    """The two rows of a pair as TRL has tokenized it."""
    rows = []
    for name, which in (("chosen_ids", CHOSEN), ("rejected_ids", REJECTED)):
        prompt, ids = example["prompt_ids"], example["prompt_ids"] + example[name]
        labels = [-100] * (len(prompt) - 1) + ids[len(prompt) :] + [-100]
        answers = [0 if label == -100 else which for label in labels]
        row = {"input_ids": ids, "labels": labels, "answers": answers}
        rows.append({**row, "reference_log_probs": reference(ids, labels)})
    return rows


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_5_text"])
def test_pairs_gradients_and_steps_are_trls(family: str, kind: Any, tmp_path: Path) -> None:
    start, policy = model_of(family), model_of(family)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # away from the reference, where every pair has another loss
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    own: PreTrainedModel = model_of(family)
    own.load_state_dict(policy.state_dict())
    theirs = Theirs(policy, tmp_path, kind, ref_model=start)

    @torch.no_grad()
    def reference(ids: list[int], labels: list[int]) -> list[float]:
        logits = start(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        losses = F.cross_entropy(logits, torch.tensor(labels), reduction="none")
        return (-losses).tolist()

    pairs = [ours_of(example, reference) for example in theirs.train_dataset]
    install(own, ReferenceAttention())
    model = LossModel(own, Dpo(beta=BETA, kind=kind)).train()
    with torch.no_grad():
        each = [float(model(batch_of([pair])).sum) for pair in pairs]
    assert each == pytest.approx(theirs.loss_of_each_pair(), abs=1e-5)
    assert max(each) - min(each) > 1e-2

    theirs.train()
    optimizer = torch.optim.AdamW(own.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    batch, losses = batch_of(pairs), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch).sum / len(pairs)
        loss.backward()
        losses.append(float(loss.detach()))
        if step == 0:
            for name, parameter in own.named_parameters():
                if parameter.grad is not None:
                    largest = max(1.0, float(theirs.first[name].abs().max()))
                    assert (
                        float((parameter.grad - theirs.first[name]).abs().max()) < 1e-5 * largest
                    ), name
        optimizer.step()
    assert losses == pytest.approx(theirs.losses, abs=1e-5)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        after = [float(model(batch_of([pair])).sum) for pair in pairs]
    assert after == pytest.approx(theirs.loss_of_each_pair(), abs=1e-5)


@pytest.mark.parametrize("is_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_a_whole_run_is_trls(kind: str, is_lora: bool, tmp_path: Path) -> None:
    """From the same file of pairs and the same folders; an adapter that has been trained before."""
    base = tmp_path / "base"
    model_of("llama").save_pretrained(base)
    tokenizer().save_pretrained(base)
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    policy: Any = AutoModelForCausalLM.from_pretrained(base)
    settings = []
    if is_lora:
        torch.manual_seed(1)
        adapted = get_peft_model(
            policy,
            LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.02)
        adapted.save_pretrained(tmp_path / "adapter")
        policy = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter", is_trainable=True
        )
        settings = ["peft=lora", f"peft.adapter={tmp_path / 'adapter'}"]
    theirs = Theirs(policy, tmp_path / "trl", kind, **({} if is_lora else {"ref_model": None}))
    theirs.train()
    rows = train(
        "dpo",
        tmp_path / "run",
        "name=x",
        f"model.pretrained={base}",
        f"dataset.path={tmp_path / 'pairs.jsonl'}",
        f"loss.kind={kind}",
        f"loss.beta={BETA}",
        *settings,
        f"cache_dir={tmp_path / 'cache'}",
        "packed_sequence.packed_sequence_size=256",
        "training.global_batch_size=1",
        f"training.max_steps={STEPS}",
        "training.log_every_steps=1",
        "training.max_grad_norm=0",
        "training.precision=fp32",
        "lr_scheduler=constant",
        "lr_scheduler.warmup_steps=0",
        f"optimizer.lr={LR}",
        "optimizer.betas=[0.9,0.95]",
        "optimizer.weight_decay=0",
    )
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses == pytest.approx(theirs.losses, abs=1e-5)
    if kind == "sigmoid":
        assert losses[0] == pytest.approx(0.69314718, abs=1e-6)
    norms = [row["grad_norm"] for row in rows if "grad_norm" in row]
    first = torch.stack([grad.norm() for grad in theirs.first.values()]).norm()
    assert norms[0] == pytest.approx(float(first), rel=1e-4)
    folder, file = (
        ("adapter", "adapter_model.safetensors") if is_lora else ("hf", "model.safetensors")
    )
    trained = load_file(tmp_path / "run" / folder / file)
    known = {name.replace(".default", ""): p for name, p in theirs.model.named_parameters()}
    moved = 0.0
    for name, weight in trained.items():
        # where a gradient is next to nothing, AdamW's steps of size lr turn on rounding
        close = (weight - known[name]).abs() < 1e-5
        assert float(close.float().mean()) > 0.999, name
        moved = max(moved, float(weight.abs().max()))
    assert moved > 0
