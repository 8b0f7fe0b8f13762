"""Task files: what is read, named as unused or refused, and how answers are scored."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from automodel_lite.errors import ConfigError, DataError
from automodel_lite.evaluation.task_files import TaskFile, choice_of, pass_at, read_task


def write(folder: Path, name: str, *rows: Any) -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def task_of(folder: Path, settings: str, *rows: Any) -> TaskFile:
    write(folder, "rows.jsonl", *rows)
    (folder / "task.yaml").write_text(f"path: rows.jsonl\n{settings}")
    return read_task(folder / "task.yaml")


@pytest.mark.parametrize(("n", "c"), [(5, 0), (5, 1), (5, 3), (5, 5)])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_all_draws_of_k(n: int, c: int, k: int) -> None:
    is_right = [True] * c + [False] * (n - c)
    drawn = [any(of_k) for of_k in combinations(is_right, k)]
    assert pass_at(k, n, c) == pytest.approx(sum(drawn) / math.comb(n, k))


def test_exact_answers_are_equal_but_for_space(tmp_path: Path) -> None:
    rows = [{"question": "2+3=", "answer": 5}, {"prompt": "Hi", "answer": ["Hello", "Hi"]}]
    task = read_task(write(tmp_path, "sums.jsonl", *rows))
    assert (task.name, task.scorer, task.unused) == ("sums", "exact", [])
    first, second = task.rows
    assert first.asked.messages == [{"role": "user", "content": "2+3="}]
    assert [task.score(first, x) for x in (" 5\n", "5.", "")] == [1, 0, 0]
    assert [task.score(second, x) for x in ("Hi", "Hello", "hello")] == [1, 1, 0]


def test_a_regex_finds_the_last_match_in_both(tmp_path: Path) -> None:
    rows = {"question": "?", "answer": "2 + 3 = 5\n#### 5"}, {"question": "?", "answer": "7"}
    task = task_of(tmp_path, "scorer: regex\npattern: '#### (-?[0-9]+)'\n", *rows)
    assert [task.score(task.rows[0], x) for x in ("#### 4, no: #### 5", "#### 55", "5")] == [
        1,
        0,
        0,
    ]
    assert task.score(task.rows[1], "so #### 7") == 1


@pytest.mark.parametrize(
    ("answer", "place"),
    [
        ("York", None),
        ("new york.", 0),
        ("New York City, of course", 1),
        ("B", 1),
        ("(B) New York City", 1),
        ("I think the answer is C.", 2),
        ("D", None),
        ("", None),
        ("A big city", 0),
    ],
)
def test_a_choice_is_named_by_its_text_or_letter(answer: str, place: int | None) -> None:
    assert choice_of(answer, ["New York", "New York City", "Lima"]) == place


@pytest.mark.parametrize("answer", ["Lima", "B", 1, ["Lima"], ["B"]])
def test_rows_with_choices_are_scored_as_choices(tmp_path: Path, answer: object) -> None:
    row = {"question": "?", "choices": ["Quito", "Lima"], "answer": answer, "id": 3}
    task = read_task(write(tmp_path, "c.jsonl", row))
    assert (task.scorer, task.unused) == ("choices", ["id"])
    assert [task.score(task.rows[0], x) for x in ("Lima.", "B)", "Quito")] == [1, 1, 0]


def test_several_choices_are_right(tmp_path: Path) -> None:
    row = {"question": "?", "choices": ["Quito", "Lima", "Oslo"], "answer": ["Lima", "A"]}
    task = read_task(write(tmp_path, "c.jsonl", row))
    assert [task.score(task.rows[0], x) for x in ("Lima", "A", "Quito", "C", "")] == [1, 1, 1, 0, 0]


def test_a_number_is_not_taken_for_the_place_of_another_choice(tmp_path: Path) -> None:
    for choices, answer, right in (
        (["3", "4", "2"], "2", "2"),
        (["3", "4", "2"], "C", "2"),
        (["0", "1", "2"], 1, "1"),
        (["3", "4", "5"], 2, "5"),
    ):
        row = {"question": "1+1=", "choices": choices, "answer": answer}
        assert read_task(write(tmp_path, "c.jsonl", row)).rows[0].answers == [right]
    write(tmp_path, "c.jsonl", {"question": "1+1=", "choices": ["3", "2", "4"], "answer": 2})
    with pytest.raises(DataError, match=r'c.jsonl:1: answer=2 is .* write "2" for the text'):
        read_task(tmp_path / "c.jsonl")


def test_a_function_of_ones_own_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_scores.py").write_text(
        "def near(given, expected, row, tolerance=0):\n"
        "    return abs(float(given) - float(expected)) <= tolerance + row.get('slack', 0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path, "rows.jsonl", {"question": "?", "answer": 5, "slack": 1})
    path = tmp_path / "near.yaml"
    path.write_text("path: rows.jsonl\nscorer: {_target_: my_scores.near, tolerance: 1}\n")
    with pytest.raises(ConfigError, match=r"security\.allow_targets=\[my_scores\]"):
        read_task(path)
    task = read_task(path, ["my_scores"])
    assert task.unused == []
    assert [task.score(task.rows[0], x) for x in ("7", "7.5")] == [1, 0]
    path.write_text("path: rows.jsonl\nscorer: {_target_: os.system}\n")
    with pytest.raises(ConfigError, match="is not allowed"):
        read_task(path, ["my_scores"])
    path.write_text("path: rows.jsonl\nscorer: {_target_: my_scores.near, slack: 1}\n")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'slack'"):
        read_task(path, ["my_scores"])
    write(tmp_path, "rows.jsonl", {"question": "?", "answer": "five"})
    path.write_text("path: rows.jsonl\nscorer: {_target_: my_scores.near}\n")
    with pytest.raises(ConfigError, match=r"fails on the right answer of rows.jsonl:1"):
        read_task(path, ["my_scores"])


GOOD = {"question": "?", "answer": "a"}


@pytest.mark.parametrize(
    ("settings", "rows", "words"),
    [
        ("", [], "the task has no rows"),
        ("", [{"answer": "a"}], r"rows.jsonl:1: a row asks by one of .* and has none"),
        (
            "",
            [{"Frage": "?", "Antwort": "a"}],
            "has none, only Frage, Antwort: rename the one that is meant",
        ),
        ("scorrer: exact\npatern: x\n", [GOOD], "mean scorer.*\n.*mean pattern"),
        (
            "",
            [GOOD, {"prompt": "a", "question": "b", "answer": "c"}],
            "rows.jsonl:2: .* prompt, qu",
        ),
        (
            "",
            [{"question": "?"}],
            "rows.jsonl:1: a row has its answer in one of answer, completion",
        ),
        ("", [{"question": "?", "answer": None}], "and has none"),
        ("", [{"question": "?", "output": "a", "target": "b"}], "and has output, target"),
        ("", [{"question": "?", "answer": {}}], "answer must be a text"),
        ("", [{"question": "?", "answer": "C", "choices": ["a", "b"]}], "none of the 2 choices"),
        ("", [{"question": "?", "answer": "a", "choices": ["a"]}], "must be two texts or more"),
        ("", [{"question": "?", "answer": 1, "choices": ["a", "a", "b"]}], "no text twice"),
        ("", [{"messages": [{"role": "assistant", "content": "a"}], "answer": "a"}], "the last is"),
        ("", ["text"], "a row is a group of keys"),
        ("scorer: exactly\n", [GOOD], "scorer=exactly must be one of exact, regex, choices"),
        ("scorer: regex\n", [GOOD], "scorer: regex and pattern: '...' belong together"),
        ("pattern: a\n", [GOOD], "belong together"),
        ("scorer: regex\npattern: '('\n", [GOOD], "no regular expression"),
        ("scorer: regex\npattern: '(a)(b)'\n", [GOOD], "has 2 groups"),
        ("scorer: choices\n", [GOOD], "rows.jsonl:1: scorer: choices, and this row has no choices"),
        ("scores: exact\n", [GOOD], "unknown key scores; did you mean scorer?"),
        ("rows: []\n", [GOOD], "set rows, a list, or path"),
        ("max_new_tokens: 0\n", [GOOD], "max_new_tokens=0 must be"),
        ("raw: 1\n", [GOOD], "raw=1 must be true"),
    ],
)
def test_what_does_not_fit_is_a_sentence(
    settings: str, rows: list[Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, DataError), match=words):
        task_of(tmp_path, settings, *rows)


def test_files_that_are_none_are_sentences(tmp_path: Path) -> None:
    for name, text, words in (
        ("a.txt", "", "a task file is .jsonl"),
        ("a.jsonl", '{"question": "?", "question": "!", "answer": "a"}', "a.jsonl:1: not JSON"),
        ("a.jsonl", '{"question": "?"}\n{"quest', r"a.jsonl:2:2: not JSON: .* cut off: write the"),
        ("a.jsonl", "PK\x03\x04", "a zip archive, as Excel's"),
        ("a b.jsonl", "{}", "rename the file"),
        ("a.yaml", "- 1", "a task is a group of keys"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.yaml", "path: b.jsonl", "path=b.jsonl must be"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises((ConfigError, DataError), match=words):
            read_task(tmp_path / name)
    with pytest.raises(ConfigError, match="there is no such file"):
        read_task(tmp_path / "none.jsonl")


def test_an_answer_stands_before_what_explains_it(tmp_path: Path) -> None:
    """As sets of mathematics have both."""
    row = {"question": "2+2=", "solution": "Count on from 2.", "answer": "4", "level": 1}
    task = read_task(write(tmp_path, "c.jsonl", row))
    assert (task.rows[0].answers, task.unused) == (["4"], ["level", "solution"])
    task = read_task(write(tmp_path, "c.jsonl", {"question": "2+2=", "solution": "4"}))
    assert (task.rows[0].answers, task.unused) == (["4"], [])
