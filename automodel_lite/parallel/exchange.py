"""What context-parallel ranks exchange around the kernel of each attention layer, and around other
mixers.

AllGatherKV        every rank keeps its queries and gathers everybody's keys and values; a run of
                   queries gets the prefix of its document as keys. Volume does not grow with the
                   number of query heads: the default.
Ulysses            all-to-all: every rank gets all tokens of Hq / cp heads, the kernel sees plain
                   packing. Less volume than the all-gather when cp > (Hq + Hkv) / Hkv.
Ring               (parallel/ring.py) keys and values travel from rank to rank behind the
                   attention: the least memory.
MixerExchange      (parallel/mixer_exchange.py) of a layer that mixes tokens in other ways

All are exact. The autograd functions are our own: torch.distributed.nn.functional.all_gather gave
wrong gradients on gloo for non-contiguous ones, with the loss right to 12 digits. Nothing here
waits for the device.

`mesh.cp_exchange=auto` compares bytes per rank and attention layer; tests count them in the process
group.

    sent per layer                    forward                            backward
    all_gather                        (cp - 1) kv                        (cp - 1) kv
    ring                              (cp - 1) kv                        2 (cp - 1) kv, with the
                                      gradients
    all_to_all                        (cp - 1) / cp (q + kv' + out)      the same

of one rank's tokens: kv all key and value heads, kv' as many times repeated as cp needs.

Legend: T tokens of the whole stream, T' tokens of the documents that a rank owns, H heads (Hq
queries, Hkv keys and values) or channels, C features, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_lite.attention.kernel import AttentionKernel, BlockKernel, refuse
from automodel_lite.attention.spec import LayerShape
from automodel_lite.errors import ConfigError
from automodel_lite.parallel.turns import hand_over, takes_turns
from automodel_lite.tensors import Tensors
from automodel_lite.thd import AttentionInputs

# compared as versions; 2.13 renamed both and warns about the old names
if torch.__version__ >= "2.13":
    all_gather_rows = dist.all_gather_single
    reduce_scatter_rows = dist.reduce_scatter_single
else:
    all_gather_rows = dist.all_gather_into_tensor
    reduce_scatter_rows = dist.reduce_scatter_tensor


class AllGatherRows(torch.autograd.Function):
    """[T / cp, F] of each rank -> [T, F] in rank order; backward sums the gradients of
    all ranks.
    """

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
    """Rows of a tensor: the first counts[0][0] of them go to rank 0, and so on; counts[1][r] come
    from rank r. Without counts each rank sends and gets as many. Backward sends back what came.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        group: dist.ProcessGroup,
        counts: tuple[list[int], list[int]] | None = None,
    ) -> Tensor:
        counts_out, counts_in = counts or (None, None)
        ctx.group = group
        ctx.counts = counts and counts[::-1]
        received = rows.new_empty(
            len(rows) if counts_in is None else sum(counts_in), *rows.shape[1:]
        )
        work = dist.all_to_all_single(
            received, rows.contiguous(), counts_in, counts_out, group=group, async_op=takes_turns()
        )
        if work is not None:  # rows travel while another micro-batch computes
            hand_over()
            work.wait()
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return AllToAll.apply(grad, ctx.group, ctx.counts), None, None


class SelectRows(torch.autograd.Function):
    """rows[taken]; the gradient is a selection too, where that of index_select adds row by row,
    atomically on a GPU.

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
class AllGatherKV(Tensors):
    """Gathers keys and values in one collective; one row selection reorders them and cuts the
    document prefixes.

    key_rows  int64 [Tk]: rows of the rank-ordered gathered keys, one document prefix after the
              other
    places    int64 [2, T]: where a gathered row went, in the early and the late prefix of its
              document; Tk = nowhere; None where trees send a row to as many prefixes as they have
              branches
    """

    group: dist.ProcessGroup
    key_rows: Tensor
    places: Tensor | None

    def attend(self, kernel: Callable[..., Tensor], inputs: AttentionInputs) -> Tensor:
        """See `Exchange`."""
        kv = AllGatherRows.apply(joined(inputs.k, inputs.v), self.group)
        if self.places is None:
            rows = kv.index_select(0, self.key_rows)
        else:
            rows = SelectRows.apply(kv, self.key_rows, self.places)
        k, v = split(rows, inputs.k, inputs.v)
        return kernel(*inputs._replace(k=k, v=v))


def joined(k_THD: Tensor, v_THD: Tensor) -> Tensor:
    """[T / cp, F]: keys and values as one message."""
    return torch.cat([k_THD.flatten(1), v_THD.flatten(1)], 1)


def split(rows_TF: Tensor, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the heads and dims that `k_THD` and `v_THD` have."""
    k, v = rows_TF.split([k_THD[0].numel(), v_THD[0].numel()], 1)
    return k.unflatten(1, k_THD.shape[1:]), v.unflatten(1, v_THD.shape[1:])


