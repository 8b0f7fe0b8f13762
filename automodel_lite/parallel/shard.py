"""Context parallelism over packed documents: each rank gets its chunks of every document, and a plan for attention.

Labels and positions were made inside each document before anything is sharded, so they are sharded along and nothing
is shifted here. Plans are integer arithmetic on CPU tensors: they belong into the loader's thread, not into the step.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from automodel_lite.errors import ConfigError
from automodel_lite.parallel.exchange import AllGatherKV, TransformerEngine, Ulysses
from automodel_lite.parallel.mixer_exchange import deal_mixers
from automodel_lite.parallel.ring import ring
from automodel_lite.parallel.zigzag import (
    concatenated_ranges,
    inverse_permutation,
    owned_segments,
    shard_indices,
)
from automodel_lite.thd import AttentionPlan, ThdBatch, cumulative, labelled_rows, per_token

EXCHANGES = ("all_gather", "all_to_all", "ring", "te")


def cp_shard(batch: ThdBatch, cp_mesh: DeviceMesh | None, exchange: str = "all_gather") -> ThdBatch:
    """This rank's part of a batch: T / cp tokens, the boundaries of the whole stream, and its attention plan.

    cp_mesh   the context-parallel axis; None or size 1 gives the batch back
    exchange  one of EXCHANGES
    Raises ValueError when a document slot is not a multiple of `2 * cp`, ConfigError for an unknown exchange.
    """
    if cp_mesh is None or cp_mesh.size() == 1:
        return batch
    if exchange not in EXCHANGES:
        raise ConfigError(f"mesh.cp_exchange={exchange} is unknown: use one of {', '.join(EXCHANGES)}.")
    group, cp_size, cp_rank = cp_mesh.get_group(), cp_mesh.size(), cp_mesh.get_local_rank()
    of_ranks = [shard_indices(batch.cu_seqlens_padded, cp_size, rank) for rank in range(cp_size)]
    mine, to_ranks = of_ranks[cp_rank], torch.cat(of_ranks)
    own = {name: vars(batch)[name][mine] for name in per_token()}
    return replace(
        batch,
        **own,
        label_rows=labelled_rows(own["labels"]),
        attention=attention_plan(batch, group, cp_size, cp_rank, exchange),
        mixers=replace(batch.mixers, exchange=deal_mixers(batch.cu_seqlens_padded, group, to_ranks, cp_size, cp_rank)),
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
    is_late = (torch.arange(len(k_lens)) % 2).repeat_interleave(k_lens)
    places = key_rows.new_full((2, len(to_stream)), len(key_rows))
    places[is_late, key_rows] = torch.arange(len(key_rows))
    gather = AllGatherKV(group, key_rows, places)
    plan = AttentionPlan(
        cu_q=cumulative(q_lens),
        cu_k=cumulative(k_lens),
        max_q=int(q_lens.max()),
        max_k=int(k_lens.max()),
        exchange=gather,
    )
    if exchange == "all_gather":
        return plan
    return replace(plan, max_k=batch.max_seqlen, exchange=ring(segments, gather, batch.max_seqlen))
