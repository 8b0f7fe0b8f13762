"""Records of questions, in the forms in which programs write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from automodel_lite.data.formats.decisions import (
    Decision,
    decisions_of,
    number_of,
    place_of,
    record,
    record_of,
    single,
)
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.errors import DataError

TEAM = {"type": "choice", "instructions": "Which?", "criteria": {"bill": "Money", "tech": None}}
CHOICES = (("bill", "Money"), ("tech", ""))


def one(question: Any, **columns: Any) -> Decision:
    """The question of a record with one, called q."""
    (decision,) = decisions_of(record({"state": "s", "questions": {"q": question}, **columns}))
    return decision


def test_a_record_of_every_type() -> None:
    row = {
        "id": 7,
        "state": {"text": "Grüße", "n": 1},
        "system": "Be fair.",
        "questions": {
            "team": TEAM,
            "urgent": {"type": "noul", "instructions": "Now?", "criteria": {"true": "today"}},
            "level": {"type": "score", "instructions": "Bad?", "criteria": ["no", "so", "very"]},
        },
        "answers": {"team": "tech", "urgent": True},
        "soft_labels": {"level": {"0": 0.2, "2": 0.8}},
        "weights": {"team": 3},
    }
    document = record(row)
    state = '{"text": "Grüße", "n": 1}'
    assert document["id"] == 7
    assert decisions_of(document) == [
        Decision("team", "choice", state, "Which?", CHOICES, (0.0, 1.0), 1, 3.0, "Be fair.", 0),
        Decision("urgent", "noul", state, "Now?", (("false", ""), ("true", "today")), (0.0, 1.0), 1,
                 1.0, "Be fair.", 1),
        Decision("level", "score", state, "Bad?", (("0", "no"), ("1", "so"), ("2", "very")),
                 (0.2, 0.0, 0.8), 2, 1.0, "Be fair.", 2),
    ]  # fmt: skip


def test_a_list_of_questions_and_of_answers() -> None:
    """An answer that is null is not known; names are numbers."""
    questions = [TEAM, {"kind": "yes_no", "question": "Now?"}, {**TEAM, "name": "other"}]
    row = {"state": "s", "questions": questions, "answers": ["bill", None, "tech"]}
    found = decisions_of(record(row))
    assert [x.name for x in found] == ["0", "1", "other"]
    assert [x.answer for x in found] == [0, -1, 1]
    assert found[1].target is None


@pytest.mark.parametrize(
    ("row", "target", "answer"),
    [
        ({"type": "choice", "options": ["a", "b"], "label": "b"}, (0.0, 1.0), 1),
        ({"options": [{"key": "a", "text": "x"}, {"key": "b"}], "answer": "b"}, (0.0, 1.0), 1),
        ({"type": "bool", "label": 1}, (0.0, 1.0), 1),
        ({"type": "noul", "options": ["yes", "no"], "label": "no"}, (1.0, 0.0), 0),
        ({"type": "score", "levels": 3, "label": 1.0}, (0.0, 1.0, 0.0), 1),
        ({"type": "choice", "choices": [1, 2], "label": 2}, (0.0, 1.0), 1),
        ({"options": ["a", "b"], "label": "a", "soft_labels": [0.4, 0.6]}, (0.4, 0.6), 0),
        ({"options": ["a", "b"], "target_probs": {"b": 0.9, "a": 0.1}}, (0.1, 0.9), 1),
        ({"options": '["a", "b"]', "soft_labels": '{"b": 1}'}, (0.0, 1.0), 1),
        ({"options": ["a", "b"], "label": {"a": 0.5, "b": 0.5}}, (0.5, 0.5), 0),
    ],
    ids=["label", "objects", "truth", "no", "level", "numbers", "both", "soft", "csv", "votes"],
)  # fmt: skip
def test_one_decision_a_row(row: dict[str, Any], target: tuple[float, ...], answer: int) -> None:
    """With an answer and soft labels, these are trained on, and that one is what is right."""
    (decision,) = decisions_of(single({"state": "s", "question": "q?", **row}))
    assert decision.question == "q?"
    assert decision.target == target
    assert decision.answer == answer


def test_soft_labels_that_are_rounded_sum_to_1() -> None:
    assert one(TEAM, soft_labels={"q": [0.333, 0.666]}).target == pytest.approx((1 / 3, 2 / 3))


@pytest.mark.parametrize(
    ("question", "columns", "sentence"),
    [
        (TEAM, {"answers": {"q": "sales"}}, "answer 'sales' is not one of its choices bill, tech"),
        (TEAM, {"answers": {"p": "bill"}}, "column answers answers 'p', which is no question"),
        (TEAM, {"answers": ["bill", "tech"]}, "column answers has 2 values for 1 questions"),
        (TEAM, {"soft_labels": {"q": [0.5, 0.2]}}, r"sum to 0.7.*divide them by their sum"),
        (TEAM, {"soft_labels": {"q": [2, -1]}}, "a soft label is a probability"),
        (TEAM, {"soft_labels": {"q": [1]}}, "has 1 soft labels for 2 choices"),
        (TEAM, {"weights": {"q": -1}}, "weight=-1 must be a number from 0 on"),
        ({**TEAM, "answer": "bill"}, {"answers": {"q": "tech"}}, "has answer 'bill', and its rec"),
        ({**TEAM, "question": "What?"}, {}, "has instructions and question, which differ"),
        ({**TEAM, "type": "span"}, {}, "type='span' must be choice, noul or score"),
        ({"type": "choice", "criteria": ["a"]}, {}, "at least two choices"),
        ({"type": "choice", "criteria": ["a", "a"]}, {}, "two choices of one name"),
        ({"type": "choice"}, {}, "needs criteria"),
        ({"instructions": "Now?"}, {}, "has no type"),
        ({"type": "noul", "criteria": ["maybe", "no"]}, {}, "is true or false"),
        ({"type": "noul"}, {"answers": {"q": "perhaps"}}, "must be true or false"),
        ({"type": "score", "criteria": {"1": "a", "2": "b"}}, {}, "named 0 to 1"),
        ("Now?", {}, r"questions\[q\] must be an object"),
        (TEAM, {"state": ""}, "column state is empty"),
        (TEAM, {"state": {"image": "a.png"}}, "put pictures into a column images"),
    ],
)
def test_what_is_no_question(question: Any, columns: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        one(question, **columns)


def test_two_questions_of_one_name() -> None:
    with pytest.raises(DataError, match="two questions of one name"):
        record({"state": "s", "questions": [{**TEAM, "name": "x"}, {**TEAM, "name": "x"}]})


def test_numbers_of_questions() -> None:
    assert (record_of(number_of(3, 2)), place_of(number_of(3, 2))) == (3, 2)
    assert number_of(0, 0) == 1


@pytest.mark.parametrize(
    ("row", "name", "ignored"),
    [
        ({"id": 1, "state": "s", "questions": {"q": TEAM}, "answers": {}, "meta": 1, "rewards": {}},
         "decisions", "meta, rewards"),
        ({"state": "s", "question": "q", "options": ["a", "b"], "label": "a", "group": "g"},
         "decision", ""),
    ],
    ids=["record", "decision"],
)  # fmt: skip
def test_the_format_is_found_by_its_columns(
    row: dict[str, Any], name: str, ignored: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    dataset = FilesDataset(str(path))
    assert dataset.kind == "decisions"
    assert f"→ {name}" in dataset.description
    assert dataset.description.endswith(f"ignored: {ignored}" if ignored else f"→ {name}")
