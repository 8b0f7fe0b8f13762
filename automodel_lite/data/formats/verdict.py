"""Answers that are judged one by one: good or bad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from automodel_lite.data.document import Document, Message, RawRow, shown
from automodel_lite.data.formats.texts import (
    alpaca,
    conversations,
    messages,
    prompt_completion,
    turns_of,
)
from automodel_lite.errors import DataError

READERS: dict[str, Callable[[RawRow], Document]] = {
    "messages": messages,
    "conversations": conversations,
    "completion": prompt_completion,
    "output": alpaca,
}
"""Column of the answer -> what reads a row with it."""
_EMPTY: tuple[Any, ...] = (None, "", [])
_WORDS = {"true": True, "false": False, "1": True, "0": False}


def verdict(row: RawRow) -> Document:
    """`label`, true or false, of an answer: the `completion` of a `prompt` (texts or messages), the
    `output` of an `instruction`, or the last turn of `messages` or `conversations`.
    """
    found = [name for name in READERS if row.get(name) not in _EMPTY]
    # one column may stand for both
    if row.get("completion") == row.get("output") not in _EMPTY:
        found.remove("completion" if row.get("instruction") not in _EMPTY else "output")
    if len(found) != 1:
        what = f"{' and '.join(found)} are there" if found else "none of them is there"
        raise DataError(
            f"a row with a label has one answer, in messages, conversations, completion or output, "
            f"and {what}."
        )
    is_good = _truth(row.get("label"))
    document = READERS[found[0]](row)
    if "messages" not in document:
        return {**document, "verdict": is_good}
    # The label judges the last turn, or all of a completion; what is before them is the prompt.
    turns = document["messages"]
    num_judged = len(turns_of(row, found[0])) if found[0] == "completion" else 1
    num_judged = 1 if isinstance(row.get(found[0]), str) else num_judged
    if turns[-1]["role"] not in ("assistant", "model"):
        raise DataError(
            f"column {found[0]} ends with a turn of {turns[-1]['role']}, and the label judges an "
            "answer: end with the assistant's."
        )
    if len(turns) == num_judged:
        raise DataError(f"column {found[0]} holds an answer, and nothing that was asked before it.")
    before = [{**turn, "weight": 0} for turn in turns[:-num_judged]]
    judged = {**document, "messages": [*before, *turns[-num_judged:]]}
    return {**judged, "verdict": is_good, "num_judged": num_judged}


def _truth(value: Any) -> bool:
    """Returns what a label says; a file of CSV holds texts."""
    if isinstance(value, str):
        value = _WORDS.get(value.strip().lower(), value)
    if value in (True, False) and not isinstance(value, str):
        return bool(value)
    raise DataError(f"column label must be true or false (or 1 or 0), not {shown(value)}.")


def mismatched(document: Document, other: Document) -> Document:
    """Returns a judged document's prompt with the answer of another one."""
    if "messages" not in document and "messages" not in other:
        return {**document, "completion": other["completion"]}
    prompt, _ = _split(document)
    _, answer = _split(other)
    kept = {"tools": document["tools"]} if "tools" in document else {}
    return {"messages": [*prompt, *answer], **kept}


def _split(document: Document) -> tuple[list[Message], list[Message]]:
    """Returns the turns of the prompt and of the answer."""
    if "messages" in document:
        turns = document["messages"]
        return turns[: -document["num_judged"]], turns[-document["num_judged"] :]
    prompt = [{"role": "user", "content": document["prompt"], "weight": 0}]
    if system := document.get("system"):
        prompt.insert(0, {"role": "system", "content": system, "weight": 0})
    return prompt, [{"role": "assistant", "content": document["completion"]}]
