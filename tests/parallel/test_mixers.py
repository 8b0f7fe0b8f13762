"""Hybrid models over context-parallel ranks compute what one process computes: logits and every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from automodel_lite.attention.documents import mixers_of
from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.parallel.context_parallel import (
    check_context_parallel,
    cp_shard,
    shard_indices,
)
from automodel_lite.parallel.document_owners import document_owners
from tests.attention.families import documents, gradients, stream
from tests.attention.hybrids import HYBRIDS, ONE_OF_EACH_KIND, InFloat64, build_hybrid
from tests.attention.test_mixers import packed, summed_loss
from tests.ranks import run_ranks

LARGEST_ERROR = 1e-9
"""fp64, relative to the largest logit or gradient."""

LENGTHS = [37, 5, 70, 1, 23]


def largest_errors(
    rank: int, cp: int, families: list[str], exchanges: list[str]
) -> dict[tuple[str, str], tuple[float, float]]:
    """For each family and exchange the largest error of logits and of gradients."""
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    batch = stream(documents(LENGTHS), 2 * cp, 192)
    mine = shard_indices(batch.cu_seqlens_padded, cp, rank)
    errors = {}
    for family in families:
        model = build_hybrid(family).double()
        install(model, ReferenceAttention())
        with InFloat64():
            want_logits, want = packed(model, batch)
        largest = max(x.abs().max() for x in want.values())
        for exchange in exchanges:
            model.zero_grad()
            check_context_parallel(model, mesh, exchange)
            part = cp_shard(batch, mesh, exchange)
            with InFloat64():
                logits = model(**part.model_inputs()).logits[0]
                summed_loss(logits, part.labels).backward()
            grads = {
                name: p.grad if p.grad is not None else torch.zeros_like(p)
                for name, p in model.named_parameters()
            }
            for grad in grads.values():
                dist.all_reduce(grad)
            errors[family, exchange] = (
                float((logits.detach() - want_logits[mine]).abs().max() / want_logits.abs().max()),
                float(max((grads[name] - x).abs().max() / largest for name, x in want.items())),
            )
    return errors


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_kind_of_mixer_over_ranks(cp: int) -> None:
    """With both exchanges; what one rank computes is computed once."""
    families = [*ONE_OF_EACH_KIND, "qwen3_next-odd-heads"]
    for errors in run_ranks(largest_errors, cp, families, ["all_gather", "all_to_all"]):
        assert all(max(error) < LARGEST_ERROR for error in errors.values()), errors


@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 4])
def test_every_family_over_ranks(cp: int) -> None:
    exchanges = ["all_gather", "all_to_all", "ring"]
    for errors in run_ranks(largest_errors, cp, sorted(HYBRIDS), exchanges):
        assert all(max(error) < LARGEST_ERROR for error in errors.values()), errors


def owners_and_ways(
    rank: int, cp: int, families: list[str], lengths: list[int]
) -> dict[str, tuple[bool, float]]:
    """Whether the mixers of a family share heads between ranks, and the largest error of a gradient; some ranks own no
    document.
    """
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    batch = stream(documents(lengths), 2 * cp)
    found = {}
    for family in families:
        model = build_hybrid(family).double()
        install(model, ReferenceAttention())
        part = cp_shard(batch, mesh)
        with InFloat64():
            want = packed(model, batch)[1]
            summed_loss(model(**part.model_inputs()).logits[0], part.labels).backward()
        assert all(p.grad is not None for p in model.parameters()), "FSDP waits for every gradient"
        grads = gradients(model)
        for grad in grads.values():
            dist.all_reduce(grad)
        largest = max(x.abs().max() for x in want.values())
        error = max(float((grads[name] - x).abs().max() / largest) for name, x in want.items())
        called = next(mixers_of(model)).forward.called  # type: ignore[attr-defined]
        found[family] = (called.divide(cp), error)
    return found


def test_heads_are_shared_where_they_divide_else_documents() -> None:
    families = [
        "lfm2",
        "nemotron_h",
        "qwen3_next",
        "qwen3_next-odd-heads",
        "minimax",
        "recurrent_gemma",
    ]
    # one document, so that one rank owns none
    for found in run_ranks(owners_and_ways, 2, families, [40]):
        shares = [family for family, (shares_heads, _) in found.items() if shares_heads]
        assert shares == ["lfm2", "nemotron_h", "qwen3_next"]
        assert all(error < LARGEST_ERROR for _, error in found.values()), found


def test_documents_are_dealt_by_length() -> None:
    assert document_owners([8, 2, 6, 4], 2) == [0, 0, 1, 1]
    assert document_owners([5], 3) == [0]
    assert document_owners([], 2) == []
