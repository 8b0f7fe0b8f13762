"""Which tokens a context-parallel rank owns: pure index arithmetic, no process group.

Each document slot is cut into `2 * cp` equal chunks and rank r owns chunks r and `2 * cp - 1 - r`, so that early
(cheap) and late (expensive) queries pair up and every rank has the same work. The layout is Transformer Engine's.

    one document of 8 tokens, cp = 2      chunk 0 0 1 1 2 2 3 3
                                          rank  0 0 1 1 1 1 0 0      rank 0 owns tokens [0, 1, 6, 7]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OwnedSegments:
    """The runs of the stream that one rank owns, in its local order; int64 [M] each, M <= 2 N, none is empty.

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
    chunk = slots // (2 * cp_size)
    if not torch.equal(chunk * (2 * cp_size), slots):
        wrong = int(slots[slots % (2 * cp_size) != 0][0])
        raise ValueError(
            f"a document slot of {wrong} tokens is not a multiple of {2 * cp_size} (2 * cp): pack with "
            f"packed_sequence.slot_multiple={2 * cp_size} and a packed_sequence_size that is a multiple of it."
        )
    owned = torch.tensor([cp_rank, 2 * cp_size - 1 - cp_rank], device=cu.device)
    start = cu[:-1, None] + chunk[:, None] * owned
    document_start, end = cu[:-1, None].expand_as(start), start + chunk[:, None]
    some = end > start
    return OwnedSegments(document_start[some], start[some], end[some])


def shard_indices(cu_seqlens_padded: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Positions in the stream of rank `cp_rank`'s tokens, int64 [T / cp].

    cu [0, 8, 12], cp 2: rank 0 [0, 1, 6, 7, 8, 11], rank 1 [2, 3, 4, 5, 9, 10].
    Equal to Transformer Engine's `thd_get_partitioned_indices`.
    """
    segments = owned_segments(cu_seqlens_padded, cp_size, cp_rank)
    return concatenated_ranges(segments.start, segments.end)


def concatenated_ranges(starts: Tensor, ends: Tensor) -> Tensor:
    """arange(start, end) of all pairs, one after the other: starts [0, 5], ends [2, 8] -> [0, 1, 5, 6, 7]."""
    lengths = ends - starts
    first = (starts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
    return first + torch.arange(len(first), device=starts.device)


def inverse_permutation(permutation: Tensor) -> Tensor:
    """int64 [T]: where each entry went. [2, 0, 1] -> [1, 2, 0]."""
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(permutation), device=permutation.device)
    return inverse
