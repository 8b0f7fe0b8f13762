"""The interface to parameter-efficient training, and which layers get adapters; only `models/lora.py` imports peft.

Adapters go beside attention, dense MLPs and shared experts, beside routed experts on request, never beside a router.
Only the language model's layers are adapted: towers of a composite and the output head have linear layers, too. A
mixture's router is recognized by its shape: beside the experts, a linear layer with one output for each of them (or a
single one, which gates the shared expert).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from automodel_lite.config.components import build
from automodel_lite.errors import ConfigError
from automodel_lite.models.layers import decoder_layers, output_head


class Adapter(Protocol):
    """Small trainable weights inside a frozen model."""

    description: str  # "lora r 16 on q_proj, v_proj: 0.8 M trained"

    def hidden(self) -> AbstractContextManager[None]:
        """Around the loading of a sharded model's weights: its layers are out of the model, then complete in it."""

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Writes the adapter's folder from the model's trainable weights, by their names in the model."""

    def merge(self) -> None:
        """Adds the adapter to the model's own weights, in place, and takes its layers away."""


class Peft(Protocol):
    """The config node `peft`."""

    is_quantized: ClassVar[bool]  # the frozen weights are held in fewer bits than a tensor core multiplies

    def check(self, device: torch.device, strategy: str, pretrained: str | None) -> None:
        """Raises ConfigError when this kind of training cannot work there."""

    def load_arguments(self, device: torch.device) -> dict[str, Any]:
        """More arguments of `from_pretrained` (quantization)."""

    def adapt(self, model: transformers.PreTrainedModel, base: str) -> Adapter:
        """Puts adapters into the model, in place, and freezes the rest. `base` is where its weights came from."""


def is_quantized(peft: Mapping[str, Any]) -> bool:
    """Does this config node hold the frozen weights in 4 bits?"""
    return bool(peft) and bool(build(peft).is_quantized)


def cast_frozen(model: transformers.PreTrainedModel, dtype: torch.dtype) -> None:
    """Frozen weights need no fp32 master: they take the compute dtype, in place. Quantized ones stay as they are.

    On the meta device a module that is trained as a copy keeps fp32: the copy's masters are made of it when it is
    loaded.
    """
    for name, parameter in model.named_parameters():
        is_source = parameter.is_meta and ".original_module." in name
        if not parameter.requires_grad and parameter.is_floating_point() and not is_source:
            parameter.data = parameter.data.to(dtype)


def cast_trained(model: transformers.PreTrainedModel, dtype: torch.dtype) -> None:
    """The weights that are trained, in place; buffers, such as the frequencies of rotations, keep fp32."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


_ADAPTABLE = (nn.Linear, nn.Embedding, Conv1D)
_FUSED_BY_KERNELS = frozenset({"out_proj", "conv1d"})
"""In these families the kernels of the state space read the weights themselves, past an adapter; peft refuses them."""
_TAKEN_FOR_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"})
"""In a model with fused experts peft 0.21 reads these names of layers as the experts of older checkpoints, where it
makes adapters and where it loads them. Named by their weights, dense MLPs and shared experts stay what they are.
"""
_STATE_SPACE_FAMILIES = frozenset({"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"})


@dataclass(frozen=True)
class LoraTargets:
    """As peft takes them."""

    modules: str | list[str]  # names that end a module's, or a pattern of whole names
    parameters: list[str]  # names that end a weight's: fused experts [experts, out, in], and some [out, in]


def lora_targets(model: transformers.PreTrainedModel, wanted: str | list[str], experts: bool) -> LoraTargets:
    """`wanted`: "all-linear", or names such as [q_proj, v_proj]; named ones may lie outside the layers (lm_head).

    experts      the routed experts too
    Raises ConfigError for a name that no layer has which can be adapted.
    """
    linear, fused = _candidates(model, experts)
    if isinstance(wanted, list):
        linear += _outside_of_layers(model)
        if unknown := [end for end in wanted if not any(_ends(name, end) for name in linear)]:
            raise ConfigError(f"peft.target_modules={wanted}: no layer that can be adapted is named {unknown[0]}.")
        linear = [name for name in linear if any(_ends(name, end) for end in wanted)]
    has_fused = any(weight.ndim == 3 for layer in decoder_layers(model) for weight in _fused_weights(layer))
    by_weight = [name for name in linear if has_fused and name.rpartition(".")[2] in _TAKEN_FOR_EXPERTS]
    weights = [*fused, *(f"{name}.weight" for name in by_weight)]
    return LoraTargets(
        _shortest_modules(model, [name for name in linear if name not in by_weight]), _shortest_weights(model, weights)
    )


def _ends(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def _outside_of_layers(model: transformers.PreTrainedModel) -> list[str]:
    """The language model's embedding and its output head."""
    ends = {model.get_input_embeddings(), output_head(model)}
    return [name for name, module in model.named_modules() if module in ends]


