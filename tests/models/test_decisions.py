"""Decisions on packs and trees against their formula: plain transformers, a question at a time, in fp64."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.data.formats.decisions import Decision, decisions_of, record
from automodel_lite.data.packing.packs import PackedDataset, join_packs
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.decisions import DecisionStyle, order_of
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.errors import DataError
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import Mesh, MeshShape, open_mesh
from automodel_lite.parallel.sharding import parallelize
from automodel_lite.parts.adapters.lora import Lora
from automodel_lite.parts.losses.decisions import Decisions, loss_hit_and_brier
from automodel_lite.thd import ThdBatch, to_thd
from automodel_lite.training.engine import Engine
from tests.attention import families, hybrids
from tests.attention.hybrids import InFloat64
from tests.data.templates import MARKED, byte_tokenizer
from tests.ranks import run_ranks

TOKENIZER = byte_tokenizer(MARKED)
STYLE = DecisionStyle(seed=5)
LOSS = Decisions()
RECORDS = [
    {
        "state": "The invoice of May is wrong. " * 3,
        "questions": {
            "team": {"type": "choice", "instructions": "Which?", "criteria": ["bill", "tech", "x"]},
            "urgent": {"type": "noul", "instructions": "Now?"},
            "level": {"type": "score", "instructions": "Bad?", "criteria": ["no", "so", "ja", "o"]},
            "open": {"type": "noul", "instructions": "Not answered?"},
        },
        "answers": {"team": "tech", "urgent": False},
        "soft_labels": {"level": {"1": 0.25, "2": 0.75}},
        "weights": {"urgent": 2.5},
    },
    {
        "state": {"seats": 3},
        "questions": [{"type": "choice", "question": "Who?", "options": ["a", "b"], "answer": "b"}],
    },
    {
        "state": "S" * 70,  # two questions of the same words, as two people answer them
        "questions": [
            {"type": "choice", "question": "Who?", "options": ["a", "b", "c"], "answer": "b"},
            {"type": "choice", "question": "Who?", "options": ["a", "b", "c"], "answer": "c"},
            {"type": "choice", "question": "Who?", "options": ["a", "b", "c"], "weight": 0.5,
             "soft_labels": [0.5, 0.5, 0]},
        ],
    },
]  # fmt: skip


def batch_of(folder: Path, tree: str, slot_multiple: int = 1) -> ThdBatch:
    path = folder / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    job = TokenizeJob(TOKENIZER, tree=tree, most_tokens=2000, decisions=STYLE)
    rows = tokenize_documents(FilesDataset(str(path)), job, folder / "cache").train
    assert len(rows) == (3 if tree == "auto" else 7)
    plan = plan_packs(rows.lengths, 2048, strategy="next_fit", slot_multiple=slot_multiple)
    packs = PackedDataset(rows, plan)
    return to_thd(join_packs([packs[i] for i in range(len(packs))]))


def build(family: str) -> Any:
    """A model whose vocabulary holds the tokenizer's."""
    made = families.build if family in families.FAMILIES else hybrids.build_hybrid
    config = made(family).config
    config.vocab_size = len(TOKENIZER)
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().train()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.15)
    return model


def asked(decision: Decision) -> list[int]:
    """The tokens of a question, up to the one behind which it is answered."""
    lines = [decision.state, "", decision.question]
    for letter, place in zip("ABCD", order_of(decision, STYLE)):
        name, meaning = decision.choices[place]
        lines.append(f'choice#{letter} = "{name}"' + (f": {meaning}" if meaning else ""))
    lines.append("Answer with one of these choices, written as choice#A.")
    text = "<|user|>" + "\n".join(lines) + "<|end|><|assistant|>choice#"
    return TOKENIZER.encode(text, add_special_tokens=False)


def formula(lm: Any) -> tuple[Tensor, dict[str, float]]:
    """Mean loss, accuracy and Brier score of all questions with an answer, by their weights."""
    letters = [TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "ABCD"]
    losses = []
    weights = []
    hits = []
    errors = []
    for row in RECORDS:
        for decision in decisions_of(record(row)):
            if decision.target is None:
                continue
            logits = lm(input_ids=torch.tensor([asked(decision)]), use_cache=False).logits[0, -1]
            order = order_of(decision, STYLE)
            log_probs = torch.log_softmax(logits[letters[: len(order)]], -1)
            target = torch.tensor([decision.target[place] for place in order]).double()
            losses.append(-(target * log_probs).sum() * decision.weight)
            weights.append(decision.weight)
            hits.append(decision.weight * (order[int(log_probs.argmax())] == decision.answer))
            errors.append(decision.weight * float((log_probs.exp() - target).square().sum()))
    assert len(losses) == 7
    total = sum(weights)
    return sum(losses) / total, {"accuracy": sum(hits) / total, "brier": sum(errors) / total}


