"""torch's FlexAttention: softcap and attention sinks on the GPU (no backward on CPU).

Legend: T tokens, H heads, D head dim.

The kernel exists only compiled: uncompiled, `flex_attention` holds [H, T, T] scores. So the graph
is traced whole (`fullgraph`), and one graph too many is an error, never the uncompiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.weak import WeakTensorKeyDictionary

from automodel_lite.attention.kernel import RepeatedBlocks, refuse, require_cuda
from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.graphs import compiled
from automodel_lite.thd import AttentionInputs, AttentionOptions, Segments, TreeKeys

LEAST_HEAD_DIM = 16  # of the compiled kernel: with fewer, compiling it fails
BLOCK = 128  # tokens of a block of the mask: flex_attention's own default


class FlexAttention(RepeatedBlocks):
    """`flex_attention`, compiled on CUDA; one block mask per batch and window, shared by all
    layers.

    compiled_attention  None compiles on CUDA only; a compiled `flex_attention` is called on every
                        device
    """

    name = "thd_flex"  # "flex_attention" inside a name makes transformers build a mask

    def __init__(self, compiled_attention: Callable[..., Any] | None = None) -> None:
        self._compiled = compiled_attention or compiled(flex_attention)
        self._compiled_devices = ("cuda",) if compiled_attention is None else ("cuda", "cpu")
        self._masks: MutableMapping[Tensor, dict[tuple[Any, ...], BlockMask]] = (
            WeakTensorKeyDictionary()
        )

    def check(self, spec: AttentionSpec) -> None:
        """Raises ConfigError off CUDA, where it has no backward, and for heads that are too narrow
        for its kernel.
        """
        require_cuda(self, spec, half=False)
        if min(spec.head_dim, spec.value_head_dim) < LEAST_HEAD_DIM:
            dims = f"head dims {spec.head_dim} / {spec.value_head_dim}"
            cure = f"its kernel needs at least {LEAST_HEAD_DIM}, use attention=reference"
            raise refuse(self, dims, cure)

    def __call__(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        segments: Segments,
        options: AttentionOptions,
    ) -> Tensor:
        """See `AttentionKernel`."""
        inputs = AttentionInputs(q_THD, k_THD, v_THD, segments, options)
        return self._with_sinks(
            *self._attend(inputs, self._mask_of(inputs, options.window, True)), options
        )

    def attend_tree(self, inputs: AttentionInputs, tree: TreeKeys) -> Tensor:
        """See `TreeKernel`."""
        window = inputs.options.window
        places = tree.position
        own = torch.arange(len(places), device=places.device)
        mask = self._known(
            tree.until, (window,), lambda: block_mask(own, tree.until, places, places, window)
        )
        return self._with_sinks(*self._attend(inputs, mask), inputs.options)

    def attend_ahead(self, inputs: AttentionInputs, reach: Tensor) -> Tensor:
        """See `AheadKernel`."""
        cu_q, cu_k, *_ = inputs.segments
        kind = (len(inputs.q), len(inputs.k), inputs.options.window)
        mask = self._known(
            cu_q, (*kind, "ahead"), lambda: packed_block_mask(cu_q, cu_k, *kind, reach=reach)
        )
        return self._with_sinks(*self._attend(inputs, mask), inputs.options)

    def block(self, inputs: AttentionInputs, causal: bool) -> tuple[Tensor, Tensor]:
        """See `BlockKernel`."""
        return self._attend(inputs, self._mask_of(inputs, None, causal))

    def _with_sinks(self, out_THD: Tensor, lse_TH: Tensor, options: AttentionOptions) -> Tensor:
        if options.sinks is None:
            return out_THD
        # softmax with one extra logit = softmax * sigmoid(lse - logit)
        return out_THD * torch.sigmoid(lse_TH - options.sinks)[..., None].to(out_THD.dtype)

    def _attend(self, inputs: AttentionInputs, mask: BlockMask) -> tuple[Tensor, Tensor]:
        """Returns the output [Tq, Hq, Dv] and the log-sum-exp [Tq, Hq]."""
        *qkv, _, options = inputs
        # Below one block the start-up probes would compile kernels, 5 to 10 s each, that training
        # never calls.
        is_compiled = qkv[0].device.type in self._compiled_devices and len(qkv[0]) >= BLOCK
        attend: Any = self._compiled if is_compiled else flex_attention
        cap = options.softcap
        out, aux = attend(
            *(x.transpose(0, 1)[None] for x in qkv),
            score_mod=None
            if cap is None
            else (lambda score, b, h, i, j: cap * torch.tanh(score / cap)),
            block_mask=mask,
            scale=options.scale,
            enable_gqa=qkv[0].shape[1] != qkv[1].shape[1],
            return_aux=AuxRequest(lse=True),
        )
        return out.squeeze(0).transpose(0, 1), aux.lse.squeeze(0).t()

    def _mask_of(self, inputs: AttentionInputs, window: int | None, causal: bool) -> BlockMask:
        cu_q, cu_k, *_ = inputs.segments
        kind = (len(inputs.q), len(inputs.k), window, causal)
        return self._known(cu_q, kind, lambda: packed_block_mask(cu_q, cu_k, *kind))

    def _known(
        self, boundaries: Tensor, kind: tuple[Any, ...], make: Callable[[], BlockMask]
    ) -> BlockMask:
        """Returns the mask that the first layer of a kind makes; others find it by the identity of
        its boundaries.
        """
        masks = self._masks.setdefault(boundaries, {})
        if kind not in masks:
            masks[kind] = make()
        return masks[kind]


def packed_block_mask(
    cu_q: Tensor,
    cu_k: Tensor,
    num_q: int,
    num_k: int,
    window: int | None,
    causal: bool = True,
    reach: Tensor | None = None,
) -> BlockMask:
    """Returns the mask of segments, from their boundaries and what a query may `reach` (see
    `AheadKernel`). A key is seen until its segment's queries end.
    """
    own, keys = (torch.arange(num, device=cu_q.device) for num in (num_q, num_k))
    segment_q, segment_k = (
        torch.bucketize(x, cu[1:], right=True) for x, cu in ((own, cu_q), (keys, cu_k))
    )
    if reach is not None:
        highest, at = (reach + cu_k[:-1][segment_q][:, None]).unbind(1)
    elif causal:
        highest = at = own + (cu_k[1:] - cu_q[1:])[segment_q]  # the key a query sits on
    else:
        highest = at = cu_k[1:][segment_q].long() - 1
    return block_mask(highest, cu_q[1:][segment_k], at, keys, window)


def block_mask(
    highest: Tensor, until: Tensor, at: Tensor, places: Tensor, window: int | None
) -> BlockMask:
    """Returns the blocks of 128 x 128 that hold visible pairs: (T / 128)^2 values at most, where
    `create_block_mask` holds 11 bytes x T^2 (11 GiB at 32,768 tokens). Reads nothing off the
    device.

    Query i sees key j if j <= highest[i] and i < until[j], and with a window if at[i] - places[j] <
    window. `highest` never falls: all tokens of an image see its last one. In a tree the places lie
    on the path: their distance is that of the two tokens in the row, however far apart the stream
    has them. A block is skipped where its first key is behind its last query, where its last key
    has expired before its first query, or where even the nearest pair of places is outside the
    window. A block too many is masked, not wrong.
    """
    first_q, last_q = _block_ends(len(highest), highest.device)
    first_k, last_k = _block_ends(len(until), until.device)
    # `highest` rises with the query: its ends in a block are its extremes there. The others do not.
    expires = _by_block(until)
    own = _by_block(at)
    others = _by_block(places)
    is_seen = (first_k <= highest[last_q][:, None]) & (expires.amax(1) > first_q[:, None])
    is_full = (last_k <= highest[first_q][:, None]) & (expires.amin(1) > last_q[:, None])
    if window is not None:
        is_seen &= own.amin(1)[:, None] - others.amax(1) < window
        is_full &= own.amax(1)[:, None] - others.amin(1) < window
    is_full &= (last_q - first_q == BLOCK - 1)[:, None] & (last_k - first_k == BLOCK - 1)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visible = (j <= highest[i]) & (i < until[j])
        return visible if window is None else visible & (at[i] - places[j] < window)

    partial = _ordered(is_seen & ~is_full)
    full = _ordered(is_full)
    sizes = (len(highest), len(until))
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=sizes
    )


def _by_block(x_T: Tensor) -> Tensor:
    """[T] -> [blocks, BLOCK]; the last value fills up the last block."""
    return torch.cat([x_T, x_T[-1:].expand(-len(x_T) % BLOCK)]).view(-1, BLOCK)


def _block_ends(num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and last token of each block."""
    first = torch.arange(0, num_tokens, BLOCK, device=device)
    return first, (first + BLOCK - 1).clamp(max=num_tokens - 1)


def _ordered(is_in: Tensor) -> tuple[Tensor, Tensor]:
    """bool [query blocks, key blocks] -> how many are in, and their indices first, as [1, 1, ...]
    int32.
    """
    indices = torch.argsort(is_in.to(torch.int8), dim=1, descending=True, stable=True)
    return is_in.sum(1, dtype=torch.int32)[None, None], indices.to(torch.int32)[None, None]
