"""Which rank reads which pack, by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_lite.data.feeding.order import (
    BatchShape,
    assign_packs,
    assign_to_ranks,
    balance_steps,
    epoch_order,
    imbalance,
    pack_costs,
    step_edges,
)
from automodel_lite.data.packing.packs import EMPTY_PACK
from automodel_lite.data.packing.plan import PackPlan, plan_packs
from automodel_lite.models.flops import CostModel


def test_a_step_is_dealt_to_ranks_and_micro_batches() -> None:
    dealt = assign_to_ranks(np.array([4, 1, 8, 5]), BatchShape(4, 1, 2))
    assert dealt.tolist() == [[[4], [1]], [[8], [5]]]
    assert dealt[:, 1].tolist() == [[1], [5]]


def test_a_short_last_step_is_filled_with_empty_packs() -> None:
    dealt = assign_to_ranks(np.array([3, 6, 9]), BatchShape(8, 2, 2))
    assert dealt.tolist() == [[[3, 6], [9, EMPTY_PACK]]]


@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 1), (1, 4), (2, 2), (3, 2)])
def test_global_batches_do_not_depend_on_the_layout(micro: int, dp: int) -> None:
    order = epoch_order(50, seed=3, epoch=1, shuffle=True)
    shape = BatchShape(12, micro, dp)
    steps = [assign_to_ranks(order[i : i + 12], shape) for i in range(0, 50, 12)]
    read = [sorted(p for p in step.ravel().tolist() if p != EMPTY_PACK) for step in steps]
    assert read == [sorted(order[i : i + 12].tolist()) for i in range(0, 50, 12)]


def test_each_epoch_has_its_own_order_and_each_seed_too() -> None:
    first, again, second, other = (
        epoch_order(100, *key, True).tolist() for key in [(0, 0), (0, 0), (0, 1), (1, 0)]
    )
    assert first == again
    assert first != second != other != first
    assert sorted(second) == list(range(100))
    assert epoch_order(4, 0, 5, shuffle=False).tolist() == [0, 1, 2, 3]


# 6 FLOPs per weight and token, 12 per pair and attention channel; weights without the input embedding
LLAMA_3_8B = CostModel(per_token=6 * 7.504e9, per_pair=12.0 * 32 * 4096)


HYBRID = replace(LLAMA_3_8B, per_pair=LLAMA_3_8B.per_pair / 4)  # one layer in four attends


QWEN3_600M = CostModel(per_token=6 * 0.596e9, per_pair=12.0 * 28 * 2048)


@pytest.fixture(scope="module")
def long_tailed() -> tuple[np.ndarray, PackPlan]:
    """90 % of about 600 tokens, 10 % of 8k to 32k, in packs of 32k."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.0, 0.9, 180_000).astype(np.int64), 16, 8192)
    long = rng.random(len(lengths)) < 0.1
    lengths[long] = rng.integers(8192, 32769, int(long.sum()))
    return lengths, plan_packs(lengths, 32768)


def test_pairs_of_documents() -> None:
    assert CostModel(1, 1).pairs(np.array([1, 2, 3, 10])).tolist() == [1, 3, 6, 55]
    # a window of 2: the first query sees 1 key, each other one 2
    assert CostModel(1, 1, window=2, window_frac=1.0).pairs(np.array([1, 2, 3, 10])).tolist() == [
        1,
        3,
        5,
        19,
    ]
    assert CostModel(1, 1, window=2, window_frac=0.5).pairs(np.array([10])).tolist() == [37]


def test_the_cost_of_packs() -> None:
    plan = plan_packs([6, 3, 4, 4], 8, strategy="next_fit", slot_multiple=2)
    # slots [6], [4, 4], [4]; tails of 2, 0, 4
    costs = pack_costs(plan, np.array([6, 3, 4, 4]), CostModel(per_token=100, per_pair=1))
    assert costs.tolist() == [800 + 21 + 3, 800 + 10 + 10, 800 + 10 + 10]
    alone = plan_packs([6, 3], 8, strategy="none")
    assert pack_costs(alone, np.array([6, 3]), CostModel(100, 1)).tolist() == [621, 306]


def test_one_step_dealt() -> None:
    costs = np.array([9.0, 1, 8, 2])
    shape = BatchShape(4, 1, dp_size=2)
    order = assign_packs(costs, "step", shape)
    assert costs[order].tolist() == [1, 2, 9, 8]
    assert imbalance(costs, shape) == 17 / 10
    assert imbalance(costs[order], shape) == 11 / 10


def test_micro_batches_are_dealt_there_and_back() -> None:
    costs = np.array([4.0, 1, 3, 2])
    order = assign_packs(costs, "step", BatchShape(4, 2, dp_size=2))
    assert costs[order].tolist() == [1, 4, 2, 3]  # rank 0: 1 + 4, rank 1: 2 + 3


