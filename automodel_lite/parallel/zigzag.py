"""Which tokens of a stream a context-parallel rank owns, in pure index arithmetic: each document is
cut into 2 * cp chunks, and rank r takes chunks r and 2 * cp - 1 - r.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_lite.prefix_trees import concatenated_ranges
from automodel_lite.thd import ThdBatch


def keys_ahead(batch: ThdBatch, ends: Tensor) -> Tensor:
    """Returns int64 [M]: keys behind the last query of each run of a stream that it sees."""
    behind = [seen[ends - 1, 0] for seen in batch.attention.ahead.values()]
    return torch.stack(behind).amax(0) if behind else torch.zeros_like(ends)


@dataclass(frozen=True)
class OwnedSegments:
    """The runs of the stream that one rank owns, in its local order; int64 [M] each, M <= 2 N, none
    is empty.

    document_start  where the document of a run begins
    start, end      the run, half open; its queries see the keys document_start .. end
    """

    document_start: Tensor
    start: Tensor
    end: Tensor


def owned_segments(cu_seqlens_padded: Tensor, cp_size: int, cp_rank: int) -> OwnedSegments:
    """Rank `cp_rank`'s runs of a stream with slot boundaries `cu_seqlens_padded` (int [N + 1]).

    Raises ValueError when a slot is not a multiple of `2 * cp_size`.
    """
    cu = cu_seqlens_padded.long()
    slots = cu.diff()
    num_chunks = 2 * cp_size
    chunk = slots // num_chunks
    if not torch.equal(chunk * num_chunks, slots):
        wrong = int(slots[slots % num_chunks != 0][0])
        raise ValueError(
            f"a document slot of {wrong} tokens is not a multiple of {num_chunks} (2 * cp): pack "
            f"with packed_sequence.slot_multiple={num_chunks} and a packed_sequence_size that is "
            "a multiple of it."
        )
    owned = torch.tensor([cp_rank, num_chunks - 1 - cp_rank], device=cu.device)
    start = cu[:-1, None] + chunk[:, None] * owned
    document_start = cu[:-1, None].expand_as(start)
    end = start + chunk[:, None]
    some = end > start
    return OwnedSegments(document_start[some], start[some], end[some])


def shard_indices(cu_seqlens_padded: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Positions in the stream of rank `cp_rank`'s tokens, int64 [T / cp].

    cu [0, 8, 12], cp 2: rank 0 [0, 1, 6, 7, 8, 11], rank 1 [2, 3, 4, 5, 9, 10].
    Equal to Transformer Engine's `thd_get_partitioned_indices`.
    """
    segments = owned_segments(cu_seqlens_padded, cp_size, cp_rank)
    return concatenated_ranges(segments.start, segments.end)


def rank_order(cu_seqlens_padded: Tensor, cp_size: int) -> Tensor:
    """Positions in the stream, rank after rank, int64 [T]."""
    return torch.cat([shard_indices(cu_seqlens_padded, cp_size, rank) for rank in range(cp_size)])


def inverse_permutation(permutation: Tensor) -> Tensor:
    """int64 [T]: where each entry went. [2, 0, 1] -> [1, 2, 0]."""
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(permutation), device=permutation.device)
    return inverse
