"""Boundaries cut for layers whose attention sees its own chunk of a document only."""

from __future__ import annotations

import torch

from automodel_lite.thd import AttentionPlan, Segments, cut_at_chunks


def test_documents_cut_at_chunks() -> None:
    cu = torch.tensor([0, 5, 7], dtype=torch.int32)
    cut_q, cut_k, *_ = cut_at_chunks(Segments(cu, cu, 5, 5), 2)
    assert cut_q is cut_k
    assert cut_k.tolist() == [0, 2, 4, 5, 7, 7, 7]
    assert cut_k.dtype == torch.int32


def test_queries_of_a_rank_keep_to_the_chunk_of_their_keys() -> None:
    """Two runs of 2 queries: tokens 1 and 2 of a document, with 3 keys, and tokens 5 and 6 of it, with 7."""
    cu_q, cu_k = torch.tensor([0, 2, 4]), torch.tensor([0, 3, 10])
    cut_q, cut_k, *_ = cut_at_chunks(Segments(cu_q, cu_k, 2, 7), 2)
    assert cut_k.tolist() == [0, 2, 3, 3, 3, 5, 7, 9, 10]
    assert cut_q.tolist() == [0, 1, 2, 2, 2, 2, 2, 3, 4]


def test_layers_of_one_forward_share_the_cut() -> None:
    """Kernels find what they made for a batch by the identity of its boundaries."""
    cu = torch.tensor([0, 5, 7], dtype=torch.int32)
    plan = AttentionPlan(Segments(cu, cu, 5, 5))
    assert plan.cut(None)[0] is cu
    assert plan.cut(2)[0] is plan.cut(2)[0]
    assert plan.cut(2)[2:] == (2, 2)
    assert plan.cut(100)[2:] == (5, 5)
