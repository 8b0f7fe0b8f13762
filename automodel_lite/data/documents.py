"""What every dataset offers to the tokeniser: normalised documents that know where they came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from automodel_lite.errors import DataError

Message = dict[str, Any]
Document = dict[str, Any]
"""A normalised document; its keys say what it is:

- `messages` (list of `{"role", "content", ...}`), optional `tools`: a chat
- `prompt`, `completion` (text), optional `system`: one question and its answer
- `text`: plain text
- `input_ids` and `labels` (int32 arrays of equal length, next-token aligned, -100 = no loss), `lengths` of the
  documents in them: already tokenised; `labels` None: not said what is trained on
"""


@dataclass(frozen=True)
class Question:
    """A held-out question and the exact answer that a trained model must generate."""

    messages: list[dict[str, str]]
    answer: str


class DocumentRows(Protocol):
    """Map-style normalised documents; reading a bad one raises `DataError` that names its place."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...

    def where(self, index: int) -> str:
        """Where document `index` came from, `train.jsonl:17`."""


class Documents(Protocol):
    """A dataset, before tokenising."""

    @property
    def train(self) -> DocumentRows: ...

    @property
    def val(self) -> Mapping[str, DocumentRows]: ...

    @property
    def kind(self) -> str:
        """messages | prompt_completion | text | tokens | mixture"""

    @property
    def questions(self) -> Sequence[Question]: ...

    @property
    def description(self) -> str:
        """One line for the start-up block."""

    @property
    def identity(self) -> str:
        """What the cache key says of the data; another identity is other data."""


@dataclass(frozen=True)
class DocumentList:
    """Documents held in memory."""

    documents: Sequence[Document]
    name: str

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Document:
        return self.documents[index]

    def where(self, index: int) -> str:
        return f"{self.name}[{index}]"


def document_texts(rows: DocumentRows, max_chars: int) -> Iterator[str]:
    """Yields the texts of the documents, for training a tokenizer, until `max_chars` characters were given.

    Bad rows are passed over here: they are reported, or counted, when the documents are tokenised.
    """
    num_chars = 0
    for index in range(len(rows)):
        try:
            document = rows[index]
        except DataError:
            continue
        for text in _texts(document):
            yield text
            num_chars += len(text)
        if num_chars >= max_chars:
            return


def _texts(document: Document) -> Iterator[str]:
    for message in document.get("messages", ()):
        if message.get("content"):
            yield message["content"]
    for key in ("system", "prompt", "completion", "text"):
        if document.get(key):
            yield document[key]
