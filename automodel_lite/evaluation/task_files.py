"""Task files: questions with the answers that are right, and how an answer of a model is scored.

    sums.jsonl   {"question": "2+3=", "answer": 5}                       scored by equality
                 {"question": "...", "choices": ["Lima", "Quito"], "answer": "Lima"}
    sums.yaml    scorer: regex                                           all settings are optional
                 pattern: "#### (-?[0-9]+)"
                 path: sums.jsonl                                        or the rows: rows: [...]

A task is named after its file.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb
from pathlib import Path
from typing import Any

import yaml

from automodel_lite.config.components import build_nested, check_origin, locate, target_problem
from automodel_lite.config.permissions import check_yaml
from automodel_lite.data.reading.documents import Question
from automodel_lite.data.reading.readers import UTF_8, json_cure
from automodel_lite.data.reading.signatures import check_signature
from automodel_lite.data.strict_json import read_json
from automodel_lite.errors import (
    ConfigError,
    DataError,
    did_you_mean,
    explained,
    is_limit,
    one_line,
)

SCORERS = ("exact", "regex", "choices")
_SETTINGS = ("scorer", "pattern", "path", "rows", "raw", "max_new_tokens")
_ASKS = ("messages", "prompt", "question", "instruction")
# as sets that are trained on call it
_ANSWERS = ("answer", "completion", "output", "response", "solution", "target")
_KNOWN = (*_ASKS, "choices")
_NAME = re.compile(r"[\w.-]+")
# "B", "(B)", "B.", "B) Lima", "the answer is B"
_LETTER = re.compile(r"^\W*([A-Z])(?:\W|$)|answer(?: is|:)\W*([A-Z])(?:\W|$)")

Function = Callable[..., float]


@dataclass(frozen=True)
class TaskRow:
    """asked     the chat, or the text to go on with
    answers   the texts that are right
    choices   of which one is right; empty where the task is no choice
    given     the row as it stands in the file, for a function of the user's
    where     its place, `sums.jsonl:17`
    """

    asked: Question
    answers: list[str]
    choices: list[str]
    given: Mapping[str, Any]
    where: str


@dataclass(frozen=True)
class TaskFile:
    """A task: its rows, and how answers to them are scored.

    max_new_tokens  of an answer; None = as all tasks have it
    """

    name: str
    rows: list[TaskRow]
    scorer: str = "exact"
    pattern: str = ""
    function: Function | None = None
    max_new_tokens: int | None = None
    unused: list[str] = field(default_factory=list)  # columns that nothing reads

    def score(self, row: TaskRow, answer: str) -> float:
        """Returns how right an answer is, 0..1. Raises whatever a function of the user's does."""
        if self.function is not None:
            return _checked_score(self._called(row, answer))
        if self.scorer == "regex":
            return float(_found(self.pattern, answer) in self._wanted(row))
        if self.scorer == "choices":
            right = [row.choices.index(text) for text in row.answers]
            return float(choice_of(answer, row.choices) in right)
        return float(answer.strip() in [text.strip() for text in row.answers])

    def _wanted(self, row: TaskRow) -> list[str]:
        """Returns what must be found: of an answer that has the pattern itself, its match."""
        found = [_found(self.pattern, text) for text in row.answers]
        return [text.strip() if one is None else one for text, one in zip(row.answers, found)]

    def _called(self, row: TaskRow, answer: str) -> Any:
        assert self.function is not None
        more = {"row": row.given} if _takes_row(self.function) else {}
        return max(self.function(answer, text, **more) for text in row.answers)


@dataclass(frozen=True)
class Drawing:
    """How the answers to one question are drawn: `num_samples` of at most `max_new_tokens`, each
    from noise of its own that follows from `seed`; temperature 0 = the likeliest tokens.
    """

    prompt: list[int]
    num_samples: int
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: tuple[str, int]


