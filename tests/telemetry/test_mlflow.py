"""MLflow over a restart."""

from pathlib import Path

import pytest

from tests.runs import train


@pytest.mark.slow
def test_mlflow_keeps_its_run_over_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    options = [
        "logger=mlflow",
        "logger.mlflow.artifact=true",
        "checkpoint.accept_changes=true",
        "samples.prompts=[Hi]",
    ]
    options += ["samples.max_new_tokens=2", "lr_scheduler=constant"]
    train("smoke", tmp_path / "run", *options, "training.max_steps=4")
    rows = train("smoke", tmp_path / "run", *options)
    client = mlflow.MlflowClient(tracking_uri=f"file:{tmp_path / 'mlruns'}")
    (run,) = client.search_runs([client.get_experiment_by_name("automodel_lite").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer.lr"] == "0.003"
    losses = {
        metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "loss")
    }
    assert losses == {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert "val_loss/held_out" in run.data.metrics
    assert "model/model.safetensors" in [
        file.path for file in client.list_artifacts(run.info.run_id, "model")
    ]
    assert "samples.json" in [file.path for file in client.list_artifacts(run.info.run_id)]
