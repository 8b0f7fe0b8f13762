"""What held-out documents ask, with their images."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from automodel_lite.data.reading.documents import IMAGE, DocumentSet, Question, question_of
from automodel_lite.errors import DataError

IMAGES = "images"
"""The key of a document: its images, in the order of the marks in its text."""


@dataclass(frozen=True)
class HeldOutQuestions(Sequence[Question]):
    """What the documents of some sets ask; those that cannot be read are left out."""

    sets: Sequence[DocumentSet]

    def __len__(self) -> int:
        return sum(map(len, self.sets))

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[Question]:
        for documents in self.sets:
            for index in range(len(documents)):
                with suppress(DataError):  # counted where the documents were tokenized
                    document = documents[index]
                    question = question_of(document)
                    if question is not None and question.answer is not None:
                        yield with_images(question, document.get(IMAGES, ()))


def with_images(question: Question, images: Sequence[Any]) -> Question:
    """Returns a question with its images, which are marks in its text, as parts of its turns."""
    rest = iter(images)
    turns = []
    for turn in question.messages:
        if IMAGE in turn["content"]:
            parts: list[dict[str, Any]] = []
            for part in parts_of(turn["content"]):
                parts.append({**part, "image": next(rest)} if part["type"] == "image" else part)
            turn = {**turn, "content": parts}
        turns.append(turn)
    return replace(question, messages=turns)


def parts_of(content: str) -> list[dict[str, Any]]:
    """`"IMAGE What?"` as templates take it: an image, and a text."""
    parts = []
    for piece in re.split(f"({IMAGE})", content):
        if piece == IMAGE:
            parts.append({"type": "image"})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts or [{"type": "text", "text": ""}]
