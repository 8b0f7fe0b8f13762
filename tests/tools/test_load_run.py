"""The checkpoint that a tool takes of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from automodel_lite.cli.hydra_app import run_command_line
from automodel_lite.errors import ConfigError
from automodel_lite.results import RESULTS
from automodel_lite.run.checkpoint_folder import exported_folder, exported_step
from recipes import average, export_hf, generate
from tests.run.test_export import FEW
from tests.runs import rows_of, train, train_on, train_quick


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path):
    run = tmp_path / "run"
    train("smoke", run, *FEW, "checkpoint.export_hf=false", "checkpoint.every_steps=1")
    with open(run / "checkpoints/step_00000003/tensors/rank_00000.safetensors", "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(bytes([file.read(1)[0] ^ 0x40]))
    with pytest.raises(
        ConfigError,
        match=r"rank_00000.safetensors does not match its checksum.*--checkpoint step_00000002",
    ):
        export_hf.main([str(run)])
    assert not (run / "hf").exists()
    assert export_hf.main([str(run), "--checkpoint", "step_00000002"]) == 0


def test_no_tool_takes_an_older_checkpoint_by_itself(tmp_path: Path) -> None:
    """Of a truncated newest one, 32 of 32 exports once took the one before without a word."""
    run = tmp_path / "run"
    assert train_quick(run, "checkpoint.every_steps=2")[0] == 0
    newest = run / "checkpoints/step_00000006/tensors/rank_00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(
        ConfigError, match=r"step_00000006 is skipped: .*\n.*choose --checkpoint step_00000004"
    ):
        export_hf.main([str(run)])
    with pytest.raises(
        ConfigError, match=r"step_00000006 is skipped: .*\n.*choose --checkpoints step_00000004"
    ):
        average.main([str(run)])
    assert export_hf.main([str(run), "--checkpoint", "step_00000004"]) == 0


RISES = [
    "training.val_every_steps=2",
    "lr_scheduler=constant",
    "optimizer.lr=0.4",  # the loss rises from the first validation on
    "checkpoint.keep_last=1",
    "checkpoint.export_hf=true",
]


@pytest.fixture(scope="module")
def best_of_four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that kept its best checkpoint and its last, and what it printed."""
    run = tmp_path_factory.mktemp("best") / "run"
    code, screen = train_quick(run, *RISES, "checkpoint.keep_best=1")
    assert code == 0
    rated = {
        row["step"]: row["val_loss/held_out"] for row in rows_of(run) if "val_loss/held_out" in row
    }
    assert min(rated, key=lambda step: rated[step]) == 2
    return run, screen


def test_a_run_that_keeps_its_best_exports_it(best_of_four: tuple[Path, str], tmp_path: Path):
    """HF's load_best_model_at_end; the last step's weights were exported beside a kept best one."""
    run, screen = best_of_four
    assert "hf: step 2, which has the lowest validation loss; loads with" in screen
    assert exported_step(run / "hf") == 2
    card = (run / "hf/README.md").read_text()
    assert "| exported | step 2; the numbers are of step 6 |" in card
    assert (
        export_hf.main([str(run), "--checkpoint", "step_00000002", "--to", f"{tmp_path}/two"]) == 0
    )
    assert export_hf.main([str(run), "--checkpoint", "best", "--to", f"{tmp_path}/best"]) == 0
    assert export_hf.main([str(run), "--checkpoint", "latest", "--to", f"{tmp_path}/last"]) == 0
    two, best, last = (
        load_file(tmp_path / f"{name}/model.safetensors") for name in ("two", "best", "last")
    )
    for name, weight in load_file(run / "hf/model.safetensors").items():
        assert torch.equal(weight, two[name]), name
        assert torch.equal(weight, best[name]), name
    assert not torch.equal(last["lm_head.weight"], best["lm_head.weight"])


