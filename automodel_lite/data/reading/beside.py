"""Columns beside those that a format reads: which of them would change what is trained, and what
the row is told.

    text, answer                 refused: half of a question and its answer
    instruction, output, text    trained on, if the text holds both: a copy of them
    text, url                    trained on; url is named as ignored
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from automodel_lite.data.document import MEDIA, NAMES, NOT_READ, Document
from automodel_lite.data.formats.known import Format, Renames

# a column of the answer that is not wanted
REJECTED = re.compile(r"reject|loser|worse|dispreferred", re.IGNORECASE)
VERDICTS = ("label", *NAMES["columns"]["label"])  # good or bad: what KTO trains on
VERDICT = (
    "says which answers are good and which are bad (KTO), and all rows would be trained on the "
    "same way: train with --config-name kto to learn from both, keep only the good rows, or set "
    "dataset.format={format} to train on all."
)
WEIGHTS = re.compile(r"(sample_|loss_|row_|example_)?weights?|importance", re.IGNORECASE)
MASKS = re.compile(
    r"(do_|is_)?(train|trained|trainable|learn|masked)|(loss|train)_mask|train_on\w*", re.IGNORECASE
)
EMPTY: tuple[Any, ...] = (None, [], {}, "")

_IGNORED = "would be ignored: "
_MEANT = "set dataset.format={format} to train without it."
_REJECTED_ANSWER = (
    f"is the answer that is not wanted, of a preference pair: keep one answer, or {_MEANT}"
)
_SECOND_ANSWER = (
    "may hold the answer that is meant: choose with dataset.columns.answer=solution or "
    "dataset.columns.answer=answer."
)
# of documents that are not token ids: columns, what a row with a value in one of them is told
_TRAPS = (
    (
        re.compile("|".join(MEDIA)),
        f"{_IGNORED}{NOT_READ}; {_MEANT}",
    ),
    (re.compile("|".join(VERDICTS)), VERDICT),
    (re.compile("history|chat_template_kwargs"), f"{_IGNORED}{_MEANT}"),
    (re.compile(f".*({REJECTED.pattern}).*", re.IGNORECASE | re.DOTALL), _REJECTED_ANSWER),
    (re.compile("solution"), _SECOND_ANSWER),
    (WEIGHTS, f"{_IGNORED}all rows weigh the same; leave rows of weight 0 out, or {_MEANT}"),
    (
        MASKS,
        "is another program's loss mask: set weight: 0 for turns that are not trained on, or "
        f"{_MEANT}",
    ),
)

# The names of each part of a document, as the formats and their other names have them, and those
# that are known only beside another column.
_OF_PART = {
    "prompt": ("prompt", "instruction", "question", "input", "context"),
    "answer": ("completion", "output", "answer", "responses"),
    "reasoning": ("reasoning_content",),
    "chat": ("messages", "conversations"),
    "text": ("text",),
    "speaker": (),
}
PARTS: dict[str, str] = {}  # name of a column -> part; of one name in two the first
for _part, _columns in _OF_PART.items():
    for _name in (*_columns, *NAMES["beside"].get(_part, ())):
        PARTS.setdefault(_name, _part)
        for _other in NAMES["columns"].get(_name, ()):
            PARTS.setdefault(_other, _part)
# `Complex_CoT`, `deepseek_thinking_trajectory`; not `reasoning_type`
_THOUGHTS = re.compile(
    r"(\w+_)?(reasoning|thinking|thoughts?|cot|chain_of_thoughts?|rationales?)"
    r"(_(content|text|traces?|chain|steps|process|trajector(y|ies)))?",
    re.IGNORECASE,
)
_CLASSES = frozenset(("label", "labels", "target", "targets"))  # whose numbers name a class
ANSWERS = frozenset(("completion", "output", "answer", "messages", "text"))  # that a user names
_PROMPTS = frozenset(("prompt", "instruction", "question", "messages", "text"))


def part_of(column: str) -> str | None:
    """Returns which part of a document a column is by its name, None for one of no meaning.

    >>> part_of("highlights"), part_of("Complex_CoT"), part_of("url")
    ('answer', 'reasoning', None)
    """
    part = PARTS.get(column.lower())
    return "reasoning" if part is None and _THOUGHTS.fullmatch(column) else part


@dataclass(frozen=True)
class Problem:
    """What a row with a value in a column is told; of a part of a document, unless it is a copy."""

    sentence: str
    part: str | None = None

    def applies(self, column: str, value: Any, document: Document) -> bool:
        """Returns whether the row of `document` loses anything by this column."""
        if self.part is None:
            # A weight or a mask of 1, and anything empty, changes nothing.
            is_one = value == 1 and (WEIGHTS.fullmatch(column) or MASKS.fullmatch(column))
            return not is_one and value not in EMPTY
        texts = [text.strip() for text in _texts(value, column)]
        return any(texts) and not _is_copy(self.part, "\n".join(filter(None, texts)), document)


def problems_beside(
    columns: Sequence[str], found: Format, renames: Renames, typed: Renames
) -> Iterator[tuple[str, Problem]]:
    """Yields the columns that would change what is trained, and what a row with a value in one of
    them is told.
    """
    meant = set()
    if not ANSWERS.isdisjoint(typed):
        meant |= {_REJECTED_ANSWER, _SECOND_ANSWER, "answer", "text", "chat"}
    if not _PROMPTS.isdisjoint(typed):
        meant.add("prompt")
    if "answer" not in found.columns:
        meant.add(_SECOND_ANSWER)
    if found.kind not in ("messages", "prompt_completion"):
        meant.add(VERDICT)
    if found.kind != "text":
        meant.add("speaker")
    if found.kind == "messages":  # a chat is whole; a text beside it is another form of it
        meant.add("text")
    for name in columns:
        if name in renames.values() or name in found.columns or name in found.optional:
            continue
        if found.kind == "tokens":
            if "mask" in name.lower():
                cure = f"call it loss_mask if its zeros are not trained on, or {_MEANT}"
                yield name, Problem(f"{_IGNORED}{cure}".format(format=found.name))
            continue
        traps = (told for pattern, told in _TRAPS if told not in meant and pattern.fullmatch(name))
        part = part_of(name)
        if told := next(traps, None):
            yield name, Problem(told.format(format=found.name))
        elif found.kind in _TOLD and part and part not in meant:
            sentence = _TOLD[found.kind](part, name, columns, found, renames)
            alone = "on each message alone" if part == "speaker" else "without it"
            cure = f"or set dataset.format={found.name} to train {alone}."
            yield name, Problem(f"{sentence}, {cure}", part)


def _beside_text(
    part: str, name: str, columns: Sequence[str], found: Format, renames: Renames
) -> str:
    """Returns what a part of another format beside a text is told, without its last cure."""
    text = renames.get("text", "text")
    prompts = [other for other in columns if part_of(other) == "prompt" and other != text]
    answers = [other for other in columns if part_of(other) == "answer" and other != text]
    if part == "speaker":
        return ONE_MESSAGE
    if part == "chat":
        return f"{_IGNORED}name the chats, dataset.columns.messages={name}"
    if part == "reasoning":
        return f"{_IGNORED}write the thoughts into {text}"
    # A prompt and an answer beside a text: what the instruction is about.
    if prompts and answers:
        cure = f"instruction={prompts[0]} dataset.columns.input={text}"
        cure += f" dataset.columns.output={answers[0]}"
    elif part == "answer":
        cure = f"prompt={text} dataset.columns.completion={name}"
        if name in ("label", "labels"):
            more = "" if name == "label" else f" dataset.columns.label={name}"
            cure += f", learn it as a class, --config-name classify{more}"
    else:
        cure = f"prompt={name} dataset.columns.completion={text}"
    return f"stands beside {text} and {_IGNORED}name both, dataset.columns.{cure}"


ONE_MESSAGE = (
    "tells who speaks, so that each row is one message: put the turns of a chat into one row, "
    '{"messages": [{"role": "user", "content": "..."}, ...]}'
)


def _beside_answer(
    part: str, name: str, columns: Sequence[str], found: Format, renames: Renames
) -> str:
    """As `_beside_text`, beside a prompt and its answer."""
    used = [renames.get(column, column) for column in found.columns]
    answer = found.columns[-1]
    if part == "answer" and answer == "responses":
        return f"{_IGNORED}add it to {used[-1]}"
    if part == "answer":
        return (
            f"may be the answer that is meant: choose, dataset.columns.{answer}={name} or "
            f"dataset.columns.{answer}={used[-1]}"
        )
    if part == "chat":
        return f"{_IGNORED}name the chats, dataset.columns.messages={name}"
    if part == "reasoning":
        if "reasoning_content" in found.optional and "reasoning_content" not in renames:
            return f"{_IGNORED}name the thoughts, dataset.columns.reasoning_content={name}"
        return f"{_IGNORED}write the thoughts into {used[-1]}"
    slot = next((one for one in ("input", "context") if one in found.optional), None)
    if slot in renames or slot in columns or answer == "responses":
        return f"{_IGNORED}write it into {used[0]}"
    if slot:
        return f"{_IGNORED}put it beside {used[0]}, dataset.columns.{slot}={name}"
    return (
        f"{_IGNORED}put it before {used[0]}, dataset.columns.context={name} "
        f"dataset.columns.question={used[0]} dataset.columns.answer={used[-1]}"
    )


def _beside_chat(
    part: str, name: str, columns: Sequence[str], found: Format, renames: Renames
) -> str:
    """As `_beside_text`, beside a chat."""
    chat = renames.get(found.columns[0], found.columns[0])
    if part == "answer":
        return (
            f"stands beside {chat}, which do not end with an answer, and {_IGNORED}name it as the "
            f"last turn, dataset.columns.response={name}"
        )
    if part == "chat":
        return f"{_IGNORED}choose, dataset.columns.messages={name}"
    if part == "reasoning" and "reasoning_content" not in renames:
        return f"{_IGNORED}name the thoughts, dataset.columns.reasoning_content={name}"
    return f"{_IGNORED}{chat} do not hold it: write it into their turns"


_TOLD = {"text": _beside_text, "prompt_completion": _beside_answer, "messages": _beside_chat}


def _texts(value: Any, column: str) -> Iterator[str]:
    """Yields the texts in a value; a number is one too, unless it names a class."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item, column)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, column)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        is_class = column.lower() in _CLASSES
        yield from [str(value)] if part_of(column) == "answer" and not is_class else ()


