"""Sends tokens to the ranks of their experts and brings the results back (mesh.ep).

    routing -> counts -> exchange of counts -> host    (the host waits for these numbers alone)
                sort  -> gather of the rows to send    (what the device computes meanwhile)
    exchange of rows -> experts -> exchange back -> weighted sum over a token's slots

The host has to know how many rows come, which depends on the routing of this layer; but the device
need not run dry for it. Counts are exchanged and copied on a stream of their own (row_counts.py)
before tokens are sorted and gathered, so that the device still has work when the host has read them
and launches the exchange. transformers' own dispatch reads behind all that, and the device is idle
from then until the next launch.

A layer that is recomputed takes order and sizes from its first run: nothing is sorted, exchanged
or read again. The backward pass sends back what came, by the same sizes.

Legend: T tokens, K slots of a token (its choices of an expert), S = T * K rows to send, R rows that
come, W ranks, E experts of a rank, C model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

from automodel_lite.models.layers import local, once
from automodel_lite.parallel import row_counts
from automodel_lite.parallel.exchange import AllToAll


class Routes:
    """Where the rows of a layer go, and where those that come are from.

    order_S  the slot of each row that is sent: sorted by expert, so by rank
    """

    def __init__(self, experts_TK: Tensor, num_experts: int, group: dist.ProcessGroup) -> None:
        ids_S = experts_TK.reshape(-1)
        counts_WE = ids_S.new_zeros(group.size() * num_experts)
        counts_WE.scatter_add_(0, ids_S, torch.ones_like(ids_S))
        self._come_WE, self._read = row_counts.exchange_counts(
            counts_WE.view(-1, num_experts), group
        )
        self.order_S = torch.argsort(ids_S)

    @cached_property
    def sizes(self) -> tuple[list[int], list[int]]:
        """The numbers of rows to each rank, and from each; the host waits for the first reading."""
        num_out, num_in = self._read()
        del self._read  # and its pinned memory: the next layer's counts go there
        return num_out, num_in

    @cached_property
    def expert_R1(self) -> Tensor:
        """This rank's expert of each row that comes."""
        num_ranks, num_experts = self._come_WE.shape
        experts = torch.arange(num_experts, device=self._come_WE.device).repeat(num_ranks)
        num_rows = sum(self.sizes[1])
        return experts.repeat_interleave(self._come_WE.reshape(-1), output_size=num_rows)[:, None]


class ExpertDispatch:
    """The forward of a module of stacked experts, of which this rank has its own.

    experts  with the forward for its own experts, before transformers' engine has replaced it
    tp       ranks with the same tokens, of which each sends its part
    """

    def __init__(self, experts: nn.Module, ep: DeviceMesh, tp: DeviceMesh) -> None:
        self.experts = experts
        self.compute: Callable[..., Tensor] = experts.forward
        self.ep = ep
        self.tp = tp
        self.of_engine: Callable[..., Tensor] | None = None

    def install(self) -> None:
        """Replaces the forward of transformers' engine; without gradients, ranks that all have the
        same tokens keep it: it sums results and sends no row.
        """
        tp_ranks = dist.get_process_group_ranks(self.tp.get_group())
        if tp_ranks == dist.get_process_group_ranks(self.ep.get_group()):
            self.of_engine = self.experts.forward
        self.experts.forward = self  # type: ignore[method-assign]

    def __call__(self, hidden_TC: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        has_gradient = torch.is_grad_enabled() and hidden_TC.requires_grad
        if self.of_engine is not None and not has_gradient:
            return self.of_engine(hidden_TC, experts_TK, weights_TK)
        hidden_TC = local(hidden_TC)
        weights_TK = local(weights_TK)
        num_tokens = len(hidden_TC)
        if self.tp.size() > 1:
            hidden_TC, experts_TK, weights_TK = (
                self._own_part(x) for x in (hidden_TC, experts_TK, weights_TK)
            )
        rows_RC, routes = self._dispatch(hidden_TC, experts_TK)
        # FSDP has gathered weights, which are local tensors of this rank's experts in here.
        with EpDispatchExpertsParallel().context_around_forward(self.experts, self.ep):
            out_RC = self._compute(rows_RC, routes.expert_R1)
        out_TC = self._combine(out_RC, weights_TK, routes)
        if self.tp.size() > 1:
            out_TC = self._of_all_parts(out_TC, num_tokens)
        return out_TC.to(hidden_TC.dtype)

    # between collectives and the host's reading, a graph would be one of a few small kernels
    @torch.compiler.disable
    def _dispatch(self, hidden_TC: Tensor, experts_TK: Tensor) -> tuple[Tensor, Routes]:
        """Sends each slot's token to the rank of its expert; returns the rows that came."""
        own: Any = self.experts
        group = self.ep.get_group()
        routes = once(partial(Routes, experts_TK, own.num_experts, group))
        # gathered before the host waits for the sizes
        rows_SC = hidden_TC[routes.order_S // experts_TK.shape[-1]]
        return AllToAll.apply(rows_SC, group, routes.sizes), routes

    def _compute(self, rows_RC: Tensor, expert_R1: Tensor) -> Tensor:
        """Computes the experts' results with weights of 1: a token's own are on its rank."""
        if len(rows_RC):
            return self.compute(rows_RC, expert_R1, torch.ones_like(expert_R1, dtype=rows_RC.dtype))
        # No row, but the backward pass has to come through here: other ranks wait for its exchange,
        # and for FSDP's reduction.
        none_1C = rows_RC.sum(dim=0, keepdim=True)
        return self.compute(none_1C, expert_R1.new_zeros(1, 1), none_1C.new_ones(1, 1))[:0]

    def _combine(self, out_RC: Tensor, weights_TK: Tensor, routes: Routes) -> Tensor:
        """Brings results back and sums each token's, weighted."""
        back_SC = AllToAll.apply(out_RC, self.ep.get_group(), routes.sizes[::-1])
        slots_SC = torch.empty_like(back_SC)
        slots_SC[routes.order_S] = back_SC
        slots_TKC = slots_SC.view(*weights_TK.shape, out_RC.shape[-1])
        return (slots_TKC * weights_TK[..., None]).sum(dim=1)

    def _own_part(self, x: Tensor) -> Tensor:
        """Returns this rank's rows of what all tp ranks have; their gradients are gathered."""
        whole = DTensor.from_local(x, self.tp, [Replicate()], run_check=False)
        return whole.redistribute(self.tp, [Shard(0)]).to_local()

    def _of_all_parts(self, out_TC: Tensor, num_tokens: int) -> Tensor:
        width = out_TC.shape[-1]
        part = DTensor.from_local(
            out_TC.contiguous(),
            self.tp,
            [Shard(0)],
            shape=torch.Size((num_tokens, width)),
            stride=(width, 1),
        )
        return part.full_tensor()
