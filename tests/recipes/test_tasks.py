"""Runs that ask task files: scores in the log, the best checkpoint by score, and a run that was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from automodel_lite.errors import ConfigError
from automodel_lite.run.checkpoint_folder import best_checkpoint, ratings_of
from automodel_lite.telemetry.callbacks import value_of
from automodel_lite.telemetry.directions import rises
from tests.run.test_checkpoint import Trained, checkpointer
from tests.runs import rows_of, train, train_until

SMALL = (
    "training.num_threads=1",
    "dataset.num_chats=40",
    "packed_sequence.packed_sequence_size=256",
)
EVERY_TWO = ("training.val_every_steps=2", "checkpoint.every_steps=2", "training.max_steps=6")
# a scorer that knows which validation asks: of 2 questions with an answer each, and one at the start
SCORES = """
calls = []
def by_turn(given, expected):
    calls.append(given)
    turn = max(0, len(calls) - 2) // 2
    return [0.25, 1.0, 0.5][turn]
"""


def write_task(folder: Path, name: str = "asked.jsonl") -> Path:
    path = folder / name
    rows = [{"question": f"What is {word}?", "answer": word} for word in ("Lima", "Oslo")]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def asked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: x for key, x in row.items() if key.startswith(("task_", "text/What"))}
        for row in rows
        if any(key.startswith(("task_", "text/What")) for key in row)
    ]


def test_the_best_checkpoint_by_score_is_kept_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path)
    (tmp_path / "turns.yaml").write_text(
        "path: asked.jsonl\nscorer: {_target_: by_turns.by_turn}\n"
    )
    (tmp_path / "by_turns.py").write_text(SCORES)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = train(
        "smoke",
        tmp_path / "run",
        *SMALL,
        *EVERY_TWO,
        "tasks=files",
        f"tasks.files=[{tmp_path}/turns.yaml]",
        "tasks.max_new_tokens=4",
        "checkpoint.keep_best=1",
        "checkpoint.keep_last=1",
        "checkpoint.best_metric=task_score",
        "security.allow_targets=[by_turns]",
    )
    scores = [row["task_score/turns"] for row in rows if "task_score/turns" in row]
    assert scores == [0.25, 1.0, 0.5]
    assert [row["task_pass_at_1/turns"] for row in rows if "task_pass_at_1/turns" in row] == [
        0,
        1,
        0,
    ]
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert kept == ["step_00000004", "step_00000006"]
    assert json.loads((tmp_path / "run/hf/automodel_lite.json").read_text())["step"] == 4
    said = capsys.readouterr().out
    assert "tasks      turns (2 questions, scored by a function); 1 answer to each" in said
    assert "4  task turns:  score 1" in said
    assert "step 4, which has the highest task_score" in said


def test_a_run_that_was_stopped_draws_the_same_answers(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    tasks = ("tasks=files", f"tasks.files=[{path}]", "tasks.num_samples=4", "tasks.pass_at=[1,4]")
    tasks += ("tasks.max_new_tokens=6", "checkpoint.export_hf=false")
    tasks += ("optimizer.lr=0.03", "lr_scheduler.warmup_steps=0")  # weights that change
    whole = train("smoke", tmp_path / "whole", *SMALL, *EVERY_TWO, *tasks)
    train_until("smoke", tmp_path / "cut", *SMALL, *EVERY_TWO, *tasks, stop_at=4)
    cut = train("smoke", tmp_path / "cut", *SMALL, *EVERY_TWO, *tasks)
    found = asked(whole)
    assert len(found) == 3 * 3  # numbers, and the first answers to both questions
    assert asked(cut) == found
    texts = [row for row in found if any(key.startswith("text/") for key in row)]
    assert len({json.dumps(row) for row in texts}) > 2  # answers are drawn, and differ


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["mesh.dp_shard=2", "mesh.cp=2", "mesh.tp=2"])
def test_every_layout_draws_the_same_answers(layout: str, tmp_path: Path) -> None:
    path = write_task(tmp_path)
    tasks = (
        "tasks=files",
        f"tasks.files=[{path}]",
        "tasks.num_samples=3",
        "tasks.max_new_tokens=6",
    )
    short = ("training.max_steps=2", "checkpoint.export_hf=false", "training.global_batch_size=2")
    one = train("smoke", tmp_path / "one", *SMALL, *tasks, *short)
    two = train("smoke", tmp_path / "two", *SMALL, *tasks, *short, layout, world_size=2)
    assert len(asked(one)) == 3
    assert asked(two) == asked(one)


def test_ratings_that_rise_and_others_do_not_mix(tmp_path: Path) -> None:
    trained = Trained(1)
    saves = checkpointer(tmp_path, keep_last=1, keep_best=1)

    def save(step: int, loss: float, score: float | None) -> None:
        state: dict[str, Any] = {"step": step, "val_loss": loss}
        if score is not None:
            state["rating"] = {"metric": "task_score", "value": score, "rises": True}
        saves.save(step, trained.model, trained.optimizer, state)

    for step, score in ((2, 0.25), (3, 0.75), (4, 0.5)):
        save(step, 5.0 - step, score)
    best = best_checkpoint(saves.run.checkpoints)
    assert best is not None
    assert (best[0].name, best[1].text) == ("step_00000003", "the highest task_score")
    save(5, 0.1, None)  # rated by its loss: scores are compared no more
    ratings = ratings_of(saves.run.checkpoints)
    assert [rating and rating.metric for rating in ratings.values()] == ["val_loss"]


def test_the_mean_over_tasks_and_the_direction_of_scores() -> None:
    row = {"task_score/a": 1.0, "task_score/b": 0.5, "task_pass_at_4/a": 1.0, "loss": 2.0}
    assert value_of(row, "task_score") == 0.75
    assert value_of(row, "task_score/b") == 0.5
    assert [rises(x) for x in ("task_score", "task_pass_at_4", "task_pass_at_4/a")] == [True] * 3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tasks=files"], "tasks.files has no value"),
        (["tasks=files", "tasks.files=[]"], "there is nothing to ask"),
        (["{asked}", "tasks.pass_at=[4]"], r"set tasks\.num_samples=4, not 1"),
        (["{asked}", "tasks.num_samples=4", "tasks.temperature=0"], "the same answer"),
        (["{asked}", "tasks.every_steps=3"], r"set training\.val_every_steps=3"),
        (["{asked}", "tasks.max_new_tokens=100000"], r"asked\.jsonl:1: the question has"),
        (
            ["{asked}", "checkpoint.keep_best=1", "checkpoint.best_metric=task_scores"],
            "did you mean task_score?",
        ),
        (["checkpoint.keep_best=1", "checkpoint.best_metric=task_score"], "set tasks=files"),
        (["checkpoint.keep_best=1", "checkpoint.best_metric=loss"], "must be a number of"),
        (
            ["checkpoint.keep_best=1", "checkpoint.best_metric=val_own"],
            r"set checkpoint\.best_rises=true",
        ),
        (["callbacks=early_stopping", "callbacks.early_stopping.metric=task_score"], "no task"),
        (["checkpoint.best_metric=task_score"], "keep_best"),
    ],
)
def test_settings_that_do_not_fit_are_sentences(
    overrides: list[str], words: str, tmp_path: Path
) -> None:
    path = write_task(tmp_path)
    given: list[str] = []
    for text in overrides:
        given += ["tasks=files", f"tasks.files=[{path}]"] if text == "{asked}" else [text]
    steps = ("training.val_every_steps=2", "checkpoint.every_steps=2", "training.max_steps=6")
    with pytest.raises(ConfigError, match=words):
        train("smoke", tmp_path / "run", *SMALL, *steps, *given)
    assert not rows_exist(tmp_path / "run")


def rows_exist(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() and any("loss" in row for row in rows_of(folder))