def test_an_export_is_used_as_the_checkpoint_that_is_named(
    best_of_four: tuple[Path, str], capsys: pytest.CaptureFixture[str]
):
    run, _ = best_of_four
    for name in ("best", "step_00000002", None):
        assert exported_folder(str(run), name) == str(run / "hf")
    with pytest.raises(
        ConfigError,
        match=r"no hf/ or adapter/ of step_00000006: automodel-lite export .*run --checkpoint step_00000006",
    ):
        exported_folder(str(run), "latest")
    with pytest.raises(
        ConfigError, match=r"step_9: there are step_00000006, step_00000002, latest, best"
    ):
        exported_folder(str(run), "step_9")
    with pytest.raises(ConfigError, match=r"--checkpoint best: .*hf is not the folder of a run"):
        exported_folder(str(run / "hf"), "best")
    assert generate.main([str(run), "Hi", "--raw", "--max-new-tokens", "1"]) == 0
    assert "hf is of step_00000002; the newest is step_00000006" in capsys.readouterr().err
    options = [str(run), "Hi", "--raw", "--max-new-tokens", "1", "--checkpoint"]
    assert generate.main([*options, "best"]) == 0
    assert capsys.readouterr().err.count("is of step_") == 0
    with pytest.raises(ConfigError, match="no hf/ or adapter/ of step_00000006"):
        generate.main([*options, "latest"])


def test_evaluate_takes_the_named_checkpoint(
    best_of_four: tuple[Path, str], capsys: pytest.CaptureFixture[str]
):
    run, _ = best_of_four
    best = min(row["val_loss/held_out"] for row in rows_of(run) if "val_loss/held_out" in row)
    line = [
        "--config-name",
        "smoke",
        "model=pretrained",
        "tokenizer=pretrained",
        f"model.pretrained={run}",
    ]
    assert run_command_line("recipes.evaluate:main", [*line, "--checkpoint", "best"]) == 0
    assert f"held_out: {best:.4f}, perplexity" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no hf/ or adapter/ of step_00000006"):
        run_command_line("recipes.evaluate:main", [*line, "--checkpoint", "latest"])


def test_the_best_of_checkpoints_without_validation_is_refused(tmp_path: Path):
    run = tmp_path / "run"
    assert train_quick(run, "dataset.num_questions=0")[0] == 0
    with pytest.raises(
        ConfigError,
        match=r"no checkpoint of a validated step.*--checkpoint latest or one of step_00000006",
    ):
        export_hf.main([str(run), "--checkpoint", "best"])
    assert export_hf.main([str(run), "--checkpoint", "latest"]) == 0


def test_a_run_that_ended_early_says_what_it_exports(tmp_path: Path):
    options = [*RISES, "callbacks=early_stopping", "callbacks.early_stopping.patience=1"]
    _, screen = train_quick(tmp_path / "kept", *options, "checkpoint.keep_last=5")
    assert "ended early: val_loss has not improved 1 time in a row" in screen
    said = " ".join(screen.split())
    assert "step_00000002 has the lowest validation loss: automodel-lite export" in said
    assert export_hf.main([str(tmp_path / "kept"), "--checkpoint", "best"]) == 0
    assert exported_step(tmp_path / "kept/hf") == 2
    _, screen = train_quick(tmp_path / "best", *options, "checkpoint.keep_best=1")
    assert "hf: step 2, which has the lowest validation loss" in screen


@pytest.mark.system
def test_ranks_and_averages_export_the_best_one(tmp_path: Path):
    """Sharded over two ranks, with an adapter, and of weights that are averaged."""
    base = tmp_path / "base"
    assert train_quick(base, "checkpoint.export_hf=true")[0] == 0
    of_adapter = [
        "model=pretrained",
        "tokenizer=pretrained",
        f"model.pretrained={base}/hf",
        "peft=lora",
    ]
    for name, options in {
        "ema": ["training.ema_decay=0.1"],
        "lora": [*of_adapter, "optimizer.lr=0.05"],
    }.items():
        run = tmp_path / name
        train_on(2, run, *RISES, "checkpoint.keep_best=1", *options)
        best = exported_step(run / ("adapter" if name == "lora" else "hf"))
        rated = {
            row["step"]: row["val_loss/held_out"]
            for row in rows_of(run)
            if "val_loss/held_out" in row
        }
        assert best == min(rated, key=lambda step: rated[step]) < 6, rated
        line = ["--config-name", "smoke", "model=pretrained", "tokenizer=pretrained"]
        assert export_hf.main([str(run), "--checkpoint", "best"]) == 0
        RESULTS.clear()
        assert run_command_line("recipes.evaluate:main", [*line, f"model.pretrained={run}/hf"]) == 0
        assert RESULTS["held_out"]["loss"] == pytest.approx(rated[best], rel=1e-4)
