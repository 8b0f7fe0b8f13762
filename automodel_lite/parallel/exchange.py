"""What context-parallel ranks exchange around the kernel of each attention layer.

AllGatherKV        every rank keeps its queries and gathers everybody's keys and values; a run of queries gets the
                   prefix of its document as keys. Volume does not grow with the number of query heads: the default.
Ulysses            all-to-all: every rank gets all tokens of Hq / cp heads, the kernel sees plain packing. Less volume
                   than the all-gather when cp > (Hq + Hkv) / Hkv.
Ring               (ring.py) keys and values travel from rank to rank behind the attention: the least memory.
TransformerEngine  the `te` kernel exchanges by itself (p2p ring, all-gather or all-to-all).

The autograd functions are our own: torch.distributed.nn.functional.all_gather gave wrong gradients on gloo for
non-contiguous ones, with the loss right to 12 digits. Nothing here waits for the device.

`mesh.cp_exchange=auto` takes the fastest that holds little. Bytes are counted, per rank and attention layer; tests
count the same in the process group. Seconds are bytes over a link's rate, less what travels behind the attention
(ring): they rank the exchanges and promise no time.

    sent per layer                    forward                            backward
    all_gather                        (cp - 1) kv                        (cp - 1) kv
    ring                              (cp - 1) kv                        2 (cp - 1) kv, with the gradients
    all_to_all                        (cp - 1) / cp (q + kv' + out)      the same

of one rank's tokens: kv all key and value heads, kv' as many times repeated as cp needs.

Legend: T tokens of the whole stream, H heads (Hq queries, Hkv keys and values), D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_lite.attention.kernel import AttentionKernel, BlockKernel
from automodel_lite.attention.spec import LayerShape
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
    """Passes the group to the `te` kernel, which needs the padded boundaries of the whole stream on every rank."""

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
            f"or be divided by the {num_kv_heads} key/value heads: use mesh.cp_exchange=all_gather, which has no "
            "such limit."
        )


MUCH_KV_GIB = 2.0
"""Gathered keys and values kept for the backward pass above which recomputing them is worth its time."""

MUCH_HELD = 2 * 2**30
"""Bytes by which an exchange may exceed the leanest before it counts as too large."""
NVLINK, NETWORK = 300.0, 50.0
"""GB/s of a GPU, assumed where mesh.cp_link_gb_per_s is null: inside a host (H100, half of its 900 GB/s each way, less
overhead), and NDR InfiniBand."""
FLOPS = 400e12
"""Of packed attention on an H100 in bf16."""
MEAN_TOKENS = 2048
"""Where nothing is known of the documents (a stream)."""


@dataclass(frozen=True)
class Load:
    """What is exchanged in one layer of one micro-batch.

    num_tokens  of the whole stream; document_tokens: of its mean document
    """

    num_tokens: int
    cp_size: int
    value_bytes: int
    document_tokens: float = MEAN_TOKENS


@dataclass(frozen=True)
class ExchangeCost:
    """Of one exchange: bytes that a layer sends forward and backward, seconds of them that attention does not hide,
    bytes held at the worst moment of a layer.
    """

    name: str
    sent: int
    exposed_s: float
    held: int

    def __str__(self) -> str:
        return f"{self.name} {self.sent / 2**20:,.3g}, {self.exposed_s * 1e3:.2g}, {self.held / 2**20:,.3g}"


def sent_bytes(exchange: str, layer: LayerShape, load: Load) -> tuple[int, int]:
    """Bytes that leave a rank in the forward and in the backward pass of one attention layer."""
    own = load.num_tokens // load.cp_size * load.value_bytes
    q, kv, out = _features(layer, 1)
    if exchange == "all_to_all":
        q, kv, out = _features(layer, load.cp_size)
        traded = own * (q + kv + out) * (load.cp_size - 1) // load.cp_size
        return traded, traded
    gathered = own * kv * (load.cp_size - 1)
    return gathered, gathered * (2 if exchange == "ring" and layer.window is None else 1)


def exchange_cost(exchange: str, layers: Sequence[LayerShape], load: Load, bytes_per_s: float) -> ExchangeCost:
    """Means over the attention layers, and the most that any of them holds."""
    layers = [layer for layer in layers if layer.num_heads]
    sent = [sent_bytes(exchange, layer, load) for layer in layers]
    exposed = [
        sum(parts) / bytes_per_s
        if exchange != "ring" or layer.window is not None
        else _ring_exposed_s(layer, load, parts, bytes_per_s)
        for layer, parts in zip(layers, sent)
    ]
    held = max(_held(exchange, layer, load) for layer in layers)
    total = sum(sum(parts) for parts in sent)
    return ExchangeCost(exchange, total // len(layers), sum(exposed) / len(layers), held)


def choose_exchange(
    kernel: AttentionKernel, layers: Sequence[LayerShape], load: Load, gb_per_s: float
) -> tuple[str, str]:
    """The exchange that keeps the GPU waiting least, of those that hold little more than the leanest; and why.

    layers    of the whole model; a model without attention gets all_gather, which has nothing to do
    gb_per_s  of a GPU's link to the others
    """
    attending = [layer for layer in layers if layer.num_heads]
    if not attending:
        return "all_gather", "no attention layers"
    names = ["all_gather"]
    if all(heads_divide(load.cp_size, layer.num_heads, layer.num_kv_heads) for layer in attending):
        names.append("all_to_all")
    if isinstance(kernel, BlockKernel):
        names.append("ring")
    costs = [exchange_cost(name, attending, load, gb_per_s * 1e9) for name in names]
    leanest = min(cost.held for cost in costs)
    best = min((cost for cost in costs if cost.held <= leanest + MUCH_HELD), key=lambda cost: cost.exposed_s)
    table = "; ".join(map(str, costs))
    return best.name, f"per layer MiB sent, ms waited for and MiB held by GPUs with {gb_per_s:g} GB/s: {table}"


def checkpointing_hint(layers: Sequence[LayerShape], load: Load, exchange: str) -> str | None:
    """A sentence when the gathered keys and values of all layers would fill memory until the backward pass.

    32 layers x 8 heads x (128 + 128) x 2 bytes x 131072 tokens = 16 GiB.
    """
    if load.cp_size == 1 or exchange != "all_gather":
        return None
    gib = sum(_features(layer, 1)[1] for layer in layers) * load.value_bytes * load.num_tokens / 2**30
    if gib < MUCH_KV_GIB:
        return None
    return (
        f"mesh.cp={load.cp_size} keeps {gib:.1f} GiB of gathered keys and values on each rank until the backward "
        "pass: training.activation_checkpointing=full gathers them again instead; mesh.cp_exchange=ring never holds "
        "all of them."
    )


def _features(layer: LayerShape, least_kv_heads: int) -> tuple[int, int, int]:
    """Values of a token: queries, keys with values, output."""
    kv_heads = max(layer.num_kv_heads, least_kv_heads)
    both = layer.head_dim + layer.value_head_dim
    return layer.num_heads * layer.head_dim, kv_heads * both, layer.num_heads * layer.value_head_dim


def _held(exchange: str, layer: LayerShape, load: Load) -> int:
    """all_gather: the document prefixes (about T rows), their gradient, and the gathered gradient. all_to_all: what was
    sent and received, with gradients. ring: two parts of keys and values, three of gradients, the fp32 output.
    """
    own = load.num_tokens // load.cp_size
    q, kv, out = _features(layer, load.cp_size if exchange == "all_to_all" else 1)
    if exchange == "all_to_all":
        return 2 * own * (q + kv + out) * load.value_bytes
    if exchange == "ring" and layer.window is None:
        return own * (5 * kv * load.value_bytes + 4 * out)
    return 3 * load.num_tokens * kv * load.value_bytes


def _ring_exposed_s(layer: LayerShape, load: Load, sent: tuple[int, int], bytes_per_s: float) -> float:
    """Of each hop, what its visit's attention does not hide: T s / (2 cp^2) pairs of documents of s tokens; 2 products
    forward and 5 backward.
    """
    hops, pairs = load.cp_size - 1, load.num_tokens * load.document_tokens / (2 * load.cp_size**2)
    product_s = pairs * layer.num_heads * (layer.head_dim + layer.value_head_dim) / FLOPS
    forward_s, backward_s = (part / hops / bytes_per_s for part in sent)
    return hops * (max(forward_s - 2 * product_s, 0.0) + max(backward_s - 5 * product_s, 0.0))
