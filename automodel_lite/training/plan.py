"""What a run is built from, and how its model will lie on the ranks; nothing is built or loaded here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PretrainedConfig

from automodel_lite.attention.kernel import AttentionKernel, ReferenceAttention
from automodel_lite.config.components import build
from automodel_lite.config.schema import Config, MeshConfig, TrainingConfig
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
    packed_sequence_size: int
    mesh: MeshConfig
    training: TrainingConfig
    teacher: CausalLM | None = None  # a frozen second model

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
    return Parts(
        model=build(config.model),
        attention=build(config.attention) if config.attention else None,
        peft=build(config.peft) if config.peft else None,
        loss=loss,
        teacher=teacher,
        optimizer=partial(build, config.optimizer),
        packed_sequence_size=packer.packed_sequence_size,
        mesh=config.mesh,
        training=config.training,
    )


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
