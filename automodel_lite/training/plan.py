"""What a run is built from, and how its model will lie on the ranks; nothing is built or loaded here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PretrainedConfig

from automodel_lite.attention.kernel import AttentionKernel, ReferenceAttention
from automodel_lite.config.components import build, missing_package
from automodel_lite.config.schema import Config, MeshConfig, TrainingConfig
from automodel_lite.data.packing.packs import Packer
from automodel_lite.data.prepare import build_packer
from automodel_lite.errors import ConfigError
from automodel_lite.models.flops import ModelSize
from automodel_lite.models.loss import Loss, checked_loss
from automodel_lite.models.source import CausalLM
from automodel_lite.parallel.mesh import MeshShape

if TYPE_CHECKING:
    from automodel_lite.models.lora import Lora  # which brings peft


@dataclass(frozen=True)
class Parts:
    """What the model is built from, and what its memory depends on.

    attention  None takes the best kernel for the model and the device
    peft       None trains the model itself
    optimizer  makes the optimizer of a module
    """

    model: CausalLM
    attention: AttentionKernel | None
    peft: Lora | None
    loss: Loss
    optimizer: Callable[[nn.Module], Optimizer]
    packer: Packer
    mesh: MeshConfig
    training: TrainingConfig
    teacher: CausalLM | None = None  # a frozen second model

    @property
    def packed_sequence_size(self) -> int:
        return self.packer.packed_sequence_size

    @property
    def is_quantized(self) -> bool:
        """Are the frozen weights held in 4 bits?"""
        return self.peft is not None and self.peft.is_quantized


def build_parts(config: Config) -> Parts:
    """Raises ConfigError for what a part refuses, and for a package that is missing."""
    loss, teacher = checked_loss(build(config.loss)), build(config.teacher) if config.teacher else None
    if loss.needs_teacher != (teacher is not None):
        name = type(loss).__name__
        cure = "needs one: set teacher=pretrained teacher.pretrained=..." if loss.needs_teacher else "does not use it"
        raise ConfigError(f"teacher={'pretrained' if teacher else 'none'}: loss={name} {cure}.")
    packer = build_packer(config)
    cuts = packer.overlong in ("truncate", "split") or packer.strategy.cuts_documents
    if "answers" in loss.required and (cuts or packer.strategy.is_ragged):
        raise ConfigError(
            f"packed_sequence.strategy={packer.strategy.name} overlong={packer.overlong}: pairs of answers stay whole, "
            "in one pack: use exact_fill, best_fit or next_fit, and overlong=drop or error."
        )
    peft = build(config.peft) if config.peft else None
    _check_fp8(config, packer, peft)
    return Parts(
        model=build(config.model),
        attention=build(config.attention) if config.attention else None,
        peft=peft,
        loss=loss,
        teacher=teacher,
        optimizer=partial(build, config.optimizer),
        packer=packer,
        mesh=config.mesh,
        training=config.training,
    )


def _check_fp8(config: Config, packer: Packer, peft: Lora | None) -> None:
    """Raises ConfigError for what keeps training.fp8 from working: its products take multiples of 16 in every dim,
    tokens too.
    """
    fp8, tokens = config.training.fp8, config.training.micro_batch_size * packer.packed_sequence_size
    if fp8 == "none":
        return
    problems = []
    if find_spec("torchao") is None:
        problems.append(missing_package("training.fp8", "torchao"))
    if peft is not None and peft.is_quantized:
        problems.append(f"training.fp8={fp8} cannot multiply peft=qlora's 4-bit weights: use peft=lora, or fp8=none.")
    if packer.strategy.is_ragged:
        problems.append(f"training.fp8={fp8} needs multiples of 16 tokens, and padded rows are not: use packing.")
    elif tokens % (16 * config.mesh.cp):
        problems.append(
            f"training.fp8={fp8} needs multiples of 16 tokens: packed_sequence.packed_sequence_size x "
            f"training.micro_batch_size = {tokens} must be a multiple of {16 * config.mesh.cp} (16 * mesh.cp)."
        )
    if problems:
        raise ConfigError("\n".join(problems))


@dataclass(frozen=True)
class ModelPlan:
    """A model on its ranks before anything of it is built: a run, its dry run and recipes/verify.py decide alike."""

    parts: Parts  # with mesh.cp_exchange decided
    config: PretrainedConfig
    size: ModelSize
    shape: MeshShape
    strategy: str  # fsdp, ddp or none
    dtype: torch.dtype  # of compute
    kernel: AttentionKernel = field(default_factory=ReferenceAttention)
    attention: str = ""  # which kernel and exchange, and why

    @property
    def tokens(self) -> int:
        """Of a micro-batch, over the ranks that share it."""
        return self.parts.training.micro_batch_size * self.parts.packed_sequence_size


def with_recomputation(parts: Parts, how: str, every: int) -> Parts:
    """Returns the parts with this activation checkpointing on each `every`-th layer."""
    training = replace(parts.training, activation_checkpointing=how, recompute_every_layers=every)
    return replace(parts, training=training)


def layer_settings(config: PretrainedConfig, num_layers: int) -> dict[str, Any]:
    """Returns the settings of a model's first layers: their number, and every list that has an entry a layer."""
    whole = config.num_hidden_layers
    lists = {key: value for key, value in vars(config).items() if isinstance(value, list) and len(value) == whole}
    return {"num_hidden_layers": num_layers, **{key: value[:num_layers] for key, value in lists.items()}}


def with_layers(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """Returns the config of the same model with its first layers alone."""
    shorter = copy.deepcopy(config)
    text = shorter.get_text_config()
    for key, value in layer_settings(text, num_layers).items():
        setattr(text, key, value)
    return shorter
