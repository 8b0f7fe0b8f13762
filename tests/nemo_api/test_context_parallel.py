"""`make_cp_batch_for_te`: the dict face of sharding, with a mesh that only knows its size and rank."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from automodel_lite.nemo_api.context_parallel import _shard_thd_chunk_for_te, make_cp_batch_for_te
from tests.test_thd import batch_of


class FakeMesh:
    """A context-parallel axis without processes."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def get_group(self) -> str:
        return "group"


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    def pretend(rank: int) -> None:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: rank)

    return pretend


def two_documents() -> dict:
    return batch_of([[6, 3]], [[8, 4]], 12)


@pytest.mark.parametrize("mesh", [None, FakeMesh(1)], ids=["no mesh", "one rank"])
def test_without_ranks_it_is_the_plain_stream(mesh: Any) -> None:
    thd, indices = make_cp_batch_for_te(mesh, two_documents(), return_local_indices=True)
    assert thd["cu_seqlens"].tolist() == [0, 6, 9]
    assert thd["cu_seqlens_padded"].tolist() == [0, 8, 12]
    assert indices.tolist() == list(range(12))
    batch = batch_of([[4], [4]], [[4], [4]], 4)
    thd, indices = make_cp_batch_for_te(mesh, batch, num_chunks=2, return_local_indices=True)
    assert thd["input_ids"].shape == (2, 4)
    assert indices is None


@pytest.mark.parametrize(
    ("rank", "want"), [(0, [0, 1, 6, 7, 8, 11]), (1, [2, 3, 4, 5, 9, 10])], ids=str
)
def test_two_ranks(as_rank: Any, rank: int, want: list[int]) -> None:
    as_rank(rank)
    thd, indices = make_cp_batch_for_te(FakeMesh(2), two_documents(), return_local_indices=True)
    assert indices.tolist() == want
    assert thd["input_ids"].tolist() == [i + 1 for i in want]
    assert thd["labels"].tolist() == [i + 101 for i in want]
    assert thd["position_ids"].tolist() == want
    assert thd["padding_mask"].tolist() == [i in (6, 7, 11) for i in want]
    assert thd["cu_seqlens"].tolist() == [0, 8, 12]
    assert thd["max_seqlen"].tolist() == 8
    assert (thd["qkv_format"], thd["cp_size"], thd["cp_rank"]) == ("thd", 2, rank)
    assert "cu_seqlens_padded" not in thd


def test_chunks_are_sharded_one_by_one(as_rank: Any) -> None:
    as_rank(0)
    batch = batch_of([[3, 4], [8, -1000]], [[4, 4], [8, -1000]], 8)
    thd, indices = make_cp_batch_for_te(FakeMesh(2), batch, num_chunks=2, return_local_indices=True)
    assert thd["input_ids"].tolist() == [[1, 4, 5, 8], [9, 10, 15, 16]]
    assert thd["cu_seqlens"].tolist() == [[0, 4, 8], [0, 8, -1000]]
    assert thd["max_seqlen"].tolist() == [4, 8]
    assert indices is None


def test_several_rotary_axes_are_sharded_along(as_rank: Any) -> None:
    as_rank(1)
    batch = batch_of([[4]], [[4]], 4) | {"position_ids": torch.arange(12).view(3, 1, 4)}
    thd = make_cp_batch_for_te(FakeMesh(2), batch)
    assert thd["position_ids"].tolist() == [[[1, 2]], [[5, 6]], [[9, 10]]]


def test_one_chunk(as_rank: Any) -> None:
    as_rank(0)
    stream = {
        "input_ids": torch.arange(8),
        "labels": torch.arange(8),
        "position_ids": torch.arange(8),
        "padding_mask": torch.zeros(8, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 8, -1000, -1000], dtype=torch.int32),
    }
    thd, indices = _shard_thd_chunk_for_te(stream, FakeMesh(2), "thd", -1000, 0)
    assert indices.tolist() == [0, 1, 6, 7]
    assert thd["cu_seqlens"].tolist() == [0, 8]


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="Currently only 'thd' format is supported, got: bshd"):
        make_cp_batch_for_te(None, two_documents(), qkv_format="bshd")


def test_transformer_engines_own_indices_where_it_is_there(
    as_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(0)
    seen = []

    def partitioned(cu: torch.Tensor, total: int, world: int, rank: int) -> torch.Tensor:
        seen.append((cu.dtype, cu.tolist(), total, world, rank))
        return torch.tensor([11, 0])

    tex = ModuleType("transformer_engine_torch")
    tex.__spec__ = ModuleSpec("transformer_engine_torch", None)
    tex.thd_get_partitioned_indices = partitioned  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", tex)
    thd = make_cp_batch_for_te(FakeMesh(2), two_documents())
    assert seen == [(torch.int32, [0, 8, 12], 12, 2, 0)]
    assert thd["input_ids"].tolist() == [12, 1]
