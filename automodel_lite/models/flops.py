"""What a model's tokens and attention pairs cost, from its config: for balancing packs and for honest utilisation.

Floating-point operations of a training step, from what the model really computes.

    per token         6 per weight of the layers that it visits; 4 where the weight is frozen (no gradient of its own)
    per label token   the same for the output head, which only labelled rows meet
    per pair          12 per visible (query, key) pair and attention channel: s (s + 1) / 2 pairs of each document,
                      not of the pack

Recomputation (activation checkpointing) and padding are not useful work and are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers
from transformers import PretrainedConfig

from automodel_lite.attention.spec import config_value, layer_window
from automodel_lite.flops import CostModel
from automodel_lite.models.layers import decoder_layers


def cost_model(model_config: PretrainedConfig) -> CostModel:
    """FLOPs a token and a visible pair; mixture-of-experts layers count the experts that a token visits."""
    config = model_config.get_text_config()
    num_heads = config.num_attention_heads
    wide = config_value(config, "intermediate_size", None) or config_value(config, "n_inner", None)
    windows = [layer_window(config, layer) for layer in range(config.num_hidden_layers)]
    narrow = [window for window in windows if window is not None]
    return CostModel.of_decoder(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=num_heads,
        num_kv_heads=config_value(config, "num_key_value_heads", num_heads),
        head_dim=config_value(config, "head_dim", config.hidden_size // num_heads),
        intermediate_size=config_value(config, "moe_intermediate_size", wide or 4 * config.hidden_size),
        vocab_size=config.vocab_size,
        experts_per_token=config_value(config, "num_experts_per_tok", 1),
        window=min(narrow, default=None),
        window_frac=len(narrow) / len(windows),
    )


@dataclass(frozen=True)
class ModelSize:
    """Counted on the meta device: no memory, and before quantization and adapters."""

    parameters: int
    layer_weights: float  # in matrices of the layers, those that one token visits
    largest_layer: int  # parameters
    embedding: int  # parameters outside of the layers, tied ones once
    head_weights: int


@dataclass(frozen=True)
class StepFlops:
    """Costs of a step's units, forward and backward."""

    per_token: float
    per_label_token: float
    attention: CostModel

    def of(self, num_tokens: int, num_label_tokens: int, num_pairs: float) -> float:
        """FLOPs of so many tokens; `num_pairs` as `attention.pairs` counts them."""
        return (
            self.per_token * num_tokens + self.per_label_token * num_label_tokens + self.attention.per_pair * num_pairs
        )


def model_size(config: PretrainedConfig) -> ModelSize:
    """Of a model config, mixture-of-experts layers by the experts that a token visits."""
    with torch.device("meta"):
        lm: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    layers = decoder_layers(lm)
    matrices = [(name, p) for layer in layers for name, p in layer.named_parameters() if p.ndim > 1]
    visited = sum(_visited(lm.config, name) * p.numel() for name, p in matrices)
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    total = sum(p.numel() for p in lm.parameters())
    head = lm.get_output_embeddings().weight.numel()
    return ModelSize(total, visited, max(sizes), total - sum(sizes), head)


def step_flops(config: PretrainedConfig, size: ModelSize, num_adapter_weights: int | None) -> StepFlops:
    """num_adapter_weights: trained weights beside a frozen model; None when the model itself is trained."""
    if num_adapter_weights is None:
        return StepFlops(6.0 * size.layer_weights, 6.0 * size.head_weights, cost_model(config))
    per_token = 4.0 * size.layer_weights + 6.0 * num_adapter_weights
    return StepFlops(per_token, 4.0 * size.head_weights, cost_model(config))


def _visited(config: PretrainedConfig, name: str) -> float:
    """The part of a layer's weight that works on one token."""
    if ".experts." not in f".{name}.":
        return 1.0
    text = config.get_text_config()
    experts = config_value(text, "num_local_experts", None) or config_value(text, "num_experts", None)
    experts = experts or config_value(text, "n_routed_experts", None)
    return config_value(text, "num_experts_per_tok", 1) / experts if experts else 1.0
