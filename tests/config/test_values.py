"""Values against the types of their keys."""

from __future__ import annotations

import pytest

from tests.runs import problems


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("dataset.path=", "dataset.path= must be a path, and it is empty: was a shell variable not set?"),
        ("dataset.path=null", "dataset.path=null must be text or a list of texts."),
        ("dataset.path=[a,7]", "dataset.path=['a', 7] must be text or a list of texts."),
        ("dataset.path=x dataset.val_path={easy: 3}", "dataset.val_path={'easy': 3} must be text or a list of texts or a group of keys or null."),
        ("dataset.path=x dataset.val_frac=1", "dataset.val_frac=1 must be at least 0 and below 1."),
    ],
    ids=["empty", "null", "list", "by name", "fraction"],
)  # fmt: skip
def test_a_wrong_dataset(override: str, sentence: str) -> None:
    assert sentence in problems("dataset=files", "~dataset.num_chats", *override.split(" ", 1))