@dataclass(frozen=True)
class Asked:
    """numbers  of metrics.jsonl: `task_score/<task>`, `task_pass_at_<k>/<task>`
    lines    for the screen, one of each task
    texts    (question, answer) of the first ones, for the report
    """

    numbers: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """Returns the probability that one of k answers is right, as n answers of which c are right
    estimate it without bias: 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374).

    >>> pass_at(1, 4, 1), pass_at(2, 4, 1), pass_at(4, 4, 1)
    (0.25, 0.5, 1.0)
    """
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def choice_of(answer: str, choices: Sequence[str]) -> int | None:
    """Returns the place of the choice that an answer names: by its text at the beginning of the
    answer, else by its letter; None where it names none.

    >>> choice_of("Lima.", ["Quito", "Lima"]), choice_of("(A) Quito", ["Quito", "Lima"])
    (1, 0)
    """
    text = answer.strip().casefold()
    # the longest: "New York City" is not "New York"
    by_length = sorted(range(len(choices)), key=lambda place: -len(choices[place].strip()))
    for place in by_length:
        choice = choices[place].strip().casefold()
        if text.startswith(choice) and not text[len(choice) : len(choice) + 1].isalnum():
            return place
    for found in _LETTER.finditer(answer):
        place = ord(found[1] or found[2]) - ord("A")
        if place < len(choices):
            return place
    return None


def read_task(path: str | Path, allowed: Sequence[str] = ()) -> TaskFile:
    """Reads a task file; raises ConfigError for its settings, DataError for a row that does not
    fit.

    allowed  packages that a function may come from, `security.allow_targets`
    """
    path = Path(path).expanduser()
    if path.suffix not in (".jsonl", ".yaml", ".yml"):
        raise ConfigError(
            f"tasks.files: {path}: a task file is .jsonl, a row per line, or .yaml with settings."
        )
    if not path.is_file():
        raise ConfigError(f"tasks.files: {path}: there is no such file.")
    if not _NAME.fullmatch(path.stem):
        raise ConfigError(
            f"tasks.files: {path}: the task is named after its file, in letters, digits, _, - and "
            ".: rename the file."
        )
    settings: dict[str, Any] = {}
    if path.suffix == ".jsonl":
        rows = _read_lines(path)
    else:
        settings = _read_settings(path)
        rows = _rows_of(settings, path)
    if not rows:
        raise DataError(f"{path}: the task has no rows.")
    task = TaskFile(path.stem, [_row(row, where, settings) for where, row in rows])
    task = _with_scorer(task, settings, path, allowed)
    _check_rows(task)
    reads = {*_KNOWN} - ({"choices"} if task.scorer != "choices" else set())
    if task.function is not None and _takes_row(task.function):
        return task
    unused = sorted(
        {
            name
            for row in task.rows
            for name in row.given.keys() - reads - {*_answer_columns(row.given)}
        }
    )
    return replace(task, unused=unused)


def _read_settings(path: Path) -> dict[str, Any]:
    check_yaml(path)
    with explained(f"{path}: not YAML", yaml.YAMLError, UnicodeDecodeError):
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: a task is a group of keys: {', '.join(_SETTINGS)}.")
    problems = []
    for key in settings:
        if key not in _SETTINGS:
            meant = did_you_mean(str(key), _SETTINGS)
            problems.append(
                ConfigError(
                    f"{path}: unknown key {key}{meant} A task takes {', '.join(_SETTINGS)}."
                )
            )
    if problems:
        raise ConfigError.of(problems)
    return settings


def _rows_of(settings: Mapping[str, Any], path: Path) -> list[tuple[str, Any]]:
    """Returns (place, row) of a YAML file: its own, or those of a file beside it."""
    if ("rows" in settings) == ("path" in settings):
        raise ConfigError(f"{path}: set rows, a list, or path, a .jsonl file beside this one.")
    if "path" in settings:
        beside = path.parent / str(settings["path"])
        if beside.suffix != ".jsonl" or not beside.is_file():
            raise ConfigError(f"{path}: path={settings['path']} must be a .jsonl file, from here.")
        return _read_lines(beside)
    if not isinstance(settings["rows"], list):
        raise ConfigError(f"{path}: rows must be a list of groups of keys.")
    return [(f"{path.name}, row {number}", row) for number, row in enumerate(settings["rows"], 1)]


