"""What a turn holds beside its text is used, noted or refused."""

from __future__ import annotations

from typing import Any

import pytest

from automodel_lite.data.formats.turns import read_turns
from automodel_lite.errors import DataError


def test_what_a_part_holds_beside_its_text_stays_to_be_noted() -> None:
    """Citations of a part were dropped without a word."""
    parts = [{"type": "text", "text": "Paris", "citations": ["a.txt"], "annotations": []}]
    (turn,) = read_turns({"role": "assistant", "content": parts}, "messages[1]")
    assert turn == {"role": "assistant", "content": "Paris", "content.citations": ["a.txt"]}


@pytest.mark.parametrize("key", ["weight", "tool_calls", "reasoning_content"])
def test_what_a_turn_is_read_by_is_refused_in_a_part(key: str) -> None:
    """`weight: 0` of a part was trained on."""
    part = {"type": "text", "text": "Paris", key: 0}
    with pytest.raises(DataError, match=rf"messages\[1\].content\[0\].{key} would be ignored: "):
        read_turns({"role": "assistant", "content": [part]}, "messages[1]")
    part.pop(key)
    assert read_turns({"role": "assistant", "content": [part]}, "messages[1]")


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        ({"from": "gpt", "value": "a", "content": "b"}, "has two texts, in value and in content"),
        ({"from": "gpt", "value": "a", "role": "user"}, "has two roles, from=gpt and role=user"),
    ],
)
def test_a_turn_of_two_forms_that_differ_is_refused(turn: dict[str, Any], told: str) -> None:
    """One of them was dropped."""
    with pytest.raises(DataError, match=told):
        read_turns(turn, "messages[0]")


def test_a_turn_of_two_forms_that_say_the_same_is_one() -> None:
    turn = {"from": "gpt", "value": "a", "role": "assistant", "content": "a"}
    assert read_turns(turn, "messages[0]") == [{"role": "assistant", "content": "a"}]
