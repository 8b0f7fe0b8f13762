"""The groups of ranks, and this process: its device, threads and kernels."""

from __future__ import annotations

import torch

from automodel_lite.config.schema import Config, TrainingConfig
from automodel_lite.parallel.mesh import (
    Mesh,
    init_mesh,
    threads_of,
)
from automodel_lite.seed import use_deterministic
from automodel_lite.telemetry.metrics import STARTUP


def open_world(config: Config) -> Mesh:
    """Opens the groups of ranks, and prepares this process; every rank calls it, once its data is
    there: ranks of a group wait only so long for each other.
    """
    mesh = init_mesh(config.mesh)
    STARTUP.lap("groups")
    prepare_process(config.training)
    return mesh


def prepare_process(config: TrainingConfig) -> None:
    """Threads and kernels of this process, before the first kernel runs, after its
    groups are open.
    """
    torch.set_num_threads(threads_of(config.num_threads)[0])
    use_deterministic(config.deterministic)
    if config.tf32:
        torch.set_float32_matmul_precision("high")


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
