"""MLflow: one run over all restarts of ours, on a tracking server or in a database of
this machine.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Metric, Param

from automodel_lite.config.components import flatten
from automodel_lite.redact import scrub
from automodel_lite.telemetry.callbacks import Callback, Row, RunInfo, numbers

_MAX_PARAM_CHARS = 500  # of older servers


class MlflowTracker(Callback):
    """The config node `logger.mlflow`; the run id goes into the checkpoint and is resumed."""

    def __init__(
        self,
        run: RunInfo,
        experiment: str = "automodel_lite",  # made where there is none
        # a server or a folder; null = MLFLOW_TRACKING_URI, else mlruns beside the run
        tracking_uri: str | None = None,
        artifact: bool = False,  # also log the exported model
    ) -> None:
        beside = f"file:{run.folder.parent / 'mlruns'}"
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", beside)
        if uri == beside:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a laptop needs no database
        self.client = mlflow.MlflowClient(tracking_uri=uri)
        self.artifact = artifact
        self.run_id: str = run.state.get("run_id", "")
        if not self.run_id:
            known = self.client.get_experiment_by_name(scrub(experiment))
            experiment_id = (
                known.experiment_id if known else self.client.create_experiment(scrub(experiment))
            )
            self.run_id = self.client.create_run(experiment_id, run_name=run.name).info.run_id
            params = [
                Param(key, str(value)[:_MAX_PARAM_CHARS]) for key, value in flatten(run.config)
            ]
            for start in range(0, len(params), 100):  # MLflow's limit of a request
                self.client.log_batch(self.run_id, params=params[start : start + 100])
        self.client.update_run(self.run_id, status="RUNNING")

    def log(self, row: Row) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            Metric(key, float(value), now_ms, row["step"]) for key, value in numbers(row).items()
        ]
        self.client.log_batch(self.run_id, metrics=metrics)

    def text(self, step: int, name: str, value: str) -> None:
        row = {"step": [step], "prompt": [name], "answer": [value]}
        self.client.log_table(self.run_id, data=row, artifact_file="samples.json")

    def exported(self, folder: Path) -> None:
        if self.artifact:
            self.client.log_artifacts(self.run_id, str(folder), "model")

    def state(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def close(self) -> None:
        self.client.set_terminated(self.run_id)
