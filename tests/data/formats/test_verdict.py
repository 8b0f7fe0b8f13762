"""Answers with a label: each row becomes its own answer, and its prompt with another row's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from automodel_lite.config.schema import TokenizeConfig
from automodel_lite.data.formats.verdict import mismatched, verdict
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.errors import ConfigError, DataError
from tests.data.templates import MARKED, byte_tokenizer

ROWS = [
    {"prompt": "1+1?", "completion": "2", "label": True},
    {"prompt": "2+2?", "completion": "5", "label": False},
    {"prompt": "3+3?", "completion": "six", "label": True},
]
USER = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "2"}


def dataset(folder: Path, rows: list[dict[str, Any]]) -> FilesDataset:
    path = folder / "judged.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return FilesDataset(str(path), format="verdict")


def test_a_row_meets_the_answer_of_the_row_before_it(tmp_path: Path) -> None:
    documents = dataset(tmp_path, ROWS).train
    pairs = [(d["verdict"], d["prompt"], d["mismatched"]["completion"]) for d in documents]
    assert pairs == [(True, "1+1?", "six"), (False, "2+2?", "2"), (True, "3+3?", "5")]


def test_a_row_that_cannot_be_read_lends_no_answer(tmp_path: Path) -> None:
    bad = {"prompt": "2+2?", "completion": "5", "label": "perhaps"}
    documents = dataset(tmp_path, [ROWS[0], bad, ROWS[2]]).train
    assert documents[2]["mismatched"]["completion"] == "2"
    with pytest.raises(DataError, match=r"jsonl:2: column label must be true or false"):
        documents[1]


def test_a_set_of_one_row_has_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no second row that can be read: add rows to it"):
        dataset(tmp_path, ROWS[:1]).train[0]


CHAT = {"messages": [{**USER, "weight": 0}, ANSWER], "verdict": True, "num_judged": 1}


@pytest.mark.parametrize(
    ("row", "document"),
    [
        ({"messages": [USER, ANSWER], "label": True}, CHAT),
        ({"prompt": [USER], "completion": [ANSWER], "label": 1}, CHAT),
        ({"instruction": "a", "output": "b", "completion": "b", "label": "False"},
         {"prompt": "a", "completion": "b", "verdict": False}),
    ],
    ids=["messages", "lists", "instruction of a CSV"],
)  # fmt: skip
def test_every_form_of_a_judged_answer(row: dict[str, Any], document: dict[str, Any]) -> None:
    assert verdict(row) == document


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "a", "completion": "b", "label": 2}, "must be true or false"),
        ({"prompt": "a", "completion": "b", "label": None}, "must be true or false"),
        ({"prompt": "a", "label": True}, "none of them is there"),
        (
            {"messages": [USER, ANSWER], "completion": "b", "label": True},
            "messages and completion are there",
        ),
        ({"messages": [ANSWER, USER], "label": True}, "end with the assistant's"),
        ({"messages": [ANSWER], "label": True}, "nothing that was asked before it"),
    ],
)
def test_what_no_label_can_judge(row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        verdict(row)


def test_a_text_and_a_chat_meet_as_a_chat() -> None:
    text = {"prompt": "a", "completion": "b", "system": "s", "verdict": False}
    assert mismatched(text, CHAT) == {
        "messages": [
            {"role": "system", "content": "s", "weight": 0},
            {"role": "user", "content": "a", "weight": 0},
            ANSWER,
        ]
    }


@pytest.mark.parametrize("mismatches", [True, False])
def test_labels_say_what_they_belong_to(mismatches: bool, tmp_path: Path) -> None:
    """Equal answers of two rows stay: they are compared with nothing."""
    rows = [*ROWS, {"prompt": "4+2?", "completion": "six", "label": True}]
    job = TokenizeJob(byte_tokenizer(MARKED), tree="auto", most_tokens=256, mismatches=mismatches)
    found = tokenize_documents(dataset(tmp_path, rows), job, tmp_path / "cache").train
    verdicts = [sorted({int(v) for v in found[i]["verdicts"]}) for i in range(len(found))]
    if mismatches:  # each row is a tree of two branches
        assert verdicts == [[0, 1, 3], [0, 2, 3], [0, 1, 3], [0, 1, 3]]
    else:
        assert verdicts == [[0, 1], [0, 2], [0, 1], [0, 1]]


def test_prompts_are_not_judged(tmp_path: Path) -> None:
    job = TokenizeJob(byte_tokenizer(MARKED), TokenizeConfig(train_on="all"))
    with pytest.raises(ConfigError, match="would judge prompts too"):
        tokenize_documents(dataset(tmp_path, ROWS), job, tmp_path / "cache")
