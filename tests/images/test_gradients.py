"""Every parameter's gradient on ranks, of which one has no image, against one process, in fp64; of experts
in fp32: torch divides gradients that it reduces in another dtype than fp32 and bf16 once too often in a group of one rank.
"""

from __future__ import annotations

import json
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import MeshShape, open_mesh
from automodel_lite.parallel.sharding import parallelize
from automodel_lite.parts.losses.distillation import Distill
from automodel_lite.parts.losses.preference import Dpo
from automodel_lite.thd import ThdBatch
from tests.attention.hybrids import InFloat64
from tests.images.families import draw, write_model
from tests.images.test_exact import batches_of, config_of_images, data_of, packed_model
from tests.images.test_objectives import log_probs, moved, with_columns
from tests.ranks import run_ranks
from tests.runs import config_of
from tests.tiers import rarely

SLOTS = 4
LAYOUTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "fsdp": ("fsdp", (1, 2, 1)),
    "ddp": ("ddp", (2, 1, 1)),
    "tp": ("fsdp", (1, 1, 1, 2)),
    "cp": ("fsdp", (1, 1, 2)),
    "hsdp": ("fsdp", (2, 2, 1)),
    "ep": ("fsdp", (1, 2, 1, 1, 2)),
}


def write_rows(folder: Path) -> None:
    """Rows that fill a pack each, in pairs of which the second has no image."""
    lines = []
    for row in range(4):
        words = "abcdefgh"[row:]
        asked: list[dict[str, Any]] = [{"type": "text", "text": words * (6 + row)}]
        if row % 2 == 0:
            draw(folder / f"{row}.png", 60, 122, seed=row)
            asked.insert(row % 4 // 2, {"type": "image", "image": f"{row}.png"})
        says = [
            [{"role": "assistant", "content": [{"type": "text", "text": said}]}]
            for said in ("xyz" * (row + 1), "yes")
        ]
        prompt = [{"role": "user", "content": asked}]
        chat = {"messages": prompt + says[0]}
        pair = {"prompt": prompt, "chosen": says[0], "rejected": says[1]}
        lines.append((json.dumps(chat), json.dumps(pair)))
    for name, of_kind in zip(("chats", "pairs"), zip(*lines)):
        (folder / f"{name}.jsonl").write_text("\n".join(of_kind))


def batches(folder: Path, kind: str) -> tuple[Any, list[ThdBatch]]:
    slots = f"packed_sequence.slot_multiple={SLOTS}"
    if kind == "dpo":
        settings = ["name=pairs", "dataset=images", f"dataset.path={folder}/pairs.jsonl"]
        settings += [f"model.pretrained={folder}", "packed_sequence.packed_sequence_size=128"]
        settings += ["training.global_batch_size=1", "training.max_steps=1", slots]
        data = data_of(config_of("dpo", folder / "run", *settings))
    else:
        size = "packed_sequence.packed_sequence_size=96"
        data = data_of(config_of_images(folder, size, "packed_sequence.tree=off", slots))
    found = batches_of(data)
    assert len(found) == 4
    with_image = [batch for batch in found if int(batch.columns["image"].max())]
    without = [batch for batch in found if not int(batch.columns["image"].max())]
    assert len(with_image) == len(without) == 2
    return data, [batch for pair in zip(with_image, without) for batch in pair]


def model_of(
    folder: Path, kind: str, data: Any, given: list[ThdBatch], dtype: torch.dtype
) -> tuple[Any, list[Any]]:
    """The model of a kind of loss, and the batches with what it reads."""
    model = packed_model(folder, data).to(dtype)
    if kind == "dpo":
        stored = [with_columns(model, batch, log_probs)[:, 0].detach() for batch in given]
        given = [
            replace(batch, columns={**batch.columns, "reference_log_probs": column})
            for batch, column in zip(given, stored)
        ]
        moved(model.lm)
        model.loss = Dpo(0.3)
    if kind == "distill":
        model.loss = Distill(cross_entropy=0.25)
        teacher = packed_model(folder, data)
        moved(teacher.lm)
        model.set_teacher(teacher)
    return model, given


def on_ranks(
    rank: int, world: int, folder: Path, layout: str, kinds: list[str], dtype: torch.dtype
) -> dict[str, tuple[float, dict[str, float]]]:
    """By how much the loss, and each gradient in the largest of all, differ from one process's."""
    strategy, shape = LAYOUTS[layout]
    mesh = open_mesh(MeshShape(*shape), torch.device("cpu"))
    found = {}
    for kind in kinds:
        precision: AbstractContextManager[Any] = nullcontext()
        if dtype == torch.float64:
            precision = InFloat64()
        with precision:
            data, given = batches(folder, kind)
            alone, given = model_of(folder, kind, data, given, dtype)
            want = torch.zeros((), dtype=torch.float64)
            for batch in given:
                loss = alone(batch).sum
                loss.backward()
                want += loss.detach()
            whole, _ = model_of(folder, kind, data, [], dtype)
            # in the dtype that the weights have, as it is
            model = parallelize(whole, mesh, strategy, torch.float32)
            mine = given[mesh.dp_rank :: mesh.shape.dp]
            if mesh.shape.dp > 1:
                images = [int(batch.columns["image"].max()) > 0 for batch in mine]
                assert all(images) if mesh.dp_rank % 2 == 0 else not any(images)
            total = torch.zeros((), dtype=torch.float64)
            for number, batch in enumerate(mine, start=1):
                with model.accumulate(is_last=number == len(mine)):
                    loss = model(cp_shard(batch, mesh.cp, "all_gather")).sum
                    (loss * model.mean_ranks).backward()
                total += loss.detach()
            total = mesh.sum(total)
        expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
        largest = max(float(x.abs().max()) for x in expected.values())
        errors = {}
        for name, parameter in model.loss_model.named_parameters():
            gradient: Tensor | None = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            if gradient is None or name not in expected:
                assert gradient is None or not gradient.any(), name
                assert name not in expected, name
                continue
            errors[name] = float((gradient - expected[name]).abs().max()) / largest
        assert errors.keys() == expected.keys()
        assert any("vis" in name for name in errors)
        found[kind] = (float(abs(total - want) / want), errors)
    return found


def check(
    folder: Path, layout: str, kinds: list[str], dtype: torch.dtype, most: tuple[float, float]
) -> None:
    """most: by how much the loss may differ, and a gradient"""
    world = math.prod(LAYOUTS[layout][1][:4])
    for of_kinds in run_ranks(on_ranks, world, folder, layout, kinds, dtype):
        for kind, (of_loss, of_gradients) in of_kinds.items():
            assert of_loss < most[0], kind
            worst = max(of_gradients, key=of_gradients.__getitem__)
            assert of_gradients[worst] < most[1], (kind, worst, of_gradients[worst])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3_vl")
    write_rows(made)
    return write_model("qwen3_vl", made)


@pytest.mark.system
@pytest.mark.parametrize("layout", ["fsdp", "cp", *rarely("ddp", "hsdp")])
def test_every_gradient_is_that_of_one_process(layout: str, folder: Path) -> None:
    """ddp and hsdp sum gradients, whatever the loss; the others divide what a loss reads, or its head."""
    kinds = ["chat"] if layout in ("ddp", "hsdp") else ["chat", "dpo", "distill"]
    check(folder, layout, kinds, torch.float64, (1e-9, 1e-8))


@pytest.mark.system
def test_every_gradient_of_layers_that_are_cut_is_that_of_one_process(tmp_path: Path) -> None:
    """The plan of Qwen3-VL cuts none."""
    write_rows(tmp_path)
    write_model("internvl", tmp_path)
    check(tmp_path, "tp", ["chat", "dpo", "distill"], torch.float64, (1e-9, 1e-8))


@pytest.mark.system
def test_every_gradient_of_experts_on_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    write_rows(tmp_path)
    write_model("qwen3_vl_moe", tmp_path)
    check(tmp_path, "ep", ["chat"], torch.float32, (1e-6, 1e-5))