def _read_lines(path: Path) -> list[tuple[str, Any]]:
    rows = []
    check_signature(path, path.name)
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if line.strip():
            where = f"{path.name}:{number}"
            with explained(f"{where}: not UTF-8", UnicodeDecodeError, kind=DataError):
                text = line.decode(UTF_8)
            try:
                rows.append((where, read_json(text)))
            except json.JSONDecodeError as error:
                cure = json_cure(error) or "mend it there"
                at = f"{where}:{error.pos + 1}"
                raise DataError(f"{at}: not JSON: {error.msg}", cure=cure) from error
            except ValueError as error:  # a key that is there twice
                raise DataError(f"{where}: not JSON: {error}.") from error
    return rows


def _row(row: Any, where: str, settings: Mapping[str, Any]) -> TaskRow:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row is a group of keys, such as question and answer.")
    asked = [name for name in _ASKS if row.get(name)]
    if len(asked) != 1:
        raise DataError(
            f"{where}: a row asks by one of {', '.join(_ASKS)}, and has "
            f"{', '.join(asked) or _none_of(row)}."
        )
    value = row[asked[0]]
    if asked[0] == "messages":
        is_chat = isinstance(value, list) and all(
            isinstance(turn, dict) and isinstance(turn.get("content"), str) and turn.get("role")
            for turn in value
        )
        if not is_chat or value[-1]["role"] == "assistant":
            raise DataError(
                f"{where}: messages are turns with role and content, and the last is the user's: "
                "the answer stands in `answer`."
            )
        messages = value
    elif isinstance(value, str):
        messages = [{"role": "user", "content": value}]
    else:
        raise DataError(f"{where}: {asked[0]} must be text.")
    raw = settings.get("raw", False)
    if not isinstance(raw, bool):
        raise ConfigError(f"raw={raw} must be true (text to go on with) or false (a chat).")
    choices = row.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(x, str) and x.strip() for x in choices):
        raise DataError(f"{where}: choices must be a list of texts.")
    if choices and len({*choices}) < max(2, len(choices)):
        raise DataError(f"{where}: choices={choices} must be two texts or more, no text twice.")
    given = _answer_columns(row)
    if len(given) != 1:
        raise DataError(
            f"{where}: a row has its answer in one of {', '.join(_ANSWERS)}, and has "
            f"{', '.join(given) or _none_of(row)}."
        )
    answers = row[given[0]]
    several = answers if isinstance(answers, list) else [answers]
    if not several or not all(_is_answer(answer) for answer in several):
        raise DataError(f"{where}: {given[0]} must be a text, a number, or a list of those.")
    if choices:
        several = [_as_choice(answer, choices, where) for answer in several]
    return TaskRow(
        Question(messages, None, is_chat=not raw), [str(x) for x in several], choices, row, where
    )


def _answer_columns(row: Mapping[str, Any]) -> list[str]:
    """Returns which columns hold the answer: where there is an `answer`, others explain it."""
    given = [name for name in _ANSWERS if row.get(name) is not None]
    return given[:1] if "answer" in given else given


def _none_of(row: Mapping[str, Any]) -> str:
    """Returns what stands for a key that is missing: the keys that are there, one of which is
    meant.
    """
    return f"none, only {', '.join(map(str, row))}: rename the one that is meant"


