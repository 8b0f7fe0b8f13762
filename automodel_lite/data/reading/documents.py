"""What every dataset offers to the tokenizer: documents that know where they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from automodel_lite.data.reading.readers import RawRows, RowList
from automodel_lite.errors import DataError

# key of a document: columns of its row that nothing uses and that begin after the first rows
UNUSED = "unused"
# the place of an image in a text; Unicode keeps such code points free
IMAGE = "\ufdd2"
Message = dict[str, Any]
Document = dict[str, Any]
"""A normalized document; its keys say what it is:

- `messages` (list of `{"role", "content", ...}`), optional `tools`: a chat
- `prompt`, `completion` (text), optional `system`: one question and its answer
- `text`: plain text
- `input_ids` and `labels` (int32 arrays of equal length, next-token aligned, -100 = no loss):
  already tokenized; `labels` None: not said what is trained on
- `documents`: several of them in one row: answers to one prompt, or what was packed before
"""


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
        [*system, {"role": "user", "content": document["prompt"]}], document["completion"] or None
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


# of columns, and of roles
NAMES = yaml.safe_load((Path(__file__).parent / "names.yaml").read_text())
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
NOT_READ = "dataset=images reads images, and nothing reads other media"


def sound_text(value: str, where: str) -> str:
    """Returns the text, if it is one that can be written as UTF-8: JSON may hold half of a
    surrogate pair.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} contains an unpaired surrogate at character {error.start + 1}."
        ) from error
    return value


def shown(value: Any) -> str:
    """Returns a value of a wrong type, for a message."""
    return "missing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
