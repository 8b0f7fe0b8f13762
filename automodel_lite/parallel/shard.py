"""Context parallelism over packed documents: each rank gets its chunks of every document, and a plan for attention.

Labels and positions were made inside each document before anything is sharded, so they are sharded along and nothing
is shifted here. Plans are integer arithmetic on CPU tensors: they belong into the loader's thread, not into the step.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from automodel_lite.errors import ConfigError
from automodel_lite.parallel.exchange import AllGatherKV, TransformerEngine, Ulysses
from automodel_lite.parallel.zigzag import (
    concatenated_ranges,
    inverse_permutation,
    owned_segments,
    shard_indices,
)
from automodel_lite.thd import (
    SEQ_LENS_PADDING,
    AttentionPlan,
    ThdBatch,
    labelled_rows,
    split_batch_into_thd_chunks,
    stack_thd_chunks,
)

EXCHANGES = ("all_gather", "all_to_all", "te")


def cp_shard(batch: ThdBatch, cp_mesh: DeviceMesh | None, exchange: str = "all_gather") -> ThdBatch:
    """This rank's part of a batch: T / cp tokens, the boundaries of the whole stream, and its attention plan.

    cp_mesh   the context-parallel axis; None or size 1 gives the batch back
    exchange  one of EXCHANGES
    Raises ValueError when a document slot is no multiple of `2 * cp`, ConfigError for an unknown exchange.
    """
    if exchange not in EXCHANGES:
        raise ConfigError(f"mesh.cp_exchange={exchange} is unknown: use one of {', '.join(EXCHANGES)}.")
    if cp_mesh is None or cp_mesh.size() == 1:
        return batch
    group, cp_rank = cp_mesh.get_group(), cp_mesh.get_local_rank()
    mine = shard_indices(batch.cu_seqlens_padded, cp_mesh.size(), cp_rank)
    labels = batch.labels[mine]
    return replace(
        batch,
        input_ids=batch.input_ids[mine],
        labels=labels,
        position_ids=batch.position_ids[mine],
        label_rows=labelled_rows(labels),
        attention=attention_plan(batch, group, cp_mesh.size(), cp_rank, exchange),
    )


def attention_plan(
    batch: ThdBatch, group: dist.ProcessGroup, cp_size: int, cp_rank: int, exchange: str
) -> AttentionPlan:
    """What the kernel of rank `cp_rank` gets, for a batch that is not sharded yet."""
    cu = batch.cu_seqlens_padded
    if exchange == "te":
        return replace(batch.attention, exchange=TransformerEngine(group))
    to_ranks = torch.cat([shard_indices(cu, cp_size, rank) for rank in range(cp_size)])
    to_stream = inverse_permutation(to_ranks)
    if exchange == "all_to_all":
        return replace(batch.attention, exchange=Ulysses(group, to_stream, to_ranks))
    segments = owned_segments(cu, cp_size, cp_rank)
    q_lens, k_lens = segments.end - segments.start, segments.end - segments.document_start
    key_rows = to_stream[concatenated_ranges(segments.document_start, segments.end)]
    return AttentionPlan(
        cu_q=_cumulative(q_lens),
        cu_k=_cumulative(k_lens),
        max_q=int(q_lens.max()),
        max_k=int(k_lens.max()),
        exchange=AllGatherKV(group, key_rows),
    )


def make_cp_batch_for_te(
    cp_mesh: DeviceMesh | None,
    batch: dict[str, Any],
    qkv_format: str = "thd",
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = SEQ_LENS_PADDING,
    return_local_indices: bool = False,
) -> Any:
    """A collated batch -> the THD dict of this context-parallel rank (Transformer Engine's layout).

    No mesh or size 1: the dict of `process_input_for_thd` / `split_batch_into_thd_chunks`. Else `input_ids, labels,
    position_ids, padding_mask` are this rank's, `cu_seqlens` the padded boundaries of the whole stream, `max_seqlen`
    the widest slot, and `qkv_format, cp_size, cp_rank` are added; with chunks, tensors are stacked.
    `return_local_indices` gives (dict, int64 [T / cp] positions in the stream), (dict, None) with chunks.
    Raises ValueError for another `qkv_format`.
    """
    if qkv_format != "thd":
        raise ValueError(f"Currently only 'thd' format is supported, got: {qkv_format}")
    thd = split_batch_into_thd_chunks(batch, num_chunks, seq_lens_padding_value, padding_token_id)
    indices: Tensor | None = None
    if cp_mesh is None or cp_mesh.size() <= 1:
        if num_chunks <= 1:
            indices = torch.arange(thd["input_ids"].shape[0], device=thd["input_ids"].device)
    elif num_chunks <= 1:
        thd, indices = _shard_thd_chunk_for_te(thd, cp_mesh, qkv_format, seq_lens_padding_value, padding_token_id)
    else:
        chunks = [
            {key: value[i] if isinstance(value, Tensor) else value for key, value in thd.items()}
            for i in range(num_chunks)
        ]
        shards = [
            _shard_thd_chunk_for_te(chunk, cp_mesh, qkv_format, seq_lens_padding_value, padding_token_id)[0]
            for chunk in chunks
        ]
        thd = stack_thd_chunks(shards, seq_lens_padding_value)
    return (thd, indices) if return_local_indices else thd


def _shard_thd_chunk_for_te(
    batch: dict[str, Any],
    cp_mesh: DeviceMesh,
    qkv_format: str,
    seq_lens_padding_value: int,
    padding_token_id: int,
) -> tuple[dict[str, Any], Tensor]:
    """One THD dict -> this rank's part of it, and the positions in the stream of its tokens (int64 [T / cp])."""
    cp_size, cp_rank = cp_mesh.size(), dist.get_rank(group=cp_mesh.get_group())
    cu = batch.get("cu_seqlens_padded", batch["cu_seqlens"])
    cu = cu[cu != seq_lens_padding_value].to(torch.int32)
    total = batch["input_ids"].shape[0]
    indices = _partitioned_indices(cu, total, cp_size, cp_rank)
    padding_mask = batch.get("padding_mask")
    if padding_mask is None:
        padding_mask = batch["input_ids"] == padding_token_id
    sharded = {
        "input_ids": batch["input_ids"].index_select(0, indices),
        "labels": None if batch.get("labels") is None else batch["labels"].index_select(0, indices),
        # [T], or [R, 1, T] with several rotary axes
        "position_ids": None if batch.get("position_ids") is None else batch["position_ids"].index_select(-1, indices),
        "padding_mask": padding_mask.index_select(0, indices),
        "cu_seqlens": cu,
        "max_seqlen": cu.diff().max().to(torch.int32),
        "qkv_format": qkv_format,
        "cp_size": cp_size,
        "cp_rank": cp_rank,
    }
    consumed = {"cu_seqlens_padded", *sharded}
    return {key: value for key, value in batch.items() if key not in consumed} | sharded, indices


def _partitioned_indices(cu_seqlens: Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    """Transformer Engine's own indices where it is installed (it computes them on the GPU), else ours: the same."""
    if "transformer_engine_torch" not in sys.modules and find_spec("transformer_engine_torch") is None:
        return shard_indices(cu_seqlens, cp_size, cp_rank)
    import transformer_engine_torch as tex

    if not torch.cuda.is_available():
        return tex.thd_get_partitioned_indices(cu_seqlens, total_tokens, cp_size, cp_rank)
    owned_segments(cu_seqlens, cp_size, cp_rank)  # its kernel asserts on the device that the slots divide: say it here
    indices = tex.thd_get_partitioned_indices(cu_seqlens.cuda(), total_tokens, cp_size, cp_rank)
    return indices.to(cu_seqlens.device).long()


def _cumulative(lengths: Tensor) -> Tensor:
    """int64 [N] -> int32 [N + 1], from 0."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
