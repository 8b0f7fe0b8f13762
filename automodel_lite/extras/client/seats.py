"""Weights, and what is trained, apart from the model that holds them: snapshots to draw answers
from, and the seats of several adapters that take turns on one model.

Values are those of this rank's shards, so nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from automodel_lite.models.layers import local


@dataclass(eq=False)
class Snapshot:
    """values  of the trained parameters; None while they are the model's own"""

    values: list[Tensor] | None = None


@dataclass
class Seat:
    """What one adapter has trained. optimizer: its state by parameter."""

    values: list[Tensor]
    gradients: list[Tensor | None]
    optimizer: dict[Any, Any]
    counts: dict[str, Any]


@torch.no_grad()
def copies(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Returns copies of this rank's values."""
    return [local(parameter).detach().clone() for parameter in parameters]


@torch.no_grad()
def put_back(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Writes values into the parameters, in place."""
    for parameter, value in zip(parameters, values):
        local(parameter).copy_(value)
