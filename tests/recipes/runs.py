"""Whole runs of the recipe on small settings, in this process or on several ranks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

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
    return placed(preset, overrides, output_dir=str(folder), cache_dir=str(folder.parent / "cache"))


def placed(preset: str, overrides: tuple[str, ...], **places: str) -> DictConfig:
    """Composed by Hydra once per process and settings (0.13 s); folders that are not among them differ by run."""
    raw = _composed_once(preset, overrides).copy()
    typed = {text.partition("=")[0] for text in overrides}
    return OmegaConf.merge(raw, {key: value for key, value in places.items() if key not in typed})  # type: ignore


@cache
def _composed_once(preset: str, overrides: tuple[str, ...]) -> DictConfig:
    return compose_config(preset, list(overrides))


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
