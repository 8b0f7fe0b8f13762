"""The shapes in which people keep their data: a row of each of them as a document."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from automodel_lite.data.document import Document, RawRow, shown
from automodel_lite.data.formats import decisions, texts, tokens
from automodel_lite.data.formats.labeled import READERS, labeled
from automodel_lite.data.formats.preference import preference
from automodel_lite.data.formats.verdict import verdict
from automodel_lite.errors import DataError

Renames = Mapping[str, str]  # canonical name -> column of the file
# column of any format: rows of one name may share their beginning (data/tokens/trees.py)
GROUP = "group"
# column of pairs: by how much a reward model should prefer the chosen answer
MARGIN = "margin"


@dataclass(frozen=True)
class Format:
    """One shape of rows.

    kind       messages | prompt_completion | text | preference | decisions | tokens |
               labeled | own
    columns    those that tell it
    normalize  makes a document of a row
    optional   columns that a row may have besides
    is_found   by the columns of a set; False: only where dataset.format names it
    """

    name: str
    kind: str
    columns: tuple[str, ...]
    normalize: Callable[[RawRow], Document]
    optional: tuple[str, ...] = ()
    is_found: bool = True


_TOOLS = ("tools", "functions")
_SYSTEM = ("system", "system_prompt")
_THOUGHTS = "reasoning_content"
_OF_CHATS = (*_TOOLS, *_SYSTEM, "response", _THOUGHTS)
_JUDGED = (
    "prompt",
    "completion",
    "messages",
    "conversations",
    "instruction",
    "output",
    "input",
    "history",
)
FORMATS = (
    Format(
        "packed",
        "tokens",
        ("input_ids", "labels", "seq_lens"),
        tokens.packed_tokens,
        ("seq_lens_padded", "loss_weights"),
    ),
    Format(
        "tokens",
        "tokens",
        ("input_ids",),
        tokens.tokens,
        ("labels", "loss_mask", "attention_mask", "loss_weights"),
    ),
    Format(
        "decisions",
        "decisions",
        ("state", "questions"),
        decisions.record,
        ("id", "answers", "soft_labels", "weights", "system"),
    ),
    Format(
        "decision",
        "decisions",
        ("state", "question"),
        decisions.single,
        ("id", *decisions.COLUMNS_OF_ONE, "system"),
    ),
    Format("messages", "messages", ("messages",), texts.messages, _OF_CHATS),
    Format("sharegpt", "messages", ("conversations",), texts.conversations, _OF_CHATS),
    Format(
        "alpaca",
        "prompt_completion",
        ("instruction", "output"),
        texts.alpaca,
        ("input", "history", *_SYSTEM, _THOUGHTS),
    ),
    Format(
        "alpaca_prompt",
        "prompt_completion",
        ("instruction", "output"),
        texts.alpaca_prompt,
        ("input",),
        is_found=False,
    ),
    Format(
        "alpaca_turn",
        "prompt_completion",
        ("instruction", "output"),
        texts.alpaca_turn,
        ("input",),
        is_found=False,
    ),
    Format(
        "squad",
        "prompt_completion",
        ("context", "question", "answers"),
        texts.squad,
        is_found=False,
    ),
    Format(
        "prompt_completion",
        "prompt_completion",
        ("prompt", "completion"),
        texts.prompt_completion,
        ("history", *_TOOLS, *_SYSTEM, _THOUGHTS),
    ),
    Format(
        "responses",
        "prompt_completion",
        ("prompt", "responses"),
        texts.responses,
        ("history", *_TOOLS, *_SYSTEM),
    ),
    Format(
        "question_answer",
        "prompt_completion",
        ("question", "answer"),
        texts.question_answer,
        ("context", *_SYSTEM, _THOUGHTS),
    ),
    Format("text", "text", ("text",), texts.text),
    Format(
        "preference",
        "preference",
        ("chosen", "rejected"),
        preference,
        ("prompt", "instruction", "input", "question", "conversations", *_TOOLS, *_SYSTEM, MARGIN),
    ),
    *(
        Format(
            "verdict",
            "preference",
            (*columns, "label"),
            verdict,
            (*(name for name in _JUDGED if name not in columns), *_TOOLS, *_SYSTEM, _THOUGHTS),
            is_found=False,
        )
        for columns in (
            ("messages",),
            ("conversations",),
            ("prompt", "completion"),
            ("instruction", "output"),
        )
    ),
    *(
        Format(
            "labeled",
            "labeled",
            (*columns, "label"),
            labeled(columns),
            ("weight", "input", "history", *_TOOLS, *_SYSTEM),
            is_found=False,
        )
        for columns in READERS
    ),
)
"""In the order in which they are looked for."""


def own_format(name: str, function: Callable[[RawRow], Any]) -> Format:
    """Returns the format of a function of the user's: it makes of a raw row a list of messages, or
    an object with `messages`, with `prompt` and `completion`, or with `text`, as a row of that
    format has them.
    """

    kinds = ("messages", "prompt_completion", "text")

    def normalize(row: RawRow) -> Document:
        made = function(row)
        made = {"messages": made} if isinstance(made, list) else made
        keys = made.keys() if isinstance(made, dict) else ()
        found = next(
            (known for known in FORMATS if known.kind in kinds and {*known.columns} <= {*keys}),
            None,
        )
        if found is None:
            raise DataError(
                f"dataset.format={name} must return a list of messages, or an object with "
                f"messages, with prompt and completion, or with text, not {shown(made)}."
            )
        return found.normalize(made)

    return Format(name, "own", (), normalize)