def _candidates(model: transformers.PreTrainedModel, experts: bool) -> tuple[list[str], list[str]]:
    """Whole names of linear layers, and of fused weights of experts."""
    names = {module: name for name, module in model.named_modules()}
    refused = _FUSED_BY_KERNELS if model.config.model_type in _STATE_SPACE_FAMILIES else frozenset()
    linear, fused = [], []
    for layer in decoder_layers(model):
        routers, of_experts = set(_routers(layer)), set(_inside_experts(layer))
        for module in layer.modules():
            if module in routers or (module in of_experts and not experts):
                continue
            if isinstance(module, _ADAPTABLE):
                if names[module].rpartition(".")[2] not in refused:
                    linear.append(names[module])
            elif module in of_experts:
                weights = module.named_parameters(recurse=False)
                fused += [f"{names[module]}.{name}" for name, weight in weights if weight.ndim == 3]
    return linear, fused


def _mixtures(layer: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """(block, its routed experts): a list of MLPs, or one module with fused weights."""
    for block in layer.modules():
        for name, child in block.named_children():
            if "expert" in type(child).__name__.lower() or ("expert" in name and isinstance(child, nn.ModuleList)):
                weights = [weight for weight in child.parameters(recurse=False) if weight.ndim == 3]
                if weights or isinstance(child, nn.ModuleList):
                    yield block, child


def _num_experts(experts: nn.Module) -> int:
    if isinstance(experts, nn.ModuleList):
        return len(experts)
    return next(weight.shape[0] for weight in experts.parameters(recurse=False) if weight.ndim == 3)


def _fused_weights(layer: nn.Module) -> Iterator[nn.Parameter]:
    for module in _inside_experts(layer):
        yield from (weight for weight in module.parameters(recurse=False) if weight.ndim == 3)


def _inside_experts(layer: nn.Module) -> Iterator[nn.Module]:
    for _, experts in _mixtures(layer):
        yield from experts.modules()


def _routers(layer: nn.Module) -> Iterator[nn.Module]:
    """Linear layers of a mixture's block that give one number for each expert, or one in all; and what is named so."""
    for name, module in layer.named_modules():
        if "router" in name:
            yield module
    for block, experts in _mixtures(layer):
        inside, num_experts = set(experts.modules()), _num_experts(experts)
        for name, module in block.named_modules():
            if module in inside or not isinstance(module, nn.Linear):
                continue
            if module.out_features in (1, num_experts) or name.rpartition(".")[2] == "gate":
                yield module


def _shortest_modules(model: nn.Module, chosen: list[str]) -> str | list[str]:
    """Short names if they mean the chosen layers alone, as readers of adapters like them; else a pattern."""
    short = sorted({name.rpartition(".")[2] for name in chosen})
    if {name for name, _ in model.named_modules() if name.rpartition(".")[2] in short} == set(chosen):
        return short
    patterns = sorted({re.sub(r"\\\.\d+(?=\\\.)", r"\\.\\d+", re.escape(name)) for name in chosen})
    pattern = "|".join(patterns)
    matched = {name for name, _ in model.named_modules() if re.fullmatch(pattern, name)}
    return pattern if matched == set(chosen) else sorted(chosen)


def _shortest_weights(model: nn.Module, chosen: list[str]) -> list[str]:
    """The last parts of the names if they mean the chosen weights alone."""
    short = sorted({".".join(name.split(".")[-3 if name.endswith(".weight") else -2 :]) for name in chosen})
    meant = {name for name, _ in model.named_parameters() if any(_ends(name, end) for end in short)}
    return short if meant == set(chosen) else sorted(chosen)
