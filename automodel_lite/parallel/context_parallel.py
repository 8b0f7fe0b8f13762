"""Context parallelism over packed documents: each rank gets its chunks of every document, and a
plan for attention.

Each document slot is cut into `2 * cp` equal chunks and rank r owns chunks r and `2 * cp - 1 - r`,
so that early (cheap) and late (expensive) queries pair up and every rank has the same work. The
layout is Transformer Engine's.

    one document of 8 tokens, cp = 2      chunk 0 0 1 1 2 2 3 3
                                          rank  0 0 1 1 1 1 0 0      rank 0 owns tokens [0, 1, 6, 7]

Labels and positions were made inside each document before anything is sharded, so they are sharded
along and nothing is shifted here. Plans are integer arithmetic on CPU tensors: they belong in the
loader's thread, not in the step.

Before a run trains, its settings, its data and the model's arithmetic over the ranks are checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from automodel_lite.attention.isolation import (
    TRIALS,
    Logits,
    drawn_ids,
    evaluating,
    model_logits,
    tolerance_std,
)
from automodel_lite.columns import labeled_rows
from automodel_lite.config.components import locate
from automodel_lite.errors import ConfigError
from automodel_lite.parallel.exchange import AllGatherKV, Ulysses
from automodel_lite.parallel.mixer_exchange import assign_mixers
from automodel_lite.parallel.ring import ring_plan
from automodel_lite.parallel.tree_exchange import tree_plan
from automodel_lite.parallel.zigzag import (
    inverse_permutation,
    keys_ahead,
    owned_segments,
    rank_order,
    shard_indices,
)
from automodel_lite.prefix_trees import concatenated_ranges
from automodel_lite.tensors import cumulative
from automodel_lite.thd import PER_TOKEN, AttentionPlan, Segments, ThdBatch, stream_of

# keys that travel; the other exchanges are of the core


def cp_shard(batch: ThdBatch, cp_mesh: DeviceMesh | None, exchange: str = "all_gather") -> ThdBatch:
    """This rank's part of a batch: T / cp tokens, the boundaries of the whole stream, and its
    attention plan.

    cp_mesh   the context-parallel axis; None or size 1 gives the batch back
    exchange  all_gather, all_to_all or ring
    Raises ValueError when a document slot is not a multiple of `2 * cp`.
    """
    if cp_mesh is None or cp_mesh.size() == 1:
        return batch
    group = cp_mesh.get_group()
    cp_size = cp_mesh.size()
    cp_rank = cp_mesh.get_local_rank()
    cu = batch.cu_seqlens_padded
    mine = shard_indices(cu, cp_size, cp_rank)
    own = {name: vars(batch)[name][mine] for name in (*PER_TOKEN, "document_lens")}
    mixers = batch.mixers
    if mixers is not None:
        mixers = replace(mixers, exchange=assign_mixers(batch, group, cp_size, cp_rank))
    return replace(
        batch,
        **own,
        columns={name: column[mine] for name, column in batch.columns.items()},
        images=batch.images and batch.images.shard(batch, mine, group),
        ahead=batch.ahead and batch.ahead.shard(mine),
        label_rows=labeled_rows(own["labels"]),
        attention=attention_plan(batch, group, cp_size, cp_rank, exchange),
        mixers=mixers,
    )


def attention_plan(
    batch: ThdBatch, group: dist.ProcessGroup, cp_size: int, cp_rank: int, exchange: str
) -> AttentionPlan:
    """Returns what the kernel of rank `cp_rank` gets, for a batch that is not sharded yet.

    exchange  a name of `mesh.cp_exchange`; package.module:function is a user's, called with the
              other arguments in place of this function
    """
    if ":" in exchange:
        make_plan: Callable[..., AttentionPlan] = locate(exchange.replace(":", "."))
        return make_plan(batch, group, cp_size, cp_rank)
    cu = batch.cu_seqlens_padded
    tree = batch.attention.tree
    to_ranks = rank_order(cu, cp_size)
    to_stream = inverse_permutation(to_ranks)
    if exchange == "all_to_all":
        return replace(batch.attention, exchange=Ulysses(group, to_stream, to_ranks))
    segments = owned_segments(cu, cp_size, cp_rank)
    # A ring passes whole chunks of documents around, of which a branch, or a token of an image,
    # sees some: it gathers, too.
    mine = concatenated_ranges(segments.start, segments.end)
    ahead = {kind: seen[mine] for kind, seen in batch.attention.ahead.items()}
    if tree is not None:
        plan = tree_plan(batch, segments, tree.paths, to_stream, group)
        return replace(plan, ahead=ahead)
    # each run of queries sees its document up to its own end; a row of keys is sent to at most two
    # runs, the early and the late one of its document
    key_end = segments.end + keys_ahead(batch, segments.end)
    q_lens = segments.end - segments.start
    k_lens = key_end - segments.document_start
    key_rows = to_stream[concatenated_ranges(segments.document_start, key_end)]
    is_late = (torch.arange(len(k_lens)) % 2).repeat_interleave(k_lens)
    places = key_rows.new_full((2, len(to_stream)), len(key_rows))
    places[is_late, key_rows] = torch.arange(len(key_rows))
    gather = AllGatherKV(group, key_rows, places)
    own = Segments(cumulative(q_lens), cumulative(k_lens), int(q_lens.max()), int(k_lens.max()))
    if exchange == "all_gather" or ahead:
        before = segments.start - segments.document_start if ahead else None
        return AttentionPlan(own, gather, ahead=ahead, before=before)
    assert exchange == "ring"
    return ring_plan(gather, own, q_lens, batch.max_seqlen)


def check_same_batch(batch: ThdBatch, axis: DeviceMesh) -> None:
    """Raises ConfigError on every rank of an axis that shares packs (cp, tp) unless all of them
    read the same batch, which is not sharded yet.
    """
    content = b"".join(
        x.numpy().tobytes() for x in (batch.input_ids, batch.labels, batch.cu_seqlens_padded)
    )
    digests = [""] * axis.size()
    dist.all_gather_object(digests, hashlib.sha256(content).hexdigest(), group=axis.get_group())
    if len(set(digests)) > 1:
        raise ConfigError(
            f"the {axis.size()} ranks that share a pack read different packs (hash of token ids, "
            "labels or boundaries): give all of them the same data, seed and packed_sequence "
            "settings."
        )


@torch.no_grad()
def check_context_parallel(
    model: nn.Module,
    cp_mesh: DeviceMesh | None,
    exchange: str = "all_gather",
    device: torch.device | str = "cpu",
    logits: Logits | None = None,
) -> None:
    """A small stream, whole and sharded: every rank must compute the same logits, of one of its
    trials at least (see `isolation.TRIALS`).

    Finds what the settings do not show: layers that mix tokens outside attention, positions that
    are used in other ways than one by one. Raises ConfigError on every rank of the group.
    """
    if cp_mesh is None or cp_mesh.size() == 1:
        return
    cp = cp_mesh.size()
    logits = logits or model_logits(model)
    lens = [2 * cp, 6 * cp, 4 * cp]
    worst = torch.zeros(())
    for ids in drawn_ids(model, TRIALS, sum(lens)):
        batch = stream_of(ids.split(lens))
        with evaluating(model):
            whole = logits(batch.to(device))
            part = logits(cp_shard(batch, cp_mesh, exchange).to(device))
        mine = shard_indices(batch.cu_seqlens_padded, cp, cp_mesh.get_local_rank()).to(device)
        worst = (part.float() - whole[mine].float()).abs().max() / whole.float().std()
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=cp_mesh.get_group())
        if worst < tolerance_std(whole.dtype):
            return
    raise ConfigError(
        f"{type(model).__name__} is not exact over mesh.cp={cp} ranks (logits off by "
        f"{worst:.1e} standard deviations): a layer mixes tokens outside attention; set "
        "mesh.cp=1."
    )
