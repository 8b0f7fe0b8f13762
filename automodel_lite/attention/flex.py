"""torch's FlexAttention: softcap and attention sinks on the GPU (no backward on CPU).

Legend: T tokens, H heads, D head dim.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from automodel_lite.attention.kernel import AttentionSpec, refuse_own_exchange, require_cuda


class FlexAttention:
    """`flex_attention`, compiled on CUDA; one block mask per batch and window, shared by all layers."""

    name = "thd_flex"  # "flex_attention" inside of a name makes transformers build a mask

    def __init__(self) -> None:
        self._compiled = torch.compile(flex_attention, dynamic=True)
        self._masks: dict[int | None, tuple[weakref.ref[Tensor], BlockMask]] = {}

    def check(self, spec: AttentionSpec) -> None:
        """Raises ConfigError off CUDA: on CPU it has no backward."""
        require_cuda(self, spec)
        refuse_own_exchange(self, spec)

    def __call__(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `AttentionKernel`."""
        attend = self._compiled if q_THD.is_cuda else flex_attention
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD))
        out, aux = attend(
            q,
            k,
            v,
            score_mod=None if softcap is None else _softcap(softcap),
            block_mask=self._block_mask(cu_q, cu_k, len(q_THD), len(k_THD), window),
            scale=scale,
            enable_gqa=q_THD.shape[1] != k_THD.shape[1],
            return_aux=AuxRequest(lse=True),  # type: ignore[arg-type]
        )
        if sinks is not None:  # softmax with one extra logit = softmax * sigmoid(lse - logit)
            out = out * torch.sigmoid(aux.lse - sinks.view(1, -1, 1))[..., None].to(out.dtype)
        return out[0].transpose(0, 1)

    def _block_mask(self, cu_q: Tensor, cu_k: Tensor, num_q: int, num_k: int, window: int | None) -> BlockMask:
        """The mask of this batch; made by its first layer of each window, found by the identity of its boundaries."""
        known = self._masks.get(window)
        if known is not None and known[0]() is cu_q:
            return known[1]
        mask = create_block_mask(_visible(cu_q, cu_k, num_q, num_k, window), None, None, num_q, num_k, cu_q.device)
        self._masks[window] = (weakref.ref(cu_q), mask)
        return mask


def _visible(cu_q: Tensor, cu_k: Tensor, num_q: int, num_k: int, window: int | None) -> Callable[..., Tensor]:
    """mask_mod of segments: same segment, causal bottom right, inside of the window."""
    segment_q = torch.bucketize(torch.arange(num_q, device=cu_q.device), cu_q[1:], right=True)
    segment_k = torch.bucketize(torch.arange(num_k, device=cu_k.device), cu_k[1:], right=True)
    shift = (cu_k[1:] - cu_q[1:])[segment_q]  # query index -> index of the key that it sits on

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i + shift[i] - j
        visible = (segment_q[i] == segment_k[j]) & (distance >= 0)
        return visible if window is None else visible & (distance < window)

    return mask_mod


def _softcap(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod
