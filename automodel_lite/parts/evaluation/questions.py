"""What documents with images ask: the images are parts of their turns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from automodel_lite.data.reading.documents import IMAGE, Question

IMAGES = "images"
"""The key of a document: its images, in the order of the marks in its text."""


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
