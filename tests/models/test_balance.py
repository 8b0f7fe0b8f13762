"""The balancing loss of a mixture whose rows share beginnings: that of the rows, each alone in plain transformers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.data.packing.packs import lay_out_packs, packed_sequence_thd_collater
from automodel_lite.data.tokens.token_rows import flatten
from automodel_lite.data.tokens.trees import cut_tree, grow_trees
from automodel_lite.models.balance import balance_of
from automodel_lite.models.loss import FusedLinearCrossEntropy, LossModel
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.thd import IGNORE_INDEX, ThdBatch, to_thd
from benchmarks.tiny_models import VOCAB, tiny_model
from tests.attention.families import gradients
from tests.attention.trees import Row, labelled, random_rows
from tests.ranks import run_ranks

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
    return [random_rows(r, VOCAB - 8, most=6), last_turns(r), random_rows(r, VOCAB - 8, 0), last_turns(r)]


def batch_of(rows: list[list[Row]], cut_at: int, slot_multiple: int) -> ThdBatch:
    """One pack of the trees; of the last group, in parts of at most `cut_at` tokens."""
    trees = []
    for group in rows:
        arrays = [{"input_ids": np.array(i, np.int32), "labels": np.array(y, np.int32)} for i, y in group]
        grown = grow_trees(arrays, least_shared=1)
        is_cut = group is rows[-1] and "branches" in grown[0]
        trees += [part for tree in grown for part in (cut_tree(tree, cut_at) if is_cut else [tree])]
    flat = flatten(trees)
    size = int((-(-flat.lengths // slot_multiple) * slot_multiple).sum()) + 8
    packs = lay_out_packs(flat, flat.offsets[:-1], flat.lengths, np.array([len(trees)]), size, slot_multiple)
    return to_thd(packed_sequence_thd_collater(packs))


def model_of(family: str) -> torch.nn.Module:
    model = tiny_model(family).float().train()
    model.config.get_text_config()._experts_implementation = "eager"
    return model


def want(family: str, rows: list[list[Row]]) -> dict[str, torch.Tensor]:
    """Gradients of the rows, with transformers' own loss of each."""
    model = model_of(family)
    for ids, labels in (row for group in rows for row in group):
        out = model(input_ids=torch.tensor([ids]), output_router_logits=True, use_cache=False)
        targets = torch.tensor(labels)
        loss = F.cross_entropy(out.logits[0], targets, reduction="sum", ignore_index=IGNORE_INDEX)
        (loss + COEFFICIENT * (targets != IGNORE_INDEX).sum() * out.aux_loss).backward()
    return gradients(model)


def got(family: str, batch: ThdBatch, coefficient: float = COEFFICIENT) -> dict[str, torch.Tensor]:
    model = model_of(family)
    install(model, ReferenceAttention())
    LossModel(model, FusedLinearCrossEntropy(), balance_of(model, coefficient)).train()(batch).backward()
    return gradients(model)


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    largest = max(x.abs().max() for x in other.values())
    return max(float((one[name] - other[name]).abs().max() / largest) for name in other)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "minimax_m2"])
@pytest.mark.parametrize(("cut_at", "slot_multiple"), [(10_000, 1), (40, 8)], ids=["whole", "cut and padded"])
def test_the_balance_of_trees_is_that_of_rows(family: str, cut_at: int, slot_multiple: int) -> None:
    rows = rows_of(1)
    batch = batch_of(rows, cut_at, slot_multiple)
    assert batch.attention.tree is not None
    expected = want(family, rows)
    assert difference(got(family, batch), expected) < 1e-5
    assert difference(got(family, batch, 0.0), expected) > 1e-3


def _on_rank(rank: int, cp: int, exchange: str) -> float:
    rows, mesh = rows_of(2), init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    found = got("qwen3_moe", cp_shard(batch_of(rows, 40, 2 * cp), mesh, exchange))
    for tensor in found.values():
        dist.all_reduce(tensor)
    return difference(found, want("qwen3_moe", rows))


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
def test_the_balance_of_trees_over_two_ranks(exchange: str) -> None:
    assert max(run_ranks(_on_rank, 2, exchange)) < 1e-5
