"""What context-parallel ranks exchange around the kernel of each attention layer.

AllGatherKV        every rank keeps its queries and gathers everybody's keys and values; a run of queries gets the
                   prefix of its document as keys. Volume does not grow with the number of query heads: the default.
Ulysses            all-to-all: every rank gets all tokens of Hq / cp heads, the kernel sees plain packing. Less volume
                   than the all-gather when cp > (Hq + Hkv) / Hkv.
Ring               (ring.py) keys and values travel from rank to rank behind the attention: the least memory.
TransformerEngine  the `te` kernel exchanges by itself (p2p ring, all-gather or all-to-all).

The autograd functions are our own: torch.distributed.nn.functional.all_gather gave wrong gradients on gloo for
non-contiguous ones, with the loss right to 12 digits. Nothing here waits for the device.

Legend: T tokens of the whole stream, H heads (Hq queries, Hkv keys and values), D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_lite.errors import ConfigError
from automodel_lite.thd import AttentionOptions, Segments

if torch.__version__ >= "2.13":  # compared as versions; 2.13 renamed both and warns about the old names
    all_gather_rows, reduce_scatter_rows = dist.all_gather_single, dist.reduce_scatter_single
else:
    all_gather_rows, reduce_scatter_rows = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


class AllGatherRows(torch.autograd.Function):
    """[T / cp, F] of each rank -> [T, F] in rank order; backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
        all_gather_rows(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        own = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        reduce_scatter_rows(own, grad.contiguous(), group=ctx.group)
        return own, None


class AllToAll(torch.autograd.Function):
    """[cp, ...] -> [cp, ...]: slice i goes to rank i. Its own inverse and its own adjoint."""

    @staticmethod
    def forward(ctx: Any, slices: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(slices, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, slices.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return AllToAll.apply(grad, ctx.group), None


class SelectRows(torch.autograd.Function):
    """rows[taken]; the gradient is a selection too, where that of index_select adds row by row, atomically on a GPU.

    places  int64 [n, rows]: where each row went, at most n times; for n > 1, len(taken) is nowhere
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, taken: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return rows.index_select(0, taken)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        if len(places) > 1:
            grad = torch.cat([grad, torch.zeros_like(grad[:1])])
        first, *others = (grad.index_select(0, place) for place in places)
        for other in others:
            first += other
        return first, None, None


@dataclass(frozen=True)
class AllGatherKV:
    """Gathers keys and values in one collective; one row selection reorders them and cuts the document prefixes.

    key_rows  int64 [Tk]: rows of the rank-ordered gathered keys, one document prefix after the other
    places    int64 [2, T]: where a gathered row went, in the early and in the late prefix of its document; Tk = nowhere
    """

    group: dist.ProcessGroup
    key_rows: Tensor
    places: Tensor

    def attend(
        self,
        kernel: Callable[..., Tensor],
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        segments: Segments,
        options: AttentionOptions,
    ) -> Tensor:
        """See `Exchange`."""
        kv = torch.cat([k_THD.flatten(1), v_THD.flatten(1)], 1)
        kv = SelectRows.apply(AllGatherRows.apply(kv, self.group), self.key_rows, self.places)
        k, v = kv.split([k_THD[0].numel(), v_THD[0].numel()], 1)
        k, v = k.unflatten(1, k_THD.shape[1:]), v.unflatten(1, v_THD.shape[1:])
        return kernel(q_THD, k, v, segments, options)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> AllGatherKV:
        return replace(self, key_rows=function(self.key_rows), places=function(self.places))


@dataclass(frozen=True)
class Ulysses:
    """Trades tokens for heads and back; one all-to-all for q, k and v together, one for the output.

    to_stream  int64 [T]: row of the rank-ordered stream that each position of the stream takes
    to_ranks   int64 [T]: its inverse
    """

    group: dist.ProcessGroup
    to_stream: Tensor
    to_ranks: Tensor

    def attend(
        self,
        kernel: Callable[..., Tensor],
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        segments: Segments,
        options: AttentionOptions,
    ) -> Tensor:
        """See `Exchange`. The kernel gets [T, Hq / cp, D] and [T, max(Hkv / cp, 1), D].

        Raises ConfigError when cp does not divide the query heads, or neither of cp and Hkv divides the other.
        """
        cp = self.group.size()
        num_heads, num_kv_heads = q_THD.shape[1], k_THD.shape[1]
        check_heads_divide(cp, num_heads, num_kv_heads)
        if num_kv_heads < cp:
            k_THD, v_THD = (x.repeat_interleave(cp // num_kv_heads, 1) for x in (k_THD, v_THD))
        by_rank = [x.unflatten(1, (cp, -1)).transpose(0, 1) for x in (q_THD, k_THD, v_THD)]  # [cp, T/cp, H/cp, D]
        sent = torch.cat([x.flatten(2) for x in by_rank], 2)
        received = AllToAll.apply(sent, self.group).flatten(0, 1)
        rows = SelectRows.apply(received, self.to_stream, self.to_ranks[None])
        q, k, v = (
            part.unflatten(1, x.shape[2:])
            for part, x in zip(rows.split([x[0, 0].numel() for x in by_rank], 1), by_rank)
        )
        if options.sinks is not None:
            options = replace(options, sinks=options.sinks.chunk(cp)[self.group.rank()])
        out = kernel(q, k, v, segments, options)
        slices = SelectRows.apply(out, self.to_ranks, self.to_stream[None]).unflatten(0, (cp, -1))
        return AllToAll.apply(slices, self.group).transpose(0, 1).flatten(1, 2)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Ulysses:
        return replace(self, to_stream=function(self.to_stream), to_ranks=function(self.to_ranks))


@dataclass(frozen=True)
class TransformerEngine:
    """Hands the group to the `te` kernel, which wants the padded boundaries of the whole stream on every rank."""

    group: dist.ProcessGroup

    def attend(
        self,
        kernel: Callable[..., Tensor],
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        segments: Segments,
        options: AttentionOptions,
    ) -> Tensor:
        """See `Exchange`."""
        return kernel(q_THD, k_THD, v_THD, segments, options, cp_group=self.group)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> TransformerEngine:
        return self


def heads_divide(cp_size: int, num_heads: int, num_kv_heads: int) -> bool:
    """Can an all-to-all deal these heads out to `cp_size` ranks?"""
    return num_heads % cp_size == 0 and (num_kv_heads % cp_size == 0 or cp_size % num_kv_heads == 0)


def check_heads_divide(cp_size: int, num_heads: int, num_kv_heads: int) -> None:
    """Raises ConfigError for heads that an all-to-all cannot distribute to `cp_size` ranks."""
    if not heads_divide(cp_size, num_heads, num_kv_heads):
        raise ConfigError(
            f"mesh.cp={cp_size} with mesh.cp_exchange=all_to_all must divide the {num_heads} query heads, and divide "
            f"or be divided by the {num_kv_heads} key/value heads: take mesh.cp_exchange=all_gather, which need not."
        )