_LONG = 20  # characters that no text holds by chance


def _is_copy(part: str, text: str, document: Document) -> bool:
    """Returns whether the document trains on what is in a column anyway, or in a chat that has its
    answer: `prompt` beside `messages` that begin with it, the `text` that a template made of an
    instruction and its output.
    """
    if part == "speaker":
        return False
    if "documents" in document:  # several answers to one prompt
        return any(_is_copy(part, text, one) for one in document["documents"])
    questions, answers = _said(document)
    if part == "answer":
        # A last answer is what is trained on, whatever else is known of the question.
        has_answer = document.get("messages", [{"role": None}])[-1]["role"] in (
            "assistant",
            "model",
        )
        return has_answer or any(text in said for said in answers) or _is_in(text, document)
    if part == "reasoning":
        return any(text in said for said in answers)
    if part == "prompt":
        is_held = any(text == said or _is_at_edge(text, said) for said in questions)
        return is_held or _is_in(text, document) or _holds(text, questions)
    return _holds(text, [*questions, *answers]) or _is_in(text, document)


def _said(document: Document) -> tuple[list[str], list[str]]:
    """Returns the texts that are asked, and the answers; none of plain text."""
    turns = document.get("messages", ())
    questions = [document.get("system", ""), document.get("prompt", "")]
    answers = [document.get("completion", "")]
    for turn in turns:
        texts = answers if turn["role"] in ("assistant", "model") else questions
        texts.append(turn["content"])
        texts.append(turn.get("reasoning_content", ""))
    return [*filter(None, map(str.strip, questions))], [*filter(None, map(str.strip, answers))]


def _holds(text: str, said: Sequence[str]) -> bool:
    """Returns whether a text has all of what is said in it, as a template writes it: an instruction
    and its input, which a blank line separates here, may stand under headings there.
    """
    return bool(said) and all(part in text for one in said for part in one.split("\n\n"))


def _is_at_edge(text: str, said: str) -> bool:
    return said.startswith(text) or said.endswith(text)


def _is_in(text: str, document: Document) -> bool:
    """Returns whether a document of plain text, or one of its turns, holds a text."""
    whole = document.get("text", "").strip()
    if whole and _is_at_edge(text, whole):
        return True
    said = [whole, *_said(document)[0]]
    return len(text) >= _LONG and any(text in one for one in said)
