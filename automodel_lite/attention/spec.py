"""What a model needs from its attention kernel, read from its Hugging Face config.

Configs have no common schema: a family that lacks a key lacks the feature, so keys are looked up
with a default here, and nowhere else.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import PretrainedConfig

from automodel_lite.errors import ConfigError


@dataclass(frozen=True)
class AttentionSpec:
    """What the attention layers of one kind need from a kernel.

    model_type     transformers' name of the family
    device, dtype  where and in what the queries arrive
    head_dim, value_head_dim  of queries and keys, and of values: they differ with latent attention
    softcap        bound of the attention logits; None without
    sinks          True when each head has a learned extra logit
    num_layers     layers of this kind
    """

    model_type: str
    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_head_dim: int
    softcap: float | None = None
    sinks: bool = False
    num_layers: int = 0


FAMILIES = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text())
UNPACKED = "take another model, automodel-lite docs models lists the families that can be packed"


def config_value(config: PretrainedConfig, key: str, default: Any = None) -> Any:
    """The config's value of `key`, or `default` for a family that has no such key (or leaves it
    None).
    """
    value = getattr(config, key, default)
    return default if value is None else value


def layer_window(config: PretrainedConfig, layer_idx: int | None) -> tuple[int | None, int | None]:
    """Returns the sliding window, in keys, that the config gives to one layer, and the tokens of a
    chunk, of which the layer sees its own only (Llama 4); None for a layer without.
    """
    kinds = config_value(config, "layer_types")
    if kinds is None or layer_idx is None:
        is_used = config_value(config, "use_sliding_window", True)
        return (config_value(config, "sliding_window") if is_used else None), None
    kind = kinds[layer_idx]
    window = None
    if kind in ("sliding_attention", "hybrid_sliding"):
        window = config.sliding_window
    chunk = None
    if kind == "chunked_attention":
        chunk = config_value(config, "attention_chunk_size")
    return window, chunk


@dataclass(frozen=True)
class LayerShape:
    """Attention of one decoder layer; `num_heads` is 0 in a layer without (state space,
    convolution, linear).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    window: int | None = None  # keys that a query sees; None = all
    # values that a layer without attention reads and writes for every token; 0 = none, or not known
    state: int = 0


def layer_shapes(model_config: PretrainedConfig) -> list[LayerShape]:
    """Of each layer; families name their sizes in several ways and may give each layer its own."""
    text = model_config.get_text_config()
    return [
        _layer_shape(text, layer) for layer in range(config_value(text, "num_hidden_layers", 0))
    ]


def _layer_shape(text: PretrainedConfig, layer: int) -> LayerShape:
    config = text.per_layer_config[layer]
    kinds = config_value(config, "layer_types")
    kind = "full_attention" if kinds is None else kinds[layer % len(kinds)]
    is_sliding = "sliding" in kind or "chunked" in kind

    def value(key: str, default: Any) -> Any:
        found = config_value(config, key, default)
        if is_sliding:
            found = config_value(config, f"swa_{key}", found)
        return found[layer] if isinstance(found, list | tuple) else found

    num_heads = value("num_attention_heads", 0)
    if (
        not num_heads
        or kind == "linear_attention"
        or not any(word in kind for word in FAMILIES["attending"])
    ):
        sizes = ([config_value(config, name) for name in names] for names in FAMILIES["states"])
        known = (
            math.prod(found) for found in sizes if all(isinstance(size, int) for size in found)
        )
        return LayerShape(0, 0, 0, 0, state=next(known, 0))
    head_dim = value("head_dim", config.hidden_size // num_heads)
    value_head_dim = value("v_head_dim", head_dim)
    # latent attention: keys are wider than values
    if config_value(config, "kv_lora_rank") is not None:
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    window = None
    if is_sliding or (kinds is None and config_value(config, "use_sliding_window", True)):
        window = value("sliding_window", value("attention_chunk_size", None))
    num_kv_heads = 1 if value("multi_query", False) else value("num_key_value_heads", num_heads)
    return LayerShape(num_heads, num_kv_heads, head_dim, value_head_dim, window)


def attention_specs(
    model_config: PretrainedConfig, device: torch.device | str, dtype: torch.dtype
) -> list[AttentionSpec]:
    """What a model of this config needs from its attention kernel, for each kind of layer (Gemma 4:
    head dim 512 in one of six), the most common first; none for a model without attention.

    Raises ConfigError for layers that cannot be packed, and for attention dropout, which no packed
    kernel has.
    """
    config = model_config.get_text_config()
    # a composite's language model, and the attention of DBRX, have a config of their own
    parts = {f"{name}.": config_value(model_config, name) for name in model_config.sub_configs}
    owners = {place: part for place, part in parts.items() if part is config} or {"": config}
    if config is model_config:
        owners |= {place: part for place, part in parts.items() if part}
    for (place, owner), key in product(owners.items(), FAMILIES["dropouts"]):
        if dropout := config_value(owner, key, 0.0):
            raise ConfigError(
                f"model_type={config.model_type} has {key}={dropout}, which packed kernels do not "
                f"support: set model.config.{place}{key}=0."
            )
    shapes = layer_shapes(config)
    for layer, name in enumerate(config_value(config, "layer_types", ())[: len(shapes)]):
        if name not in chain(*FAMILIES["packable_layers"]):
            raise ConfigError(
                f"model_type={config.model_type}: layer {layer} ({name}) is not known to keep "
                f"documents apart: {UNPACKED}."
            )
    counts = Counter(replace(shape, window=None) for shape in shapes if shape.num_heads)
    return [
        AttentionSpec(
            *(config.model_type, torch.device(device), dtype, kind.head_dim, kind.value_head_dim),
            softcap=config_value(config, "attn_logit_softcapping"),
            sinks=passes_sinks(config),
            num_layers=num_layers,
        )
        for kind, num_layers in counts.most_common()
    ]


def passes_sinks(config: PretrainedConfig) -> bool:
    """Does any attention of this family pass sinks to its kernel? Of a text config; looked up in
    transformers' code.
    """
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return False
    return "s_aux=" in inspect.getsource(sys.modules[model_class.__module__])
