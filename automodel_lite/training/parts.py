"""The parts of a run that make its model, built once from the configuration, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import Optimizer

from automodel_lite.attention.kernel import AttentionKernel
from automodel_lite.config.components import build
from automodel_lite.config.schema import Config, MeshConfig, TrainingConfig
from automodel_lite.data.prepare import build_packer
from automodel_lite.models.adapter import Peft
from automodel_lite.models.loss import Loss
from automodel_lite.models.source import CausalLM


@dataclass(frozen=True)
class Parts:
    """What the model is built from, and what its memory depends on.

    attention  None takes the best kernel for the model and the device
    peft       None trains the model itself
    optimizer  makes the optimizer of a module
    """

    model: CausalLM
    attention: AttentionKernel | None
    peft: Peft | None
    loss: Loss
    optimizer: Callable[[nn.Module], Optimizer]
    packed_sequence_size: int
    mesh: MeshConfig
    training: TrainingConfig

    @property
    def is_quantized(self) -> bool:
        """Are the frozen weights held in 4 bits?"""
        return self.peft is not None and self.peft.is_quantized


def build_parts(config: Config) -> Parts:
    """Raises ConfigError for what a part refuses, and for a package that is missing."""
    return Parts(
        model=build(config.model),
        attention=build(config.attention) if config.attention else None,
        peft=build(config.peft) if config.peft else None,
        loss=build(config.loss),
        optimizer=partial(build, config.optimizer),
        packed_sequence_size=build_packer(config).packed_sequence_size,
        mesh=config.mesh,
        training=config.training,
    )
