"""QLoRA (Dettmers et al., 2023): LoRA on a base model in 4-bit NF4 through bitsandbytes, which is slow on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import bitsandbytes  # noqa: F401 - transformers imports it late; a missing one is named when the config is checked
import torch
from transformers import BitsAndBytesConfig

from automodel_lite.errors import ConfigError
from automodel_lite.models.lora import Lora


@dataclass(frozen=True)
class QLora(Lora):
    """The config node `peft`: as Lora, and the frozen weights are held in 4 bits."""

    is_quantized: ClassVar[bool] = True
    double_quant: bool = True  # quantize the scales too: 0.4 bits a weight less

    def check(self, device: torch.device, strategy: str, pretrained: str | None) -> None:
        """Raises ConfigError under FSDP, which cannot cut 4-bit blocks."""
        super().check(device, strategy, pretrained)
        if strategy == "fsdp":
            raise ConfigError(
                "peft=qlora keeps the whole 4-bit model on each GPU and cannot be sharded: set mesh.strategy=ddp, or "
                "use peft=lora."
            )

    def load_arguments(self, device: torch.device) -> dict[str, Any]:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=self.double_quant,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        return {"quantization_config": quantization, "device_map": {"": device}}
