"""The recipe in miniature for tests: the smoke preset in this process, or on several ranks."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from automodel_lite.config.check import check_config
from automodel_lite.config.schema import Config
from tests.ranks import run_ranks
from tests.recipes.runs import placed

QUICK = [
    "training.num_threads=1",
    "training.val_every_steps=0",
    "training.max_steps=6",
    "training.global_batch_size=4",
    "checkpoint.every_steps=2",
    "checkpoint.export_hf=false",
    "optimizer.lr=0.01",
]
# a model with dropout in its embeddings and its layers; learned positions, so the model's length is the pack's
DROPOUT = [
    "~model.config",
    "model.config.model_type=gpt2",
    "model.config.n_embd=32",
    "model.config.n_layer=2",
    "model.config.n_head=4",
    "model.config.n_positions=128",
    "model.config.attn_pdrop=0.0",
    "model.config.resid_pdrop=0.1",
    "model.config.embd_pdrop=0.1",
]


def config_of(folder: Path, *overrides: str) -> Config:
    return check_config(composed(folder, *overrides))


def composed(folder: Path, *overrides: str) -> DictConfig:
    return placed("smoke", (*QUICK, *overrides), output_dir=str(folder))


def train(
    folder: Path, *overrides: str, term_at: int = 0, stop_at: int = 0, stop_by: int = signal.SIGTERM
) -> tuple[int, str]:
    return train_config(composed(folder, *overrides), term_at, stop_at, stop_by)


def train_config(raw: DictConfig, term_at: int = 0, stop_at: int = 0, stop_by: int = signal.SIGTERM) -> tuple[int, str]:
    """Runs the recipe in this process -> exit code, what it printed. `term_at`: this rank is told to stop in that step;
    negative: its data workers too. `stop_at`: the same by another signal."""
    import torch

    from automodel_lite.run.stopping import SIGNALS
    from recipes import train_ft

    torch.set_num_threads(1)
    SIGNALS.__init__()  # type: ignore[misc]
    SIGNALS.install()
    real_step = train_ft.TrainFinetuneRecipe.step

    def step(recipe: Any, batches: Any) -> Any:
        if recipe.num_steps + 1 == abs(term_at):
            for child in multiprocessing.active_children() if term_at < 0 else ():
                subprocess.run(["kill", "-TERM", str(child.pid)], check=True)  # from elsewhere, as SLURM would
            os.kill(os.getpid(), signal.SIGTERM)
        if recipe.num_steps + 1 == stop_at:
            os.kill(os.getpid(), stop_by)
        return real_step(recipe, batches)

    train_ft.TrainFinetuneRecipe.step = step  # type: ignore[method-assign]
    screen = io.StringIO()
    try:
        with redirect_stdout(screen):
            code = train_ft.main(check_config(raw))
    finally:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        train_ft.TrainFinetuneRecipe.step = real_step  # type: ignore[method-assign]
        SIGNALS._stop_watching()  # its thread would take the next run's pause for a hang, and end this process
        SIGNALS.__init__()  # type: ignore[misc]  # what this run was told is not for the next one
    return code, screen.getvalue()


def _rank(rank: int, world_size: int, raw: DictConfig, term_at: int, term_rank: int) -> Any:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have workers
    return train_config(raw, term_at if rank == term_rank else 0)


def train_on(world_size: int, folder: Path, *overrides: str, term_at: int = 0, term_rank: int = 0) -> tuple[int, str]:
    """Runs the recipe on so many ranks -> rank 0's exit code and screen."""
    results = run_ranks(_rank, world_size, composed(folder, *overrides), term_at, term_rank)
    assert len({code for code, _ in results}) == 1, results
    return tuple(results[0])  # type: ignore[return-value]


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm) as logged, every digit."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}
