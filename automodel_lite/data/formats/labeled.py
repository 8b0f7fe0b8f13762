"""Documents that are given a label: texts, pairs of texts, and chats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from automodel_lite.data.document import Document, RawRow, shown
from automodel_lite.data.formats.texts import (
    alpaca,
    chat,
    prompt_completion,
    text_of,
    turns_of,
)
from automodel_lite.errors import DataError


def _text(row: RawRow) -> Document:
    return {"text": text_of(row, "text")}


def _sentences(row: RawRow) -> Document:
    return {"text": f"{text_of(row, 'sentence1')}\n{text_of(row, 'sentence2')}"}


def _query_document(row: RawRow) -> Document:
    """The query comes first: rows of one query share it, as a tree."""
    query = text_of(row, "query")
    return {
        "text": f"Query: {query}\nDocument: {text_of(row, 'document')}",
        "group": query if row.get("group") is None else row["group"],
    }


def _messages(row: RawRow) -> Document:
    return chat(turns_of(row, "messages"), row)


def _conversations(row: RawRow) -> Document:
    return chat(turns_of(row, "conversations"), row)


READERS: dict[tuple[str, ...], Callable[[RawRow], Document]] = {
    ("messages",): _messages,
    ("conversations",): _conversations,
    ("query", "document"): _query_document,
    ("sentence1", "sentence2"): _sentences,
    ("prompt", "completion"): prompt_completion,
    ("instruction", "output"): alpaca,
    ("text",): _text,
}
"""Columns of what is read -> what reads them, in the order in which they are looked for."""


def labeled(columns: tuple[str, ...]) -> Callable[[RawRow], Document]:
    """Returns what reads rows of these columns and `label`, with an optional `weight` of the row.

    text; sentence1 and sentence2, a line each; query and document, `Query: ...` and a line
    `Document: ...`; prompt and completion, or instruction and output; messages or conversations
    """

    def read(row: RawRow) -> Document:
        document = {**READERS[columns](row), "label": row.get("label")}
        if row.get("weight") is not None:
            document["weight"] = _weight(row["weight"])
        return document

    return read


def _weight(value: Any) -> float:
    """Returns what a row counts; a file of CSV holds texts."""
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = -1.0
    if not 0 <= weight < 1e6 or isinstance(value, bool):
        raise DataError(f"column weight must be a number from 0 on, not {shown(value)}.")
    return weight
