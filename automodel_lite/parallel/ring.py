"""Ring exchange: keys and values travel from rank to rank while each rank attends to those that it
has.

A rank holds its own keys and values and those on the way, never all of them; the next ones arrive
while the kernel works. With the zig-zag layout every visit but the own one is half of the pairs,
and all of its pairs are visible:

    from an earlier rank   all queries of a document see its early chunk
    from a later rank      the queries of the late chunk see both chunks

The outputs of all visits are merged by their log-sum-exps. Layers that do not see whole documents
(windows, chunks) gather their keys as `AllGatherKV` does. (Ring attention: arXiv:2310.01889.)

Legend: T tokens of the whole stream, H heads (Hq queries, Hkv keys and values), D head dim, F
features of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_lite.attention.kernel import BlockKernel
from automodel_lite.parallel.exchange import AllGatherKV, joined, split
from automodel_lite.prefix_trees import concatenated_ranges
from automodel_lite.tensors import Tensors, at_least_fp32, cumulative, wide_dtype
from automodel_lite.thd import AttentionInputs, AttentionOptions, AttentionPlan, Segments


def ring_plan(gather: AllGatherKV, own: Segments, q_lens: Tensor, longest: int) -> AttentionPlan:
    """Returns the plan of a rank whose keys travel.

    gather   what layers do whose window ends within a chunk
    q_lens   int64 [2 N]: each document's early and late run on this rank, which are equally long
             and not empty
    longest  tokens of the longest document
    """
    lengths = q_lens.view(-1, 2)[:, 0]
    whole = cumulative(2 * lengths)
    starts = whole[:-1].long()
    around = Ring(
        group=gather.group,
        early=concatenated_ranges(starts, starts + lengths),
        late=concatenated_ranges(starts + lengths, starts + 2 * lengths),
        cu_whole=whole,
        cu_half=cumulative(lengths),
        max_half=int(lengths.max()),
        longest=longest,
        gather=gather,
    )
    return AttentionPlan(own._replace(max_k=longest), around)


@dataclass(frozen=True)
class Ring(Tensors):
    """Passes keys and values around the ranks of `group`.

    early, late  int64 [T / cp / 2]: the rank's rows of the early and of the late chunk of each
                 document
    cu_whole     int32 [N + 1]: boundaries of the documents among the rank's own tokens; cu_half: of
                 either chunk alone
    max_half     longest chunk, in tokens
    longest      longest document of the stream, in tokens, and `max_k` of the plan: the same on all
                 ranks, which must agree on the layers that gather
    gather       the exchange of layers that do not
    """

    group: dist.ProcessGroup
    early: Tensor
    late: Tensor
    cu_whole: Tensor
    cu_half: Tensor
    max_half: int
    longest: int
    gather: AllGatherKV

    def attend(self, kernel: Callable[..., Tensor], inputs: AttentionInputs) -> Tensor:
        """See `Exchange`."""
        window = inputs.options.window
        if inputs.segments.max_k < self.longest or (window is not None and window < self.longest):
            return self.gather.attend(kernel, inputs)
        assert isinstance(kernel, BlockKernel)
        of_blocks = replace(inputs.options, window=None, sinks=None)
        return _RingAttention.apply(*inputs[:3], inputs.options.sinks, self, kernel, of_blocks)

    def visit(self, source: int) -> tuple[Tensor | None, Tensor | None, Segments, bool]:
        """Returns what this rank attends to when the keys and values of rank `source` are here:
        rows of its queries and of the visiting keys (None = all), the segments over those rows, and
        whether they are causal.
        """
        rank = self.group.rank()
        max_whole = 2 * self.max_half
        if source == rank:
            return None, None, Segments(self.cu_whole, self.cu_whole, max_whole, max_whole), True
        if source < rank:
            return (
                None,
                self.early,
                Segments(self.cu_whole, self.cu_half, max_whole, self.max_half),
                False,
            )
        return (
            self.late,
            None,
            Segments(self.cu_half, self.cu_whole, self.max_half, max_whole),
            False,
        )


class _RingAttention(torch.autograd.Function):
    """Forward and backward each pass keys and values around once; gradients of the visitors travel
    on with them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        sinks: Tensor | None,
        ring: Ring,
        kernel: BlockKernel,
        options: AttentionOptions,
    ) -> Tensor:
        # Keys and values go round; queries, and the sum so far, stay. The softmax over all keys is
        # put together from those over each visitor's, by their log-sum-exp.
        wide = wide_dtype(q_THD.dtype)
        out = q_THD.new_zeros(*q_THD.shape[:2], v_THD.shape[2], dtype=wide)
        lse_TH = q_THD.new_full(q_THD.shape[:2], float("-inf"), dtype=wide)
        for source, kv in _passed_around(joined(k_THD, v_THD), ring.group):
            rows, k_rows, segments, causal = ring.visit(source)
            k, v = split(_rows(kv, k_rows), k_THD, v_THD)
            inputs = AttentionInputs(_rows(q_THD, rows), k, v, segments, options)
            of_visit, lse_of_visit = kernel.block(inputs, causal)
            # The shares of what was there and of the visit are 1 - x and x: taken from the rounded
            # log-sum-exp of both, their sum is off by its rounding, which adds up over the visits.
            old = _rows(out, rows)
            old_lse = _rows(lse_TH, rows)
            share = (lse_of_visit - old_lse).sigmoid()[..., None]
            old.mul_(1 - share).addcmul_(of_visit, share)
            new_lse = torch.logaddexp(old_lse, lse_of_visit)
            if rows is None:
                lse_TH.copy_(new_lse)
            else:
                out.index_copy_(0, rows, old)
                lse_TH.index_copy_(0, rows, new_lse)
        if sinks is not None:  # one more logit, without a value
            with_sinks = torch.logaddexp(lse_TH, sinks.to(lse_TH.dtype))
            out *= (lse_TH - with_sinks).exp()[..., None]
            lse_TH = with_sinks
        out = out.to(v_THD.dtype)
        ctx.save_for_backward(q_THD, k_THD, v_THD, sinks, out, lse_TH)
        ctx.ring = ring
        ctx.kernel = kernel
        ctx.options = options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_THD, v_THD, sinks, out, lse_TH = ctx.saved_tensors
        # Keys and values go round once more. Gradients of a visitor travel one step behind it: each
        # rank adds its part to what comes from the rank before, and the last one is the owner.
        grad_q = torch.zeros_like(q_THD, dtype=wide_dtype(q_THD.dtype))
        own: Tensor | None = None
        pending: _Pass | None = None
        for source, kv in _passed_around(joined(k_THD, v_THD), ctx.ring.group):
            rows, k_rows, segments, causal = ctx.ring.visit(source)
            k, v = split(_rows(kv, k_rows), k_THD, v_THD)
            inputs = AttentionInputs(_rows(q_THD, rows), k, v, segments, ctx.options)
            of_output = (_rows(x, rows) for x in (grad, out, lse_TH))
            dq, dk, dv = ctx.kernel.block_backward(inputs, causal, *of_output)
            if rows is None:
                grad_q += dq
            else:
                grad_q.index_add_(0, rows, dq.to(grad_q.dtype))
            of_visitor = joined(dk, dv)
            # of the rows that were not visited: zero
            if k_rows is not None:
                of_visitor = of_visitor.new_zeros(kv.shape).index_copy_(0, k_rows, of_visitor)
            if own is None:
                own = of_visitor
                continue
            if pending is not None:
                of_visitor += pending.wait()
            # half the bytes of fp32, for one rounding at each hop
            pending = _Pass(of_visitor.to(kv.dtype), ctx.ring.group)
        assert own is not None
        assert pending is not None
        own += pending.wait()
        dk, dv = split(own, k_THD, v_THD)
        # A sink is a logit without a value: minus its share of each query's softmax, by the dot
        # product of output and gradient.
        grad_sinks = None
        if sinks is not None:
            delta_TH = (at_least_fp32(grad) * at_least_fp32(out)).sum(-1)
            grad_sinks = (
                -((sinks.to(lse_TH.dtype) - lse_TH).exp() * delta_TH).sum(0).to(sinks.dtype)
            )
        return (
            grad_q.to(q_THD.dtype),
            dk.to(k_THD.dtype),
            dv.to(v_THD.dtype),
            grad_sinks,
            None,
            None,
            None,
        )


class _Pass:
    """A tensor on its way to the next rank, and the one that comes from the rank before."""

    def __init__(self, rows: Tensor, group: dist.ProcessGroup) -> None:
        self.sent = rows
        self.received = torch.empty_like(rows)  # held until it has arrived
        cp = group.size()
        rank = group.rank()
        to = [0] * cp
        of = [0] * cp
        to[(rank + 1) % cp] = of[(rank - 1) % cp] = len(rows)
        self.work = dist.all_to_all_single(self.received, rows, of, to, group=group, async_op=True)

    def wait(self) -> Tensor:
        self.work.wait()
        return self.received


def _passed_around(rows: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """(rank, its rows) of all ranks of the group, the own first; the next ones travel while the
    caller works.
    """
    cp = group.size()
    rank = group.rank()
    for hop in range(cp):
        following = _Pass(rows, group) if hop + 1 < cp else None
        yield (rank - hop) % cp, rows
        if following is not None:
            rows = following.wait()


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)
