"""Pairs of a wanted and an unwanted answer."""

from __future__ import annotations

import math
from itertools import takewhile

from automodel_lite.data.document import Document, Message, RawRow, shown
from automodel_lite.data.formats.texts import answered, chat, instruction_of, text_of, turns_of
from automodel_lite.errors import DataError


def preference(row: RawRow) -> Document:
    """A pair, and where the row has a `margin` of its answers, that."""
    margin = row.get("margin")
    if margin is None:
        return _pair(row)
    try:
        value = math.nan if isinstance(margin, bool) else float(margin)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"column margin must be a number, not {shown(margin)}.")
    return {**_pair(row), "margin": value}


def _pair(row: RawRow) -> Document:
    """`chosen` and `rejected`: answers (texts, messages, or one message) to a `prompt` (text or
    messages), an Alpaca `instruction`, a `question` or a ShareGPT `conversations`; or whole chats,
    or whole texts, that begin with the same prompt.
    """
    for name in ("chosen", "rejected"):
        if row.get(name) in (None, "", []):
            raise DataError(f"column {name} is empty: a preference pair has two answers.")
    if row["chosen"] == row["rejected"]:
        raise DataError(
            "column chosen and column rejected are equal, so there is nothing to prefer."
        )
    if isinstance(row["chosen"], str) != isinstance(row["rejected"], str):
        raise DataError(
            "column chosen and column rejected must be of one kind: both texts, or both lists of "
            "messages."
        )
    if not isinstance(row["chosen"], str):
        return {
            name: chat(turns, row)
            for name, turns in zip(("chosen", "rejected"), _answer_turns(row))
        }
    if isinstance(row.get("prompt"), list) or row.get("conversations"):
        before = [{**turn, "weight": 0} for turn in _prompt_turns(row)]
        answers = {
            name: [*before, {"role": "assistant", "content": text_of(row, name)}]
            for name in ("chosen", "rejected")
        }
        return {name: chat(turns, row) for name, turns in answers.items()}
    if (prompt := _prompt_text(row)) is not None:
        return {name: answered(row, prompt, name) for name in ("chosen", "rejected")}
    # Whole texts: what they share, to its last white space, is the prompt.
    texts = {name: text_of(row, name) for name in ("chosen", "rejected")}
    shared = takewhile(lambda both: both[0] == both[1], zip(*texts.values()))
    cut = max(
        (place + 1 for place, (character, _) in enumerate(shared) if character.isspace()), default=0
    )
    if not cut or any(not text[cut:].strip() for text in texts.values()):
        raise DataError(_NO_COMMON_PROMPT)
    return {name: {"prompt": text[:cut], "completion": text[cut:]} for name, text in texts.items()}


_NO_COMMON_PROMPT = (
    "column chosen and column rejected must begin with the same prompt, and go on with an answer."
)


def _prompt_text(row: RawRow) -> str | None:
    """Returns what was asked, of the first column that says it; None: there is no such column."""
    names = ("prompt", "instruction", "question")
    for name in names:
        if row.get(name) not in (None, ""):
            return instruction_of(row) if name == "instruction" else text_of(row, name)
    return "" if "" in map(row.get, names) else None


def _prompt_turns(row: RawRow) -> list[Message]:
    """Returns the turns before the answers, as far as they stand in a column of their own."""
    if row.get("conversations"):
        return turns_of(row, "conversations")
    if isinstance(row.get("prompt"), list):
        return turns_of(row, "prompt")
    text = _prompt_text(row)
    return [{"role": "user", "content": text}] if text else []


def _answer_turns(row: RawRow) -> list[list[Message]]:
    """Returns both chats, whose common beginning is not trained on."""
    listed = {
        name: row[name] if isinstance(row[name], list) else [row[name]]
        for name in ("chosen", "rejected")
    }
    chats = [turns_of(listed, name) for name in listed]
    # answers alone, else the whole chat is in both
    if any(turns[0]["role"] == "assistant" for turns in chats):
        chats = [[*_prompt_turns(row), *turns] for turns in chats]
    pairs = list(zip(*chats))
    num_shared = next(
        (place for place, (one, other) in enumerate(pairs) if one != other), len(pairs)
    )
    # Answers may begin alike: what is shared ends with the last turn that is not the assistant's.
    while num_shared and chats[0][num_shared - 1]["role"] == "assistant":
        num_shared -= 1
    for turns in chats:
        answers = turns[num_shared:]
        if not num_shared or not answers or answers[0]["role"] != "assistant":
            raise DataError(_NO_COMMON_PROMPT)
    return [
        [*({**turn, "weight": 0} for turn in turns[:num_shared]), *turns[num_shared:]]
        for turns in chats
    ]
