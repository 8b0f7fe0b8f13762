"""Which tokens a context-parallel rank owns: literal lists, no process group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_lite.parallel.context_parallel import (
    inverse_permutation,
    owned_segments,
    shard_indices,
)


@pytest.mark.parametrize(
    ("cu", "rank", "want"),
    [
        ([0, 8, 16], 0, [0, 1, 6, 7, 8, 9, 14, 15]),
        ([0, 8, 12], 0, [0, 1, 6, 7, 8, 11]),
        ([0, 8, 12], 1, [2, 3, 4, 5, 9, 10]),
        ([0, 4, 12], 0, [0, 3, 4, 5, 10, 11]),
        ([0, 4, 12], 1, [1, 2, 6, 7, 8, 9]),
        ([0, 4, 4, 12], 1, [1, 2, 6, 7, 8, 9]),
    ],
    ids=str,
)
def test_indices_of_two_ranks(cu: list[int], rank: int, want: list[int]) -> None:
    assert shard_indices(torch.tensor(cu, dtype=torch.int32), 2, rank).tolist() == want


def test_segments_know_their_document() -> None:
    segments = owned_segments(torch.tensor([0, 8, 12]), 2, 0)
    assert segments.document_start.tolist() == [0, 0, 8, 8]
    assert segments.start.tolist() == [0, 6, 8, 11]
    assert segments.end.tolist() == [2, 8, 9, 12]


def test_a_slot_that_does_not_divide_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"slot of 6 tokens is not a multiple of 4 \(2 \* cp\): pack with "
    ):
        shard_indices(torch.tensor([0, 4, 10]), 2, 0)


def test_inverse_permutation() -> None:
    assert inverse_permutation(torch.tensor([2, 0, 1])).tolist() == [1, 2, 0]


def transformer_engine_indices(cu: list[int], total: int, world: int, rank: int) -> list[int]:
    """The arithmetic of `thd_partition_src_index` in Transformer Engine's context_parallel.cu, token by token."""
    local = [boundary // world for boundary in cu]
    indices = []
    for token in range(total // world):
        document = max(i for i in range(len(local) - 1) if local[i] <= token)
        length = local[document + 1] - local[document]
        place = token - local[document]
        offset = rank if place < length // 2 else (world - 1) * 2 - rank
        indices.append(place + local[document] * world + length // 2 * offset)
    return indices


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_every_token_has_one_owner_as_in_transformer_engine(world: int, chunks: list[int]) -> None:
    cu = [0]
    for chunk in chunks:
        cu.append(cu[-1] + chunk * 2 * world)
    shards = [shard_indices(torch.tensor(cu), world, rank).tolist() for rank in range(world)]
    assert sorted(index for shard in shards for index in shard) == list(range(cu[-1]))
    assert {len(shard) for shard in shards} == {cu[-1] // world}
    for rank, shard in enumerate(shards):
        assert shard == transformer_engine_indices(cu, cu[-1], world, rank)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_all_ranks_have_the_same_work(world: int, chunks: list[int]) -> None:
    """Visible (query, key) pairs: zigzag is balanced for every mix of documents."""
    cu = torch.tensor([0, *chunks]).cumsum(0) * 2 * world
    work = set()
    for rank in range(world):
        segments = owned_segments(cu, world, rank)
        ends, starts = (
            segments.end - segments.document_start,
            segments.start - segments.document_start,
        )
        work.add(int(((ends * (ends + 1) - starts * (starts + 1)) // 2).sum()))
    assert len(work) == 1
