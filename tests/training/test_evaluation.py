"""Scores of answers, and samples of a model in training."""

import json
from pathlib import Path

import pytest

from automodel_lite.config.components import build
from automodel_lite.errors import ConfigError
from automodel_lite.evaluation.questions import has_questions
from automodel_lite.parts.evaluation.exact_match import f1
from tests.runs import Row, train


def test_scores_of_an_answer():
    assert f1("The capital of Peru is Lima.", "the capital of peru is Lima") == 1.0
    assert f1("Lima", "the city of Lima") == 0.5  # 1 word of 1, 1 of 3 (the article does not count)
    assert f1("Quito", "Lima") == 0.0
    assert f1("", "") == 1.0


FILES = "automodel_lite.data.reading.files.FilesDataset"
MIXTURE = "automodel_lite.parts.datasets.mixture.Mixture"
DATASETS = {
    "chat": ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', True),
    "no answer last": ('{"messages": [{"role": "assistant", "content": "b"}, {"role": "user", "content": "a"}]}', False),
    "text": ('{"text": "a"}', False),
    "token ids": ('{"input_ids": [1, 2]}', False),
}  # fmt: skip


@pytest.mark.parametrize(("row", "has"), DATASETS.values(), ids=DATASETS)
def test_data_without_questions_is_known_before_the_training(row: str, has: bool, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(f"{row}\n" * 2)
    (tmp_path / "b.jsonl").write_text(f"{row}\n" * 3)
    node = {"_target_": FILES, "path": str(tmp_path / "a.jsonl")}
    assert not has_questions(build(node))  # what is trained on is not held out
    node["val_path"] = str(tmp_path / "b.jsonl")
    assert has_questions(build(node)) == has
    sources = {name: {"dataset": node, "weight": 0.5} for name in ("one", "two")}
    assert has_questions(build({"_target_": MIXTURE, "sources": sources})) == has


def test_the_best_checkpoint_needs_held_out_data(tmp_path: Path):
    row, _ = DATASETS["chat"]
    (tmp_path / "a.jsonl").write_text(f"{row}\n" * 8)
    data = ("~dataset.num_chats", "dataset=files", f"dataset.path={tmp_path / 'a.jsonl'}")
    with pytest.raises(ConfigError, match=r"^checkpoint.keep_best=1 compares validation losses"):
        train("smoke", tmp_path / "run", *data, "checkpoint.keep_best=1")
    with pytest.raises(
        ConfigError, match=r"^evaluation asks held-out questions, and there are none"
    ):
        train("smoke", tmp_path / "run", *data, "evaluation=exact_match")


def test_decisions_are_judged_by_every_validation(tmp_path: Path):
    questions = {"big": {"type": "noul", "instructions": "Is it big?"}}
    row = {"state": "A whale.", "questions": questions, "answers": {"big": True}}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    data = ("~dataset.num_chats", "dataset=files", f"dataset.path={tmp_path / 'a.jsonl'}")
    more = ("dataset.val_frac=0.25", "loss=decisions", "evaluation=exact_match")
    with pytest.raises(ConfigError, match=r"to decisions are choices, .*: set evaluation=none"):
        train("smoke", tmp_path / "run", *data, *more)


ASKED = [
    "samples.prompts=[What is the capital of France?]",
    "samples.max_new_tokens=4",
    "training.max_steps=3",
]


def texts(rows: list[Row]) -> list[str]:
    return [
        row["text/What is the capital of France?"]
        for row in rows
        if "text/What is the capital of France?" in row
    ]


def test_samples_are_the_same_sharded_and_whole(tmp_path: Path):
    asked = [*ASKED, "packed_sequence.slot_multiple=4"]  # the same packs
    alone = texts(train("smoke", tmp_path / "one", *asked))
    pair = texts(train("smoke", tmp_path / "two", *asked, "mesh.cp=2", world_size=2))
    assert len(alone) == 1
    assert alone[0]
    assert pair == alone
