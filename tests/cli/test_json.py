"""`--json FILE`: every command that prints numbers writes them, and what it writes is JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from automodel_lite import results
from automodel_lite.__main__ import main
from automodel_lite.errors import ConfigError
from tests.forked import warm_python
from tests.ranks import in_a_process

RUN = ["--config-name", "smoke", "name=a", "cache_dir=cache", "training.num_threads=1"]
SHORT = ["training.max_steps=2", "training.global_batch_size=1"]
TEACHER = ["loss=distill_topk", "loss.top_k=4", "loss.teacher=runs/a/hf"]


def typed(*arguments: str) -> None:
    sys.argv = ["automodel-lite", *arguments]
    main()


def numbers(folder: Path, *arguments: str) -> dict[str, Any]:
    code, screen = in_a_process(typed, folder, *arguments, "--json", "found.json")
    assert code == 0, screen
    found = json.loads((folder / "found.json").read_text())
    (folder / "found.json").unlink()
    assert isinstance(found, dict)
    return found


@pytest.mark.system
def test_every_command_with_numbers_writes_them(tmp_path: Path) -> None:
    """A run, and everything that is asked before and after it."""
    dry = numbers(tmp_path, "train", *RUN, *SHORT, "dry_run=true")
    assert dry["max_steps"] == 2
    assert dry["peak_bytes"] >= dry["weights_bytes"] == 4 * dry["parameters"]
    assert dry["packing"]["packs"] > 0

    prepared = numbers(tmp_path, "prepare", *RUN)
    inspected = numbers(tmp_path, "inspect", *RUN)
    of_data = {key: value for key, value in prepared.items() if key.startswith("data/train/")}
    assert of_data["data/train/num_label_tokens"] > 0
    assert of_data.items() <= inspected.items()
    assert of_data.items() <= dry.items()
    assert sum(inspected["lengths"]["documents"]) == of_data["data/train/num_rows"]

    trained = numbers(tmp_path, "train", *RUN, *SHORT, "evaluation=exact_match")
    rows = [json.loads(row) for row in (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert (trained["step"], trained["loss"]) == (2, losses[-1])
    assert "answers_right" in trained

    reported = numbers(tmp_path, "report", "runs/a")["runs/a"]
    assert (reported["loss"], reported["state"]) == (losses[-1], "finished")

    evaluated = numbers(
        tmp_path, "evaluate", *RUN, "model=pretrained", "model.pretrained=runs/a/hf"
    )
    (key,) = (key for key in trained if key.startswith("val_loss/"))
    held_out = evaluated[key.partition("/")[2]]
    assert held_out["loss"] == pytest.approx(trained[key], rel=1e-5)
    assert 0 <= held_out["token_accuracy"] <= 1 < held_out["perplexity"]

    scored = numbers(tmp_path, "score", *RUN, *TEACHER)
    assert scored["train"]["documents"] == of_data["data/train/num_rows"]
    assert Path(tmp_path, scored["train"]["folder"]).is_dir()

    verified = numbers(tmp_path, "verify", *RUN)
    assert verified["num_failed"] == 0
    assert all(check["passed"] for check in verified["checks"])

    command = [warm_python(), "-m", "automodel_lite", "doctor", "--json", "-"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    checked = json.loads(done.stdout)
    assert "reference: ok" in done.stderr
    assert checked["problems"] == []
    assert checked["ranks"][0]["tflops"] > 0


def test_a_dash_is_the_standard_output_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "RESULTS", {"loss": 0.5})
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # given back at the end
    results.open_json("-")
    print("all else")
    results.write_results()
    printed, screen = capsys.readouterr()
    assert json.loads(printed) == {"loss": 0.5}
    assert screen == "all else\n"


def test_numbers_that_json_has_not_are_texts_and_secrets_stay_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hf_0123456789abcdefghij")
    monkeypatch.setattr(results, "RESULTS", {"loss": float("nan"), "at": "hf_0123456789abcdefghij"})
    results.open_json(str(tmp_path / "found.json"))
    results.write_results()
    text = (tmp_path / "found.json").read_text()
    assert json.loads(text)["loss"] == "NaN"
    assert "0123456789abcdefghij" not in text


def test_a_file_that_cannot_be_is_refused_before_anything(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "found.json"
    with pytest.raises(ConfigError, match="is not a file in a folder that exists"):
        results.open_json(str(missing))
