"""A packed tree equals its rows, each alone in plain transformers."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.models.experts import SORTED_MM
from automodel_lite.thd import ThdBatch
from tests.attention.families import FAMILIES, VOCAB, build, gradients
from tests.attention.hybrids import HYBRIDS, ONE_OF_EACH_KIND, InFloat64, build_hybrid
from tests.attention.trees import Row, batch_of, labelled, random_rows

LARGEST_ERROR = 1e-9
"""fp64, relative; of gradients, to the largest."""

Result = tuple[torch.Tensor, dict[str, torch.Tensor]]
HYBRID_CASES = [
    pytest.param(x, marks=() if x in ONE_OF_EACH_KIND else pytest.mark.slow)
    for x in sorted(HYBRIDS)
]


def rows_one_by_one(model: torch.nn.Module, trees: list[list[Row]]) -> Result:
    loss = torch.zeros(())
    for ids, labels in (row for rows in trees for row in rows):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        loss = loss + F.cross_entropy(
            logits, torch.tensor(labels), reduction="sum", ignore_index=IGNORE_INDEX
        )
    loss.backward()
    return loss.detach(), gradients(model)


def as_trees(model: torch.nn.Module, batch: ThdBatch, weights: torch.Tensor) -> Result:
    logits = model(**batch.model_inputs()).logits[0]
    loss = (
        F.cross_entropy(logits, batch.labels, reduction="none", ignore_index=IGNORE_INDEX) * weights
    ).sum()
    loss.backward()
    return loss.detach(), gradients(model)


def assert_equal(got: Result, want: Result) -> None:
    assert abs(got[0] - want[0]) < LARGEST_ERROR * want[0]
    assert got[1].keys() == want[1].keys()
    largest = max(x.abs().max() for x in want[1].values())
    for name in want[1]:
        assert (got[1][name] - want[1][name]).abs().max() < LARGEST_ERROR * largest, name


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRID_CASES])
def test_trees_equal_their_rows(family: str) -> None:
    r = random.Random(family)
    with InFloat64():
        model = build_hybrid(family) if family in HYBRIDS else build(family)
        model.set_experts_implementation(SORTED_MM)  # transformers' product has no fp64
        model.double()
        trees = [
            random_rows(r, VOCAB, depth, branching, most=7)
            for depth, branching in ((6, 5), (0, 1), (2, 3))
        ]
        want = rows_one_by_one(model, trees)
        install(model, ReferenceAttention())
        for multiple in (1, 8):
            assert_equal(as_trees(model, *batch_of(trees, multiple)), want)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "nemotron_h", "lfm2"])
def test_long_branches_start_from_their_trunks_state(family: str) -> None:
    """Where walking the paths again would be more work: a trunk of 150 tokens, branches of 40 and more."""
    r = random.Random(family)
    trunk, turn = ([r.randrange(3, VOCAB) for _ in range(n)] for n in (150, 60))
    rows = [[*trunk, *[r.randrange(3, VOCAB) for _ in range(n)]] for n in (40, 70, 90)]
    rows += [[*trunk[:100], *turn, *[r.randrange(3, VOCAB) for _ in range(n)]] for n in (50, 80)]
    trees = [[labelled(ids, 100) for ids in rows], [labelled(turn, 1)]]
    with InFloat64():
        model = build_hybrid(family).double()
        want = rows_one_by_one(model, trees)
        install(model, ReferenceAttention())
        for multiple in (1, 8):
            batch, weights = batch_of(trees, multiple)
            assert batch.mixers is not None
            assert batch.mixers.stream.tree is not None
            assert batch.mixers.stream.tree.pieces is not None
            assert_equal(as_trees(model, batch, weights), want)
