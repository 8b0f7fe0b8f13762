"""Context parallelism over packed documents: each rank gets its chunks of every document, and a plan for attention.

Labels and positions were made inside each document before anything is sharded, so they are sharded along and nothing
is shifted here. Plans are integer arithmetic on CPU tensors: they belong in the loader's thread, not in the step.

Before a run trains, its settings, its data and the model's arithmetic over the ranks are checked.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from automodel_lite.attention.interface import Logits, logits_of, tolerance_std
from automodel_lite.attention.spec import AttentionSpec, config_value, layer_chunk
from automodel_lite.errors import ConfigError
from automodel_lite.parallel.exchange import AllGatherKV, TransformerEngine, Ulysses, check_heads_divide
from automodel_lite.parallel.mixer_exchange import deal_mixers
from automodel_lite.parallel.ring import ring
from automodel_lite.parallel.zigzag import (
    concatenated_ranges,
    inverse_permutation,
    owned_segments,
    shard_indices,
)
from automodel_lite.thd import AttentionPlan, MixerPlan, ThdBatch, cumulative, document_rows, labeled_rows, per_token

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
    mixers = batch.mixers and replace(
        batch.mixers, exchange=deal_mixers(batch.cu_seqlens_padded, group, to_ranks, cp_size, cp_rank)
    )
    return replace(
        batch,
        **own,
        label_rows=labeled_rows(own["labels"]),
        attention=attention_plan(batch, group, cp_size, cp_rank, exchange),
        mixers=mixers,
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


LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def check_cp_settings(
    model_config: PretrainedConfig, spec: AttentionSpec, cp_size: int, exchange: str, packed_sequence_size: int
) -> None:
    """Raises ConfigError where context parallelism over `cp_size` ranks would be wrong or impossible.

    packed_sequence_size  tokens of a pack: no document is longer
    """
    if cp_size == 1:
        return
    if packed_sequence_size % (2 * cp_size):
        good = -(-packed_sequence_size // (2 * cp_size)) * 2 * cp_size
        raise ConfigError(
            f"packed_sequence.packed_sequence_size={packed_sequence_size} must be a multiple of {2 * cp_size} "
            f"(2 * mesh.cp): use {good}."
        )
    if exchange == "all_to_all":
        for kind in spec.kinds:
            check_heads_divide(cp_size, kind.num_heads, kind.num_kv_heads)
    text = model_config.get_text_config()
    chunks = [layer_chunk(text, layer) for layer in range(config_value(text, "num_hidden_layers", 0))]
    if exchange == "te" and any(chunks):
        raise ConfigError("mesh.cp_exchange=te does not support chunked attention: use mesh.cp_exchange=all_gather.")
    _refuse_length_dependent_rope(model_config.get_text_config(), cp_size, packed_sequence_size)


def check_ranks_read_alike(batch: ThdBatch, cp_mesh: DeviceMesh | None) -> None:
    """The ranks that share a pack (over cp or tp) must read the same: compares a hash of one batch (not yet sharded).

    Raises ConfigError on every rank of the group when they differ.
    """
    if cp_mesh is None or cp_mesh.size() == 1:
        return
    own = torch.stack([_hash(x) for x in (batch.input_ids, batch.labels, batch.cu_seqlens_padded)]).to(
        cp_mesh.device_type
    )
    largest, smallest = own.clone(), own.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=cp_mesh.get_group())
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=cp_mesh.get_group())
    if not torch.equal(largest, smallest):
        raise ConfigError(
            f"the {cp_mesh.size()} ranks that share a pack read different packs (hash of token ids, labels "
            "or boundaries): give all of them the same data, seed and packed_sequence settings."
        )


@torch.no_grad()
def check_context_parallel(
    model: nn.Module,
    cp_mesh: DeviceMesh | None,
    exchange: str = "all_gather",
    device: torch.device | str = "cpu",
    logits: Logits | None = None,
) -> None:
    """A small stream, whole and sharded: every rank must compute the same logits.

    Finds what the settings do not show: layers that mix tokens outside attention, positions that are used in other
    ways than one by one. Raises ConfigError on every rank of the group.
    """
    if cp_mesh is None or cp_mesh.size() == 1:
        return
    cp, was_training = cp_mesh.size(), model.training
    logits = logits or logits_of(model)
    batch = _small_stream(model.get_input_embeddings().num_embeddings, cp)  # type: ignore[operator]
    model.eval()
    try:
        whole = logits(batch.to(device))
        part = logits(cp_shard(batch, cp_mesh, exchange).to(device))
    finally:
        model.train(was_training)
    mine = shard_indices(batch.cu_seqlens_padded, cp, cp_mesh.get_local_rank()).to(device)
    worst = ((part.float() - whole[mine].float()).abs().max() / whole.float().std()).reshape(1)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=cp_mesh.get_group())
    if not worst.item() < tolerance_std(whole.dtype):
        raise ConfigError(
            f"{type(model).__name__} is not exact over mesh.cp={cp} ranks (logits off by {worst.item():.1e} standard "
            "deviations): a layer mixes tokens outside attention; set mesh.cp=1."
        )


def _refuse_length_dependent_rope(config: PretrainedConfig, cp_size: int, longest_document: int) -> None:
    """DynamicNTK and LongRoPE pick their frequencies by the largest position that the *local* batch holds."""
    rope = config_value(config, "rope_parameters", {})
    by_layer = rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]
    for parameters in by_layer:
        kind = parameters.get("rope_type")
        if kind not in LENGTH_DEPENDENT_ROPE:
            continue
        at_top = config_value(config, "original_max_position_embeddings", config.max_position_embeddings)
        original = parameters.get("original_max_position_embeddings") or at_top
        if longest_document > original:
            raise ConfigError(
                f"model.config.rope_parameters.rope_type={kind} selects its frequencies by the longest document a "
                f"rank sees, so mesh.cp={cp_size} ranks would disagree beyond {original} tokens: set "
                f"packed_sequence.packed_sequence_size={original}, or mesh.cp=1, or another rope_type."
            )


def _small_stream(vocab: int, cp_size: int) -> ThdBatch:
    """Three documents of 2, 6 and 4 tokens a chunk pair; labels are the ids."""
    lens = torch.tensor([2, 6, 4]) * cp_size
    cu = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
    total, longest = int(lens.sum()), int(lens.max())
    ids = torch.randint(min(3, vocab - 1), vocab, (total,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lens.tolist()])
    plan = AttentionPlan(cu, cu, longest, longest)
    rows = MixerPlan(document_rows(cu))
    return ThdBatch(ids, ids, positions, torch.arange(total), cu, cu, longest, total, total, plan, rows)


def _hash(values: Tensor) -> Tensor:
    """int64: a sum over values and places, with wrap-around."""
    values = values.long()
    return ((values + 1) * (torch.arange(len(values)) * 2654435761 + 40503)).sum()
