"""Floating-point operations of a training step, from what the model really computes.

    per token         6 per weight of the layers that it visits; 4 where the weight is frozen (no
                      gradient of its own)
    per label token   the same for the output head, which only labeled rows meet
    per pair          12 per visible (query, key) pair and attention channel: s (s + 1) / 2 pairs of
                      each document, not of the pack

Recomputation (activation checkpointing) and padding are not useful work and are not counted. The
same costs balance packs over ranks and give the utilization.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import transformers
from transformers import PretrainedConfig

from automodel_lite.attention.spec import FAMILIES, layer_shapes
from automodel_lite.models.layers import decoder_layers, output_head, text_decoder
from automodel_lite.models.settings import (
    describe_with,
    experts_per_token,
    number_of_experts,
)
from automodel_lite.models.source import describe


@dataclass(frozen=True)
class CostModel:
    """FLOPs of a forward and backward pass: `per_token`, and `per_pair` of a visible (query, key)
    pair.

    window: keys that a query sees in sliding-window layers; `window_frac` of the layers have it.
    """

    per_token: float
    per_pair: float
    window: int | None = None
    window_frac: float = 0.0

    def pairs(self, lengths: np.ndarray) -> np.ndarray:
        """Counts visible pairs of causal documents, float64: s (s + 1) / 2, fewer where a window
        cuts them.
        """
        s = lengths.astype(np.float64)
        full = s * (s + 1) / 2
        if self.window is None or not self.window_frac:
            return full
        beyond = np.maximum(s - self.window, 0)
        return full - self.window_frac * beyond * (beyond + 1) / 2


def cost_model(
    model_config: PretrainedConfig, size: ModelSize | None = None, num_ahead: int = 0
) -> CostModel:
    """FLOPs of a token and of a visible pair; mixture-of-experts layers count the experts that a
    token visits.

    size       of a model that is counted already
    num_ahead  heads that predict further tokens: each attends like the costliest layer
    A layer without attention reads its state once and writes it twice (decay, update) for every
    token: 3 products forward, 6 backward. Kernels that work in chunks do other products, of the
    same order.
    """
    size = size or model_size(model_config)
    layers = layer_shapes(model_config)
    # Scores and values, a multiply and an add each: 2 (D + Dv) forward, twice that backward.
    num_calls = FAMILIES["attention_calls"].get(model_config.get_text_config().model_type, 1)
    per_layer = [
        6.0 * num_calls * layer.num_heads * (layer.head_dim + layer.value_head_dim)
        for layer in layers
    ]
    # One window stands for all: families have one, and the cost is linear in its share of the
    # layers.
    narrow = [
        (layer.window, cost) for layer, cost in zip(layers, per_layer) if layer.window is not None
    ]
    per_pair = sum(per_layer) + num_ahead * max(per_layer, default=0.0)
    return CostModel(
        per_token=6.0 * (size.layer_weights + (1 + num_ahead) * size.head_weights)
        + 18.0 * sum(layer.state for layer in layers),
        per_pair=per_pair,
        window=min((window for window, _ in narrow), default=None),
        window_frac=sum(cost for _, cost in narrow) / per_pair if per_pair else 0.0,
    )


@dataclass(frozen=True)
class ModelSize:
    """Counted on the meta device: no memory, and before quantization and adapters."""

    parameters: int
    layer_weights: float  # in matrices of the language model's layers, those that one token visits
    num_layers: int
    largest_layer: int  # parameters
    num_experts: int  # stacked in that layer; 0 = none
    expert_weights: int  # of that layer, all of its experts
    all_experts: int  # weights of all layers' experts
    embedding: int  # parameters of the language model outside its layers, tied ones once
    head_weights: int
    # parameters of a composite that text does not meet: vision, audio, their projections
    towers: int


@dataclass(frozen=True)
class StepFlops:
    """Costs of a step's units, forward and backward."""

    per_token: float
    per_label_token: float
    attention: CostModel

    def of(self, num_tokens: int, num_label_tokens: float, num_pairs: float) -> float:
        """FLOPs of so many tokens; `num_pairs` as `attention.pairs` counts them."""
        return (
            self.per_token * num_tokens
            + self.per_label_token * num_label_tokens
            + self.attention.per_pair * num_pairs
        )

    def with_teacher(self, teacher: StepFlops) -> StepFlops:
        """Returns the costs with a teacher's forward pass, a third of what training it costs; its
        windows count as the student's.
        """
        attention = replace(
            self.attention,
            per_token=self.attention.per_token + teacher.attention.per_token / 3,
            per_pair=self.attention.per_pair + teacher.attention.per_pair / 3,
        )
        return StepFlops(
            self.per_token + teacher.per_token / 3,
            self.per_label_token + teacher.per_label_token / 3,
            attention,
        )

    def without_frozen(self, lm: transformers.PreTrainedModel) -> StepFlops:
        """Returns the costs without the gradients of weights that are frozen: 4 products in place
        of 6.
        """
        # Below the first trained layer not even the inputs need gradients; that saving is not
        # counted.
        frozen_frac = 1 - visited_weights(lm, only_trained=True) / visited_weights(lm)
        head_frac = 1.0 if output_head(lm).weight.requires_grad else 2 / 3
        return replace(
            self,
            per_token=self.per_token * (1 - frozen_frac / 3),
            per_label_token=self.per_label_token * head_frac,
        )


