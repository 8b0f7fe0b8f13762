"""Real runs of the recipe inside of a test: composed as on the command line, in this process or on several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from automodel_lite.cli import compose_config
from automodel_lite.config import Config, check_config


def config_of(preset: str, *overrides: str) -> Config:
    """What `--config-name preset overrides...` gives."""
    return check_config(compose_config(preset, list(overrides)))


def train(preset: str, *overrides: str) -> list[dict[str, Any]]:
    """Runs the recipe in this process; the rows of metrics.jsonl. `output_dir` belongs to the overrides."""
    from recipes.train_ft import main

    config = config_of(preset, *overrides)
    assert main(config) == 0
    return rows_of(Path(config.output_dir))


def train_on_rank(rank: int, world_size: int, preset: str, *overrides: str) -> list[dict[str, Any]]:
    """`train` for run_ranks."""
    return train(preset, *overrides)


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(rows: list[dict[str, Any]]) -> list[float]:
    """The training losses among the rows."""
    return [row["loss"] for row in rows if "loss" in row]
