"""Decisions: a state and typed questions about it, each with a fixed list of choices.

A row is a record, `{"state", "questions", "answers", "soft_labels"}`, or one decision,
`{"state", "question", "options", "label"}`. Types are those of System One's requests:

    choice   one of named choices: `criteria` {"billing": "Charges and invoices", ...} or a list
    noul     true or false
    score    a level, from "0" up: `criteria` describes each in a list, or `levels` counts them

An answer is a choice's name (of a score its number, of noul a truth value); soft labels give each
choice its probability.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from automodel_lite.data.document import MEDIA, UNUSED, Document, RawRow, shown, sound_text
from automodel_lite.data.formats.calls import parsed
from automodel_lite.errors import DataError, counted, did_you_mean

MOST_QUESTIONS = 1 << 16  # of a record
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_KINDS = {
    **dict.fromkeys(("choice", "multiple_choice", "mcq", "select"), "choice"),
    **dict.fromkeys(("noul", "bool", "boolean", "yes_no", "yn"), "noul"),
    **dict.fromkeys(("score", "rating", "ordinal", "likert"), "score"),
}
# each value of a question, under the names that programs write it with; the first one is printed
_NAMES = {
    "type": ("type", "kind", "question_type"),
    "instructions": ("instructions", "instruction", "question", "prompt", "text", "query"),
    "criteria": ("criteria", "options", "choices", "levels"),
    "answer": ("answer", "label", "gold", "target"),
    "soft_labels": ("soft_labels", "target_probs", "gold_probs", "probs", "distribution"),
    "weight": ("weight",),
    "name": ("name", "id", "key"),
}
COLUMNS_OF_ONE = (
    "type",
    "kind",
    "options",
    "criteria",
    "choices",
    "levels",
    "label",
    "answer",
    "gold",
    "soft_labels",
    "target_probs",
    "weight",
    "name",
)
"""What a row of one decision may have beside its state, its question and `system`."""
_TRUTH = {"true": 1, "yes": 1, "y": 1, "1": 1, "false": 0, "no": 0, "n": 0, "0": 0}
_NOUL = ("false", "true")
_ROUNDING = 0.01  # by which probabilities may miss a sum of 1


@dataclass(frozen=True)
class Decision:
    """One question about a state.

    name     of the question in its record
    kind     choice | noul | score
    choices  (name, meaning) of each, in the order of the data; a meaning may be empty
    target   probability of each choice; None where no answer is known
    answer   place of the right choice, with soft labels alone of the likeliest one; -1: not known
    weight   what the question counts in a mean
    place    of the question in its record
    """

    name: str
    kind: str
    state: str
    question: str
    choices: tuple[tuple[str, str], ...]
    target: tuple[float, ...] | None = None
    answer: int = -1
    weight: float = 1.0
    system: str = ""
    place: int = 0

    def value_of(self, place: int) -> str | bool | int:
        """Returns a choice as an answer of the data has it: a truth value, a level, or a name."""
        if self.kind == "noul":
            return bool(place)
        return place if self.kind == "score" else self.choices[place][0]


def number_of(document: int, place: int) -> int:
    """Returns the number of a question in the data, from 1 on.

    >>> number_of(3, 2), record_of(number_of(3, 2)), place_of(number_of(3, 2))
    (196611, 3, 2)
    """
    return document * MOST_QUESTIONS + place + 1


def record_of(number: Any) -> Any:
    """Returns the document of a question, by its number; of arrays, too."""
    return (number - 1) // MOST_QUESTIONS


def place_of(number: Any) -> Any:
    """Returns the place of a question in its document, by its number."""
    return (number - 1) % MOST_QUESTIONS


def record(row: RawRow) -> Document:
    """`state` (a text, or any JSON), `questions` by name or in a list, and their `answers`,
    `soft_labels` and `weights`: by name, or in a list of the same order.
    """
    state = _text_of_state(row.get("state"))
    system = _text(row["system"], "column system") if row.get("system") else ""
    questions = list(_named(row.get("questions"), "questions"))
    if not questions:
        raise DataError("column questions has no question: add one.")
    if len(questions) > MOST_QUESTIONS:
        raise DataError(
            f"column questions has {len(questions):,} questions, and a record may have "
            f"{MOST_QUESTIONS:,}: split it."
        )
    names = [name for name, _ in questions]
    if len({*names}) < len(names):
        raise DataError(f"column questions has two questions of one name, in {names}: rename one.")
    answers = _values(row, "answers", names)
    soft = _values(row, "soft_labels", names)
    weights = _values(row, "weights", names)
    unused: list[str] = []
    found = []
    for place, (name, asked) in enumerate(questions):
        given = {"answer": answers, "soft_labels": soft, "weight": weights}
        beside = {key: values[name] for key, values in given.items() if name in values}
        where = f"questions[{name}]"
        found.append(_decision(asked, beside, where, name, state, system, place, unused))
    return _document(row, found, unused)


def single(row: RawRow) -> Document:
    """`state`, and one `question` with its `type`, `options`, and `label` or `soft_labels`."""
    names = ("question", *COLUMNS_OF_ONE)
    asked = {name: row[name] for name in names if row.get(name) not in _EMPTY}
    name = str(asked.pop("name", "question"))
    state = _text_of_state(row.get("state"))
    system = _text(row["system"], "column system") if row.get("system") else ""
    decision = _decision(asked, {}, "column question", name, state, system, 0, [])
    return _document(row, [decision], [])


def _document(row: RawRow, decisions: list[Decision], unused: list[str]) -> Document:
    document: Document = {"documents": [{"decision": decision} for decision in decisions]}
    if row.get("id") is not None:
        document["id"] = row["id"]
    if unused:
        document[UNUSED] = list(dict.fromkeys(unused))
    return document


def decisions_of(document: Document) -> list[Decision]:
    """Returns the questions of a record; of another document none."""
    return [part["decision"] for part in document.get("documents", ()) if "decision" in part]


def asked(numbers: Iterable[int], documents: Any) -> Iterator[Decision]:
    """Yields the questions of these numbers, in rising order; each record is read once."""
    last = -1
    decisions: dict[int, Decision] = {}
    for number in numbers:
        if record_of(number) != last:
            last = record_of(number)
            decisions = {one.place: one for one in decisions_of(documents[last])}
        yield decisions[place_of(number)]


def _named(value: Any, column: str) -> Iterator[tuple[str, Any]]:
    """Yields name and question of a mapping; of a list, by a name in it or by its number."""
    questions = parsed(value, f"column {column}")
    if isinstance(questions, Mapping):
        # a table has a field for every name that any row has
        yield from ((str(name), asked) for name, asked in questions.items() if asked is not None)
    elif isinstance(questions, list):
        for place, asked in enumerate(questions):
            named = _first(asked, "name") if isinstance(asked, Mapping) else None
            yield str(place if named is None else named), asked
    else:
        raise DataError(
            f"column {column} must hold questions by name, or a list of them, not {shown(value)}."
        )


def _values(row: RawRow, column: str, names: list[str]) -> dict[str, Any]:
    """Returns the values of a column by question; a question may have none."""
    if row.get(column) in _EMPTY:
        return {}
    values = parsed(row[column], f"column {column}")
    if isinstance(values, list):
        if len(values) != len(names):
            raise DataError(
                f"column {column} has {counted(len(values), 'value')} for "
                f"{counted(len(names), 'question')}: give each its own, or null."
            )
        values = dict(zip(names, values))
    if not isinstance(values, Mapping):
        raise DataError(
            f"column {column} must hold values by question, or a list of them, not {shown(values)}."
        )
    given = {str(name): value for name, value in values.items() if value is not None}
    for name in given:
        if name not in names:
            raise DataError(
                f"column {column} answers {name!r}, which is no question of this record"
                f"{did_you_mean(name, names)}"
            )
    return given


def _first(asked: Mapping[str, Any], key: str) -> Any:
    """Returns the value that a question has under any of its names; None without one."""
    given = [name for name in _NAMES[key] if asked.get(name) not in _EMPTY]
    if len(given) > 1 and any(asked[name] != asked[given[0]] for name in given):
        raise DataError(f"has {' and '.join(given)}, which differ: keep one of them.")
    return asked[given[0]] if given else None


def _decision(
    asked: Any,
    beside: Mapping[str, Any],
    where: str,
    name: str,
    state: str,
    system: str,
    place: int,
    unused: list[str],
) -> Decision:
    """Reads one question; `beside`: what columns of the record say of it."""
    if not isinstance(asked, Mapping):
        raise DataError(
            f'{where} must be an object like {{"type": "choice", "instructions": "Which team?", '
            f'"criteria": ["billing", "sales"]}}, not {shown(asked)}.'
        )
    try:
        values = {key: _first(asked, key) for key in _NAMES}
        for key, value in beside.items():
            if values[key] is not None and values[key] != value:
                raise DataError(f"has {key} {values[key]!r}, and its record {value!r}: keep one.")
            values[key] = value
        kind = _kind(values["type"], values["criteria"])
        choices = _choices(kind, values["criteria"])
        target, answer = _target(kind, choices, values["answer"], values["soft_labels"])
        weight = 1.0 if values["weight"] is None else values["weight"]
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise DataError(f"weight must be a number, not {shown(weight)}.")
        if not 0 <= weight < math.inf:
            raise DataError(f"weight={weight} must be a number from 0 on.")
        words = values["instructions"]
        question = name if words is None else _text(words, "instructions")
    except DataError as error:
        raise DataError(f"{where} {error.text}") from None
    known = {other for names in _NAMES.values() for other in names}
    unused += [f"{key} of a question" for key in asked if key not in known]
    return Decision(
        name, kind, state, question, choices, target, answer, float(weight), system, place
    )


def _kind(value: Any, criteria: Any) -> str:
    if value is None:
        if criteria is None:
            raise DataError('has no type: "choice" with criteria, "noul" (yes or no) or "score".')
        return "choice"
    kind = _KINDS.get(str(value).strip().lower())
    if kind is None:
        raise DataError(f"type={value!r} must be choice, noul or score.")
    return kind


def _choices(kind: str, criteria: Any) -> tuple[tuple[str, str], ...]:
    """Returns names and meanings, in the order of the data."""
    criteria = parsed(criteria, "criteria") if isinstance(criteria, str) else criteria
    if kind == "noul":
        meanings = criteria
        if not isinstance(criteria, Mapping):
            names = sorted(map(_lower, criteria or _NOUL))
            if names not in (["false", "true"], ["no", "yes"]):
                raise DataError(f"a noul question is true or false, and its choices are {names}.")
            meanings = {}
        named = {str(_TRUTH.get(_lower(key), key)): meaning for key, meaning in meanings.items()}
        if extra := named.keys() - {"0", "1"}:
            raise DataError(f"a noul question has the choices true and false, not {min(extra)!r}.")
        return tuple((name, _meaning(named.get(str(at)))) for at, name in enumerate(_NOUL))
    if kind == "score":
        if isinstance(criteria, int) and not isinstance(criteria, bool):
            criteria = [""] * criteria
        if isinstance(criteria, Mapping):
            numbers = [str(at) for at in range(len(criteria))]
            if {*map(str, criteria)} != {*numbers}:
                raise DataError(
                    f"the levels of a score are named 0 to {len(criteria) - 1}, not "
                    f"{', '.join(map(str, criteria))}: use type choice for names."
                )
            by_name = {str(key): meaning for key, meaning in criteria.items()}
            criteria = [by_name[number] for number in numbers]
        if not isinstance(criteria, list):
            raise DataError(
                f"a score needs criteria, a list that describes its levels, not {shown(criteria)}."
            )
        found = [(str(at), _meaning(meaning)) for at, meaning in enumerate(criteria)]
    else:
        found = [*_named_choices(criteria)]
    names = [name for name, _ in found]
    if len(names) < 2:
        raise DataError(f"needs at least two choices, and has {names}.")
    if len({*names}) < len(names):
        raise DataError(f"has two choices of one name, in {names}: rename one.")
    return tuple(found)


def _named_choices(criteria: Any) -> Iterator[tuple[str, str]]:
    """Yields name and meaning of each: of a mapping, or of a list of names or of objects."""
    if isinstance(criteria, Mapping):
        for name, meaning in criteria.items():
            yield _text(name, "a choice"), _meaning(meaning)
        return
    if not isinstance(criteria, list):
        raise DataError(f"needs criteria, its choices by name or in a list, not {shown(criteria)}.")
    for option in criteria:
        if isinstance(option, Mapping):
            named = [option[key] for key in ("key", "id", "label", "name") if option.get(key)]
            meant = [option[key] for key in ("text", "description", "meaning") if option.get(key)]
            if not named + meant:
                raise DataError(f"a choice must have a key, not {dict(option)!r}.")
            name = _text((named or meant)[0], "a choice")
            yield name, _meaning(meant[0]) if named and meant else ""
        else:
            is_number = isinstance(option, int | float) and not isinstance(option, bool)
            yield (str(option) if is_number else _text(option, "a choice")), ""


def _target(
    kind: str, choices: tuple[tuple[str, str], ...], answer: Any, soft: Any
) -> tuple[tuple[float, ...] | None, int]:
    """Returns what each choice should have, and the place of the right one."""
    names = [name for name, _ in choices]
    if isinstance(answer, str) and answer.lstrip().startswith("{"):
        answer = parsed(answer, "answer")
    if isinstance(answer, Mapping | list):  # an answer by its probabilities
        if soft not in (None, answer):
            raise DataError("has two soft labels, in its answer and beside it: keep one.")
        answer, soft = None, answer
    place = -1 if answer is None else _place(kind, names, answer)
    if soft is None:
        hard = tuple(float(at == place) for at in range(len(names)))
        return (None if place < 0 else hard), place
    soft = parsed(soft, "soft_labels")
    values = [0.0] * len(names)
    if isinstance(soft, list):
        if len(soft) != len(names):
            raise DataError(f"has {len(soft)} soft labels for {len(names)} choices.")
        values = [_probability(value) for value in soft]
    elif isinstance(soft, Mapping):
        for key, value in soft.items():
            if value is not None:
                values[_place(kind, names, key)] = _probability(value)
    else:
        raise DataError(f"soft labels give each choice its probability, not {shown(soft)}.")
    total = sum(values)
    if abs(total - 1) > _ROUNDING:
        raise DataError(
            f"soft labels sum to {total:g}, and probabilities sum to 1: divide them by their sum."
        )
    target = tuple(value / total for value in values)
    return target, place if place >= 0 else max(range(len(names)), key=target.__getitem__)


def _place(kind: str, names: list[str], answer: Any) -> int:
    """Returns the place of the choice that an answer names."""
    if kind == "noul":
        found = _TRUTH.get(_lower(answer))
        if found is None:
            raise DataError(f"answer must be true or false, not {answer!r}.")
        return found
    if isinstance(answer, float) and answer.is_integer():  # of a column of numbers
        answer = int(answer)
    name = str(answer).strip()
    if name not in names:
        hint = did_you_mean(name, names)
        raise DataError(f"answer {answer!r} is not one of its choices {', '.join(names)}{hint}")
    return names.index(name)


def _probability(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise DataError(f"a soft label is a probability, not {shown(value)}.")
    return float(value)


def _lower(value: Any) -> str:
    return str(value).strip().lower()


def _meaning(value: Any) -> str:
    return "" if value in _EMPTY else _text(value, "the meaning of a choice")


def _text(value: Any, what: str) -> str:
    if isinstance(value, bool):
        value = str(value).lower()
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{what} must be a text, not {shown(value)}.")
    return sound_text(value, what)


def _text_of_state(state: Any) -> str:
    """Returns a text as it is, and anything else as JSON."""
    if isinstance(state, str) and state.strip():
        return sound_text(state, "column state")
    if state in _EMPTY or isinstance(state, str):
        raise DataError("column state is empty, and the questions are about it.")
    if isinstance(state, Mapping):
        media = [name for name in MEDIA if state.get(name) not in _EMPTY]
        if media:
            raise DataError(
                f"column state holds {media[0]}, which would be written as text: put pictures "
                "into a column images, and read them with dataset=images."
            )
    return sound_text(json.dumps(state, ensure_ascii=False), "column state")
