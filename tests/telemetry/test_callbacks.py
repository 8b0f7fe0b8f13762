"""Callbacks as a run uses them: trackers, early stopping, one's own; wandb and mlflow are not installed by `.[dev]`, their tests are slow ones."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.config.components import build
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError
from automodel_lite.parallel.control import Control
from automodel_lite.parts.callbacks.early_stopping import EarlyStopping
from automodel_lite.run.folder import RunFolder
from automodel_lite.telemetry.callbacks import (
    Callback,
    JsonlLogger,
    RunInfo,
    open_metrics,
)
from automodel_lite.telemetry.directions import rises
from tests.runs import config_of, rows_of, train


class Breaks(Callback):
    """A tracker whose network goes away after two rows."""

    def __init__(self, run: RunInfo, at_start: bool = False) -> None:
        if at_start:
            raise OSError("no route to host")
        self.seen: list[dict[str, Any]] = []

    def log(self, row: dict[str, Any]) -> None:
        self.seen.append(row)
        if len(self.seen) == 2:
            raise OSError("connection lost")

    def state(self) -> dict[str, Any]:
        return {"id": "a1"}


class SecondRank(Control):
    """Of two, without a group: it sends nothing here."""

    is_first = False


def metrics_of(folder: Path, says: list[str], is_first: bool = True, **options: Any):
    config = Config(name="x", logger={"mine": {"_target_": f"{__name__}.Breaks", **options}})
    return open_metrics(
        config,
        RunFolder(folder),
        Control(None) if is_first else SecondRank(None),
        0,
        {},
        says.append,
    )


def test_a_tracker_that_fails_is_off_and_the_run_goes_on(tmp_path: Path):
    says: list[str] = []
    metrics = metrics_of(tmp_path, says)
    assert metrics.state() == {"mine": {"id": "a1"}}
    for step in (1, 2, 3):
        metrics.log({"step": step, "loss": 2.0})
    metrics.close()
    assert says == [
        "WARNING: mine is turned off: OSError: connection lost; metrics.jsonl is still written"
    ]
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]


def test_a_tracker_that_does_not_start_costs_a_warning(tmp_path: Path):
    says: list[str] = []
    metrics_of(tmp_path, says, at_start=True).log({"step": 1})
    assert says == [
        "WARNING: mine is turned off: OSError: no route to host; metrics.jsonl is still written"
    ]
    with pytest.raises(ConfigError, match="projekt"):
        metrics_of(tmp_path, says, projekt="x")


STOPPING = [
    "callbacks=early_stopping",
    "callbacks.early_stopping.patience=2",
    "callbacks.early_stopping.min_delta=9",  # nothing falls by so much
    "training.val_every_steps=2",
    "training.max_steps=20",
    "lr_scheduler=constant",
]


@pytest.mark.system
def test_two_ranks_stop_early_together_and_are_profiled(tmp_path: Path):
    run = tmp_path / "run"
    rows = train("smoke", run, *STOPPING, "training.profile_steps=[3,4]", world_size=2)
    assert [row["step"] for row in rows if "val_loss/held_out" in row] == [2, 4, 6]
    assert max(row["step"] for row in rows) == 6
    status = json.loads((run / "STATUS.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 6)
    assert status["reason"].startswith("val_loss has not improved 2 times in a row (best: ")
    assert (run / "checkpoints/step_00000006").is_dir()
    assert (run / "hf/model.safetensors").is_file()
    for rank in range(2):
        trace = json.loads(
            gzip.decompress((run / f"profile/rank_{rank:05d}.trace.json.gz").read_bytes())
        )
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert sum("Optimizer.step" in name for name in names) == 2
        assert "aten::mm" in names
        # the longest operations, which are others on a busy machine
        assert "Self CPU time total" in (run / f"profile/rank_{rank:05d}.txt").read_text()


@pytest.mark.system
def test_early_stopping_goes_on_counting_after_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    # two values: the best, and one that is no better
    train("smoke", run, *STOPPING, "training.max_steps=4")
    (run / "STATUS.json").unlink()
    rows = train("smoke", run, *STOPPING, "checkpoint.accept_changes=true")
    assert [row["step"] for row in rows if "val_loss/held_out" in row] == [2, 4, 6]
    (run / "STATUS.json").unlink()
    train("smoke", run, *STOPPING)  # killed before it was marked as finished: not a step more
    assert "ended early: val_loss has not improved 2 times" in capsys.readouterr().out
    assert max(row["step"] for row in rows_of(run)) == 6


def test_a_metric_that_falls_does_not_end_the_run(tmp_path: Path):
    ended: list[str] = []
    stopping = EarlyStopping(
        RunInfo("x", tmp_path, {}, 0, {}, ended.append), metric="val_loss", patience=2
    )
    for step, (easy, hard) in enumerate(
        [(3.0, 3.0), (9.0, 9.0), (2.0, 3.0), (2.0, 3.0), (1.0, 3.9)]
    ):
        stopping.log({"step": step, "loss": 100.0 + step})
        stopping.log({"step": step, "val_loss/easy": easy, "val_loss/hard": hard})
    assert ended == []
    stopping.log({"step": 5, "val_loss/easy": float("nan"), "val_loss/hard": 1.0})
    stopping.log({"step": 6, "val_loss/easy": 3.0, "val_loss/hard": 3.0})
    assert ended == ["val_loss has not improved 2 times in a row (best: 2.4500 at step 4)"]


def test_a_loss_that_leaps_ends_the_run(tmp_path: Path) -> None:
    ended: list[str] = []
    raw = compose_config("smoke", ["callbacks=loss_leap"])
    node = check_config(raw).callbacks["loss_leap"]
    leap = build(node, run=RunInfo("x", tmp_path, {}, 0, {}, ended.append))
    for step, loss in enumerate(
        [4.0, 3.0, 3.9, 2.0, 3.5, 3.5, 3.5, 3.5, 2.9, 3.5, float("nan"), 3.5, 9.0], start=1
    ):
        leap.log({"step": step, "loss": loss})
    assert not ended  # four above 2 + 1, then one that is not, then four
    leap.log({"step": 14, "loss": 3.1})
    assert ended == ["loss was 1 above its best 5 times in a row (best: 2.0000 at step 4)"]


def test_the_steps_to_profile_are_a_first_and_a_last(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"training.profile_steps=\[3, 2\] must be the first and the last step"
    ):
        config_of("smoke", tmp_path / "run", "training.profile_steps=[3,2]")


def test_a_removed_file_is_made_again(tmp_path: Path):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log({"step": 1})
    (tmp_path / "metrics.jsonl").unlink()
    logger.log({"step": 2})
    logger.log({"step": 3})
    logger.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 2}\n{"step": 3}\n'


def test_metrics_that_cannot_be_written_end_the_start(tmp_path: Path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        JsonlLogger(tmp_path / "metrics.jsonl")


def test_without_a_tracker_metrics_jsonl_is_written(tmp_path: Path):
    config = config_of("smoke", tmp_path)
    metrics = open_metrics(config, RunFolder(tmp_path), Control(None), 0, {}, print)
    metrics.log({"step": 1, "loss": 2.5})
    metrics.close()
    assert rows_of(tmp_path) == [{"step": 1, "loss": 2.5}]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_only_the_first_rank_writes(tmp_path: Path):
    metrics = metrics_of(tmp_path, [], is_first=False)
    metrics.log({"step": 1})
    assert metrics.state() == {}
    assert not (tmp_path / "metrics.jsonl").exists()


def test_rows_wait_for_room_on_the_disk(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "metrics.jsonl"
    jsonl = JsonlLogger(path, say=told.append)
    jsonl._path = Path("/dev/full")
    jsonl.log({"step": 1})
    jsonl.log({"step": 2})
    jsonl._path = path
    assert told == [
        "WARNING: metrics.jsonl cannot be written (No space left on device); its rows wait for room"
    ]
    jsonl.log({"step": 3})
    jsonl.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_number_that_should_rise_does_not_end_the_run_by_rising(tmp_path: Path) -> None:
    ended: list[str] = []
    run = RunInfo("x", tmp_path, {}, 0, {}, ended.append)
    stopping = EarlyStopping(run, metric="val_token_accuracy/val", patience=2)
    for step, right in enumerate([0.083, 0.173, 0.237, 0.2, 0.256], start=1):
        stopping.log({"step": step, "val_token_accuracy/val": right})
    assert not ended
    for step in (6, 7):
        stopping.log({"step": step, "val_token_accuracy/val": 0.25})
    assert ended == [
        "val_token_accuracy/val has not improved 2 times in a row (best: 0.2560 at step 5)"
    ]


def test_a_number_of_ones_own_names_its_direction(tmp_path: Path) -> None:
    run = RunInfo("x", tmp_path, {}, 0, {}, lambda reason: None)
    with pytest.raises(
        ConfigError, match=r"metric=val_mine/val has no .*early_stopping.rises=true"
    ):
        EarlyStopping(run, metric="val_mine/val")
    rising = EarlyStopping(run, metric="val_mine/val", rises=True)
    for step, value in enumerate([1.0, 2.0], start=1):
        rising.log({"step": step, "val_mine/val": value})
    assert rising.state() == {"best": 2.0, "best_step": 2, "num_worse": 0}
    options = ["callbacks=early_stopping", "callbacks.early_stopping.metric=val_mine/val"]
    with pytest.raises(ConfigError, match=r"^callbacks.early_stopping.metric=val_mine/val has no"):
        train("smoke", tmp_path / "run", *options)


@pytest.mark.parametrize(
    ("metric", "is_rising"),
    [
        ("val_loss", False),
        ("val_loss/easy", False),
        ("val_perplexity/easy", False),
        ("val_accuracy/held_out", True),
        ("loss/accuracy", True),
        ("val_reward_margin/val", True),
        ("score/f1", True),
        ("grad_norm", False),
        ("lr", None),
    ],
)
def test_which_way_a_number_gets_better(metric: str, is_rising: bool | None) -> None:
    assert rises(metric) is is_rising
