"""Classes that a score head tells apart, and the numbers that stand for the labels of rows.

    label of a row                       what is learned                          kind
    "spam", 3, true                      one of the classes                       one
    ["red", "round"], [1, 0, 1]          which of the classes hold, each alone    many
    3.8                                  a number                                 number
    (none: one of a pair is better)      a number that orders documents           order

A row of several classes is one of the distinct sets of classes that the data hold: in a batch, the
number of its set stands for it, whatever the number of classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from automodel_lite.errors import ConfigError, DataError, did_you_mean, listed

Kind = Literal["one", "many", "number", "order"]
MOST_CLASSES = 100  # that need no second look: more of them are looked at beside the rows
_INT = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class Classes:
    """What the labels of a data set are.

    names  of the classes, by their numbers; () of numbers
    sets   of kind `many`: the distinct sets of classes, each by rising numbers
    """

    kind: Kind
    names: tuple[str, ...] = ()
    sets: tuple[tuple[int, ...], ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Returns the names of all scores, for a config.json."""
        return self.names or ("LABEL_0",)

    @property
    def problem_type(self) -> str | None:
        """Returns what transformers calls it; it has no word for an order."""
        return {
            "one": "single_label_classification",
            "many": "multi_label_classification",
            "number": "regression",
        }.get(self.kind)

    @property
    def num_scores(self) -> int:
        """Returns how many numbers the head gives."""
        return len(self.names) or 1

    def code(self, label: Any) -> int | float:
        """Returns what stands for the label of a row; raises DataError for one that is none of
        these.

        >>> Classes("one", ("ham", "spam")).code("spam")
        1
        """
        value = canonical(label)
        if self.kind == "number":
            return _number(value)
        if self.kind == "many":
            return self._places[self._members(value)]
        if isinstance(value, tuple):
            raise DataError("column label is a list here, and one class in other rows.")
        return self._number_of(value)

    def name_of_code(self, code: int) -> str:
        """Returns the name of a class, or those of a set of classes.

        >>> Classes("one", ("ham", "spam")).name_of_code(1)
        'spam'
        """
        if self.kind != "many":
            return self.names[code]
        return ", ".join(self.names[number] for number in self.sets[code]) or "none"

    @cached_property
    def _places(self) -> dict[tuple[int, ...], int]:
        return {members: place for place, members in enumerate(self.sets)}

    def _members(self, value: Any) -> tuple[int, ...]:
        if not isinstance(value, tuple):
            raise DataError("column label is one class here, and a list of classes in other rows.")
        if is_multi_hot(value) and len(value) == len(self.names):
            return tuple(number for number, flag in enumerate(value) if flag)
        return tuple(sorted({self._number_of(one) for one in value}))

    def _number_of(self, value: Any) -> int:
        name = name_of(value)
        if name in self.names:
            return self.names.index(name)
        # of classes that have names, a number is the place of one
        has_names = not any(map(_INT.fullmatch, self.names))
        if has_names and _INT.fullmatch(name) and 0 <= int(name) < len(self.names):
            return int(name)
        raise DataError(
            f"column label is {name!r}, which is none of the classes {listed(self.names, 8)}"
            f"{did_you_mean(name, self.names)}"
        )


def canonical(label: Any) -> Any:
    """Returns a label as something to compare: a bool, a number, a text, or a tuple of them; raises
    DataError for what is none.
    """
    if isinstance(label, list | tuple):
        return tuple(canonical(one) for one in label)
    if isinstance(label, str) and label.strip():
        return label.strip()
    if isinstance(label, bool | int):
        return label
    if isinstance(label, float) and label == label and abs(label) != float("inf"):
        return label
    found = "missing" if label in (None, "") else f"{label!r:.40}"
    raise DataError(
        f"column label is {found}: it must be a class (a name or a number), a list of classes, or "
        "a number with a decimal point."
    )


