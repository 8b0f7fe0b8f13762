"""The first layers of a model, for checks that need its arithmetic but not its size."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_lite.models.source import CausalLM

LARGEST_PARAMETERS = {"cpu": 60e6, "cuda": 2e9}
LEAST_LAYERS = 2


def first_layers(source: CausalLM, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> tuple[CausalLM, str]:
    """A model of as many layers as are quickly checked on the device, each kind of layer included; and how many."""
    config = source.config(tokenizer)
    num_layers = config.num_hidden_layers
    largest = LARGEST_PARAMETERS[device.type]
    whole = num_parameters(config)
    if whole <= largest or num_layers <= LEAST_LAYERS:
        return source, f"all {num_layers} layers, {whole / 1e6:,.1f} M parameters"
    per_layer = (whole - num_parameters(cut_config(config, 1))) / (num_layers - 1)
    fitting = int((largest - (whole - num_layers * per_layer)) / per_layer)
    kept = min(num_layers, max(LEAST_LAYERS, fitting, _layers_with_every_kind(config)))
    cut = CausalLM(source.pretrained, {**source.overrides, **cut_settings(config, kept)})
    return cut, f"the first {kept} of {num_layers} layers ({whole / 1e6:,.0f} M parameters in all)"


def num_parameters(config: PretrainedConfig) -> int:
    """Of a model of this config, without making it."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def cut_settings(config: PretrainedConfig, num_layers: int) -> dict[str, Any]:
    """Settings of the first layers: their number, and every list that has an entry a layer."""
    whole = config.num_hidden_layers
    lists = {key: value for key, value in config.to_dict().items() if isinstance(value, list) and len(value) == whole}
    return {"num_hidden_layers": num_layers, **{key: value[:num_layers] for key, value in lists.items()}}


def cut_config(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    return type(config).from_dict({**config.to_dict(), **cut_settings(config, num_layers)})


def _layers_with_every_kind(config: PretrainedConfig) -> int:
    """As many first layers as hold each kind of `layer_types` once."""
    kinds = config.to_dict().get("layer_types") or []
    return max((kinds.index(kind) + 1 for kind in set(kinds)), default=1)
