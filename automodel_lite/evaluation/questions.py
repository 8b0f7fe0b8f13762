"""What documents with images ask: the images are parts of their turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from automodel_lite.data.document import IMAGE
from automodel_lite.data.feeding.planned import document_kind
from automodel_lite.data.reading.documents import Documents, Question, question_of
from automodel_lite.errors import DataError, is_limit

IMAGES = "images"
"""The key of a document: its images, in the order of the marks in its text."""
PROBE = "PROBE"
_KEY_OF_A_PART = re.compile(r"""['"]type['"]""")


@runtime_checkable
class OwnQuestions(Protocol):
    """An evaluation that brings its questions, and refuses what it does not know before anything is
    trained.
    """

    def check_tasks(self) -> None: ...


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


Render = Callable[[list[dict[str, Any]]], str]
"""Chat -> its text, by a chat template."""


def probe_turn(render: Render, role: str, content: str | list[dict[str, Any]]) -> str:
    """Returns what a chat template writes of a chat with a turn of this role, whose content is
    `PROBE`, as a text or in parts; nothing where the turn's text is not in it as it is.

    Of a text, some templates write nothing (LLaVA's); of parts, some write the list as Python does
    (GLM-4.1V's, of an assistant's turn).
    """
    turn = {"role": role, "content": content}
    asked = {"role": "user", "content": "Hi" if isinstance(content, str) else parts_of("Hi")}
    chat = [asked, turn]
    if role == "user":
        chat = [turn]
    elif role in ("system", "developer"):
        chat = [turn, asked]
    elif role == "tool":
        chat = [asked, {"role": "assistant", "content": "a"}, turn]
    try:
        text = render(chat)
    except Exception as error:  # whatever a template does wrong
        if is_limit(error):
            raise
        return ""
    return text if PROBE in text and not _KEY_OF_A_PART.search(text) else ""


def as_template_takes(render: Render, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a chat of texts with parts in the turns of whose texts the template writes none."""
    roles = {turn["role"] for turn in chat}
    by_parts = {
        role
        for role in roles
        if not probe_turn(render, role, PROBE) and probe_turn(render, role, parts_of(PROBE))
    }
    return [
        {**turn, "content": parts_of(turn["content"])} if turn["role"] in by_parts else turn
        for turn in chat
    ]


def has_questions(documents: Documents) -> bool:
    """Returns whether there is anything to ask that is not trained on; text and token ids are not
    read for it.
    """
    if document_kind(documents) in ("text", "tokens", "rows") or not documents.val:
        return bool(documents.questions)
    return next(questions_of(documents), None) is not None


def questions_of(documents: Documents) -> Iterator[Question]:
    """Yields the dataset's own; where it has none, what its validation documents ask; without any,
    its documents, of a file that is evaluated.
    """
    if documents.questions:
        yield from documents.questions
        return
    for rows in documents.val.values() or [documents.train]:
        for index in range(len(rows)):
            try:
                document = rows[index]
                question = question_of(document)
            except DataError:  # counted where the documents were tokenized
                continue
            if question and question.answer is not None:
                images = document.get("images")
                yield with_images(question, images) if images else question
