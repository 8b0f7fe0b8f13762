"""What context-parallel ranks exchange around layers that mix tokens in other ways than attention.

By heads      all-to-all: every rank gets all tokens of H / cp heads or channels, and mixes whole documents of them.
By documents  all-to-all: every rank gets whole documents, shared by length, and mixes all heads of them. For mixers
              whose heads do not divide, or whose inner functions are unknown. A document is never cut, so the longest
              one bounds what more ranks can save.

Both are exact; neither waits for the device.

Legend: T tokens of the whole stream, T' tokens of the documents that a rank owns, H heads or channels, C features.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from automodel_lite.parallel.exchange import AllToAll, SelectRows
from automodel_lite.parallel.zigzag import concatenated_ranges, inverse_permutation
from automodel_lite.thd import DocumentRows, document_rows


class AllToAllRows(torch.autograd.Function):
    """Rows of a tensor: the first counts_out[0] of them go to rank 0, and so on; counts_in[r] come from rank r."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, counts_out: list[int], counts_in: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.counts, ctx.group = (counts_in, counts_out), group
        received = rows.new_empty(sum(counts_in), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), counts_in, counts_out, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return AllToAllRows.apply(grad, *ctx.counts, ctx.group), None, None, None


@dataclass(frozen=True)
class DealtMixers:
    """See `MixerExchange`.

    to_stream, to_ranks  int64 [T]: row of the rank-ordered stream that each position of the stream takes; its inverse
    send       int64 [T / cp]: this rank's tokens in the order of their documents' owners
    arrange    int64 [T']: place among the received rows of each token of the owned documents, one after the other
    counts_out, counts_in  tokens that go to each rank, and come from it
    """

    group: dist.ProcessGroup
    to_stream: Tensor
    to_ranks: Tensor
    owned: DocumentRows
    send: Tensor
    unsend: Tensor
    arrange: Tensor
    unarrange: Tensor
    counts_out: list[int]
    counts_in: list[int]

    @property
    def size(self) -> int:
        return self.group.size()

    def own(self, x_T: Tensor) -> Tensor:
        return x_T.index_select(0, self.to_ranks.view(self.size, -1)[self.group.rank()])

    def summed(self, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def to_heads(self, xs_TH: Sequence[Tensor]) -> list[Tensor]:
        """One collective for all tensors of a dtype: under autocast, gates and decays are fp32."""
        by_rank = [x.unflatten(1, (self.size, -1)).transpose(0, 1) for x in xs_TH]  # [cp, T/cp, H/cp, ...]
        result: dict[int, Tensor] = {}
        for dtype in {x.dtype for x in by_rank}:
            places = [i for i, x in enumerate(by_rank) if x.dtype == dtype]
            sent = torch.cat([by_rank[i].flatten(2) for i in places], 2)
            received = AllToAll.apply(sent, self.group).flatten(0, 1)
            rows = SelectRows.apply(received, self.to_stream, self.to_ranks[None])
            parts = rows.split([by_rank[i][0, 0].numel() for i in places], 1)
            result |= {i: part.unflatten(1, by_rank[i].shape[2:]) for i, part in zip(places, parts)}
        return [result[i] for i in range(len(by_rank))]

    def from_heads(self, x_TH: Tensor) -> Tensor:
        slices = SelectRows.apply(x_TH, self.to_ranks, self.to_stream[None]).unflatten(0, (self.size, -1))
        return AllToAll.apply(slices, self.group).transpose(0, 1).flatten(1, 2)

    def part(self, weight: Tensor, dim: int) -> Tensor:
        return weight.chunk(self.size, dim)[self.group.rank()]

    def to_owner(self, x_TC: Tensor) -> Tensor:
        sent = SelectRows.apply(x_TC, self.send, self.unsend[None])
        received = AllToAllRows.apply(sent, self.counts_out, self.counts_in, self.group)
        if not len(received):  # a rank without a document mixes one token of zeros, so that its weights have gradients
            return F.pad(received, (0,) * (2 * received.ndim - 1) + (1,))
        return SelectRows.apply(received, self.arrange, self.unarrange[None])  # type: ignore[no-any-return]

    def from_owner(self, x_TC: Tensor) -> Tensor:
        rows = SelectRows.apply(x_TC, self.unarrange, self.arrange[None])
        received = AllToAllRows.apply(rows, self.counts_in, self.counts_out, self.group)
        return SelectRows.apply(received, self.unsend, self.send[None])  # type: ignore[no-any-return]

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> DealtMixers:
        return replace(
            self,
            to_stream=function(self.to_stream),
            to_ranks=function(self.to_ranks),
            owned=self.owned.map_tensors(function),
            send=function(self.send),
            unsend=function(self.unsend),
            arrange=function(self.arrange),
            unarrange=function(self.unarrange),
        )


def deal_mixers(
    cu_seqlens: Tensor, group: dist.ProcessGroup, to_ranks: Tensor, cp_size: int, cp_rank: int
) -> DealtMixers:
    """The exchange of rank `cp_rank`; to_ranks int64 [T]: positions in the stream, rank after rank."""
    lens = cu_seqlens.diff().long()
    owners = document_owners(lens.tolist(), cp_size)
    owner = torch.tensor(owners).repeat_interleave(lens)[to_ranks].view(cp_size, -1)  # of each rank's local tokens
    send = owner[cp_rank].argsort(stable=True)
    to_me = owner == cp_rank
    mine = torch.tensor([rank == cp_rank for rank in owners])
    received = to_ranks.view(cp_size, -1)[to_me]
    place = torch.empty_like(to_ranks)
    place[received] = torch.arange(len(received))
    arrange = place[concatenated_ranges(cu_seqlens[:-1].long()[mine], cu_seqlens[1:].long()[mine])]
    return DealtMixers(
        group=group,
        to_stream=inverse_permutation(to_ranks),
        to_ranks=to_ranks,
        owned=document_rows(F.pad(lens[mine].cumsum(0), (1, 0))),
        send=send,
        unsend=inverse_permutation(send),
        arrange=arrange,
        unarrange=inverse_permutation(arrange),
        counts_out=torch.bincount(owner[cp_rank], minlength=cp_size).tolist(),
        counts_in=to_me.sum(1).tolist(),
    )


def document_owners(lens: list[int], num_ranks: int) -> list[int]:
    """The rank of each document: the longest first, each to the rank that has the fewest tokens so far.

    [8, 2, 6, 4] over 2 ranks: [0, 0, 1, 1].
    """
    loads = [(0, rank) for rank in range(num_ranks)]
    owners = [0] * len(lens)
    for document in sorted(range(len(lens)), key=lambda i: -lens[i]):
        load, rank = heapq.heappop(loads)
        owners[document] = rank
        heapq.heappush(loads, (load + lens[document], rank))
    return owners
