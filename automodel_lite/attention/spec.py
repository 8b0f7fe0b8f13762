"""What a Hugging Face config says of its attention layers.

Configs have no common schema: a family that lacks a key lacks the feature, so keys are looked up with a default here,
and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from automodel_lite.attention.kernel import AttentionSpec
from automodel_lite.errors import ConfigError

FAMILIES_WITH_SINKS = frozenset({"gpt_oss"})
PACKABLE_LAYERS = frozenset(
    {
        *("full_attention", "sliding_attention", "chunked_attention", "attention"),
        *("linear_attention", "mamba", "mamba2", "recurrent", "conv"),  # attention/mixers.py
        *("hybrid", "hybrid_sliding"),  # both in one layer, or after it
        *("moe", "mlp", "dense", "sparse"),  # mix no tokens
    }
)
"""Kinds of layers that keep documents apart here. What a name does not tell, the probe does."""

ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
UNPACKED = "take another model, docs/models.md lists the families that can be packed"


def config_value(config: PretrainedConfig, key: str, default: Any = None) -> Any:
    """The config's value of `key`, or `default` for a family that has no such key (or leaves it None)."""
    value = getattr(config, key, default)
    return default if value is None else value


def layer_window(config: PretrainedConfig, layer_idx: int | None) -> int | None:
    """The sliding window, in keys, that the config gives to one layer; None for a layer that sees all.

    Raises ConfigError for a layer type that cannot be packed.
    """
    kinds = config_value(config, "layer_types")
    if kinds is not None and layer_idx is not None:
        kind = kinds[layer_idx]
        if kind not in PACKABLE_LAYERS:
            raise ConfigError(
                f"model_type={config.model_type}: layer {layer_idx} ({kind}) is not known to keep documents apart: "
                f"{UNPACKED}."
            )
        return config.sliding_window if kind in ("sliding_attention", "hybrid_sliding") else None
    if not config_value(config, "use_sliding_window", True):
        return None
    return config_value(config, "sliding_window")


def layer_chunk(config: PretrainedConfig, layer_idx: int | None) -> int | None:
    """Tokens of a chunk in a layer of chunked attention (Llama 4), which sees its own chunk only; None elsewhere."""
    kinds = config_value(config, "layer_types")
    if kinds is None or layer_idx is None or kinds[layer_idx] != "chunked_attention":
        return None
    chunk: int | None = config_value(config, "attention_chunk_size")
    return chunk


def has_attention(config: PretrainedConfig) -> bool:
    """False for a family without attention layers (Mamba), of a text config."""
    return config_value(config, "num_attention_heads") is not None


def attention_spec(
    model_config: PretrainedConfig, device: torch.device | str, dtype: torch.dtype, own_exchange: bool = False
) -> AttentionSpec:
    """What a model of this config will ask of its attention kernel.

    own_exchange  True for mesh.cp_exchange=te with mesh.cp > 1
    Raises ConfigError for layers that cannot be packed, and for attention dropout, which no packed kernel has.
    """
    config = model_config.get_text_config()
    for key in ATTENTION_DROPOUTS:
        if dropout := config_value(config, key, 0.0):
            raise ConfigError(
                f"model_type={config.model_type} has {key}={dropout}, which packed kernels do not do: set "
                f"model.config.{key}=0."
            )
    if not has_attention(config):
        return AttentionSpec(config.model_type, torch.device(device), dtype, 0, 0, 0, 0)
    num_heads = config.num_attention_heads
    head_dim = config_value(config, "head_dim", config.hidden_size // num_heads)
    value_head_dim = head_dim
    if config_value(config, "kv_lora_rank") is not None:  # latent attention: keys are wider than values
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        value_head_dim = config.v_head_dim
    windows = [layer_window(config, i) for i in range(config.num_hidden_layers)]
    return AttentionSpec(
        model_type=config.model_type,
        device=torch.device(device),
        dtype=dtype,
        num_heads=num_heads,
        num_kv_heads=config_value(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        window=min((window for window in windows if window is not None), default=None),
        softcap=config_value(config, "attn_logit_softcapping"),
        sinks=config.model_type in FAMILIES_WITH_SINKS,
        own_exchange=own_exchange,
    )
