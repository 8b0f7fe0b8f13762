"""Whole runs of the recipe on small settings, in this process or on several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.config.schema import Config
from recipes.train_ft import main
from tests.ranks import run_ranks

Row = dict[str, Any]


def config_of(preset: str, folder: Path, *overrides: str) -> Config:
    """The checked configuration of a run in `folder`; token caches live beside it."""
    return check_config(composed(preset, folder, *overrides))


def composed(preset: str, folder: Path, *overrides: str) -> DictConfig:
    places = [f"output_dir={folder}", f"cache_dir={folder.parent / 'cache'}"]
    return compose_config(preset, [*places, *overrides])


def train(preset: str, folder: Path, *overrides: str, world_size: int = 1) -> list[Row]:
    """Runs a preset to its end and returns the rows of metrics.jsonl."""
    if world_size == 1:
        assert main(config_of(preset, folder, *overrides)) == 0
    else:
        run_ranks(_train_on_rank, world_size, composed(preset, folder, *overrides))
    return rows_of(folder)


def _train_on_rank(rank: int, world_size: int, raw: DictConfig) -> None:
    assert main(check_config(raw)) == 0


def rows_of(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(rows: list[Row]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each logged step."""
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
