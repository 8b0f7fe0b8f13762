"""What the rest of the program knows of parameter-efficient training; peft itself lives in `models/lora.py` alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import transformers
from torch import Tensor

from automodel_lite.config.components import build


class Adapter(Protocol):
    """Small trainable weights inside of a frozen model."""

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
