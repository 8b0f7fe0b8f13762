"""The sums of a step over ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automodel_lite.errors import DataError
from automodel_lite.parallel.mesh import Mesh, MeshShape, open_mesh
from automodel_lite.training.engine import Engine
from tests.ranks import run_ranks


def engine_on(mesh: Mesh) -> Engine:
    """An engine that sums alone needs neither a model nor settings."""
    nothing: Any = SimpleNamespace()
    return Engine(mesh, nothing, nothing)


def sums_of(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.ones(()) for name in names}


def _unequal(rank: int, world_size: int) -> str:
    engine = engine_on(open_mesh(MeshShape(2, 1, 1), torch.device("cpu")))
    assert engine.total(sums_of("loss", "kl"), of_model=False)["kl"] == 2
    with pytest.raises(DataError) as raised:
        engine.total(sums_of(*["loss", "ratio", "kl"][: 2 + rank]))
    return str(raised.value)


def test_unequal_parts_of_ranks_get_a_sentence() -> None:
    """They ended in a crash of gloo."""
    for rank, said in enumerate(run_ranks(_unequal, 2)):
        parts = ["loss, ratio", "loss, ratio, kl"]
        assert said.startswith(
            f"rank {rank}: the losses have the parts {parts[rank]}, and those of"
        )
        assert "add the missing column to all rows" in said


def test_parts_stay_those_of_the_first_step() -> None:
    engine = engine_on(Mesh(MeshShape(1, 1, 1), torch.device("cpu"), None))
    engine.total(sums_of("loss", "ratio"), of_model=False)
    engine.total(sums_of("loss", "kl"))
    with pytest.raises(
        DataError, match=r"have the parts loss, and those of the first step loss, kl"
    ):
        engine.total(sums_of("loss"))