def name_of(value: Any) -> str:
    """Returns the name of a class."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_multi_hot(value: tuple[Any, ...]) -> bool:
    """Returns whether a list is one flag per class; a list of one is a class."""
    return len(value) > 1 and all(one in (0, 1) and not isinstance(one, str) for one in value)


def find_classes(labels: Iterable[Any], names: Sequence[str] | None = None) -> Classes:
    """Finds out what labels are; classes are in the order of their numbers, or of their names.

    labels  of all rows; those that cannot be read are left to `Classes.code`
    names   the classes, where they are given

    Raises DataError for labels of several kinds, or one class alone.
    """
    found: dict[Any, None] = {}
    num_rows = 0
    for label in labels:
        num_rows += 1
        try:
            found.setdefault((type(value := canonical(label)), value))
        except DataError:
            continue
    values = [value for _, value in found]
    if not values:
        raise DataError("no row has a label: column label is empty everywhere.")
    lists = [value for value in values if isinstance(value, tuple)]
    if lists:
        return _many(lists, len(lists) < len(values), names)
    if names is not None:
        return Classes("one", tuple(names))
    texts = [value for value in values if isinstance(value, str)]
    numbers = values
    if texts and len(texts) < len(values):
        other = next(value for value in values if not isinstance(value, str))
        raise DataError(f"column label holds texts such as {texts[0]!r}, and {other!r}.")
    if texts:  # a file of CSV has no other
        numbers = [_as_number(text) for text in texts]
    if any(one is None for one in numbers):
        return Classes("one", _checked(sorted(texts), num_rows))
    if any(isinstance(one, float) for one in numbers):
        return Classes("number")
    ordered = sorted(zip(numbers, map(name_of, values)))
    return Classes("one", _checked([name for _, name in ordered], num_rows))


def _many(values: list[tuple[Any, ...]], is_mixed: bool, names: Sequence[str] | None) -> Classes:
    if is_mixed:
        raise DataError(
            "column label is a list of classes in some rows and one class in others: write [...] in"
            " all of them."
        )
    lengths = {len(value) for value in values}
    # A list of class numbers would hold the same two in every row: one flag per class.
    if len(lengths) == 1 and all(map(is_multi_hot, values)):
        known = tuple(names) if names else tuple(map(str, range(lengths.pop())))
    elif names is not None:
        known = tuple(names)
    else:
        members = {one for value in values for one in value}
        if any(isinstance(one, float | tuple) for one in members):
            raise DataError(
                "column label holds lists of numbers with a decimal point: list classes, by names "
                "or whole numbers."
            )
        numbers = [one for one in members if not isinstance(one, str)]
        if numbers and len(numbers) < len(members):
            raise DataError("column label holds lists of names, and lists of numbers.")
        known = tuple(map(name_of, sorted(members)))
    bare = Classes("many", known)
    sets = set()
    for value in values:
        try:
            sets.add(bare._members(value))
        except DataError:  # said with its place
            continue
    return Classes("many", _checked(known, 0), tuple(sorted(sets)))


def _checked(names: Sequence[str], num_rows: int) -> tuple[str, ...]:
    if len(names) < 2:
        raise DataError(
            f"column label is {names[0] if names else 'empty'} in every row: there is nothing to "
            "tell apart."
        )
    if len({*names}) < len(names):
        twice = next(name for name in names if [*names].count(name) > 1)
        raise DataError(f"column label has the class {twice} as a text and as a number.")
    if len(names) > MOST_CLASSES and 2 * len(names) > num_rows > 0:
        raise DataError(
            f"column label has {len(names):,} different texts in {num_rows:,} rows, such as "
            f"{names[0]!r:.60}: these are no classes; name the column, dataset.columns.label=..."
        )
    return tuple(names)


def _as_number(text: str) -> int | float | None:
    if _INT.fullmatch(text):
        return int(text)
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def _number(value: Any) -> float:
    number = _as_number(value) if isinstance(value, str) else value
    if isinstance(number, tuple) or number is None:
        raise DataError(f"column label is {value!r:.40}, and a number in other rows.")
    return float(number)


def described(classes: Classes) -> str:
    """Returns a few words for the start block: `3 classes: bad, good, mixed`."""
    if classes.kind == "number":
        return "labels are numbers (regression)"
    several = f", {len(classes.sets):,} sets of them" if classes.kind == "many" else ""
    return f"{len(classes.names):,} classes: {listed(classes.names, 5)}{several}"


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of classes that a user gives; raises ConfigError."""
    found = tuple(map(str, names))
    if len(found) < 2 or len({*found}) < len(found):
        raise ConfigError(
            f"dataset.classes={list(found)} must be at least two classes, each once",
            key="dataset.classes",
            cure="name them in the order of their numbers, or leave it out",
        )
    return found


ONE_SCORE = Classes("order")
"""Of a reward model: a number by which answers are ordered."""
