"""What the labels of rows are, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from automodel_lite.classes import Classes, find_classes
from automodel_lite.errors import DataError

FOUND: dict[str, tuple[list[Any], Classes]] = {
    "names": (["spam", "ham", "spam"], Classes("one", ("ham", "spam"))),
    "whole numbers": ([2, 0, 10, 1], Classes("one", ("0", "1", "2", "10"))),
    "truth": ([True, False], Classes("one", ("false", "true"))),
    "whole numbers of a CSV file": (["10", "9", "9"], Classes("one", ("9", "10"))),
    "numbers": ([3.5, 4, 1.0], Classes("number")),
    "numbers of a CSV file": (["3.5", "4"], Classes("number")),
    "lists of names": (
        [["new"], ["red", "new"], []],
        Classes("many", ("new", "red"), ((), (0,), (0, 1))),
    ),
    "lists of numbers": ([[2], [0, 2]], Classes("many", ("0", "2"), ((0, 1), (1,)))),
    "a flag per class": (
        [[1, 0, 1], [0, 0, 0]],
        Classes("many", ("0", "1", "2"), ((), (0, 2))),
    ),
}


@pytest.mark.parametrize(("labels", "want"), FOUND.values(), ids=FOUND.keys())
def test_what_labels_are_follows_from_them(labels: list[Any], want: Classes) -> None:
    assert find_classes(labels) == want


def test_given_classes_keep_their_order_and_those_that_no_row_has() -> None:
    classes = find_classes(["no", "yes"], ["yes", "no", "maybe"])
    assert classes.names == ("yes", "no", "maybe")
    assert [classes.code(label) for label in ("no", "yes", "maybe")] == [1, 0, 2]
    several = find_classes([[0, 1], [1, 1]], ["red", "new"])
    assert several == Classes("many", ("red", "new"), ((0, 1), (1,)))
    assert several.name_of_code(several.code(["red", "new"])) == "red, new"


def test_codes_of_labels() -> None:
    assert Classes("one", ("ham", "spam")).code(" spam ") == 1
    # of classes that have names, a number is the place of one
    assert Classes("one", ("LABEL_0", "LABEL_1", "LABEL_2")).code(2) == 2
    assert Classes("one", ("neg", "pos")).code("1") == 1
    assert Classes("one", ("1", "0")).code(1) == 0
    assert Classes("number").code("-1.5") == -1.5
    assert Classes("many", ("a", "b"), ((), (1,))).code(["b", "b"]) == 1


REFUSED: dict[str, tuple[list[Any], str]] = {
    "one class": (["a", "a"], "nothing to tell apart"),
    "no label": ([None, ""], "no row has a label"),
    "lists and classes": ([["a"], "b"], "one class in others"),
    "texts and numbers": (["a", 1], "holds texts such as 'a', and 1"),
    "as many texts as rows": ([f"text {i}" for i in range(150)], "these are no classes"),
}


@pytest.mark.parametrize(("labels", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_labels_that_teach_nothing_are_refused(labels: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        find_classes(labels)


WRONG: dict[str, tuple[Classes, Any, str]] = {
    "another class": (Classes("one", ("ham", "spam")), "spma", "did you mean spam"),
    "no class": (Classes("one", ("ham", "spam")), None, "missing"),
    "a list": (Classes("one", ("ham", "spam")), ["ham"], "one class in other rows"),
    "no list": (Classes("many", ("ham", "spam"), ((0,),)), "ham", "a list of classes"),
    "no number": (Classes("number"), "good", "a number in other rows"),
    "not finite": (Classes("number"), float("nan"), "label is nan"),
}


@pytest.mark.parametrize(("classes", "label", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_label_of_another_kind_is_named(classes: Classes, label: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        classes.code(label)
