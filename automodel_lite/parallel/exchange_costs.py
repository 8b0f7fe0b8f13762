"""What each context-parallel exchange sends and holds, and `mesh.cp_exchange=auto`: the fastest that holds little.

Bytes are counted, per rank and attention layer; tests count the same in the process group. Seconds are bytes over a
link's rate, less what travels behind the attention (ring): they rank the exchanges and promise no time.

    sent per layer                    forward                            backward
    all_gather                        (cp - 1) kv                        (cp - 1) kv
    ring                              (cp - 1) kv                        2 (cp - 1) kv, with the gradients
    all_to_all                        (cp - 1) / cp (q + kv' + out)      the same

of one rank's tokens: kv all key and value heads, kv' as many times repeated as cp needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from automodel_lite.attention.kernel import AttentionKernel, BlockKernel
from automodel_lite.attention.spec import LayerShape
from automodel_lite.parallel.exchange import heads_divide

MUCH_KV_GIB = 2.0
"""Gathered keys and values kept for the backward pass above which recomputing them is worth its time."""

MUCH_HELD = 2 * 2**30
"""Bytes by which an exchange may exceed the leanest before it counts as too large."""
NVLINK, NETWORK = 300e9, 50e9
"""Bytes per second of a GPU: inside a host (H100, half of its 900 GB/s each way, less overhead), and NDR InfiniBand."""
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
        sent, held = (f"{value / 2**20:,.3g} MiB" for value in (self.sent, self.held))
        return f"{self.name} sends {sent} per layer ({self.exposed_s * 1e3:.2g} ms not hidden), holds {held}"


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
    kernel: AttentionKernel, layers: Sequence[LayerShape], load: Load, is_one_host: bool
) -> tuple[str, str]:
    """The exchange that keeps the GPU waiting least, of those that hold little more than the leanest; and why.

    layers  of the whole model; a model without attention gets all_gather, which has nothing to do
    """
    attending = [layer for layer in layers if layer.num_heads]
    if not attending:
        return "all_gather", "no attention layers"
    names = ["all_gather"]
    if all(heads_divide(load.cp_size, layer.num_heads, layer.num_kv_heads) for layer in attending):
        names.append("all_to_all")
    if isinstance(kernel, BlockKernel):
        names.append("ring")
    costs = [exchange_cost(name, attending, load, NVLINK if is_one_host else NETWORK) for name in names]
    leanest = min(cost.held for cost in costs)
    best = min((cost for cost in costs if cost.held <= leanest + MUCH_HELD), key=lambda cost: cost.exposed_s)
    return best.name, "; ".join(str(cost) for cost in (best, *(cost for cost in costs if cost is not best)))


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
        f"mesh.cp={load.cp_size} keeps {gib:.1f} GiB of gathered keys and values on each rank until the backward pass: "
        "training.activation_checkpointing=full gathers them again instead, mesh.cp_exchange=ring never has them all."
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
