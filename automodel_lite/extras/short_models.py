"""A model's first layers alone: the same model, built or read in a part of the time."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PretrainedConfig


def layer_settings(config: PretrainedConfig, num_layers: int) -> dict[str, Any]:
    """Returns the settings of a model's first layers: their number, and every list that has an
    entry a layer.
    """
    whole = config.num_hidden_layers
    lists = {
        key: value
        for key, value in vars(config).items()
        if isinstance(value, list) and len(value) == whole
    }
    return {
        "num_hidden_layers": num_layers,
        **{key: value[:num_layers] for key, value in lists.items()},
    }


def with_layers(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """Returns the config of the same model with its first layers alone."""
    shorter = copy.deepcopy(config)
    text = shorter.get_text_config()
    for key, value in layer_settings(text, num_layers).items():
        setattr(text, key, value)
    return shorter
