"""What a run's folder holds, read back without trust: its files may be cut by a kill, or be another program's."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel_lite.errors import ConfigError
from automodel_lite.run.folder import RunFolder, json_object, saved_config

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
        """Returns the finite values of `key` over the steps."""
        points = [(row["step"], float(row[key])) for row in self.rows if key in row]
        points = [(step, value) for step, value in points if math.isfinite(value)]
        return [step for step, _ in points], [value for _, value in points]

    def last(self, key: str) -> float | None:
        values = self.curve(key)[1]
        return values[-1] if values else None

    def typical(self, key: str) -> float | None:
        """Returns the median, which the first slow steps do not move."""
        values = sorted(self.curve(key)[1])
        return values[len(values) // 2] if values else None

    def validation_keys(self) -> list[str]:
        return sorted({key for row in self.rows for key in row if key.startswith("val_loss/")})

    def axes(self) -> dict[str, Curve]:
        """Returns document tokens and minutes until each logged step; validation and saving do not count as time."""
        steps, tokens, minutes, before = [0], [0.0], [0.0], 0
        for row in self.rows:
            if "step_s" in row and "tokens_per_s" in row:  # both cover the steps since the row before
                seconds = row["step_s"] * (row["step"] - before)
                steps.append(row["step"])
                tokens.append(tokens[-1] + row["tokens_per_s"] * seconds)
                minutes.append(minutes[-1] + seconds / 60)
                before = row["step"]
        return {"tokens": (steps, tokens), "minutes": (steps, minutes)}

    def time_s(self) -> dict[str, float]:
        """Returns phase -> seconds of the whole run."""
        spent: Counter[str] = Counter()
        for row in self.rows:
            spent.update({key.removeprefix("time_s/"): row[key] for key in row if key.startswith("time_s/")})
        return dict(spent)


def read_run(path: Path) -> RunRecord:
    """Raises ConfigError for a folder that is not a run's, or that has logged nothing yet."""
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise ConfigError(f"{path} is not a run's folder: it has no config.yaml.")
    rows = [_leaves(row) for row in folder.rows()]
    if not rows:
        raise ConfigError(f"{path} has logged no step yet.")
    config, facts = saved_config(folder.config), json_object(folder.facts)
    printed = facts.get("lines")
    found = printed if isinstance(printed, list) else []
    lines = [line for line in found if isinstance(line, list) and [*map(type, line)] == [str, str]]
    return RunRecord(
        path=path,
        name=str(config.get("name", folder.path.name)),
        config=config,
        rows=rows,
        packing=_leaves(json_object(folder.packing)),
        lengths=json_object(folder.lengths),
        status=_leaves(folder.read_status()),
        facts={**facts, "lines": lines},
    )


def _leaves(found: dict[str, Any]) -> dict[str, Any]:
    """The numbers and texts of a row or a small file; one that is damaged, or another program's, may hold anything."""
    texts = {key for key in found if key in _TEXTS or key.startswith("text/")}
    return {key: value for key, value in found.items() if isinstance(value, str if key in texts else (int, float))}


_TEXTS = ("state", "reason", "checkpoint", "strategy")
