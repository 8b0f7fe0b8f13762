"""Mixtures of experts: how they are computed, and the loss that balances them."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from automodel_lite.errors import ConfigError
from automodel_lite.models.balance import balance_of
from automodel_lite.models.source import describe
from benchmarks.survey_models import LENGTHS, documents, load, run, save, separate, step_of
from benchmarks.tiny_models import tiny_config, tiny_model
from tests.ranks import run_ranks

COEFFICIENT = 0.5
BALANCED = f"model.router_aux_loss={COEFFICIENT}"


@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])
def test_the_experts_are_computed_as_asked(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tiny_model("qwen3_moe"), tmp_path / "model")
    want = step_of(separate(load(tmp_path)))
    printed = io.StringIO()
    monkeypatch.setattr(contextlib, "redirect_stdout", lambda _: contextlib.nullcontext())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", printed)
        row = json.loads(run(tmp_path, "full", f"model.experts={how}", "checkpoint.export_hf=false"))
    assert row["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    assert f"experts {how}" in " ".join(printed.getvalue().split())


def balanced_norm(model: PreTrainedModel) -> float:
    """The gradient norm of documents one by one, with transformers' own load-balancing loss of each."""
    num_labels = sum(LENGTHS) - len(LENGTHS)
    for row in documents():
        out = model(input_ids=torch.tensor([row["input_ids"]]), output_router_logits=True, use_cache=False)
        labels = torch.tensor(row["labels"])
        loss = F.cross_entropy(out.logits[0], labels, reduction="sum")
        ((loss + COEFFICIENT * (len(labels) - 1) * out.aux_loss) / num_labels).backward()
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()


def check_balanced(row: str, folder: Path) -> None:
    plain = step_of(separate(load(folder)))
    norm = balanced_norm(load(folder))
    assert norm != pytest.approx(plain["grad_norm"], rel=1e-3)
    got = json.loads(row)
    assert got["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert got["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "jetmoe", "granitemoehybrid", "qwen3_vl_moe"])
def test_the_balancing_loss_is_transformers_own_of_each_document(family: str, tmp_path: Path) -> None:
    save(tiny_model(family), tmp_path / "model")
    settings = ["checkpoint.export_hf=false", "training.activation_checkpointing=full"]
    check_balanced(run(tmp_path, "full", BALANCED, *settings), tmp_path)


def _on_rank(rank: int, world_size: int, folder: Path, settings: list[str]) -> str:
    return run(folder, "two", BALANCED, "checkpoint.export_hf=false", *settings)


RANKS = {
    "cp": ["mesh.cp=2"],
    "cp-heads": ["mesh.cp=2", "mesh.cp_exchange=all_to_all"],
    "dp": ["packed_sequence.packed_sequence_size=24", "training.global_batch_size=2"],
    "ep": ["mesh.ep=2", "packed_sequence.packed_sequence_size=24", "training.global_batch_size=2"],
    "tp": ["mesh.tp=2"],
    "micro-batches": ["packed_sequence.packed_sequence_size=24", "training.global_batch_size=2", "mesh.cp=2"],
}


@pytest.mark.parametrize(
    "settings",
    [pytest.param(RANKS[name], id=name, marks=() if name in ("dp", "cp") else pytest.mark.slow) for name in RANKS],
)
def test_the_balancing_loss_over_two_ranks(settings: list[str], tmp_path: Path) -> None:
    save(tiny_model("qwen3_moe"), tmp_path / "model")
    check_balanced(run_ranks(_on_rank, 2, tmp_path, settings)[0], tmp_path)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_model_without_such_a_loss_is_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=r"router_aux_loss=0.5: transformers has no load-balancing loss"):
        balance_of(describe(tiny_config(family)), COEFFICIENT)
