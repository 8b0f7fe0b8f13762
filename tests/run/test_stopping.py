"""What the ranks tell each other in a step: one message, which nobody waits for."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recipes.train_ft import TrainFinetuneRecipe
from tests.ranks import run_ranks
from tests.runs import train_quick

OPTIONS = [
    "training.max_steps=6",
    "training.log_every_steps=100",
    "checkpoint.every_steps=0",
    "training.val_every_steps=0",
]


def _messages(rank: int, world_size: int, folder: str) -> list[str]:
    """The collectives of host values from the start of step 2 to the end of step 5."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    found: list[str] = []
    is_on = False
    real_step = TrainFinetuneRecipe.step

    def step(recipe: TrainFinetuneRecipe, ready: Any) -> Any:
        nonlocal is_on
        is_on = 1 <= recipe.num_steps < 5
        return real_step(recipe, ready)

    def watched(name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            is_of_device = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float32
            if is_on and not is_of_device:
                found.append(f"{name} {'started' if options.get('async_op') else 'waited for'}")
            return real(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainFinetuneRecipe, "step", step)
        for name in ("all_reduce", "broadcast_object_list", "all_gather_object", "barrier"):
            patch.setattr(dist, name, watched(name, getattr(dist, name)))
        assert train_quick(Path(folder), *OPTIONS)[0] == 0
    return found


def test_a_step_has_one_message_that_is_not_waited_for(tmp_path: Path) -> None:
    """Two blocking reductions a step, of counts and of signals, took 40 to 80 ms each at a thousand ranks."""
    assert run_ranks(_messages, 2, str(tmp_path / "run")) == [["all_reduce started"] * 4] * 2
