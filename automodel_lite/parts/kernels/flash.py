"""The flash-attn package: `flash_attn_varlen_func` (CUDA, fp16 / bf16), softcap included.

On a torch that bundles FlashAttention-2 it brings no speed over the varlen kernel; it is there for
softcap, and for people who have it anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from automodel_lite.attention.kernel import refuse, require_cuda
from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.errors import ConfigError
from automodel_lite.thd import AttentionOptions, Segments

try:  # flash-attn-4 alone leaves an empty package of the same name
    from flash_attn import flash_attn_varlen_func
except ImportError:
    raise ConfigError(
        "attention=flash needs flash-attn: pip install --no-build-isolation "
        "'automodel-lite[flash]'."
    ) from None

LARGEST_HEAD_DIM = 256


class FlashAttention:
    """`flash_attn_varlen_func`; with training.deterministic its slower backward,
    without atomics.
    """

    name = "thd_fa2"  # "flash" inside a name makes transformers run checks of its own

    def check(self, spec: AttentionSpec) -> None:
        """Raises ConfigError off CUDA, outside fp16 / bf16, with sinks, for unusual head dims."""
        require_cuda(self, spec)
        if spec.sinks:
            raise refuse(self, f"the attention sinks of {spec.model_type}", "use attention=flex")
        if spec.head_dim != spec.value_head_dim or spec.head_dim > LARGEST_HEAD_DIM:
            dims = f"head dims {spec.head_dim} / {spec.value_head_dim}"
            raise refuse(
                self, dims, f"they must be equal and at most {LARGEST_HEAD_DIM}, use attention=te"
            )

    def __call__(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        segments: Segments,
        options: AttentionOptions,
    ) -> Tensor:
        """See `AttentionKernel`."""
        if options.sinks is not None:
            raise refuse(self, "attention sinks", "use attention=flex")
        window = options.window
        return flash_attn_varlen_func(
            q_THD,
            k_THD,
            v_THD,
            cu_seqlens_q=segments.cu_q,
            cu_seqlens_k=segments.cu_k,
            max_seqlen_q=max(segments.max_q, 2),  # 1 would select the decode path
            max_seqlen_k=max(segments.max_k, 2),
            softmax_scale=options.scale,
            causal=True,  # bottom right since flash-attn 2.1
            # (w, 0) sees w keys besides the query's own
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=0.0 if options.softcap is None else options.softcap,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
