"""LoRA (Hu et al., 2021), DoRA (Liu et al., 2024) and QLoRA through peft.

peft puts its layers into the Hugging Face model in place, so that the model keeps its class: attention kernels, the
loss and sharding see the model that they know, with more and mostly frozen parameters.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

import peft
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig

from automodel_lite.config.components import missing_package
from automodel_lite.config.rules import Positive, Range
from automodel_lite.errors import ConfigError, one_line
from automodel_lite.models.adapter import lora_targets
from automodel_lite.models.layers import local
from automodel_lite.models.sharded import keep_part
from automodel_lite.models.source import load_whole

_PREFIX = "base_model.model."  # peft's names of the weights of the model that it wraps


@dataclass(frozen=True)
class Lora:
    """The config node `peft`."""

    is_quantized: ClassVar[bool] = False
    r: Positive = 16  # rank of the matrices
    alpha: Positive = 32  # the update is scaled by alpha / r
    dropout: Annotated[float, Range(0, below=1)] = 0.0  # on the input of the adapter
    target_modules: str | list[str] = "all-linear"  # attention, dense MLPs, shared experts; or names, [q_proj, v_proj]
    experts: bool = False  # also adapt the routed experts of a mixture (never its router)
    modules_to_save: list[str] | None = None  # modules to train fully, [embed_tokens, lm_head]
    use_dora: bool = False  # train the magnitude of each weight column separately (peft=dora)
    use_rslora: bool = False  # scale by alpha / sqrt(r) instead of alpha / r

    def check(self, device: torch.device, strategy: str, pretrained: str | None) -> None:
        """Raises ConfigError for a model from scratch: its random weights are not saved anywhere."""
        if not pretrained:
            raise ConfigError(
                "peft adapts an existing model, but model.pretrained=null creates one from scratch: set "
                "model=pretrained model.pretrained=<folder or hub name>, or peft=none."
            )

    def load_arguments(self, device: torch.device) -> dict[str, Any]:
        return {}

    def adapt(self, model: transformers.PreTrainedModel, base: str) -> LoraAdapter:
        """Puts adapters into `model`, in place; raises ConfigError when no layer has a name of target_modules."""
        targets = lora_targets(model, self.target_modules, self.experts)
        if targets.parameters and (self.dropout or self.use_dora):
            raise ConfigError(
                f"peft adapts {targets.parameters[0]} of this mixture of experts as a weight, without peft.dropout and "
                "peft.use_dora: set peft.dropout=0 and peft=lora, or name other layers in peft.target_modules."
            )
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=targets.modules,
            target_parameters=targets.parameters or None,
            modules_to_save=self.modules_to_save,
            use_dora=self.use_dora,
            use_rslora=self.use_rslora,
        )
        try:
            with _with_memory(model):
                wrapped = peft.get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(f"peft.target_modules={self.target_modules}: {one_line(error)}") from None
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
        adapted = [name.split(".lora_A")[0].split(".") for name, _ in model.named_parameters() if ".lora_A" in name]
        names = {"experts" if {"experts", "base_layer"} & {*name} else name[-1] for name in adapted}
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        whole = f", whole {', '.join(self.modules_to_save)}" if self.modules_to_save else ""
        kind = "dora" if self.use_dora else "lora"
        where = ", ".join(sorted(names)) + whole
        return f"{kind} r {self.r}, alpha {self.alpha} on {where}: {trained / 1e6:,.2f} M trained"


@dataclass(frozen=True)
class QLora(Lora):
    """The config node `peft`: QLoRA (Dettmers et al., 2023), LoRA on frozen weights in 4-bit NF4 through bitsandbytes,
    which is slow on a CPU.
    """

    is_quantized: ClassVar[bool] = True
    double_quant: bool = True  # also quantize the scales, saves 0.4 bits per weight

    def __post_init__(self) -> None:
        if find_spec("bitsandbytes") is None:  # transformers imports it late
            raise ConfigError(missing_package("peft=qlora", "bitsandbytes"))

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

    def adapt(self, model: transformers.PreTrainedModel, base: str) -> LoraAdapter:
        """See `Lora.adapt`. Never packed for the CPU kernel that `eval()` selects (bitsandbytes 0.50, AVX-512): it has
        no gradient, and the weights would stay packed in training.
        """
        for module in model.modules():
            if "support_avx512bf16_for_cpu" in vars(module):
                vars(module)["support_avx512bf16_for_cpu"] = False
        return super().adapt(model, base)


@dataclass(frozen=True)
class LoraAdapter:
    """The adapter inside a model."""

    wrapped: peft.PeftModel
    description: str

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Without its layers the weights have the names that checkpoints know; back in their places, the layers take
        what they need from the loaded weights: copies of whole modules, and DoRA's magnitudes.
        """
        model: Any = self.wrapped.base_model.model
        places = [
            (parent, name, child)
            for parent in model.modules()
            if not isinstance(parent, _LAYERS)
            for name, child in parent.named_children()
            if isinstance(child, _LAYERS)
        ]
        for parent, name, layer in places:
            is_copy = isinstance(layer, ModulesToSaveWrapper)
            setattr(parent, name, layer.original_module if is_copy else layer.get_base_layer())  # type: ignore[union-attr]
        yield
        for parent, name, layer in places:
            setattr(parent, name, layer)
            _take_from_base(layer)

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """adapter_config.json and adapter_model.safetensors, as `PeftModel.from_pretrained` reads them."""
        named = {_PREFIX + name: value for name, value in weights.items()}
        self.wrapped.save_pretrained(str(folder), state_dict=named, save_embedding_layers=False)

    def merge(self) -> None:
        """Layer by layer, each whole while it is merged. Raises ValueError when merged weights are not finite."""
        for layer in self.wrapped.base_model.modules():
            if isinstance(layer, BaseTunerLayer) and isinstance(layer, nn.Module):
                with _whole(layer):
                    layer.merge(safe_merge=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # all adapters are merged already
            self.wrapped.merge_and_unload()


def _leave_casts_to_autocast(model: nn.Module) -> None:
    """peft casts a layer's input to its adapter's fp32, and autocast casts that back: a 1B model at 8,192 tokens moves
    289 GB per step with both casts and 225 without (counted).
    """
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            vars(module)["cast_input_dtype_enabled"] = False


_LAYERS = (BaseTunerLayer, ModulesToSaveWrapper)


@torch.no_grad()
def _take_from_base(layer: Any) -> None:
    """Sharded alike, a shard of the copy or of the magnitudes is made from the same shard of the weight."""
    if isinstance(layer, ModulesToSaveWrapper):
        copy = layer.modules_to_save["default"]
        for name, original in layer.original_module.named_parameters():
            module, _, weight = name.rpartition(".")
            setattr(copy.get_submodule(module), weight, nn.Parameter(original.detach().clone()))
        return
    for magnitude in layer.lora_magnitude_vector.values():
        weight = local(layer.get_base_layer().weight)
        local(magnitude.weight).copy_(torch.linalg.norm(weight.float(), dim=1))


@contextlib.contextmanager
def _whole(layer: nn.Module) -> Iterator[None]:
    """The layer's sharded parameters are whole inside (a collective); then each rank keeps its part of them."""
    shards: list[Any] = [(m, n, p) for m in layer.modules() for n, p in m._parameters.items() if isinstance(p, DTensor)]
    for module, name, shard in shards:
        module._parameters[name] = nn.Parameter(shard.full_tensor().detach(), requires_grad=False)
    yield
    for module, name, shard in shards:
        whole: Any = module._parameters[name]
        keep_part(shard, whole.detach())
        module._parameters[name] = shard


@contextlib.contextmanager
def _with_memory(model: nn.Module) -> Iterator[None]:
    """Weights on the meta device are, inside, one zero seen from everywhere: peft makes its own layers where the base's
    are, and on the meta device their numbers would be lost.
    """
    _replace(model, lambda p: p.is_meta, lambda p: p.new_zeros(1, device="cpu").expand(p.shape))
    yield
    _replace(model, _is_one_value, lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"))


def _is_one_value(p: Tensor) -> bool:
    return p.numel() > 1 and p.untyped_storage().nbytes() < p.numel() * p.element_size()


def _replace(model: nn.Module, which: Callable[[Tensor], bool], make: Callable[[Tensor], Tensor]) -> None:
    """Parameters that modules share stay shared."""
    made = {p: nn.Parameter(make(p), p.requires_grad) for p in model.parameters() if which(p)}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter in made:
                module._parameters[name] = made[parameter]


def load_adapted(folder: str, dtype: torch.dtype, trust_remote_code: bool = False) -> transformers.PreTrainedModel:
    """The base that an adapter's folder names, with the adapter in it.

    Through peft: AutoModelForCausalLM.from_pretrained of transformers 5.23 resets DoRA's magnitudes.
    """
    base = peft.PeftConfig.from_pretrained(folder).base_model_name_or_path
    model = load_whole(base, dtype, trust_remote_code)
    peft.PeftModel.from_pretrained(model, folder)  # puts the adapter's layers into `model`
    return model


def _absolute(base: str) -> str:
    """A folder by its absolute path, so that the adapter finds it from anywhere; a hub name as it is."""
    folder = Path(base).expanduser()
    return str(folder.resolve()) if folder.is_dir() else base
