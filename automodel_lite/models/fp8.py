"""Linear layers in fp8 (torchao); for GPUs whose tensor cores have it (compute capability 8.9 and later)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from automodel_lite.errors import ConfigError

_LEAST_MULTIPLE = 16  # of both dims of a weight, for the fp8 matrix product


def use_fp8(layers: list[nn.Module], recipe: str, emulate: bool = False) -> None:
    """Replaces the linear layers inside `layers`, in place; adapters and the output head stay as they are.

    emulate  rounds to fp8 and multiplies in fp32, on any device: for tests
    Raises ConfigError.
    """
    if not emulate and (not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9)):
        raise ConfigError(
            f"training.fp8={recipe} needs a GPU of compute capability 8.9 or later: set training.fp8=none."
        )
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=_fits)


def _fits(module: nn.Module, name: str) -> bool:
    return (
        isinstance(module, nn.Linear)
        and "lora_" not in name  # an adapter's matrices are too thin to win, and stay in fp32
        and module.in_features % _LEAST_MULTIPLE == 0
        and module.out_features % _LEAST_MULTIPLE == 0
    )
