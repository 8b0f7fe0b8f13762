"""Puts a kernel under a Hugging Face model, through transformers' AttentionInterface.

A registered attention name without a registered mask function makes transformers build no mask at all. Documents
reach the layer as `cu_seq_lens_q/k`, keyword arguments of the model's forward that every layer passes on (through
activation checkpointing and peft too); a layer that does not pass them on is refused by its first forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from automodel_lite.attention.kernel import AttentionKernel
from automodel_lite.attention.spec import UNPACKED, layer_window
from automodel_lite.errors import ConfigError
from automodel_lite.thd import Exchange

ATTENTION_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cp_exchange")
"""What `ThdBatch.model_inputs` gives to attention alone."""


def install(model: transformers.PreTrainedModel, kernel: AttentionKernel) -> None:
    """Makes all attention layers of `model` run on `kernel`.

    Raises ConfigError when the family does not go through AttentionInterface: transformers itself only warns.
    """
    transformers.AttentionInterface.register(kernel.name, outside_of_graphs(packed_attention(kernel)))
    model.set_attn_implementation(kernel.name)
    if model.config._attn_implementation != kernel.name:
        raise ConfigError(
            f"model_type={model.config.model_type} ({type(model).__name__}) does not take its attention from "
            f"transformers' AttentionInterface, so its documents cannot be kept apart: {UNPACKED}."
        )


class Unseen:
    """Arguments on their way through compiled layers to attention. A graph that saw the boundaries of the documents, or
    the length of the longest, would be made anew for packs of other documents; of this object it sees the type.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


def outside_of_graphs(attend: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """`attend`, where torch.compile does not look; takes arguments that came as `unseen=Unseen(...)`."""

    def forward(*args: Any, unseen: Unseen | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        return attend(*args, **kwargs) if unseen is None else attend(*args, **kwargs, **unseen.arguments)

    outside: Callable[..., tuple[Tensor, None]] = torch.compiler.disable(forward)
    return outside


def packed_attention(kernel: AttentionKernel) -> Callable[..., tuple[Tensor, None]]:
    """The kernel with the signature that transformers' attention layers call."""

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        cp_exchange: Exchange | None = None,
        **of_other_layers: Any,  # the model passes every keyword argument of its forward to every layer
    ) -> tuple[Tensor, None]:
        """query [1, Hq, T, D], key, value [1, Hkv, T, D] -> ([1, T, Hq, Dv], None)."""
        if cu_seq_lens_q is None or cu_seq_lens_k is None or max_length_q is None or max_length_k is None:
            raise ConfigError(
                f"{type(module).__name__} got no cu_seq_lens_q/k: call the model with ThdBatch.model_inputs(), or, if "
                f"you did, this family drops the arguments on the way to its attention: {UNPACKED}."
            )
        _refuse_what_packing_cannot(module, query, attention_mask, dropout, is_causal)
        _refuse_hidden_window(module, sliding_window)
        q, k, v = (_in_compute_dtype(x)[0].transpose(0, 1) for x in (query, key, value))
        attend: Callable[..., Tensor] = kernel
        if cp_exchange is not None:
            q, k, v, s_aux = cp_exchange.before(q, k, v, s_aux)
            attend = partial(kernel, **cp_exchange.kernel_kwargs)
        out = attend(
            q,
            k,
            v,
            cu_seq_lens_q,
            cu_seq_lens_k,
            max_length_q,
            max_length_k,
            scale=q.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
        if cp_exchange is not None:
            out = cp_exchange.after(out)
        return out[None], None

    return forward


def _in_compute_dtype(x: Tensor) -> Tensor:
    """Under autocast, rotary embeddings leave queries and keys in fp32 and values in bf16: all take autocast's dtype.

    Kernels want one dtype (and FlashAttention no fp32), and context parallelism sends half the bytes.
    """
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _refuse_what_packing_cannot(
    module: nn.Module, query: Tensor, attention_mask: Tensor | None, dropout: float, is_causal: bool | None
) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise ConfigError(
            f"{name} brings a mask of shape {tuple(attention_mask.shape)} to packed attention, which takes its "
            f"documents from cu_seq_lens: this family builds masks of its own: {UNPACKED}."
        )
    if query.shape[0] != 1:
        raise ConfigError(f"{name} got {query.shape[0]} rows: packed attention takes one stream of tokens.")
    if dropout:
        raise ConfigError(f"{name} asks for attention dropout {dropout}: set model.config.attention_dropout=0.")
    if is_causal is False:
        raise ConfigError(f"{name} is not causal: packed attention is. {UNPACKED.capitalize()}.")


def _refuse_hidden_window(module: nn.Module, sliding_window: int | None) -> None:
    """Some families (PhiMoE) put the window into the mask only, which is not built here; the probe's forward tells."""
    expected = layer_window(module.config, module.layer_idx)  # type: ignore[arg-type]
    if expected != sliding_window:
        raise ConfigError(
            f"{type(module).__name__}: the config gives layer {module.layer_idx} a sliding window of {expected}, its "
            f"attention call passes {sliding_window}, so the window would be lost in silence: set "
            "model.config.sliding_window=null if no document is longer than it, or take another model."
        )