def model_size(config: PretrainedConfig) -> ModelSize:
    """Counts a model config, mixture-of-experts layers by the experts that a token visits."""
    # the first that makes the model of a config.json
    return size_of(describe_with({}, partial(describe, config)))


def size_of(lm: transformers.PreTrainedModel) -> ModelSize:
    """Counts a whole model without adapters, on any device."""
    decoder = text_decoder(lm)
    layers = decoder_layers(lm)
    head = output_head(lm)
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    experts = [
        [p for name, p in layer.named_parameters() if ".experts." in f".{name}"] for layer in layers
    ]
    # Memory is planned by the largest layer, which a mixture's dense first layers are not.
    largest = experts[sizes.index(max(sizes))]
    total = sum(p.numel() for p in lm.parameters())
    of_text = sum(p.numel() for p in {*decoder.parameters(), *head.parameters()})
    return ModelSize(
        parameters=total,
        layer_weights=visited_weights(lm),
        num_layers=len(layers),
        largest_layer=max(sizes),
        num_experts=min((p.shape[0] for p in largest if p.ndim == 3), default=0),
        expert_weights=sum(p.numel() for p in largest),
        all_experts=sum(p.numel() for of_layer in experts for p in of_layer),
        embedding=of_text - sum(sizes),
        head_weights=head.weight.numel(),
        towers=total - of_text,
    )


def step_flops(
    config: PretrainedConfig, size: ModelSize, num_adapter_weights: float | None, num_ahead: int = 0
) -> StepFlops:
    """Returns the costs of a step.

    num_adapter_weights  trained weights beside a frozen model that work on one token; None when the
                         model itself is trained
    num_ahead            heads that predict further tokens; labels of each meet the output head
    """
    products = 6.0 if num_adapter_weights is None else 4.0
    per_token = products * size.layer_weights + 6.0 * (num_adapter_weights or 0)
    per_label_token = products * size.head_weights * (1 + num_ahead)
    return StepFlops(per_token, per_label_token, cost_model(config, size, num_ahead))


def visited_weights(lm: transformers.PreTrainedModel, only_trained: bool = False) -> float:
    """Counts the weights of the layers' matrices that work on one token: of routed experts, as many
    as are chosen; those of a layer that it passes several times (HRM's), as often.
    """
    text = lm.config.get_text_config()
    chosen_frac = min((experts_per_token(text) or 1) / (number_of_experts(text) or 1), 1.0)
    total = 0.0
    layers = decoder_layers(lm)
    for layer in layers:
        for name, module in layer.named_modules():
            if FAMILIES["experts_of_images"] in name:
                continue
            # stacked weights of JetMoE's have a name of their own
            is_routed = ".experts." in f".{name}." or "Experts" in type(module).__name__
            visited_frac = chosen_frac if is_routed else 1.0
            for weight in module.parameters(recurse=False):
                if weight.ndim > 1 and (weight.requires_grad or not only_trained):
                    total += visited_frac * weight.numel()
    is_looped = text.model_type in FAMILIES["looped"]
    return total * (text.num_hidden_layers / len(layers) if is_looped else 1.0)
