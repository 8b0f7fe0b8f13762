"""Ends a run early by one of its numbers."""

from __future__ import annotations

import math
from typing import Annotated, Any

from automodel_lite.config.rules import Positive, Range
from automodel_lite.errors import ConfigError, counted, did_you_mean
from automodel_lite.telemetry import directions
from automodel_lite.telemetry.callbacks import Callback, Row, RunInfo, value_of
from automodel_lite.telemetry.directions import direction_problem


class EarlyStopping(Callback):
    """Ends the run when a number has stopped getting better (`callbacks=early_stopping`) or has
    leapt away from its best (`loss_leap`).
    """

    def __init__(
        self,
        run: RunInfo,
        # a key of metrics.jsonl; val_loss = the mean over the validation sets
        metric: str = "val_loss",
        patience: Positive = 3,  # consecutive values that are not better than the best one
        # how much better counts; below 0: so much worse than the best
        min_delta: Annotated[float, Range(-100, 100)] = 0.0,
        # true = higher is better; null = by its name: losses fall, accuracies and scores rise
        rises: bool | None = None,
    ) -> None:
        if problem := direction_problem(metric, rises, "callbacks.early_stopping"):
            raise ConfigError(problem)
        self.sign = -1 if (directions.rises(metric) if rises is None else rises) else 1
        self.run = run
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.best = self.sign * math.inf
        self.best_step = 0
        self.num_worse = 0
        if run.state:
            self.best, self.best_step, self.num_worse = (
                run.state[key] for key in ("best", "best_step", "num_worse")
            )
            self._end_if_due()

    def log(self, row: Row) -> None:
        value = value_of(row, self.metric)
        if value is None:
            # rows of steps and of validations take turns
            kind = "val_" if self.metric.startswith("val_") else "grad_norm"
            if any(key.startswith(kind) for key in row):
                raise ValueError(f"no row has metric={self.metric}{did_you_mean(self.metric, row)}")
            return
        # of a number that rises, all is compared with its sign changed; NaN is not good
        better_by = self.sign * (self.best - value)
        is_good = better_by > self.min_delta
        self.num_worse = 0 if is_good else self.num_worse + 1
        if is_good and better_by > 0:
            self.best = value
            self.best_step = row["step"]
        self._end_if_due()

    def state(self) -> dict[str, Any]:
        return (
            {"best": self.best, "best_step": self.best_step, "num_worse": self.num_worse}
            if self.best_step
            else {}
        )

    def _end_if_due(self) -> None:
        if self.num_worse >= self.patience:
            best = f"{self.best:.4f} at step {self.best_step}" if self.best_step else "none"
            what = (
                "has not improved"
                if self.min_delta >= 0
                else f"was {-self.min_delta:g} {'above' if self.sign > 0 else 'below'} its best"
            )
            self.run.end(
                f"{self.metric} {what} {counted(self.num_worse, 'time')} in a row (best: {best})"
            )
