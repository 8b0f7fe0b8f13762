"""Trackers as a run uses them; wandb and trackio are not installed by `.[dev]`, their tests are slow ones."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError
from automodel_lite.run.folder import RunFolder
from automodel_lite.telemetry.tracker import RunInfo, open_metrics
from tests.recipes.runs import rows_of, train


class Breaks:
    """A tracker whose network goes away after two rows."""

    def __init__(self, run: RunInfo, at_start: bool = False) -> None:
        if at_start:
            raise OSError("no route to host")
        self.seen: list[dict[str, Any]] = []

    def log(self, row: dict[str, Any]) -> None:
        self.seen.append(row)
        if len(self.seen) == 2:
            raise OSError("connection lost")

    def text(self, step: int, name: str, value: str) -> None: ...

    def state(self) -> dict[str, Any]:
        return {"id": "a1"}

    def close(self) -> None: ...


def metrics_of(folder: Path, says: list[str], is_first: bool = True, **options: Any):
    config = Config(name="x", logger={"mine": {"_target_": f"{__name__}.Breaks", **options}})
    return open_metrics(config, RunFolder(folder), is_first, 0, {}, says.append)


def test_a_tracker_that_fails_is_off_and_the_run_goes_on(tmp_path: Path):
    says: list[str] = []
    metrics = metrics_of(tmp_path, says)
    assert metrics.state() == {"mine": {"id": "a1"}}
    for step in (1, 2, 3):
        metrics.log({"step": step, "loss": 2.0})
    metrics.close()
    assert says == ["WARNING: logger mine is off from here: OSError: connection lost; metrics.jsonl goes on"]
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]


def test_a_tracker_that_does_not_start_costs_a_warning_a_wrong_option_ends_the_run(tmp_path: Path):
    says: list[str] = []
    metrics_of(tmp_path, says, at_start=True).log({"step": 1})
    assert says == ["WARNING: logger mine is off: OSError: no route to host; metrics.jsonl is written"]
    with pytest.raises(ConfigError, match="projekt"):
        metrics_of(tmp_path, says, projekt="x")


def test_only_the_first_rank_writes(tmp_path: Path):
    metrics = metrics_of(tmp_path, [], is_first=False)
    metrics.log({"step": 1})
    assert metrics.state() == {}
    assert not (tmp_path / "metrics.jsonl").exists()


def test_tensorboard_of_a_continued_run_has_each_step_once(tmp_path: Path):
    run = tmp_path / "run"
    options = ["logger=tensorboard", "checkpoint.accept_changes=true", "lr_scheduler=constant"]
    train("smoke", run, *options, "training.max_steps=4")
    train("smoke", run, *options)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("val_loss/held_out")] == [3, 4, 6]


@pytest.mark.slow
def test_wandb_offline_keeps_its_run_over_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    train("smoke", tmp_path / "run", "logger=wandb", "logger.wandb.timeout_s=5", "training.max_steps=1")
    assert "WARNING: wandb is offline" in capsys.readouterr().out
    assert list((tmp_path / "run/wandb").glob("offline-run-*"))
    written = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and b"0123456789" * 4 in p.read_bytes()]
    assert written == []


@pytest.mark.slow
def test_trackio_runs_locally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    train("smoke", tmp_path / "run", "logger=trackio", "training.max_steps=2")
    assert list((tmp_path / "trackio").glob("*.db"))
