"""The documents of a stream as right-padded rows, for layers that mix tokens in other ways than attention.

What follows a document cannot reach back into it, so a causal mixer that starts anew in each row keeps documents apart,
whatever it does. Documents of similar length share a tensor, which bounds the padding.

    cu_seqlens 0 5 7 11      rows  [0 1 2 3 4]      to_stream  0 1 2 3 4 | 8 9 | 10 11 ...
    (documents of 5, 2, 4)         [7 8 9 10 10]
                                   [5 6 6 6 6]      to_stream[t]: where token t is in the flattened rows

Legend: T tokens of the stream, N documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FREE_PADDING_TOKENS, FREE_PADDING_FRAC = 256, 0.1
"""Padding that a tensor of rows may hold: so many tokens, or so much of it. One more tensor is one more call of the
mixer, which costs a small model on a CPU as much as some hundred tokens.
"""


@dataclass(frozen=True)
class DocumentRows:
    """rows       int64 [n, L] each: positions in the stream; behind its end, a document's last position is repeated
    to_stream  int64 [T]: where each position of the stream is in all rows, flattened one after the other
    cu_seqlens int32 [N + 1] and seq_idx int32 [1, T] (the document of each token): what kernels of packages want
    cu_host    cu_seqlens, never moved: some of those kernels read it on the host
    """

    rows: tuple[Tensor, ...]
    to_stream: Tensor
    cu_seqlens: Tensor
    seq_idx: Tensor
    cu_host: Tensor

    def moved(self, move: Callable[[Tensor], Tensor]) -> DocumentRows:
        return replace(
            self,
            rows=tuple(move(rows) for rows in self.rows),
            to_stream=move(self.to_stream),
            cu_seqlens=move(self.cu_seqlens),
            seq_idx=move(self.seq_idx),
        )

    def each(self, mix: Callable[[list[Tensor]], Tensor], streams: Sequence[Tensor]) -> Tensor:
        """`mix` on the rows of each of `streams`, [T, ...] each -> [n, L, ...]; its results [n, L, ...] -> [T, ...]."""
        outs = []
        for rows in self.rows:
            at, shape = rows.flatten(), rows.shape
            outs.append(mix([x.index_select(0, at).unflatten(0, shape) for x in streams]).flatten(0, 1))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.index_select(0, self.to_stream)


def document_rows(cu_seqlens: Tensor) -> DocumentRows:
    """The rows of a stream with boundaries `cu_seqlens` (int [N + 1], on the host)."""
    starts, lens = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    document = torch.repeat_interleave(lens)
    order = lens.argsort(descending=True, stable=True)
    order = order[: int((lens > 0).sum())]
    rows, first = [], torch.zeros_like(starts)  # first: where a document begins in the flattened rows
    num_before = 0
    for documents in order.split(_rows_per_tensor(lens[order].tolist())):
        longest = int(lens[documents[0]])
        within = torch.minimum(torch.arange(longest), lens[documents, None] - 1)
        rows.append(starts[documents, None] + within)
        first[documents] = num_before + longest * torch.arange(len(documents))
        num_before += rows[-1].numel()
    rows = rows or [torch.zeros(1, 1, dtype=torch.long)]  # of no documents: a mixer has to run for its gradients
    to_stream = first[document] + torch.arange(len(document)) - starts[document]
    cu = cu_seqlens.to(torch.int32)
    return DocumentRows(tuple(rows), to_stream, cu, document[None].to(torch.int32), cu)


def _rows_per_tensor(lens: list[int]) -> list[int]:
    """How many documents share a tensor; `lens` from the longest to the shortest."""
    sizes: list[int] = []
    longest = padding = 0
    for length in lens:
        padding += longest - length
        if sizes and padding <= max(FREE_PADDING_TOKENS, FREE_PADDING_FRAC * longest * (sizes[-1] + 1)):
            sizes[-1] += 1
        else:
            sizes.append(1)
            longest, padding = length, 0
    return sizes
