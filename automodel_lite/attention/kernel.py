"""The one signature of all attention kernels, and what a model asks of them.

Legend: T tokens, H heads (Hq of the queries, Hkv of keys and values), D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from automodel_lite.errors import ConfigError


@dataclass(frozen=True)
class AttentionSpec:
    """What the attention layers of a model ask of a kernel.

    model_type     transformers' name of the family
    device, dtype  where and in what the queries arrive
    num_heads, num_kv_heads; head_dim, value_head_dim  (the two differ with latent attention); 0 without attention
    window         keys that a query of the narrowest sliding layer sees, its own included; None without such layers
    softcap        bound of the attention logits; None without
    sinks          True when each head has a learned extra logit
    own_exchange   True when the kernel itself must exchange between context-parallel ranks (mesh.cp_exchange=te)
    num_layers     layers of this kind
    others         what layers with other heads ask (Gemma 4: head dim 512 in one of six)
    """

    model_type: str
    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    own_exchange: bool = False
    num_layers: int = 0
    others: tuple[AttentionSpec, ...] = ()

    @property
    def kinds(self) -> tuple[AttentionSpec, ...]:
        """One for each kind of attention layer."""
        return (replace(self, others=()), *self.others)


class AttentionKernel(Protocol):
    """Packed attention: segment i of the queries attends to segment i of the keys.

    Causal, aligned bottom right: the last query of a segment sees its whole key segment. That one rule serves plain
    packing and context parallelism, where a rank's chunk of queries has the prefix of its document as keys.
    """

    name: str
    """As transformers knows it; must not contain sdpa, flash or flex_attention, which get checks of their own there."""

    def check(self, spec: AttentionSpec) -> None:
        """Raises ConfigError when this kernel cannot do what the model asks for."""

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
        """q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv] -> [Tq, Hq, Dv].

        cu_q, cu_k  int32 [N + 1]
        window      visible keys, the query's own included; None sees all
        sinks       [Hq]
        A kernel that exchanges between context-parallel ranks by itself takes its exchange's `kernel_kwargs` as well.
        """


def refuse(kernel: AttentionKernel, asked: str, cure: str) -> ConfigError:
    """The error for a model that asks `kernel` for something that it cannot do."""
    return ConfigError(f"attention={kernel.name.removeprefix('thd_')} cannot do {asked}: {cure}.")


def require_cuda(kernel: AttentionKernel, spec: AttentionSpec) -> None:
    """Raises ConfigError off CUDA."""
    if spec.device.type != "cuda":
        raise refuse(kernel, f"device={spec.device}", "it runs on CUDA only, take attention=reference")


def require_half(kernel: AttentionKernel, spec: AttentionSpec) -> None:
    """Raises ConfigError outside of fp16 and bf16."""
    if spec.dtype not in (torch.float16, torch.bfloat16):
        cure = "set training.precision=bf16, or take attention=flex or attention=reference"
        raise refuse(kernel, f"dtype={spec.dtype}", cure)


def refuse_own_exchange(kernel: AttentionKernel, spec: AttentionSpec) -> None:
    """Raises ConfigError for mesh.cp_exchange=te on any other kernel."""
    if spec.own_exchange:
        raise refuse(kernel, "mesh.cp_exchange=te", "take attention=te, or mesh.cp_exchange=all_gather")