@dataclass(frozen=True)
class Heads(Tensors):
    """Trades tokens for heads and back.

    to_stream  int64 [T]: row of the rank-ordered stream that each position of the stream takes
    to_ranks   int64 [T]: its inverse
    """

    group: dist.ProcessGroup
    to_stream: Tensor
    to_ranks: Tensor

    @property
    def size(self) -> int:
        return self.group.size()

    def to_heads(self, xs_TH: Sequence[Tensor]) -> list[Tensor]:
        """See `MixerExchange`. One collective for all tensors of a dtype: under autocast, gates and
        decays are fp32.
        """
        # [cp, T/cp, H/cp, ...]
        by_rank = [x.unflatten(1, (self.size, -1)).transpose(0, 1) for x in xs_TH]
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
        slices = SelectRows.apply(x_TH, self.to_ranks, self.to_stream[None]).unflatten(
            0, (self.size, -1)
        )
        return AllToAll.apply(slices, self.group).transpose(0, 1).flatten(1, 2)

    def part(self, weight: Tensor, dim: int) -> Tensor:
        return weight.chunk(self.size, dim)[self.group.rank()]


@dataclass(frozen=True)
class Ulysses(Heads):
    """One all-to-all for q, k and v together, one for the output."""

    def attend(self, kernel: Callable[..., Tensor], inputs: AttentionInputs) -> Tensor:
        """See `Exchange`. The kernel gets [T, Hq / cp, D] and [T, max(Hkv / cp, 1), D]."""
        q, k, v, _, options = inputs
        if k.shape[1] < self.size:
            k, v = (x.repeat_interleave(self.size // k.shape[1], 1) for x in (k, v))
        q, k, v = self.to_heads([q, k, v])
        if options.sinks is not None:
            options = replace(options, sinks=self.part(options.sinks, 0))
        return self.from_heads(kernel(q, k, v, inputs.segments, options))


MUCH_KV_GIB = 2.0
"""Gathered keys and values of one layer, while it runs, that are too many."""


def choose_exchange(
    wanted: str,
    kernel: AttentionKernel,
    layers: Sequence[LayerShape],
    num_tokens: int,
    cp_size: int,
    value_bytes: int,
) -> tuple[str, str]:
    """Returns the exchange that is `wanted`; for auto one that suits, and why.

    All-to-all where heads divide and it sends less than an all-gather, as it holds no keys of other
    ranks' heads; a ring where a layer's gathered keys would fill memory; else the all-gather, which
    works for every model.

    Raises ConfigError for an all-to-all of heads that do not divide, and a ring on a kernel without
    a log-sum-exp.
    """
    attending = [layer for layer in layers if layer.num_heads]
    uneven = [
        x
        for x in attending
        if x.num_heads % cp_size or (x.num_kv_heads % cp_size and cp_size % x.num_kv_heads)
    ]
    if wanted == "ring" and not isinstance(kernel, BlockKernel):
        cure = "use attention=varlen, flex or reference, or mesh.cp_exchange=all_gather"
        raise refuse(kernel, "mesh.cp_exchange=ring", cure)
    if wanted == "all_to_all" and uneven:
        raise ConfigError(
            f"mesh.cp={cp_size} with mesh.cp_exchange=all_to_all must divide the "
            f"{uneven[0].num_heads} query heads, and divide or be divided by the "
            f"{uneven[0].num_kv_heads} key/value heads: use mesh.cp_exchange=all_gather, which has "
            "no such limit."
        )
    if wanted != "auto":  # one of one's own among them
        return wanted, ""
    # where ranks outnumber the key heads, an all-to-all sends each of them to several ranks
    traded = sum(
        (x.num_heads + max(x.num_kv_heads, cp_size)) * (x.head_dim + x.value_head_dim)
        for x in attending
    )
    # of keys and values
    features = [x.num_kv_heads * (x.head_dim + x.value_head_dim) for x in attending]
    gathered = cp_size * sum(features)
    if traded < gathered and not uneven:
        return "all_to_all", f"it sends {traded / gathered:.2f} x the bytes of an all-gather"
    gib = max(features, default=0) * num_tokens * value_bytes / 2**30
    if gib > MUCH_KV_GIB and isinstance(kernel, BlockKernel):
        return "ring", f"an all-gather would hold {gib:.1f} GiB of keys and values in each layer"
    return "all_gather", f"it holds {gib:.2g} GiB of keys and values in each layer"
