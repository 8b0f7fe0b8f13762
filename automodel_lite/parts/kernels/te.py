"""Transformer Engine's `DotProductAttention` in THD format (CUDA, fp16 / bf16), for latent
attention's heads too.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import MutableMapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from automodel_lite.attention.kernel import refuse, require_cuda
from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.errors import ConfigError
from automodel_lite.thd import AttentionOptions, Segments

if find_spec("transformer_engine") is None:
    raise ConfigError(
        "attention=te needs Transformer Engine",
        key="attention",
        cure="pip install --no-build-isolation 'automodel-lite[te]'",
    )

# Where no kernel fits, Transformer Engine pads documents to the longest and holds the scores of all
# of them, 128 GiB for 32 of 8,192 tokens: without this fallback it says that none fits.
os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")

from transformer_engine.pytorch.attention import DotProductAttention

LARGEST_HEAD_DIM = 256
DOCUMENTS_STEP = 32
"""cuDNN (9.24 and later) builds a graph for each number of documents: boundaries are filled up with
empty ones.
"""


class TransformerEngineAttention:
    """`DotProductAttention`, one module for each shape of heads: it has no parameters, so layers
    share it.
    """

    name = "thd_te"

    def __init__(self) -> None:
        self.has_flash = find_spec("flash_attn") is not None
        self.has_softcap = "softcap" in inspect.signature(DotProductAttention.__init__).parameters
        self._modules: dict[tuple[Any, ...], nn.Module] = {}
        self._filled: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def check(self, spec: AttentionSpec) -> None:
        """Raises ConfigError off CUDA, outside fp16 / bf16, with sinks, and for what this version
        cannot do on this GPU: without flash-attn only cuDNN is left, which has no softcap, and THD
        from compute capability 9.0 on.
        """
        require_cuda(self, spec)
        if spec.sinks:
            raise refuse(self, f"the attention sinks of {spec.model_type}", "use attention=flex")
        if spec.softcap is not None and not self.has_softcap:
            raise refuse(
                self, f"the softcap of {spec.model_type} in this version", "use attention=flex"
            )
        if max(spec.head_dim, spec.value_head_dim) > LARGEST_HEAD_DIM:
            dims = f"head dims {spec.head_dim} / {spec.value_head_dim}"
            cure = f"at most {LARGEST_HEAD_DIM} have a kernel, use attention=flex"
            raise refuse(self, dims, cure)
        if not self.has_flash:
            flash = "pip install flash-attn, or use attention=flex"
            if spec.softcap is not None:
                raise refuse(self, f"the softcap of {spec.model_type} without flash-attn", flash)
            if torch.cuda.is_available() and torch.cuda.get_device_capability(spec.device) < (9, 0):
                raise refuse(self, "packed documents on this GPU without flash-attn", flash)

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
        cu_q, cu_k, max_q, max_k = segments
        is_self = cu_q is cu_k
        mask_type = "padding_causal" if is_self else "padding_causal_bottom_right"
        cu_q = self._fill(cu_q)
        cu_k = self._fill(cu_k)
        heads = (q_THD.shape[1], k_THD.shape[1], q_THD.shape[2], v_THD.shape[2])
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        key = (heads, options.scale, options.window, options.softcap, mask_type, is_deterministic)
        if key not in self._modules:
            # from documents x heads x longest^2 = 2^30 on, at some step or other
            if is_deterministic and not self.has_flash:
                capability = torch.cuda.get_device_capability(q_THD.device)
                if capability == (9, 0):
                    cure = "pip install flash-attn, or use attention=flex"
                    raise refuse(self, "training.deterministic without flash-attn", cure)
            self._modules[key] = DotProductAttention(
                q_THD.shape[1],
                (q_THD.shape[2], v_THD.shape[2]),
                num_gqa_groups=k_THD.shape[1],
                qkv_format="thd",
                attn_mask_type=mask_type,
                attention_type="self" if is_self else "cross",
                window_size=(-1, 0) if options.window is None else (options.window - 1, 0),
                softmax_scale=options.scale,
                **({} if options.softcap is None else {"softcap": options.softcap}),
            )
        attend = self._modules[key]
        try:
            out = attend(
                q_THD.contiguous(),
                k_THD.contiguous(),
                v_THD.contiguous(),
                attn_mask_type=mask_type,
                cu_seqlens_q=cu_q,
                cu_seqlens_kv=cu_k,
                # the very same tensors: nothing lies between the segments, and every backend stays
                # eligible
                cu_seqlens_q_padded=cu_q,
                cu_seqlens_kv_padded=cu_k,
                max_seqlen_q=max_q,
                max_seqlen_kv=max_k,
                pad_between_seqs=False,
            )
        except Exception as error:  # of no class of its own
            if "dot product attention" not in str(error):
                raise
            what = f"heads of {q_THD.shape[2]} / {v_THD.shape[2]}, window {options.window}"
            raise refuse(self, f"{what} ({error})", "use attention=flex") from error
        return out.view(len(q_THD), q_THD.shape[1], v_THD.shape[2])

    def _fill(self, cu: Tensor) -> Tensor:
        """Boundaries with empty documents at the end, up to a multiple of 32; made once a batch,
        for all layers.
        """
        if cu not in self._filled:
            self._filled[cu] = torch.cat([cu, cu[-1:].expand(-(len(cu) - 1) % DOCUMENTS_STEP)])
        return self._filled[cu]
