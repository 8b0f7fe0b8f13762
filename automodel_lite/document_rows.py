"""Documents as right-padded rows, for layers that mix tokens in other ways than attention.

What follows a document cannot reach back into it, so a causal mixer that starts over in each row
keeps documents apart, whatever it does. Documents of similar length share a tensor, which bounds
the padding.

    cu_seqlens 0 5 7 11      rows  [0 1 2 3 4]      to_stream  0 1 2 3 4 | 8 9 | 10 11 ...
    (documents of 5, 2, 4)         [7 8 9 10 10]
                                   [5 6 6 6 6]      to_stream[t]: where token t is in the flattened
                                   rows

A document may be a tree of rows that share their beginning (prefix_trees.py): its rows are the
paths of the tree.

Legend: T tokens of the stream, N documents (slots), n rows, L row length, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from automodel_lite.prefix_trees import Nodes, concatenated_ranges, find_pieces
from automodel_lite.tensors import ON_HOST, Tensors, cumulative

NEAR_TOKENS = 8
"""Tokens that a convolution may look back; those of transformers' families look back 2 or 3."""

FILLING_TOKENS = 32
"""Half a chunk of the mixers that start a branch from its trunk's state."""

FREE_PADDING_TOKENS = 256
FREE_PADDING_FRAC = 0.1
"""Padding that a tensor of rows may hold: so many tokens, or so much of it. One more tensor is one
more call of the mixer, which costs a small model on a CPU as much as some hundred tokens.
"""


@dataclass(frozen=True)
class TreeRows(Tensors):
    """paths  int64 [Tk]: places in the stream, the path of each node one after the other
    own    int64 [T]: where each token of the stream is among them
    near   the same of paths that begin NEAR_TOKENS before their node; None in itself
    pieces of the stream, each behind the end of another (`find_pieces`), never mapped; None where
    paths are less work
    """

    paths: Tensor
    own: Tensor
    near: DocumentRows | None = None
    pieces: tuple[Tensor, Tensor, Tensor] | None = field(default=None, metadata=ON_HOST)


@dataclass(frozen=True)
class DocumentRows(Tensors):
    """rows       int64 [n, L] each: positions in the stream; behind its end, a document's last
    position is repeated
    to_stream  int64 [T]: where each position of the stream is in all rows, flattened one after the
               other
    cu_seqlens int32 [N + 1] and seq_idx int32 [1, T] (the document of each token): what kernels of
    packages want
    cu_host    cu_seqlens, never mapped: some of those kernels read it on the host
    tree       where documents branch; the rows are those of the trees then, and `cu_seqlens` and
               `seq_idx` describe the paths of the tree, one after the other
    """

    rows: tuple[Tensor, ...]
    to_stream: Tensor
    cu_seqlens: Tensor
    seq_idx: Tensor
    cu_host: Tensor = field(metadata=ON_HOST)
    tree: TreeRows | None = None

    @cached_property
    def document(self) -> Tensor:
        """Returns int32 [T], of each token; one object, by which mixers find what they have made
        for it.
        """
        return self.seq_idx[0]

    def map_rows(self, mix: Callable[[list[Tensor]], Tensor], streams: Sequence[Tensor]) -> Tensor:
        """`mix` on the rows of each of `streams`, [T, ...] each -> [n, L, ...]; its results [n, L,
        ...] -> [T, ...].
        """
        outs = []
        for rows in self.rows:
            at = rows.flatten()
            shape = rows.shape
            outs.append(
                mix([x.index_select(0, at).unflatten(0, shape) for x in streams]).flatten(0, 1)
            )
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.index_select(0, self.to_stream)


