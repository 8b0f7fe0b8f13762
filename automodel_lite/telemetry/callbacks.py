"""metrics.jsonl: one object per line, written at once, so that a killed run keeps what it has
logged.

Callbacks beside it: started on rank 0 alone, fed the same rows. Trackers are callbacks, and so is
early stopping. One that fails is switched off with a warning; one may end the run early, as if the
last step were done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_lite.config.components import build
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError, counted, one_line
from automodel_lite.parallel.control import Control
from automodel_lite.redact import scrub, scrub_tree
from automodel_lite.results import RESULTS
from automodel_lite.run.durable import json_line
from automodel_lite.run.folder import RunFolder, plain

Row = dict[str, Any]


def numbers(row: Row) -> dict[str, float]:
    """Returns the values of a row that a chart can show, its step left out."""
    return {
        key: value
        for key, value in row.items()
        if key != "step" and isinstance(value, (int, float))
    }


class JsonlLogger:
    """Appends rows to a file. Those for which the disk has no room wait for the next one, with a
    warning.
    """

    def __init__(
        self, path: Path, is_silent: bool = False, say: Callable[[str], None] = print
    ) -> None:
        self._path = path
        self._name = path.name
        self._is_silent = is_silent
        self._say = say
        self._pending = b""
        if not is_silent:
            path.open("ab").close()  # what cannot be written ends the run at its start

    def log(self, row: dict[str, Any]) -> None:
        self.write_line(json_line(row))

    def write_line(self, line: str) -> None:
        """Appends a line as it is, its end included."""
        if not self._is_silent:
            self._write(line.encode(), is_first=not self._pending)

    def close(self) -> None:
        if self._pending:
            self._write(b"", is_first=False)
        if num_lost := self._pending.count(b"\n"):
            self._say(
                f"WARNING: {counted(num_lost, 'row')} of {self._name} lost: there was no room left"
            )

    def _write(self, line: bytes, is_first: bool) -> None:
        self._pending += line
        try:
            with open(self._path, "ab", buffering=0) as file:
                while self._pending:
                    self._pending = self._pending[file.write(self._pending) or 0 :]
        except OSError as error:
            if is_first:
                self._say(
                    f"WARNING: {self._name} cannot be written ({error.strerror}); its rows wait "
                    "for room"
                )


@dataclass(frozen=True)
class RunInfo:
    """What a callback gets to know about the run."""

    name: str
    folder: Path
    config: dict[str, Any]  # as in config.yaml: plain values, secrets left out
    first_step: int  # rows of later steps will come (again)
    # what this callback's `state()` was when the checkpoint was written; empty for a fresh run
    state: dict[str, Any]
    # ends the run at this step: it is saved, exported and finished
    end: Callable[[str], None] = lambda reason: None


class Callback:
    """One node of `logger` or `callbacks`, built with `run=RunInfo` at the start. A subclass has
    what it needs.
    """

    def log(self, row: Row) -> None:
        """Numbers of a step: {"step": 10, "loss": 2.3, ...}, or of a validation: {"step": 10,
        "val_loss/val": 2.4}.
        """

    def text(self, step: int, name: str, value: str) -> None:
        """A generated sample: what the model answered (`value`) to a prompt (`name`)."""

    def exported(self, folder: Path) -> None:
        """The trained model, or its adapter, is in this folder."""

    def state(self) -> dict[str, Any]:
        """What it needs after a restart; small and JSON, kept in each checkpoint."""
        return {}

    def close(self) -> None:
        """The run ends, for now or for good."""


def value_of(row: Row, metric: str) -> float | None:
    """Returns a number of a row; `val_loss` is the mean over its validation sets, `task_score` over
    its tasks. None where the row has none.

    >>> value_of({"step": 3, "val_loss/easy": 1.0, "val_loss/hard": 3.0}, "val_loss")
    2.0
    """
    of_sets = [value for key, value in row.items() if key.startswith(f"{metric}/")]
    if metric.startswith(("val_", "task_")) and of_sets:
        return sum(of_sets) / len(of_sets)
    return row.get(metric)


class MetricsLog:
    """metrics.jsonl and all callbacks, as one. Silent on every rank but the first. No secret gets
    past here.
    """

    def __init__(
        self,
        jsonl: JsonlLogger,
        say: Callable[[str], None],
        ranks: Control | None = None,
        states: dict[str, Any] | None = None,
    ) -> None:
        self.jsonl = jsonl
        self.say = say
        self.callbacks: dict[str, Callback] = {}
        self.end_reason: str | None = None  # of the first callback that ended the run
        self._ranks = ranks  # that learn from the first one whether a callback has ended the run
        self._states = states or {}  # of callbacks, when the run began

    def log(self, row: Row) -> None:
        row = scrub_tree(row)
        RESULTS.update(row)
        self.jsonl.log(row)
        self._each(lambda callback: callback.log(row))

    def log_step(self, row: Row) -> None:
        """Logs a row of the training; every rank calls it, and knows afterwards whether a callback
        ends the run.
        """
        self.log(row)
        if self._ranks:
            self.end_reason = self._ranks.on_first(lambda: self.end_reason)

    def text(self, step: int, name: str, value: str) -> None:
        name = scrub(name)
        value = scrub(value)
        self.jsonl.log({"step": step, f"text/{name}": value})
        self._each(lambda callback: callback.text(step, name, value))

    def log_validation(
        self, step: int, losses: Mapping[str, float], answers: Iterable[tuple[str, str]]
    ) -> None:
        """Logs losses of validation sets, and answers to prompts; every rank calls it."""
        if losses:
            self.log_step({"step": step, **losses})
        for prompt, answer in answers:
            self.text(step, prompt, answer)

    def exported(self, folder: Path) -> None:
        self._each(lambda callback: callback.exported(folder))

    def end(self, reason: str) -> None:
        """Asks for the end of the run at this step."""
        self.end_reason = self.end_reason or reason

    def state(self) -> dict[str, Any]:
        """For the checkpoint: callback -> its state; that of one which is not used any
        more stays.
        """
        self._states |= scrub_tree(
            {name: callback.state() for name, callback in self.callbacks.items()}
        )
        return self._states

    def close(self) -> None:
        self.jsonl.close()
        self._each(lambda callback: callback.close())

    def _each(self, call: Callable[[Callback], None]) -> None:
        for name, callback in list(self.callbacks.items()):
            try:
                call(callback)
            except Exception as error:  # a callback's trouble is not the run's
                del self.callbacks[name]
                self.say(_turned_off(name, error))


def open_metrics(
    config: Config,
    folder: RunFolder,
    ranks: Control,
    step: int,
    state: dict[str, Any],
    say: Callable[[str], None],
) -> MetricsLog:
    """Opens metrics.jsonl, and on the first rank the configured callbacks with the `state` of their
    checkpoint; one that does not start costs a warning. Every rank calls it.
    """
    is_first = ranks.is_first
    with folder.explain_os_errors():
        jsonl = JsonlLogger(folder.metrics, is_silent=not is_first, say=say)
    metrics = MetricsLog(jsonl, say, ranks if config.callbacks else None, dict(state))
    nodes = config.logger | config.callbacks if is_first else {}
    for name, node in nodes.items():
        info = RunInfo(
            scrub(config.name), folder.path, plain(config), step, state.get(name, {}), metrics.end
        )
        try:
            metrics.callbacks[name] = build(node, run=info)
        except ConfigError:
            raise
        except Exception as error:
            say(_turned_off(name, error))
    if config.callbacks:  # one may end the run at once, by what it has kept
        metrics.end_reason = ranks.on_first(lambda: metrics.end_reason)
    return metrics


def _turned_off(name: str, error: Exception) -> str:
    reason = scrub(f"{type(error).__name__}: {one_line(error)}")[:200]
    return f"WARNING: {name} is turned off: {reason}; metrics.jsonl is still written"
