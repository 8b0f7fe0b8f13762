"""What context-parallel ranks exchange around a layer that mixes tokens in other ways than
attention.

One of two: all-to-all of heads or channels, as `Ulysses`; or every rank gets whole documents,
shared by length. That is for mixers whose heads do not divide, or whose inner functions are
unknown. A document is never cut, so the longest one bounds what more ranks can save.

Legend: T tokens of the whole stream, T' tokens of the documents that a rank owns, C features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from automodel_lite.document_rows import DocumentRows, document_rows
from automodel_lite.parallel.document_owners import document_owners
from automodel_lite.parallel.exchange import AllToAll, Heads, SelectRows
from automodel_lite.parallel.zigzag import (
    inverse_permutation,
    rank_order,
)
from automodel_lite.prefix_trees import concatenated_ranges, find_nodes
from automodel_lite.thd import ThdBatch


@dataclass(frozen=True)
class OwnedDocumentMixers(Heads):
    """See `MixerExchange`.

    owned      the documents that this rank mixes when whole documents are distributed, as rows of
               [T']
    send       int64 [T / cp]: this rank's tokens in the order of their documents' owners
    arrange    int64 [T']: place among the received rows of each token of the owned documents, one
               after the other
    unsend, unarrange      their inverses
    counts_out, counts_in  tokens that go to each rank, and come from it
    """

    owned: DocumentRows
    send: Tensor
    unsend: Tensor
    arrange: Tensor
    unarrange: Tensor
    counts_out: list[int]
    counts_in: list[int]

    def own(self, x_T: Tensor) -> Tensor:
        return x_T.index_select(0, self.to_ranks.view(self.size, -1)[self.group.rank()])

    def summed(self, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def map_rows(self, mix: Callable[[list[Tensor]], Tensor], streams: Sequence[Tensor]) -> Tensor:
        owned = []
        for x_TC in streams:
            sent = SelectRows.apply(x_TC, self.send, self.unsend[None])
            received = AllToAll.apply(sent, self.group, (self.counts_out, self.counts_in))
            if len(received):
                owned.append(SelectRows.apply(received, self.arrange, self.unarrange[None]))
            else:
                # a rank without a document mixes one token of zeros, so that its weights have
                # gradients
                owned.append(F.pad(received, (0,) * (2 * received.ndim - 1) + (1,)))
        mixed = self.owned.map_rows(mix, owned)
        # and back, the same way
        rows = SelectRows.apply(mixed, self.unarrange, self.arrange[None])
        received = AllToAll.apply(rows, self.group, (self.counts_in, self.counts_out))
        return SelectRows.apply(received, self.unsend, self.send[None])


def assign_mixers(
    batch: ThdBatch, group: dist.ProcessGroup, cp_size: int, cp_rank: int
) -> OwnedDocumentMixers:
    """The exchange of rank `cp_rank`, for a batch that is not sharded yet."""
    cu_seqlens = batch.cu_seqlens_padded
    to_ranks = rank_order(cu_seqlens, cp_size)
    lens = cu_seqlens.diff().long()
    owners = document_owners(lens.tolist(), cp_size)
    # of each rank's local tokens
    owner = torch.tensor(owners).repeat_interleave(lens)[to_ranks].view(cp_size, -1)
    send = owner[cp_rank].argsort(stable=True)
    to_me = owner == cp_rank
    mine = torch.tensor([rank == cp_rank for rank in owners])
    received = to_ranks.view(cp_size, -1)[to_me]
    place = torch.empty_like(to_ranks)
    place[received] = torch.arange(len(received))
    of_owned = concatenated_ranges(cu_seqlens[:-1].long()[mine], cu_seqlens[1:].long()[mine])
    arrange = place[of_owned]
    cu_owned = F.pad(lens[mine].cumsum(0), (1, 0))
    nodes = find_nodes(cu_owned, batch.position_ids[of_owned], batch.cu_seqlens.diff()[mine])
    return OwnedDocumentMixers(
        group=group,
        to_stream=inverse_permutation(to_ranks),
        to_ranks=to_ranks,
        owned=document_rows(cu_owned, nodes),
        send=send,
        unsend=inverse_permutation(send),
        arrange=arrange,
        unarrange=inverse_permutation(arrange),
        counts_out=torch.bincount(owner[cp_rank], minlength=cp_size).tolist(),
        counts_in=to_me.sum(1).tolist(),
    )
