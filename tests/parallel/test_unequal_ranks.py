"""Ranks that do unequal work train as one process: one long document, many short ones, padding, trees."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from packaging.version import Version
from torch.distributed.tensor import DTensor

from automodel_lite.attention.documents import runs_by_rows
from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.models.loss import FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import MeshShape, open_mesh
from automodel_lite.parallel.sharding import parallelize
from automodel_lite.thd import ThdBatch
from benchmarks.tiny_models import VOCAB, random_model, tiny_config
from tests.attention.families import documents, stream
from tests.attention.trees import batch_of, random_rows
from tests.ranks import run_ranks

BY_ROWS = ["falcon", "bloom", "mpt", "gpt_neo", "gpt_neox_japanese", "xglm"]
"""Families with an attention of their own code, which is called once per tensor of rows."""
if Version(transformers.__version__) < Version("5.24"):
    BY_ROWS += ["gptj", "codegen"]  # later they ask transformers' registry
OTHERS = ["llama", "deepseek_v3", "qwen3_next", "mamba"]
LONGEST = 400


def batches() -> dict[str, ThdBatch]:
    """What a rank may have; the first two are as many calls as can be, and one."""
    tree, _ = batch_of([random_rows(random.Random(3), VOCAB - 8, most=6)], 4)
    return {
        "mixed": stream(documents([380, 160, *[2] * 30, 40], VOCAB - 8), 4),
        "one": stream(documents([90], VOCAB - 8, seed=1), 4),
        "short": stream(documents([2] * 20, VOCAB - 8, seed=2), 4),
        "padding": stream([], 4, 16),
        "tree": tree,
    }


PAIRS = [("mixed", "short"), ("one", "mixed"), ("mixed", "padding"), ("tree", "one")]


def dtype_of(family: str) -> torch.dtype:
    """fp64, but for a family whose own code cannot."""
    return torch.float32 if family == "xglm" else torch.float64


def model_of(family: str) -> torch.nn.Module:
    config = tiny_config(family)
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if getattr(config, key, None):
            setattr(config, key, LONGEST)
    model = random_model(config).to(dtype_of(family))
    model.config._experts_implementation = "eager"  # grouped products have no fp64
    install(model, ReferenceAttention())
    return model.train()


def differences(
    rank: int, world: int, families: list[str], axis: str
) -> dict[str, tuple[float, float]]:
    """Of loss and gradients, relative to the largest one, from one process with all batches."""
    sizes = (1, 2, 1, 1) if axis == "dp_shard" else (1, 1, 2, 1)
    mesh = open_mesh(MeshShape(*sizes), torch.device("cpu"))
    loss, found = FusedLinearCrossEntropy(), {}
    for family in families:
        alone = LossModel(model_of(family), loss)
        is_by_rows = runs_by_rows(alone.lm)
        assert is_by_rows == (family in BY_ROWS), family
        model = parallelize(LossModel(model_of(family), loss), mesh, "fsdp", dtype_of(family))
        for names in PAIRS:
            given = [batches()[name] for name in names]
            want = torch.zeros(())
            for batch in given:
                part = alone(batch).sum
                part.backward()
                want = want + part.detach()
            own = given[rank] if axis == "dp_shard" else None
            total = torch.zeros(())
            for number, batch in enumerate([own] if own else given):
                with model.accumulate(is_last=own is not None or number == 1):
                    part = model(cp_shard(batch, mesh.cp, "all_gather")).sum
                    (part * model.mean_ranks).backward()
                total = total + part.detach()
            grads = [p.grad for p in model.loss_model.parameters()]
            whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
            wanted = [p.grad for p in alone.parameters()]
            assert [g is None for g in whole] == [g is None for g in wanted], family
            largest = max(g.abs().max() for g in wanted if g is not None)
            of_grads = max(
                float((one - other).abs().max() / largest)
                for one, other in zip(whole, wanted)
                if one is not None and other is not None
            )
            found[f"{family} {names}"] = float(abs(mesh.sum(total) / want - 1)), of_grads
            for each in (alone, model.loss_model):
                each.zero_grad()
    return found


@pytest.mark.parametrize(
    ("families", "axis"),
    [
        (BY_ROWS[:2], "dp_shard"),
        pytest.param(BY_ROWS[2:], "dp_shard", marks=pytest.mark.system),
        pytest.param(OTHERS, "dp_shard", marks=pytest.mark.system),
        pytest.param([*BY_ROWS, *OTHERS], "cp", marks=pytest.mark.slow),
    ],
    ids=["two by rows", "the others by rows", "not by rows", "cp"],
)
def test_ranks_of_unequal_work_train_as_one(families: list[str], axis: str) -> None:
    for of_rank in run_ranks(differences, 2, families, axis):
        for case, (of_loss, of_grads) in of_rank.items():
            assert of_loss < 1e-6, case  # logits are fp32
            assert of_grads < 1e-5, case