@dataclass(frozen=True)
class Found:
    loss: float
    parts: dict[str, float]
    gradients: dict[str, Tensor]


def by_engine(
    folder: Path, family: str, tree: str, shape: tuple[int, int, int], strategy: str, peft: bool
) -> Found:
    device = torch.device("cpu")
    is_alone = shape == (1, 1, 1)
    opened = Mesh(MeshShape(*shape), device, None) if is_alone else None
    mesh = opened or open_mesh(MeshShape(*shape), device)
    lm = build(family)
    install(lm, ReferenceAttention())
    if peft:
        adapt(lm)
    model = parallelize(LossModel(lm, LOSS).train(), mesh, strategy, torch.float64)
    engine = Engine(mesh, model, None)  # type: ignore[arg-type]
    batch = batch_of(folder, tree, 2 * mesh.shape.cp)
    num_items = LOSS.num_items(batch)
    assert num_items == 2.5 + 0.5 + 5
    batches = [cp_shard(LOSS.prepare(batch), mesh.cp, "all_gather")]
    with InFloat64():
        sums = engine.forward_backward(batches, divisor=num_items * mesh.shape.dp)
    total = num_items * mesh.shape.dp  # every rank has all packs
    sums = {name: float(mesh.sum(value.double())) / total for name, value in sums.items()}
    return Found(sums.pop("loss"), sums, gradients(model.loss_model))


def adapt(lm: Any) -> None:
    """Adds an adapter that is not 0."""
    torch.manual_seed(3)
    Lora(r=2).adapt(lm, "base")
    with torch.no_grad():
        for _, weight in sorted(lm.named_parameters()):
            if weight.requires_grad:
                weight.copy_(torch.randn(weight.shape, dtype=weight.dtype) * 0.1)


def gradients(model: Any) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


def check(found: Found, family: str, peft: bool, error: float) -> None:
    lm = build(family)
    if peft:
        adapt(lm)
    with InFloat64():
        want, parts = formula(lm)
    want.backward()
    assert found.loss == pytest.approx(float(want), abs=error)
    assert found.parts == pytest.approx(parts, abs=error)
    wanted = gradients(lm)
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    assert largest > 1e-3
    for got, grad in zip(found.gradients.values(), wanted.values(), strict=True):
        assert float((got - grad).abs().max()) < error * largest


CASES = {
    "tree": ("llama", "auto", False),
    "rows": ("llama", "off", False),
    "lora": ("llama", "auto", True),
    "softcap and windows": ("gemma2_softcap_window", "auto", False),
    "mixers": ("mamba", "auto", False),
}


@pytest.mark.parametrize(("family", "tree", "peft"), CASES.values(), ids=CASES)
def test_a_step_equals_the_formula(family: str, tree: str, peft: bool, tmp_path: Path) -> None:
    found = by_engine(tmp_path, family, tree, (1, 1, 1), "none", peft)
    check(found, family, peft, 1e-10)


def spread(rank: int, world: int, folder: Path, shape: tuple[int, int, int]) -> Found:
    return by_engine(folder / str(rank), "llama", "auto", shape, "fsdp", False)


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 2, 1)], ids=["cp 2", "fsdp 2"])
def test_two_ranks_equal_the_formula(shape: tuple[int, int, int], tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for found in run_ranks(spread, 2, tmp_path, shape):
        check(found, "llama", False, 1e-6)


def test_a_label_without_choices_is_refused(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, "off")
    number = batch.columns["question_numbers"].clone()
    number[batch.label_rows[0]] = 0
    columns = batch.columns | {"question_numbers": number}
    with pytest.raises(DataError, match="a label has no choices"):
        LOSS.prepare(replace(batch, columns=columns))


def test_the_loss_is_that_of_the_choices_alone() -> None:
    """Two choices of three logits: log(1 + e^-2), whatever the third token has."""
    logits = torch.tensor([[3.0, 100.0, 1.0]])
    values = loss_hit_and_brier(
        logits, torch.tensor([[2, 0, -1]]), torch.tensor([[0.0, 2.0, 0.0]]), torch.tensor([0])
    )
    p = 1 / (1 + math.exp(-2))
    assert values[0].tolist() == pytest.approx([-2 * math.log(p), 2.0, 2 * 2 * (1 - p) ** 2])
