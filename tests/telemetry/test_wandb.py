"""Weights & Biases, offline and over a restart."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.runs import train


@pytest.mark.slow
def test_wandb_offline_keeps_its_run_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    run = tmp_path / "run"
    options = ["logger=wandb", "checkpoint.accept_changes=true", "lr_scheduler=constant"]
    train("smoke", run, *options, "training.max_steps=4")
    train("smoke", run, *options)
    ids = {path.name.split("-")[-1] for path in (run / "wandb").glob("offline-run-*")}
    state = json.loads((run / "checkpoints/step_00000006/state.json").read_text())
    assert ids == {state["extra"]["wandb"]["id"]}


@pytest.mark.slow
def test_wandb_with_a_key_and_no_network_goes_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    train(
        "smoke",
        tmp_path / "run",
        "logger=wandb",
        "logger.wandb.timeout_s=5",
        "training.max_steps=1",
    )
    assert "WARNING: wandb is offline" in capsys.readouterr().out
    assert list((tmp_path / "run/wandb").glob("offline-run-*"))
    written = [
        p
        for p in (tmp_path / "run").rglob("*")
        if p.is_file() and b"0123456789" * 4 in p.read_bytes()
    ]
    assert written == []


@pytest.mark.slow
def test_wandb_keeps_samples_best_values_and_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    logged: list[Any] = []
    monkeypatch.setattr(wandb.Run, "log_artifact", lambda run, artifact: logged.append(artifact))
    summaries: list[dict[str, Any]] = []
    finish = wandb.Run.finish
    monkeypatch.setattr(
        wandb.Run, "finish", lambda run: (summaries.append(dict(run.summary)), finish(run))
    )
    samples = ["samples.prompts=[Capital of Peru?,Hi]", "samples.max_new_tokens=2"]
    rows = train(
        "smoke",
        tmp_path / "run",
        "logger=wandb",
        "logger.wandb.artifact=true",
        "optimizer.lr=0.5",
        *samples,
    )
    (summary,) = summaries
    assert summary["samples"]["nrows"] == 4  # two validations of two prompts
    lowest = min(row["loss"] for row in rows if "loss" in row)
    assert summary["loss"]["min"] == lowest
    assert "model.safetensors" in logged[-1].manifest.entries