@settings(deadline=None)
@given(
    costs=st.lists(st.floats(1, 100), max_size=200),
    ranks=st.integers(1, 4),
    micro_steps=st.integers(1, 4),
    micro_batch_size=st.integers(1, 3),
    balance=st.sampled_from(["none", "step", "window"]),
)
def test_steps_and_windows_keep_their_packs(
    costs, ranks, micro_steps, micro_batch_size, balance
) -> None:
    step = ranks * micro_steps * micro_batch_size
    shape = BatchShape(step, micro_batch_size, ranks)
    costs = np.array(costs)
    order = assign_packs(costs, balance, shape, seed=3)
    assert sorted(order.tolist()) == list(range(len(costs)))
    kept = {"none": 1, "step": step, "window": 32 * step}[balance]
    for start in range(0, len(costs) // kept * kept, kept):
        assert sorted(order[start : start + kept].tolist()) == list(range(start, start + kept))
    whole = len(costs) // step * step
    assert order[whole:].tolist() == list(range(whole, len(costs)))
    if balance == "step" and micro_batch_size == 1:
        assert imbalance(costs[order], shape) <= imbalance(costs, shape) + 1e-9


def test_64_ranks_on_a_32k_mix() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(600) - 0.4, 0.9, 600_000).astype(int), 16, 8192)
    long = rng.random(len(lengths)) < 0.1
    lengths[long] = rng.integers(8192, 32769, long.sum())
    plan = plan_packs(lengths, 32768, strategy="best_fit")
    costs = pack_costs(plan, lengths, LLAMA_3_8B)
    shape = BatchShape(512, 1, dp_size=64)
    assert imbalance(costs, shape) > 1.15
    assert imbalance(costs[assign_packs(costs, "step", shape)], shape) < 1.04
    assert imbalance(costs[assign_packs(costs, "window", shape)], shape) < 1.005


def test_a_thousand_ranks_wait_for_none(long_tailed: tuple[np.ndarray, PackPlan]) -> None:
    """One pack a rank and step, the hardest case: nothing can be dealt inside of a step."""
    lengths, plan = long_tailed
    shape = BatchShape(1024, 1, dp_size=1024)
    # 13 of a window's 32 steps
    for model, limit in ((LLAMA_3_8B, 1.02), (HYBRID, 1.01), (QWEN3_600M, 1.05)):
        costs = pack_costs(plan, lengths, model)
        assert imbalance(costs, shape) > 1.04
        assert imbalance(costs[assign_packs(costs, "window", shape)], shape) < limit


def test_a_tree_costs_its_paths_not_its_square() -> None:
    """Two documents of 6 tokens, one of them a tree whose longest row has 4: 10 pairs and 2 x 4 at most, not 21."""
    plan, lengths = plan_packs([6, 6], 6, strategy="next_fit"), np.array([6, 6])
    assert pack_costs(plan, lengths, CostModel(0.0, 1.0), np.array([6, 4])).tolist() == [21.0, 18.0]
    assert pack_costs(plan, lengths, CostModel(0.0, 1.0)).tolist() == [21.0, 21.0]


@pytest.mark.parametrize(
    ("documents", "per_step", "edges"),
    [
        ([47, 48, 47, 48], 64, [0, 1, 3, 4]),  # 47, 95, 142, 190: near 64, 128 and all
        ([10] * 6, 20, [0, 2, 4, 6]),
        ([10] * 5, 20, [0, 2, 4, 5]),  # a short last step
        ([1] * 5, 2, [0, 2, 4, 5]),
        ([100, 100], 8, [0, 1, 2]),  # a pack is not cut
        ([90, 1, 1, 1], 30, [0, 1, 2, 3, 4]),  # every step has a pack
        ([1, 1, 1, 90], 30, [0, 1, 2, 3, 4]),
        ([3, 0, 0, 3], 3, [0, 1, 4]),  # packs of the middles of documents that are cut
        ([5, 5], 100, [0, 2]),
        ([], 4, [0]),
    ],
)
def test_steps_of_a_number_of_documents(documents, per_step, edges) -> None:
    assert step_edges(np.array(documents, int), per_step).tolist() == edges


def test_steps_of_documents_are_balanced_each_by_itself() -> None:
    """Two ranks run packs of like cost at a time; the third of the last step keeps its place."""
    costs = np.array([9.0, 1, 8, 2, 7, 3, 5])
    order = balance_steps(costs, "step", BatchShape(4, 1, 2), [0, 4, 7])
    assert sorted(map(sorted, costs[order][:4].reshape(2, 2).tolist())) == [[1, 2], [8, 9]]
    assert order[4:].tolist() in ([4, 5, 6], [5, 4, 6])


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 40), st.integers(1, 4))
def test_every_pack_is_in_one_step_of_documents(documents, per_step, ranks) -> None:
    edges = step_edges(np.array(documents, int), per_step).tolist()
    assert sorted({*edges}) == edges
    assert (edges[0], edges[-1]) == (0, len(documents))
    costs = np.random.default_rng(1).random(len(documents))
    order = balance_steps(costs, "step", BatchShape(4 * ranks, 2, ranks), edges)
    for start, stop in pairwise(edges):
        assert sorted(order[start:stop].tolist()) == list(range(start, stop))
