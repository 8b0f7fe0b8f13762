"""Trackio, on this machine and over a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import train


def test_a_run_goes_on_in_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="trackio is not installed")
    options = ["logger=trackio", "checkpoint.accept_changes=true", "lr_scheduler=constant"]
    options += ["name=tracked", "training.log_every_steps=1"]
    options += ["samples.prompts=[Hi]", "samples.max_new_tokens=2"]
    train("smoke", tmp_path / "run", *options, "training.max_steps=2")
    rows = train("smoke", tmp_path / "run", *options, "training.max_steps=3")
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    assert storage.get_runs("automodel_lite") == ["tracked"]
    logs = storage.get_logs("automodel_lite", "tracked")
    logged = {entry["step"]: entry["loss"] for entry in logs if "loss" in entry}
    assert logged == {row["step"]: pytest.approx(row["loss"]) for row in rows if "loss" in row}
    assert [entry["step"] for entry in logs if "samples" in entry] == [2, 3]
