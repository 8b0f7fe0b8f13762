"""Mixtures of experts: how they are computed, and the loss that balances them, of documents and of rows of trees."""

from __future__ import annotations

import contextlib
import io
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.data.packing.packs import join_packs, lay_out_packs
from automodel_lite.data.tokens.token_rows import flatten
from automodel_lite.data.tokens.trees import cut_tree, grow_trees
from automodel_lite.errors import ConfigError
from automodel_lite.graphs import compiled_graphs
from automodel_lite.models.balance import balance_of
from automodel_lite.models.experts import SORTED_MM, use_experts
from automodel_lite.models.layers import compile_layers, decoder_layers, recompute_layers
from automodel_lite.models.loss import FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.models.source import describe
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.thd import ThdBatch, stream_of, to_thd
from benchmarks.survey_models import LENGTHS, documents, load, run, save, separate, step_of
from benchmarks.tiny_models import VOCAB, tiny_config, tiny_model
from tests.attention.families import gradients
from tests.attention.hybrids import InFloat64
from tests.attention.trees import Row, labelled, random_rows
from tests.ranks import run_ranks

pytestmark = pytest.mark.numbers

COEFFICIENT = 0.5


def last_turns(r: random.Random) -> list[Row]:
    """The steps of an agent: each row is the whole history, of which it trains the end alone."""
    history: list[int] = []
    rows = []
    for _ in range(5):
        history = history + [r.randrange(3, VOCAB - 8) for _ in range(r.randint(4, 12))]
        rows.append(labelled(history, len(history) - 3))
    return rows


def rows_of(seed: int) -> list[list[Row]]:
    r = random.Random(seed)
    return [
        random_rows(r, VOCAB - 8, most=6),
        last_turns(r),
        random_rows(r, VOCAB - 8, 0),
        last_turns(r),
    ]


