"""LoRA (Hu et al., 2021) and DoRA (Liu et al., 2024) through peft.

peft puts its layers into the Hugging Face model in place, so that the model keeps its class: attention kernels, the
loss and sharding see the model that they know, with more and mostly frozen parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import peft
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from automodel_lite.config.rules import Positive, Range
from automodel_lite.errors import ConfigError

_PREFIX = "base_model.model."  # peft's names of the weights of the model that it wraps


@dataclass(frozen=True)
class Lora:
    """The config node `peft`.

    target_modules    "all-linear" (every linear layer but the output head), or names such as [q_proj, v_proj]
    modules_to_save   modules trained whole and saved with the adapter, such as [embed_tokens, lm_head]
    """

    r: Positive = 16
    alpha: Positive = 32
    dropout: Annotated[float, Range(0, below=1)] = 0.0
    target_modules: str | list[str] = "all-linear"
    modules_to_save: list[str] | None = None
    use_dora: bool = False
    use_rslora: bool = False

    def check(self, device: torch.device, strategy: str, pretrained: str | None) -> None:
        """Raises ConfigError for a model from scratch: its random weights are not saved anywhere."""
        if not pretrained:
            raise ConfigError(
                "peft trains an adapter of a model that exists, and model.pretrained=null makes one from scratch: set "
                "model=pretrained model.pretrained=<folder or hub name>, or peft=none."
            )

    def load_arguments(self, device: torch.device) -> dict[str, Any]:
        return {}

    def adapt(self, model: transformers.PreTrainedModel, base: str) -> LoraAdapter:
        """Puts adapters into `model`, in place; raises ConfigError when no layer has a name of target_modules."""
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.target_modules,
            modules_to_save=self.modules_to_save,
            use_dora=self.use_dora,
            use_rslora=self.use_rslora,
        )
        try:
            wrapped = peft.get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(f"peft.target_modules={self.target_modules}: {' '.join(str(error).split())}") from None
        self._check_saved_modules(model)
        _leave_casts_to_autocast(model)
        wrapped.peft_config["default"].base_model_name_or_path = _absolute(base)
        return LoraAdapter(wrapped, self._describe(model))

    def _check_saved_modules(self, model: transformers.PreTrainedModel) -> None:
        found = {
            name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)
        }
        missing = sorted(set(self.modules_to_save or ()) - found)
        if missing:
            raise ConfigError(f"peft.modules_to_save={self.modules_to_save}: the model has no module {missing[0]}.")

    def _describe(self, model: transformers.PreTrainedModel) -> str:
        names = {name.split(".lora_A")[0].split(".")[-1] for name, _ in model.named_parameters() if ".lora_A" in name}
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        whole = f", whole {', '.join(self.modules_to_save)}" if self.modules_to_save else ""
        kind = "dora" if self.use_dora else "lora"
        where = ", ".join(sorted(names)) + whole
        return f"{kind} r {self.r}, alpha {self.alpha} on {where}: {trained / 1e6:,.2f} M trained"


@dataclass(frozen=True)
class LoraAdapter:
    """The adapter inside of a model."""

    wrapped: peft.PeftModel
    description: str

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """adapter_config.json and adapter_model.safetensors, as `PeftModel.from_pretrained` reads them."""
        named = {_PREFIX + name: value for name, value in weights.items()}
        self.wrapped.save_pretrained(str(folder), state_dict=named, save_embedding_layers=False)

    def merge(self) -> None:
        """Raises RuntimeError when the merged weights are not finite."""
        self.wrapped.merge_and_unload(safe_merge=True)


def _leave_casts_to_autocast(model: nn.Module) -> None:
    """peft casts a layer's input to its adapter's fp32, and autocast casts that back: a 1B model at 8,192 tokens moves
    289 GB per step with both casts and 225 without (counted).
    """
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            vars(module)["cast_input_dtype_enabled"] = False


def load_adapted(folder: str, dtype: torch.dtype, trust_remote_code: bool = False) -> transformers.PreTrainedModel:
    """The base that an adapter's folder names, with the adapter in it.

    Through peft: AutoModelForCausalLM.from_pretrained of transformers 5.23 starts DoRA's magnitudes anew.
    """
    base = peft.PeftConfig.from_pretrained(folder).base_model_name_or_path
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype, trust_remote_code=trust_remote_code)
    peft.PeftModel.from_pretrained(model, folder)  # puts the adapter's layers into `model`
    return model


def _absolute(base: str) -> str:
    """A folder by its absolute path, so that the adapter finds it from anywhere; a hub name as it is."""
    folder = Path(base).expanduser()
    return str(folder.resolve()) if folder.is_dir() else base
