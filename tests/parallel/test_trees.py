"""Trees over context-parallel ranks: loss and gradients are those of one rank."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.parallel.context_parallel import cp_shard, owned_segments
from automodel_lite.parallel.tree_exchange import tree_plan
from automodel_lite.thd import ThdBatch
from tests.attention.families import FAMILIES, VOCAB, build, gradients
from tests.attention.hybrids import InFloat64, build_hybrid
from tests.attention.trees import batch_of, random_rows
from tests.ranks import run_ranks

ATTENTION = [
    "llama",
    "gemma2_softcap_window",
    "gpt_oss_sinks_window",
    "llama4_chunks",
    "deepseek_v3_latent",
]
MIXERS = ["qwen3_next", "qwen3_next-odd-heads", "mamba", "lfm2", "minimax"]
"""Of the mixers, odd heads and lightning attention get whole documents, the others all tokens of some heads."""


def trees_of(cp: int) -> tuple[ThdBatch, torch.Tensor]:
    r = random.Random(5)
    return batch_of(
        [random_rows(r, VOCAB, most=6), random_rows(r, VOCAB, 0), random_rows(r, VOCAB, 2, 3)],
        2 * cp,
    )


def step(family: str, batch: ThdBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = build(family) if family in FAMILIES else build_hybrid(family)
    model.set_experts_implementation("eager")  # the grouped product has no fp64
    install(model.double(), ReferenceAttention())
    with InFloat64():
        logits = model(**batch.model_inputs()).logits[0]
        weights = batch.columns["loss_weights"].to(logits.dtype)
        loss_T = F.cross_entropy(logits, batch.labels, reduction="none", ignore_index=IGNORE_INDEX)
        loss = (loss_T * weights).sum()
    loss.backward()
    return loss.detach(), gradients(model)


def errors(
    rank: int, cp: int, families: list[str], exchanges: list[str]
) -> dict[tuple[str, str], tuple[float, float]]:
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    batch, _ = trees_of(cp)
    found = {}
    for family in families:
        want_loss, want = step(family, batch)
        largest = max(x.abs().max() for x in want.values())
        for exchange in exchanges:
            loss, grads = step(family, cp_shard(batch, mesh, exchange))
            for tensor in (loss, *grads.values()):
                dist.all_reduce(tensor)
            assert grads.keys() == want.keys()
            worst = max((grads[name] - want[name]).abs().max() / largest for name in want)
            of_loss = float(abs(loss - want_loss) / want_loss)
            found[family, exchange] = (of_loss, float(worst))
    return found


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_tree_over_ranks_equals_one_rank(cp: int) -> None:
    """With every exchange; what one rank computes is computed once."""
    exchanges = ["all_gather", "all_to_all", "ring"]
    for of_rank in run_ranks(errors, cp, ATTENTION + MIXERS, exchanges):
        for case, (loss, gradient) in of_rank.items():
            assert loss < 1e-9, case
            assert gradient < 1e-9, case


def test_the_pieces_of_a_rank() -> None:
    """Rank 0 of 2 owns tokens 0 1 6 7: the root, and the last two tokens of a branch at token 5 that follows token 1."""
    batch = batch_of([[([1, 2, 3, 4, 5], [1] * 5), ([1, 2, 3, 6, 7, 8], [1] * 6)]])[0]
    nodes = batch.attention
    assert nodes.segments.cu_q.tolist() == [0, 5, 9]
    cu = torch.tensor([0, 8])
    one_tree = nodes.segments._replace(cu_q=torch.tensor([0, 5, 8]), cu_k=torch.tensor([0, 5, 10]))
    batch = replace(batch, attention=replace(nodes, segments=one_tree))
    paths = torch.tensor([0, 1, 2, 3, 4, 0, 1, 5, 6, 7])
    plan = tree_plan(batch, owned_segments(cu, 2, 0), paths, torch.arange(8), None)  # type: ignore[arg-type]
    assert plan.segments.cu_q.tolist() == [0, 2, 4]
    assert plan.segments.cu_k.tolist() == [0, 2, 7]
    assert plan.exchange.key_rows.tolist() == [0, 1, 0, 1, 5, 6, 7]  # type: ignore[union-attr]
