"""What a row of a file and a document are, and the words that both are read with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from automodel_lite.errors import DataError

RawRow = dict[str, Any]
"""A row as its file has it: column -> value."""
Message = dict[str, Any]
Document = dict[str, Any]
"""A normalized document; its keys say what it is:

- `messages` (list of `{"role", "content", ...}`), optional `tools`: a chat
- `prompt`, `completion` (text), optional `system`: one question and its answer; `raw`: written as
  they are, whatever chat template the tokenizer has
- `text`: plain text
- `input_ids` and `labels` (int32 arrays of equal length, next-token aligned, -100 = no loss):
  already tokenized; `labels` None: not said what is trained on
- `documents`: several of them in one row: answers to one prompt, or what was packed before
- `chosen`, `rejected` (documents): a preference pair, with or without a `margin`
  of their scores
- `decision` (formats/decisions.py): a question about a state, answered by one of its choices; its
  row may have an `id`
- `label` of any of the first three: the number of its class or set of classes (int), or a number
  (float), with a `weight`
- `verdict` (bool) of its last answer, beside `mismatched`, the document of its prompt and another
  row's answer; of a chat `num_judged`, the turns of the answer
"""

# key of a document: columns of its row that nothing uses and that begin after the first rows
UNUSED = "unused"
# the place of an image in a text; Unicode keeps such code points free
IMAGE = "\ufdd2"

# of columns, and of roles
NAMES = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text())
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
NOT_READ = "dataset=images reads images, and nothing reads other media"


def is_compared(document: Document) -> bool:
    """Returns whether a document is one of two token rows that an objective compares."""
    return "chosen" in document or "verdict" in document


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
