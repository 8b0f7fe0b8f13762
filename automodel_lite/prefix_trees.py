"""Trees in the stream: rows that share a beginning, which is there once.

A tree lies in one document slot, depth first, and its positions alone tell where it branches: a
token whose position does not follow the one before begins a branch, and its path is the path so
far, cut off at its own position. Each branch begins with a copy of the last token that it shares,
because that token has another label in each branch. The path leaves the other copies out, so every
row is there whole, and every token of the stream has one label.

    rows       a b c d e      a b c x y      a b c x z w
    stream     a b c d e c x y x z w         the second c and the second x are copies
    positions  0 1 2 3 4 2 3 4 3 4 5
    nodes      [0, 5)    [5, 8) [8, 11)      each ends where a row ends: as many nodes as rows
    paths      0 1 2 3 4 | 0 1 5 6 7 | 0 1 5 8 9 10
    until      11 11 5 5 5 11 8 8 11 11 11   a key is seen by the queries at or behind it and before
               this one

Everything here is integer arithmetic on the host.

Legend: T tokens of the stream, M nodes, Tk tokens of all paths together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Range = tuple[int, int]


@dataclass(frozen=True)
class Nodes:
    """The runs of a stream between branches, in its order; a document without branches is one node.

    start, end  int64 [M]: the node, half open
    path_lens   int64 [M]: tokens of the path, the node's own included
    paths       int64 [Tk]: places in the stream, one path after the other, each with its own node
                last
    before      int64 [M]: the token before the node on its path; -1 where a document begins
    until       int64 [T]: a key is seen by the queries i with key <= i < until[key]
    """

    start: Tensor
    end: Tensor
    path_lens: Tensor
    paths: Tensor
    before: Tensor
    until: Tensor


def find_nodes(cu_padded: Tensor, position_ids: Tensor, lens: Tensor | None = None) -> Nodes | None:
    """Returns the nodes of a stream, or None where no document branches.

    cu_padded     int [N + 1], slot boundaries; position_ids int64 [T]
    lens          int64 [N], real tokens of each slot: padding behind them has any positions; None =
                  no padding
    Raises ValueError for positions that leave tokens out.
    """
    cu = cu_padded.long()
    slots = cu.diff()
    positions = position_ids.long()
    document = torch.repeat_interleave(slots)
    within = torch.arange(len(document)) - cu[document]
    steps = positions.diff(prepend=positions[:1] - 1)
    is_real = (within > 0) if lens is None else (within > 0) & (within < lens[document])
    branches = (is_real & (steps != 1)).nonzero().squeeze(1)
    if not len(branches):
        return None
    starts = torch.cat([cu[:-1][slots > 0], branches]).sort().values
    ends = torch.cat([starts[1:], cu[-1:]])
    first = cu[document[starts]]
    depths = torch.where(starts == first, 0, positions[starts] - positions[first])
    return _with_paths(starts, ends, depths.tolist(), len(positions))


def _with_paths(starts: Tensor, ends: Tensor, depths: list[int], num_tokens: int) -> Nodes:
    """depths: tokens of each node's path that lie before the node."""
    until = torch.empty(num_tokens, dtype=torch.int64)
    # the path to the token that was read last: what the next branch may cut off
    path: list[Range] = []
    ranges = []
    path_lens = []
    before = []
    length = 0
    for start, end, depth in zip(starts.tolist(), ends.tolist(), depths):
        if not 0 <= depth <= length:
            raise ValueError(
                f"position_ids at {start} of the stream go to {depth} behind a path of {length} "
                "tokens: inside a document, positions rise by one, or go back to where a branch "
                "begins."
            )
        # No later query sees what is cut off: depth first, all that lies below it has been read.
        while length > depth:
            first, last = path.pop()
            kept = max(first, last - (length - depth))
            until[kept:last] = start
            length -= last - kept
            if kept > first:
                path.append((first, kept))
        before.append(path[-1][1] - 1 if path else -1)
        path.append((start, end))
        length += end - start
        ranges += path
        path_lens.append(length)
    for first, last in path:
        until[first:last] = num_tokens
    flat = torch.tensor(ranges)
    paths = concatenated_ranges(flat[:, 0], flat[:, 1])
    return Nodes(starts, ends, torch.tensor(path_lens), paths, torch.tensor(before), until)


def concatenated_ranges(starts: Tensor, ends: Tensor) -> Tensor:
    """Returns arange(start, end) of all pairs, one after the other: starts [0, 5], ends [2, 8] ->
    [0, 1, 5, 6, 7].
    """
    lengths = ends - starts
    first = (starts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
    return first + torch.arange(len(first), device=starts.device)


def find_pieces(nodes: Nodes) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts a stream where nodes begin and where branches leave them, so that every piece follows
    the end of another.

    Returns int64 [S] each: where a piece begins, its tokens, and the piece that it follows; -1
    where a document begins.
    """
    branches = nodes.before[nodes.before >= 0] + 1
    cuts = torch.cat([nodes.start, branches, nodes.end[-1:]]).unique()
    starts = cuts[:-1]
    parents = torch.arange(len(starts)) - 1  # inside a node, the piece before
    parents[torch.searchsorted(starts, nodes.start)] = (
        torch.searchsorted(starts, nodes.before, right=True) - 1
    )
    return starts, cuts.diff(), parents