def _is_answer(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _as_choice(answer: Any, choices: Sequence[str], where: str) -> str:
    """Returns the text of the right choice, by its text, its letter, or its place from 0."""
    if answer in choices:
        return str(answer)
    is_number = isinstance(answer, int)
    if is_number and str(answer) in choices and choices[answer : answer + 1] != [str(answer)]:
        raise DataError(
            f"{where}: answer={answer} is the text of a choice, but a number is the place of one: "
            f'write "{answer}" for the text, or the letter.'
        )
    if isinstance(answer, str) and len(answer) == 1 and answer.isupper():
        answer = ord(answer) - ord("A")
    if isinstance(answer, int) and 0 <= answer < len(choices):
        return choices[answer]
    raise DataError(
        f"{where}: answer={answer} is none of the {len(choices)} choices: give its text, its "
        "letter (A is the first) or its place (0 is the first)."
    )


def _with_scorer(
    task: TaskFile, settings: Mapping[str, Any], path: Path, allowed: Sequence[str]
) -> TaskFile:
    """Returns the task with its scorer and its settings."""
    has_choices = [bool(row.choices) for row in task.rows]
    scorer = settings.get("scorer", "choices" if all(has_choices) else "exact")
    pattern = settings.get("pattern", "")
    tokens = settings.get("max_new_tokens")
    if tokens is not None and (not isinstance(tokens, int) or tokens < 1):
        raise ConfigError(f"{path}: max_new_tokens={tokens} must be a whole number above 0.")
    if (scorer == "regex") != bool(pattern):
        raise ConfigError(f"{path}: scorer: regex and pattern: '...' belong together.")
    if isinstance(scorer, dict):
        return replace(task, function=_function(scorer, path, allowed), max_new_tokens=tokens)
    if scorer not in SCORERS:
        raise ConfigError(
            f"{path}: scorer={scorer} must be one of {', '.join(SCORERS)}, or a function: "
            "{_target_: my_scores.same_number}."
        )
    if pattern:
        with explained(f"{path}: pattern={pattern} is no regular expression", re.error):
            num_groups = re.compile(str(pattern)).groups
        if num_groups > 1:
            raise ConfigError(
                f"{path}: pattern={pattern} has {num_groups} groups, and the answer is that of "
                "one: (?:...) groups without counting."
            )
    if scorer == "choices" and not all(has_choices):
        where = task.rows[has_choices.index(False)].where
        raise DataError(f"{where}: scorer: choices, and this row has no choices.")
    return replace(task, scorer=scorer, pattern=str(pattern), max_new_tokens=tokens)


def _function(node: Mapping[str, Any], path: Path, allowed: Sequence[str]) -> Function:
    target = node.get("_target_")
    if problem := target_problem(target, allowed):
        raise ConfigError(f"{path}: scorer: {problem}")
    found = locate(str(target))
    check_origin(str(target), found, allowed)
    scorer = build_nested(dict(node))
    if not callable(scorer):
        raise ConfigError(f"{path}: scorer: {target} is no function of (given, expected).")
    function: Function = scorer
    return function


def _takes_row(function: Function) -> bool:
    return "row" in inspect.signature(function).parameters


def _check_rows(task: TaskFile) -> None:
    """Raises DataError where the answer that is right is scored as wrong: nothing would be right.
    A function is called once, before anything is trained.
    """
    for row in task.rows if task.function is None else task.rows[:1]:
        try:
            score = task.score(row, row.answers[0])
        except Exception as error:  # whatever a function of the user's does
            if is_limit(error):
                raise
            raise ConfigError(
                f"{task.name}: the scorer fails on the right answer of {row.where} "
                f"({one_line(error)}): it gets (given, expected) and returns a number from 0 to 1."
            ) from error
        # a regex finds an answer in a sentence, and the row may have the bare answer
        if not score and task.function is None and task.scorer != "regex":
            raise DataError(f"{row.where}: its own answer, {row.answers[0]!r}, is scored as wrong.")


def _checked_score(value: Any) -> float:
    score = float(value)
    if not 0 <= score <= 1 or math.isnan(score):
        raise ValueError(f"the score {value} is not from 0 to 1")
    return score


def _found(pattern: str, text: str) -> str | None:
    """Returns the last match, of its group where it has one; None without a match."""
    found = None
    for match in re.finditer(pattern, text):
        found = match[match.re.groups] or ""
    return found if found is None else found.strip()
