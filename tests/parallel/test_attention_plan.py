"""What each context-parallel rank attends over: literal plans, and random documents with the ranks emulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.parallel.context_parallel import attention_plan, cp_shard, shard_indices
from automodel_lite.parallel.exchange import AllGatherKV, SelectRows, Ulysses
from automodel_lite.parallel.ring import Ring
from automodel_lite.thd import AttentionOptions
from tests.attention.families import documents, stream

GROUP: Any = None


def test_all_gather_of_two_documents() -> None:
    """Slots of 8 and 4 tokens, cp 2. Gathered rows are rank 0's [0 1 6 7 8 11], then rank 1's [2 3 4 5 9 10]."""
    batch = stream(documents([7, 3]), 4)
    assert batch.cu_seqlens_padded.tolist() == [0, 8, 12]
    plan = attention_plan(batch, GROUP, 2, 0, "all_gather")
    assert plan.segments.cu_q.tolist() == [0, 2, 4, 5, 6]
    assert plan.segments.cu_k.tolist() == [0, 2, 10, 11, 15]
    assert (plan.segments.max_q, plan.segments.max_k) == (2, 8)
    assert isinstance(plan.exchange, AllGatherKV)
    segments = [[0, 1], [0, 1, 6, 7, 8, 9, 2, 3], [4], [4, 10, 11, 5]]
    assert plan.exchange.key_rows.tolist() == [row for segment in segments for row in segment]
    early, late = plan.exchange.places.tolist()
    assert early == [0, 1, 15, 15, 10, 15, 15, 15, 15, 15, 15, 15]
    assert late == [2, 3, 8, 9, 11, 14, 4, 5, 6, 7, 12, 13]
    plan = attention_plan(batch, GROUP, 2, 1, "all_gather")
    assert plan.segments.cu_q.tolist() == [0, 2, 4, 5, 6]
    assert plan.segments.cu_k.tolist() == [0, 4, 10, 12, 15]


def test_all_to_all_of_two_documents() -> None:
    batch = stream(documents([7, 3]), 4)
    plan = attention_plan(batch, GROUP, 2, 0, "all_to_all")
    assert plan.segments.cu_q is plan.segments.cu_k
    assert plan.segments.cu_q.tolist() == [0, 8, 12]
    assert isinstance(plan.exchange, Ulysses)
    assert plan.exchange.to_ranks.tolist() == [0, 1, 6, 7, 8, 11, 2, 3, 4, 5, 9, 10]
    assert plan.exchange.to_stream.tolist() == [0, 1, 6, 7, 8, 9, 2, 3, 4, 10, 11, 5]


def test_a_ring_of_two_documents() -> None:
    """Rank 1 of two owns [2 3 | 4 5] of the first document and [9 | 10] of the second."""
    batch = stream(documents([7, 3]), 4)
    ring = attention_plan(batch, GROUP, 2, 1, "ring").exchange
    assert isinstance(ring, Ring)
    assert (ring.early.tolist(), ring.late.tolist()) == ([0, 1, 4], [2, 3, 5])
    assert (ring.cu_whole.tolist(), ring.cu_half.tolist()) == ([0, 4, 6], [0, 2, 3])
    assert (ring.max_half, ring.longest) == (2, 8)


def test_one_rank_gets_the_batch_itself() -> None:
    batch = stream(documents([7, 3]))
    assert cp_shard(batch, None) is batch


def test_moving_a_plan_moves_its_exchange() -> None:
    plan = attention_plan(stream(documents([7, 3]), 4), GROUP, 2, 0, "all_gather")
    seen: list[int] = []
    moved = plan.map_tensors(lambda tensor: seen.append(tensor.numel()) or tensor.clone())
    assert sorted(seen) == [5, 5, 15, 24]
    assert moved.exchange is not plan.exchange


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([2, 4]),
    st.lists(st.integers(1, 25), min_size=1, max_size=5),
    st.sampled_from([None, 3]),
)
def test_ranks_together_attend_like_one(cp: int, lengths: list[int], window: int | None) -> None:
    """Outputs, and gradients of keys and values summed over the ranks, with the exchange done by hand."""
    batch = stream(documents(lengths), 2 * cp)
    total = len(batch.input_ids)
    torch.manual_seed(total)
    q, k, v, grad = (torch.randn(total, 2, 8, dtype=torch.float64) for _ in range(4))
    kernel = ReferenceAttention()

    def attend(q: torch.Tensor, plan: Any, rows: Any, grad: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        keys, values = (x[rows] for x in leaves[1:])
        out = kernel(leaves[0], keys, values, plan.segments, AttentionOptions(0.3, window))
        out.backward(grad)
        return [out.detach(), *(x.grad for x in leaves)]

    want = attend(q, batch.attention, slice(None), grad)
    together = [torch.zeros_like(x) for x in want]
    in_rank_order = torch.cat(
        [shard_indices(batch.cu_seqlens_padded, cp, rank) for rank in range(cp)]
    )
    for rank in range(cp):
        mine = shard_indices(batch.cu_seqlens_padded, cp, rank)
        plan = attention_plan(batch, GROUP, cp, rank, "all_gather")
        assert isinstance(plan.exchange, AllGatherKV)
        out, dq, dk, dv = attend(q[mine], plan, in_rank_order[plan.exchange.key_rows], grad[mine])
        together[0][mine], together[1][mine] = out, dq
        together[2] += dk
        together[3] += dv
    for got, expected in zip(together, want):
        assert (got - expected).abs().max() < 1e-12


class NoScatter(TorchDispatchMode):
    """Operations that add rows up in an order of their own, atomically on a GPU, fail."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in ("index_add", "index_put", "scatter")), func
        return func(*args, **(kwargs or {}))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 4]), st.lists(st.integers(1, 25), min_size=1, max_size=5))
def test_the_gradient_of_a_selection_is_that_of_index_select(cp: int, lengths: list[int]) -> None:
    """Bit for bit: of each rank's prefixes, which take a row twice, once or never, and of the way to the stream."""
    batch = stream(documents(lengths), 2 * cp)
    for rank in range(cp):
        keys = attention_plan(batch, GROUP, cp, rank, "all_gather").exchange
        heads = attention_plan(batch, GROUP, cp, rank, "all_to_all").exchange
        assert isinstance(keys, AllGatherKV)
        assert isinstance(heads, Ulysses)
        for taken, places in (
            (keys.key_rows, keys.places),
            (heads.to_stream, heads.to_ranks[None]),
        ):
            rows = torch.randn(len(batch.input_ids), 3, dtype=torch.bfloat16, requires_grad=True)
            grad = torch.randn(len(taken), 3, dtype=torch.bfloat16)
            selected, plain = SelectRows.apply(rows, taken, places), rows.index_select(0, taken)
            assert torch.equal(selected, plain)
            (want,) = torch.autograd.grad(plain, rows, grad)
            with NoScatter():
                (got,) = torch.autograd.grad(selected, rows, grad)
            assert torch.equal(got, want)


def test_a_scattered_gradient_is_noticed() -> None:
    rows = torch.randn(4, 3, requires_grad=True)
    with NoScatter(), pytest.raises(AssertionError, match="index_add"):
        rows.index_select(0, torch.tensor([0, 0, 1])).sum().backward()
