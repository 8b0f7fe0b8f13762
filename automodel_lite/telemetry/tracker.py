"""metrics.jsonl: one object a line, written at once, so that a killed run keeps what it has logged.

Trackers beside metrics.jsonl: started on rank 0 alone, fed the same rows, never able to stop a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from automodel_lite.config.components import build
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError
from automodel_lite.redact import scrub, scrub_tree
from automodel_lite.run.folder import RunFolder, config_yaml_values


class JsonlLogger:
    """Appends rows to a file. NaN and infinities are written as text, so that every line is valid JSON."""

    def __init__(self, path: Path, is_silent: bool = False) -> None:
        self._file = None if is_silent else open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the run

    def log(self, row: dict[str, Any]) -> None:
        if self._file:
            self._file.write(json.dumps({key: _json_value(value) for key, value in row.items()}) + "\n")

    def close(self) -> None:
        if self._file:
            self._file.close()


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


Row = dict[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told of the run."""

    name: str
    folder: Path
    config: dict[str, Any]  # as in config.yaml: plain values, secrets left out
    first_step: int  # rows of later steps will come (again)
    state: dict[str, Any]  # what this tracker's `state()` was when the checkpoint was written; empty for a fresh run


class Tracker(Protocol):
    """One tracker. Its config node is built with `run=RunInfo`, which starts it."""

    def log(self, row: Row) -> None:
        """Numbers of a step: {"step": 10, "loss": 2.3, ...}."""

    def text(self, step: int, name: str, value: str) -> None:
        """A generated sample or the like."""

    def state(self) -> dict[str, Any]:
        """What finds this tracker's run again after a restart; small and JSON."""

    def close(self) -> None: ...


class MetricsLog:
    """metrics.jsonl and all trackers, as one. Silent on every rank but the first. No secret gets past here."""

    def __init__(self, jsonl: JsonlLogger, trackers: dict[str, Tracker], say: Callable[[str], None]) -> None:
        self.jsonl = jsonl
        self.trackers = trackers
        self.say = say

    def log(self, row: Row) -> None:
        row = scrub_tree(row)
        self.jsonl.log(row)
        self._each(lambda tracker: tracker.log(row))

    def text(self, step: int, name: str, value: str) -> None:
        name, value = scrub(name), scrub(value)
        self.jsonl.log({"step": step, f"text/{name}": value})
        self._each(lambda tracker: tracker.text(step, name, value))

    def state(self) -> dict[str, Any]:
        """For the checkpoint: tracker -> its state."""
        state: dict[str, Any] = scrub_tree({name: tracker.state() for name, tracker in self.trackers.items()})
        return state

    def close(self) -> None:
        self.jsonl.close()
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # a tracker's trouble is not the run's
                del self.trackers[name]
                self.say(f"WARNING: logger {name} is off from here: {_one_line(error)}; metrics.jsonl goes on")


def open_metrics(
    config: Config, folder: RunFolder, is_first: bool, step: int, state: dict[str, Any], say: Callable[[str], None]
) -> MetricsLog:
    """metrics.jsonl, and on the first rank the configured trackers; one that does not start costs a warning.

    state   what `MetricsLog.state()` was at the checkpoint that the run continues from, {} for a fresh run
    """
    jsonl = JsonlLogger(folder.metrics, is_silent=not is_first)
    trackers: dict[str, Tracker] = {}
    for name, node in config.logger.items() if is_first else ():
        info = RunInfo(scrub(config.name), folder.path, config_yaml_values(config), step, state.get(name, {}))
        try:
            trackers[name] = build(node, run=info)
        except ConfigError:
            raise
        except Exception as error:
            say(f"WARNING: logger {name} is off: {_one_line(error)}; metrics.jsonl is written")
    return MetricsLog(jsonl, trackers, say)


def numbers(row: Row) -> dict[str, float]:
    """The values of a row that a chart can show, its step left out."""
    return {key: value for key, value in row.items() if key != "step" and isinstance(value, (int, float))}


def _one_line(error: Exception) -> str:
    return scrub(f"{type(error).__name__}: {' '.join(str(error).split())}")[:200]
