"""What every dataset offers to the tokenizer: documents that know where they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from automodel_lite.data.document import Document, Message
from automodel_lite.data.reading.readers import RawRows, RowList


@dataclass(frozen=True)
class Question:
    """A chat that waits for the model's turn, and the answer that a trained model should give."""

    messages: list[Message]
    answer: str | None  # None: not known
    tools: list[Any] | None = None
    is_chat: bool = True  # False: plain text, to be gone on with as it is


def question_of(document: Document) -> Question | None:
    """Returns what a document asks: its last answer taken off. None for tokens.

    >>> question_of({"prompt": "2 + 2?", "completion": "4"})
    Question(messages=[{'role': 'user', 'content': '2 + 2?'}], answer='4', tools=None, is_chat=True)
    """
    if document.get("verdict") is False:  # nobody should give a bad answer
        return None
    if "documents" in document:  # several answers to one prompt
        document = document["documents"][0]
    if "messages" in document:
        asked = list(document["messages"])
        last = asked.pop() if asked[-1]["role"] == "assistant" and len(asked) > 1 else None
        answer = last["content"] if last and not last.get("tool_calls") else None
        # is for training
        turns = [{key: value for key, value in turn.items() if key != "weight"} for turn in asked]
        return Question(turns, answer, document.get("tools"))
    if "text" in document:
        return Question([{"role": "user", "content": document["text"]}], None, is_chat=False)
    if "prompt" not in document:
        return None
    system = [{"role": "system", "content": document["system"]}] if document.get("system") else []
    return Question(
        [*system, {"role": "user", "content": document["prompt"]}],
        document["completion"] or None,
        is_chat=not document.get("raw"),
    )


DocumentSet = RawRows
"""Map-style normalized documents; reading a bad one raises `DataError` that names its place,
`train.jsonl:17`.
"""


class Documents(Protocol):
    """A dataset, before tokenizing."""

    @property
    def train(self) -> DocumentSet: ...

    @property
    def val(self) -> Mapping[str, DocumentSet]: ...

    @property
    def kind(self) -> str:
        """messages | prompt_completion | text | tokens | rows | mixture"""

    @property
    def questions(self) -> Sequence[Question]: ...

    @property
    def description(self) -> str:
        """One line for the start-up block."""

    @property
    def identity(self) -> str:
        """What the cache key says of the data; another identity is other data."""


class DocumentList(RowList):
    """Documents held in memory, numbered from 0."""

    def where(self, index: int) -> str:
        return f"{self.name}[{index}]"