def document_rows(cu_seqlens: Tensor, nodes: Nodes | None = None) -> DocumentRows:
    """Returns the rows of a stream with boundaries `cu_seqlens` (int [N + 1], on the host), or of
    its trees.
    """
    if nodes is not None:
        # Each path is a document of its own; what a shared token becomes is taken from the path
        # that it belongs to.
        lens = nodes.end - nodes.start
        ends = nodes.path_lens.cumsum(0)
        near_lens = torch.minimum(nodes.path_lens, lens + NEAR_TOKENS)
        near = rows_of_paths(
            nodes.paths[concatenated_ranges(ends - near_lens, ends)], near_lens, lens
        )
        whole = rows_of_paths(nodes.paths, nodes.path_lens, lens)
        assert whole.tree is not None
        pieces = find_pieces(nodes)
        # Each piece is filled up to whole chunks: where they are short, walking the paths again is
        # less work.
        saves = len(nodes.until) + FILLING_TOKENS * len(pieces[0]) < len(nodes.paths)
        return replace(whole, tree=replace(whole.tree, near=near, pieces=pieces if saves else None))
    starts = cu_seqlens[:-1].long()
    lens = cu_seqlens.diff().long()
    document = torch.repeat_interleave(lens)
    order = lens.argsort(descending=True, stable=True)
    order = order[: int((lens > 0).sum())]
    # first: where a document begins in the flattened rows
    rows = []
    first = torch.zeros_like(starts)
    num_before = 0
    for documents in order.split(_rows_per_tensor(lens[order].tolist())):
        longest = int(lens[documents[0]])
        within = torch.minimum(torch.arange(longest), lens[documents, None] - 1)
        rows.append(starts[documents, None] + within)
        first[documents] = num_before + longest * torch.arange(len(documents))
        num_before += rows[-1].numel()
    # of no documents: a mixer has to run for its gradients
    rows = rows or [torch.zeros(1, 1, dtype=torch.long)]
    to_stream = first[document] + torch.arange(len(document)) - starts[document]
    cu = cu_seqlens.to(torch.int32)
    return DocumentRows(tuple(rows), to_stream, cu, document[None].to(torch.int32), cu)


def rows_of_paths(paths: Tensor, path_lens: Tensor, lens: Tensor) -> DocumentRows:
    """Returns the rows of paths, the last `lens` tokens of which are their own; int64 [M] each."""
    of_paths = document_rows(cumulative(path_lens))
    ends = path_lens.cumsum(0)
    own = concatenated_ranges(ends - lens, ends)
    return replace(
        of_paths,
        rows=tuple(paths[x] for x in of_paths.rows),
        to_stream=of_paths.to_stream[own],
        tree=TreeRows(paths, own),
    )


def _rows_per_tensor(lens: list[int]) -> list[int]:
    """Returns how many documents share a tensor; `lens` from the longest to the shortest."""
    sizes: list[int] = []
    longest = padding = 0
    for length in lens:
        padding += longest - length
        if sizes and padding <= max(
            FREE_PADDING_TOKENS, FREE_PADDING_FRAC * longest * (sizes[-1] + 1)
        ):
            sizes[-1] += 1
        else:
            sizes.append(1)
            longest = length
            padding = 0
    return sizes


class MixerExchange(Protocol):
    """What context parallelism does around a layer that mixes tokens in other ways than attention:
    each rank gets either all tokens of some heads, or whole documents. [T / cp] are this rank's
    tokens, [T] the whole stream.
    """

    @property
    def owned(self) -> DocumentRows:
        """Documents that this rank mixes."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def map_rows(self, mix: Callable[[list[Tensor]], Tensor], streams: Sequence[Tensor]) -> Tensor:
        """As `DocumentRows.map_rows`, of streams [T / cp, ...]: each rank mixes whole documents."""

    def own(self, x_T: Tensor) -> Tensor: ...  # [T, ...] -> [T / cp, ...]

    def summed(self, x: Tensor) -> Tensor: ...  # over the ranks, without gradients

    # [T / cp, H, ...] -> [T, H / cp, ...], of each
    def to_heads(self, xs_TH: Sequence[Tensor]) -> list[Tensor]: ...

    def from_heads(self, x_TH: Tensor) -> Tensor: ...  # and back

    # the slice of a weight that belongs to this rank's heads
    def part(self, weight: Tensor, dim: int) -> Tensor: ...


@dataclass(frozen=True)
class MixerPlan(Tensors):
    """What layers get that mix tokens in other ways than attention.

    stream    the documents of the whole stream
    exchange  what to do around such a layer; None without context parallelism
    """

    stream: DocumentRows
    exchange: MixerExchange | None = None

    @property
    def num_calls(self) -> int:
        """Returns how often `map_rows` calls what it is given."""
        return len((self.exchange.owned if self.exchange else self.stream).rows)

    def map_rows(self, mix: Callable[[list[Tensor]], Tensor], streams: Sequence[Tensor]) -> Tensor:
        """As `DocumentRows.map_rows`, of this rank's streams."""
        return (self.exchange or self.stream).map_rows(mix, streams)
