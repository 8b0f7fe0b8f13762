"""Steps whose loss or gradient is not finite: skipped on all ranks, and the end of the run when they are too many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_lite.errors import RunStoppedError
from automodel_lite.run import checkpoint_folder
from tests.ranks import run_ranks
from tests.run.jobs import status_of
from tests.runs import train_quick


def _train_with_bad_steps(
    rank: int, world_size: int, folder: str, bad: dict[int, int], overrides: list[str]
) -> Any:
    """`bad`: step -> the rank whose loss is NaN in it."""
    from recipes import train_ft

    real = train_ft.TrainFinetuneRecipe.step

    def step(recipe: Any, *args: Any) -> Any:
        is_bad = bad.get(recipe.num_steps + 1) == rank
        embeddings = recipe.model.loss_model.lm.get_input_embeddings()
        hook = embeddings.register_forward_hook(
            lambda m, args, out: out * float("nan") if is_bad else out
        )
        result = real(recipe, *args)
        hook.remove()
        finite = all(
            torch.isfinite(getattr(p, "_local_tensor", p)).all() for p in recipe.model.parameters()
        )
        assert finite, "the optimizer moved on bad numbers"
        return result

    train_ft.TrainFinetuneRecipe.step = step  # type: ignore[method-assign]
    try:
        return train_quick(Path(folder), *overrides)
    except RunStoppedError as error:
        return 1, str(error)


def test_a_bad_step_on_one_rank_is_skipped_on_all(tmp_path: Path) -> None:
    options = ["training.max_nonfinite_steps=2", "training.max_steps=6", "checkpoint.every_steps=2"]
    results = run_ranks(_train_with_bad_steps, 2, str(tmp_path), {3: 1, 4: 0}, options)
    assert [code for code, _ in results] == [0, 0]
    screen = results[0][1]
    assert screen.count("WARNING: step") == 2
    assert "step 3: the loss or the gradient is not finite" in screen
    dumped = json.loads((tmp_path / "bad_steps/step_00000003/rank_00001.json").read_text())
    assert dumped["step"] == 3
    assert len(dumped["pack_ids"]) == 4
    assert (tmp_path / "bad_steps/step_00000003/rank_00001.safetensors").is_file()
    # no checkpoint of step 4, whose numbers were bad: it is made up for at step 5
    steps = [
        line.split("saved ")[1].split()[0] for line in screen.splitlines() if "saved step" in line
    ]
    assert steps == ["step_00000002", "step_00000005", "step_00000006"]


def test_too_many_bad_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    options = [
        "training.max_nonfinite_steps=1",
        "training.max_steps=4",
        "checkpoint.every_steps=1",
    ]
    results = run_ranks(_train_with_bad_steps, 2, str(tmp_path), {3: 0, 4: 0}, options)
    for code, text in results:
        assert code == 1
        assert (
            "step 4: the loss or the gradient is not finite (gradient norm nan), 2 times in a row"
            in text
        )
        assert "training.max_nonfinite_steps=1" in text
    complete, _ = checkpoint_folder.survey(tmp_path / "checkpoints")
    assert complete[0].name == "step_00000002"
    assert json.loads((tmp_path / "STATUS.json").read_text())["state"] == "failed"
    assert train_quick(tmp_path, *options)[0] == 0  # the same command, without the fault


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["optimizer.lr=1", "optimizer.weight_decay=1e38", "training.max_steps=3"],
            "step 3 is the last one, and .* not finite: ",
        ),
        (
            ["optimizer.lr=1", "optimizer.weight_decay=1e45", "training.max_steps=1"],
            "step 1 is the last one, and the trained weights are not finite",
        ),
    ],
)
def test_numbers_that_are_not_finite_are_not_finished(
    tmp_path: Path, overrides: list[str], said: str
) -> None:
    """NaN once was `finished`, exit 0, with nothing saved."""
    more = [
        "checkpoint.every_steps=0",
        "lr_scheduler=constant",
        "training.max_grad_norm=0",
        "training.max_nonfinite_steps=9",
    ]
    with pytest.raises(RunStoppedError, match=said):
        train_quick(tmp_path, *overrides, *more)
    assert status_of(tmp_path)["state"] == "failed"
    assert not list(tmp_path.glob("checkpoints/step_*"))
