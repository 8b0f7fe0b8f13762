"""torch's FlexAttention: softcap and attention sinks on the GPU (no backward on CPU).

Legend: T tokens, H heads, D head dim.

The kernel exists only compiled: uncompiled, `flex_attention` holds [H, T, T] scores. So the graph is traced whole
(`fullgraph`), and one graph too many is an error, never the uncompiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.weak import WeakTensorKeyDictionary

from automodel_lite.attention.kernel import refuse_own_exchange, require_cuda
from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.graphs import strict_graphs
from automodel_lite.thd import AttentionInputs, AttentionOptions, Segments, TreeKeys

BLOCK = 128  # tokens of a block of the mask: flex_attention's own default


def compiled_flex(backend: str = "inductor") -> Callable[..., Any]:
    """`flex_attention` as one graph; sizes that change become symbolic at their second value.

    Not `dynamic=True`: it makes scale and softcap symbolic, which torch 2.11 to 2.13 cannot trace with gradients.
    """
    strict_graphs()
    return torch.compile(flex_attention, fullgraph=True, backend=backend)


class FlexAttention:
    """`flex_attention`, compiled on CUDA; one block mask per batch and window, shared by all layers.

    compiled  None compiles on CUDA only; a compiled `flex_attention` is called on every device
    """

    name = "thd_flex"  # "flex_attention" inside a name makes transformers build a mask

    def __init__(self, compiled: Callable[..., Any] | None = None) -> None:
        self._compiled = compiled or compiled_flex()
        self._compiled_devices = ("cuda",) if compiled is None else ("cuda", "cpu")
        self._masks: MutableMapping[Tensor, dict[tuple[Any, ...], BlockMask]] = WeakTensorKeyDictionary()

    def check(self, spec: AttentionSpec) -> None:
        """Raises ConfigError off CUDA: on CPU it has no backward."""
        require_cuda(self, spec)
        refuse_own_exchange(self, spec)

    def __call__(
        self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, segments: Segments, options: AttentionOptions
    ) -> Tensor:
        """See `AttentionKernel`."""
        mask = self._block_mask(segments, len(q_THD), len(k_THD), options.window, causal=True)
        return self._with_sinks(*self._attend(q_THD, k_THD, v_THD, mask, options), options)

    def attend_tree(self, inputs: AttentionInputs, tree: TreeKeys) -> Tensor:
        """See `TreeKernel`."""
        q_THD, k_THD, v_THD, _, options = inputs
        masks = self._masks.setdefault(tree.until, {})
        kind = (options.window,)
        if kind not in masks:
            masks[kind] = tree_block_mask(tree.until, tree.position, options.window)
        return self._with_sinks(*self._attend(q_THD, k_THD, v_THD, masks[kind], options), options)

    def block(self, inputs: AttentionInputs, causal: bool) -> tuple[Tensor, Tensor]:
        """See `BlockKernel`."""
        q_THD, k_THD, v_THD, segments, options = inputs
        mask = self._block_mask(segments, len(q_THD), len(k_THD), None, causal)
        return self._attend(q_THD, k_THD, v_THD, mask, options)

    def block_backward(
        self, inputs: AttentionInputs, causal: bool, grad_THD: Tensor, out_THD: Tensor, lse_TH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel`: the block once more, and back through its share exp(lse_block - lse) of the output."""
        q, k, v = leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        with torch.enable_grad():
            of_block = self.block(inputs._replace(q=q, k=k, v=v), causal)
        share = (of_block[1].detach() - lse_TH).exp()[..., None]
        change = (grad_THD * (of_block[0].detach() - out_THD)).float().sum(-1, keepdim=True)
        grads = ((grad_THD * share).to(of_block[0].dtype), (share * change).squeeze(-1))
        dq, dk, dv = torch.autograd.grad(of_block, leaves, grads)
        return dq, dk, dv

    def _with_sinks(self, out_THD: Tensor, lse_TH: Tensor, options: AttentionOptions) -> Tensor:
        if options.sinks is None:
            return out_THD
        # softmax with one extra logit = softmax * sigmoid(lse - logit)
        return out_THD * torch.sigmoid(lse_TH - options.sinks)[..., None].to(out_THD.dtype)

    def _attend(
        self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, mask: BlockMask, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Output [Tq, Hq, Dv] and log-sum-exp [Tq, Hq]."""
        # below one block the start-up probes would compile kernels, 5 to 10 s each, that training never calls
        is_compiled = q_THD.device.type in self._compiled_devices and len(q_THD) >= BLOCK
        attend: Any = self._compiled if is_compiled else flex_attention
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD))
        out, aux = attend(
            q,
            k,
            v,
            score_mod=None if options.softcap is None else _softcap(options.softcap),
            block_mask=mask,
            scale=options.scale,
            enable_gqa=q_THD.shape[1] != k_THD.shape[1],
            return_aux=AuxRequest(lse=True),  # type: ignore[arg-type]
        )
        return out.squeeze(0).transpose(0, 1), aux.lse.squeeze(0).t()

    def _block_mask(self, segments: Segments, num_q: int, num_k: int, window: int | None, causal: bool) -> BlockMask:
        """Made by the first layer of each kind, found by the identity of its boundaries."""
        masks = self._masks.setdefault(segments.cu_q, {})
        kind = (num_q, num_k, window, causal)
        if kind not in masks:
            masks[kind] = packed_block_mask(segments.cu_q, segments.cu_k, num_q, num_k, window, causal)
        return masks[kind]


def packed_block_mask(
    cu_q: Tensor, cu_k: Tensor, num_q: int, num_k: int, window: int | None, causal: bool = True
) -> BlockMask:
    """The blocks of 128 x 128 that hold visible pairs, from the boundaries alone: (T / 128)^2 values at most, where
    `create_block_mask` holds 11 bytes x T^2 (11 GiB at 32,768 tokens). Reads nothing off the device.

    Query i sees keys lowest(i) to highest(i), and both rise with i: a block of queries sees at most what lies between
    the lowest key of its first row and the highest of its last. With a window a block may be taken in between two
    documents of which no key is visible: it is masked, not wrong.
    """
    segment_q, segment_k = _segments(cu_q, num_q), _segments(cu_k, num_k)
    if causal:
        highest = torch.arange(num_q, device=cu_q.device) + (cu_k[1:] - cu_q[1:])[segment_q]  # the key a query sits on
    else:
        highest = cu_k[1:][segment_q].long() - 1
    lowest = cu_k[segment_q].long()
    if window is not None:
        lowest = torch.maximum(lowest, highest - window + 1)
    first_q, last_q = _block_ends(num_q, cu_q.device)
    first_k, last_k = _block_ends(num_k, cu_k.device)
    is_seen = (first_k <= highest[last_q][:, None]) & (last_k >= lowest[first_q][:, None])
    is_one_document = segment_q[first_q] == segment_q[last_q]
    is_full = (first_k >= lowest[last_q][:, None]) & (last_k <= highest[first_q][:, None]) & is_one_document[:, None]
    is_full &= (last_q - first_q == BLOCK - 1)[:, None] & (last_k - first_k == BLOCK - 1)
    partial, full = _ordered(is_seen & ~is_full), _ordered(is_full)
    mask_mod = _visible(segment_q, segment_k, highest, window)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(num_q, num_k))


def tree_block_mask(until: Tensor, position: Tensor, window: int | None) -> BlockMask:
    """The mask of a stream with trees: query i sees key j if j <= i < until[j], and inside the window of their path.

    Positions lie on the path: their distance is that of the two tokens in the row, however far apart the stream has
    them. A block is skipped where its last key has expired before its first query, or where even the nearest pair of
    positions is outside the window. Plain documents among the trees are keys until the end of their document.
    """
    num_tokens = len(until)
    first, last = _block_ends(num_tokens, until.device)
    expires, places = _by_block(until), _by_block(position)
    is_seen = (first <= last[:, None]) & (expires.amax(1) > first[:, None])
    is_full = (last <= first[:, None]) & (expires.amin(1) > last[:, None])
    if window is not None:
        is_seen &= places.amin(1)[:, None] - places.amax(1) < window
        is_full &= places.amax(1)[:, None] - places.amin(1) < window
    is_full &= (last - first == BLOCK - 1)[:, None] & (last - first == BLOCK - 1)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visible = (j <= i) & (i < until[j])
        return visible if window is None else visible & (position[i] - position[j] < window)

    partial, full = _ordered(is_seen & ~is_full), _ordered(is_full)
    sizes = (num_tokens, num_tokens)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=sizes)


def _by_block(x_T: Tensor) -> Tensor:
    """[T] -> [blocks, BLOCK]; the last value fills up the last block."""
    return torch.cat([x_T, x_T[-1:].expand(-len(x_T) % BLOCK)]).view(-1, BLOCK)


def _segments(cu: Tensor, num_tokens: int) -> Tensor:
    """The document of each token."""
    return torch.bucketize(torch.arange(num_tokens, device=cu.device), cu[1:], right=True)


def _block_ends(num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and last token of each block."""
    first = torch.arange(0, num_tokens, BLOCK, device=device)
    return first, (first + BLOCK - 1).clamp(max=num_tokens - 1)


def _ordered(is_in: Tensor) -> tuple[Tensor, Tensor]:
    """bool [query blocks, key blocks] -> how many are in, and their indices first, as [1, 1, ...] int32."""
    indices = torch.argsort(is_in.to(torch.int8), dim=1, descending=True, stable=True)
    return is_in.sum(1, dtype=torch.int32)[None, None], indices.to(torch.int32)[None, None]


def _visible(segment_q: Tensor, segment_k: Tensor, highest: Tensor, window: int | None) -> Callable[..., Tensor]:
    """mask_mod of segments: same segment, causal bottom right, inside the window."""

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = highest[i] - j
        visible = (segment_q[i] == segment_k[j]) & (distance >= 0)
        return visible if window is None else visible & (distance < window)

    return mask_mod


def _softcap(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod
