"""What a run has left in its folder, read for drawing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel_lite.errors import ConfigError
from automodel_lite.run.folder import RunFolder, saved_config

Curve = tuple[list[int], list[float]]  # steps, values


@dataclass(frozen=True)
class RunRecord:
    """One run: its settings, its rows, what its packs look like and how it ended."""

    path: Path
    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    packing: dict[str, Any]  # packing.json; empty when there is none
    lengths: dict[str, Any]  # lengths.json; empty when there is none
    status: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)  # run.json: the command and the start block

    def curve(self, key: str) -> Curve:
        """The finite values of `key` over the steps."""
        points = [(row["step"], float(row[key])) for row in self.rows if key in row]
        points = [(step, value) for step, value in points if math.isfinite(value)]
        return [step for step, _ in points], [value for _, value in points]

    def last(self, key: str) -> float | None:
        values = self.curve(key)[1]
        return values[-1] if values else None

    def typical(self, key: str) -> float | None:
        """The median, which the first slow steps do not move."""
        values = sorted(self.curve(key)[1])
        return values[len(values) // 2] if values else None

    def validation_keys(self) -> list[str]:
        return sorted({key for row in self.rows for key in row if key.startswith("val_loss/")})

    def num_tokens(self) -> float:
        """Document tokens trained on: each logged rate covers the steps since the row before it."""
        total, before = 0.0, 0
        for row in self.rows:
            if "step_s" in row and "tokens_per_s" in row:
                total += row["tokens_per_s"] * row["step_s"] * (row["step"] - before)
                before = row["step"]
        return total

    def time_s(self) -> dict[str, float]:
        """Phase -> seconds of the whole run."""
        spent: dict[str, float] = {}
        for row in self.rows:
            for key, value in row.items():
                if key.startswith("time_s/"):
                    spent[key.removeprefix("time_s/")] = spent.get(key.removeprefix("time_s/"), 0.0) + value
        return spent


def read_run(path: Path) -> RunRecord:
    """Raises ConfigError for a folder that is no run's, or that has logged nothing yet."""
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise ConfigError(f"{path} is not a run's folder: it has no config.yaml.")
    lines = folder.metrics.read_text(errors="replace").splitlines() if folder.metrics.is_file() else []
    rows = [row for row in map(_row, lines) if row]
    if not rows:
        raise ConfigError(f"{path} has logged no step yet.")
    config = saved_config(folder.config)
    return RunRecord(
        path=path,
        name=str(config.get("name", folder.path.name)),
        config=config,
        rows=rows,
        packing=_json(folder.packing),
        lengths=_json(folder.lengths),
        status=_json(folder.status),
        facts=_json(folder.facts),
    )


def differences(records: list[RunRecord]) -> list[tuple[str, list[str]]]:
    """(key, value of each run) of every setting in which runs differ; names and folders are left out."""
    flat = [dict(flatten(record.config)) for record in records]
    keys = sorted({key for values in flat for key in values} - {"name", "output_dir"})
    table = [(key, [str(values.get(key, "-")) for values in flat]) for key in keys]
    return [(key, values) for key, values in table if len(set(values)) > 1]


def flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _row(line: str) -> dict[str, Any] | None:
    """None for a line that a kill has cut, or that is none of ours."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    return {
        key: value for key, value in row.items() if isinstance(value, str if key.startswith("text/") else (int, float))
    }


def _json(path: Path) -> dict[str, Any]:
    """Empty when there is no such file, or a damaged one: the rest of the run can be drawn."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
