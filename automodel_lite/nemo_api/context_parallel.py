"""The THD dict of one context-parallel rank, in the layout of Transformer Engine: the dict form of
`cp_shard`.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from automodel_lite.nemo_api.thd_utils import split_batch_into_thd_chunks, stack_thd_chunks
from automodel_lite.parallel.zigzag import owned_segments, shard_indices
from automodel_lite.thd import SEQ_LENS_PADDING


def make_cp_batch_for_te(
    cp_mesh: DeviceMesh | None,
    batch: dict[str, Any],
    qkv_format: str = "thd",
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = SEQ_LENS_PADDING,
    return_local_indices: bool = False,
) -> Any:
    """Turns a collated batch into the THD dict of this context-parallel rank (Transformer Engine's
    layout).

    No mesh or size 1: the dict of `process_input_for_thd` / `split_batch_into_thd_chunks`. Else
    `input_ids, labels, position_ids, padding_mask` are this rank's, `cu_seqlens` the padded
    boundaries of the whole stream, `max_seqlen` the widest slot, and `qkv_format, cp_size, cp_rank`
    are added; with chunks, tensors are stacked. `return_local_indices` gives (dict, int64 [T / cp]
    positions in the stream), (dict, None) with chunks. Raises ValueError for another `qkv_format`.
    """
    if qkv_format != "thd":
        raise ValueError(f"Currently only 'thd' format is supported, got: {qkv_format}")
    thd = split_batch_into_thd_chunks(batch, num_chunks, seq_lens_padding_value, padding_token_id)
    indices = torch.arange(thd["input_ids"].shape[0], device=thd["input_ids"].device)
    if cp_mesh is not None and cp_mesh.size() > 1:
        chunks = [thd]
        if num_chunks > 1:
            chunks = [
                {k: v[i] if isinstance(v, Tensor) else v for k, v in thd.items()}
                for i in range(num_chunks)
            ]
        shards = [
            _shard_thd_chunk_for_te(
                chunk, cp_mesh, qkv_format, seq_lens_padding_value, padding_token_id
            )
            for chunk in chunks
        ]
        thd, indices = shards[0]
        if num_chunks > 1:
            thd = stack_thd_chunks([shard for shard, _ in shards], seq_lens_padding_value)
    return (thd, indices if num_chunks <= 1 else None) if return_local_indices else thd


def _shard_thd_chunk_for_te(
    batch: dict[str, Any],
    cp_mesh: DeviceMesh,
    qkv_format: str,
    seq_lens_padding_value: int,
    padding_token_id: int,
) -> tuple[dict[str, Any], Tensor]:
    """One THD dict -> this rank's part of it, and the positions in the stream of its tokens (int64
    [T / cp]).
    """
    cp_size = cp_mesh.size()
    cp_rank = dist.get_rank(group=cp_mesh.get_group())
    cu = batch.get("cu_seqlens_padded", batch["cu_seqlens"])
    cu = cu[cu != seq_lens_padding_value].to(torch.int32)
    total = batch["input_ids"].shape[0]
    indices = _partitioned_indices(cu, total, cp_size, cp_rank)
    padding_mask = batch.get("padding_mask")
    if padding_mask is None:
        padding_mask = batch["input_ids"] == padding_token_id
    # [T]; positions are [R, 1, T] with several rotary axes
    along_stream = {
        name: None if batch.get(name) is None else batch[name].index_select(-1, indices)
        for name in ("labels", "position_ids")
    }
    sharded = {
        **along_stream,
        "input_ids": batch["input_ids"].index_select(0, indices),
        "padding_mask": padding_mask.index_select(0, indices),
        "cu_seqlens": cu,
        "max_seqlen": cu.diff().max().to(torch.int32),
        "qkv_format": qkv_format,
        "cp_size": cp_size,
        "cp_rank": cp_rank,
    }
    consumed = {"cu_seqlens_padded", *sharded}
    return {key: value for key, value in batch.items() if key not in consumed} | sharded, indices


def _partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, cp_size: int, cp_rank: int
) -> Tensor:
    """Transformer Engine's own indices where it is installed (it computes them on the GPU), else
    ours: the same.
    """
    if (
        "transformer_engine_torch" not in sys.modules
        and find_spec("transformer_engine_torch") is None
    ):
        return shard_indices(cu_seqlens, cp_size, cp_rank)
    import transformer_engine_torch as tex

    if not torch.cuda.is_available():
        return tex.thd_get_partitioned_indices(cu_seqlens, total_tokens, cp_size, cp_rank)
    # its kernel asserts on the device that the slots divide: say it here
    owned_segments(cu_seqlens, cp_size, cp_rank)
    indices = tex.thd_get_partitioned_indices(cu_seqlens.cuda(), total_tokens, cp_size, cp_rank)
    return indices.to(cu_seqlens.device).long()