def batch_of(rows: list[list[Row]], cut_at: int, slot_multiple: int) -> ThdBatch:
    """One pack of the trees; of the last group, in parts of at most `cut_at` tokens."""
    trees = []
    for group in rows:
        arrays = [
            {"input_ids": np.array(i, np.int32), "labels": np.array(y, np.int32)} for i, y in group
        ]
        grown = grow_trees(arrays, least_shared=1)
        is_cut = group is rows[-1] and "branches" in grown[0]
        trees += [part for tree in grown for part in (cut_tree(tree, cut_at) if is_cut else [tree])]
    flat = flatten(trees)
    size = int((-(-flat.lengths // slot_multiple) * slot_multiple).sum()) + 8
    packs = lay_out_packs(
        flat, flat.offsets[:-1], flat.lengths, np.array([len(trees)]), size, slot_multiple
    )
    return to_thd(join_packs(packs))


def model_of(family: str) -> torch.nn.Module:
    model = tiny_model(family).double().train()
    model.config.get_text_config()._experts_implementation = "eager"
    return model


def want(family: str, rows: list[list[Row]]) -> dict[str, torch.Tensor]:
    """Gradients of the rows, with transformers' own loss of each."""
    model = model_of(family)
    for ids, labels in (row for group in rows for row in group):
        with InFloat64():
            out = model(input_ids=torch.tensor([ids]), output_router_logits=True, use_cache=False)
        targets = torch.tensor(labels)
        loss = F.cross_entropy(out.logits[0], targets, reduction="sum", ignore_index=IGNORE_INDEX)
        (loss + COEFFICIENT * (targets != IGNORE_INDEX).sum() * out.aux_loss).backward()
    return gradients(model)


def got(family: str, batch: ThdBatch, coefficient: float = COEFFICIENT) -> dict[str, torch.Tensor]:
    model = model_of(family)
    install(model, ReferenceAttention())
    loss_model = LossModel(model, FusedLinearCrossEntropy(), balance_of(model, coefficient)).train()
    with InFloat64():
        total = loss_model(batch).sum
    total.backward()
    return gradients(model)


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    largest = max(x.abs().max() for x in other.values())
    return max(float((one[name] - other[name]).abs().max() / largest) for name in other)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "minimax_m2"])
@pytest.mark.parametrize(
    ("cut_at", "slot_multiple"), [(10_000, 1), (40, 8)], ids=["whole", "cut and padded"]
)
def test_the_balance_of_trees_is_that_of_rows(family: str, cut_at: int, slot_multiple: int) -> None:
    rows = rows_of(1)
    batch = batch_of(rows, cut_at, slot_multiple)
    assert batch.attention.tree is not None
    expected = want(family, rows)
    assert difference(got(family, batch), expected) < 1e-9
    assert difference(got(family, batch, 0.0), expected) > 1e-3


@pytest.mark.same_on_every_cpu
def test_a_refused_batch_leaves_nothing_in_the_model() -> None:
    batch, model = batch_of(rows_of(1), 10_000, 1), model_of("qwen3_moe")
    install(model, ReferenceAttention())
    loss_model = LossModel(model, FusedLinearCrossEntropy(), balance_of(model, COEFFICIENT)).train()
    with pytest.raises(ConfigError, match="answers"):
        loss_model(replace(batch, columns={"answers": torch.zeros_like(batch.labels)}))
    assert torch.isfinite(loss_model.eval()(batch).sum)  # whose routers give no logits


def _on_rank(rank: int, cp: int, exchange: str) -> float:
    rows, mesh = rows_of(2), init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    found = got("qwen3_moe", cp_shard(batch_of(rows, 40, 2 * cp), mesh, exchange))
    for tensor in found.values():
        dist.all_reduce(tensor)
    return difference(found, want("qwen3_moe", rows))


@pytest.mark.parametrize(
    "exchange", ["all_gather", pytest.param("all_to_all", marks=pytest.mark.system)]
)
def test_the_balance_of_trees_over_two_ranks(exchange: str) -> None:
    assert max(run_ranks(_on_rank, 2, exchange)) < 1e-9


def test_routers_are_recorded_in_compiled_layers() -> None:
    """Recomputed, too: documents of other lengths need no other graph, and nothing that the
    backward pass computes again is kept.
    """
    batches = [stream_of(torch.arange(24).view(rows, -1) * 5 % VOCAB, "cpu") for rows in (2, 3)]
    steps = []
    for coefficient, compiles in ((COEFFICIENT, False), (COEFFICIENT, True), (0.0, False)):
        torch._dynamo.reset()
        model = tiny_model("qwen3_moe").train()
        use_experts(model.config, SORTED_MM)
        install(model, ReferenceAttention())
        loss = FusedLinearCrossEntropy()
        loss_model = LossModel(model, loss, balance_of(model, coefficient)).train()
        assert loss_model.routers is not None
        first = compiled_graphs()
        if compiles:
            compile_layers(decoder_layers(model), "eager", after=loss_model.routers.drop)
        recompute_layers(decoder_layers(model), "full", 1)
        made = []
        for batch in batches:
            loss_model(batch).sum.backward()
            made.append(compiled_graphs() - first)
        assert loss_model.routers.taken() == []
        assert made == ([4, 4] if compiles else [0, 0])
        steps.append(gradients(model))
    balanced, compiled, plain = steps
    for name, gradient in balanced.items():
        assert (compiled[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name
    assert any((plain[n] - balanced[n]).abs().max() > 1e-2 * balanced[n].abs().max() for n in plain)


BALANCED = f"model.router_aux_loss={COEFFICIENT}"


@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm", "sorted_mm"])
def test_the_experts_are_computed_as_asked(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tiny_model("qwen3_moe"), tmp_path / "model")
    want = step_of(separate(load(tmp_path)))
    printed = io.StringIO()
    monkeypatch.setattr(contextlib, "redirect_stdout", lambda _: contextlib.nullcontext())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", printed)
        row = json.loads(
            run(tmp_path, "full", f"model.experts={how}", "checkpoint.export_hf=false")
        )
    assert row["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    assert f"experts {how}" in " ".join(printed.getvalue().split())


def balanced_norm(model: PreTrainedModel) -> float:
    """The gradient norm of documents one by one, with transformers' own load-balancing loss of each."""
    num_labels = sum(LENGTHS) - len(LENGTHS)
    for row in documents():
        out = model(
            input_ids=torch.tensor([row["input_ids"]]), output_router_logits=True, use_cache=False
        )
        labels = torch.tensor(row["labels"])
        loss = F.cross_entropy(out.logits[0], labels, reduction="sum")
        ((loss + COEFFICIENT * (len(labels) - 1) * out.aux_loss) / num_labels).backward()
    return (
        torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    )


def check_balanced(row: str, folder: Path) -> None:
    plain = step_of(separate(load(folder)))
    norm = balanced_norm(load(folder))
    assert norm != pytest.approx(plain["grad_norm"], rel=1e-3)
    got = json.loads(row)
    assert got["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert got["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen3_moe", marks=pytest.mark.system),
        "gpt_oss",
        "jetmoe",
        pytest.param("granitemoehybrid", marks=pytest.mark.system),
        "qwen3_vl_moe",
    ],
)
def test_the_balancing_loss_is_transformers_own_of_each_document(
    family: str, tmp_path: Path
) -> None:
    save(tiny_model(family), tmp_path / "model")
    settings = ["checkpoint.export_hf=false", "training.activation_checkpointing=full"]
    check_balanced(run(tmp_path, "full", BALANCED, *settings), tmp_path)


def _documents_on_rank(rank: int, world_size: int, folder: Path, settings: list[str]) -> str:
    return run(folder, "two", BALANCED, "checkpoint.export_hf=false", *settings)


RANKS = {
    "cp": ["mesh.cp=2"],
    "cp-heads": ["mesh.cp=2", "mesh.cp_exchange=all_to_all"],
    "dp": ["packed_sequence.packed_sequence_size=24", "training.global_batch_size=2"],
    "ep": ["mesh.ep=2", "packed_sequence.packed_sequence_size=24", "training.global_batch_size=2"],
    "tp": ["mesh.tp=2"],
    "micro-batches": [
        "packed_sequence.packed_sequence_size=24",
        "training.global_batch_size=2",
        "mesh.cp=2",
    ],
}


MARKS: dict[str, Any] = {"cp": (), "dp": pytest.mark.system}


@pytest.mark.parametrize(
    "settings",
    [pytest.param(RANKS[name], id=name, marks=MARKS.get(name, pytest.mark.slow)) for name in RANKS],
)
def test_the_balancing_loss_over_two_ranks(settings: list[str], tmp_path: Path) -> None:
    save(tiny_model("qwen3_moe"), tmp_path / "model")
    check_balanced(run_ranks(_documents_on_rank, 2, tmp_path, settings)[0], tmp_path)


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_model_without_such_a_loss_is_refused(family: str) -> None:
    with pytest.raises(
        ConfigError, match=r"router_aux_loss=0.5: transformers has no load-balancing loss"
    ):
        balance_of(describe(tiny_config(family)), COEFFICIENT)


@pytest.mark.same_on_every_cpu
def test_a_mixture_without_a_sparse_layer_has_nothing_to_balance() -> None:
    config = tiny_config("qwen3_moe")
    config.mlp_only_layers = [0, 1]
    with pytest.raises(ConfigError, match=r"^model.router_aux_loss=0.1: .*no experts"):
        balance_of(describe(config), 0.1)
