"""The shapes in which people keep their data: a row of each of them as a document."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from automodel_lite.config.components import locate
from automodel_lite.data.reading.documents import Document, shown
from automodel_lite.data.reading.readers import RawRow
from automodel_lite.errors import DataError

Renames = Mapping[str, str]  # canonical name -> column of the file


@dataclass(frozen=True)
class Format:
    """One shape: the columns that tell it, how a row of it becomes a document, and what more it may
    have.

    reader  a dotted path, or the function itself
    """

    name: str
    kind: str
    columns: tuple[str, ...]
    reader: str | Callable[[RawRow], Document]
    optional: tuple[str, ...] = ()

    @cached_property
    def normalize(self) -> Callable[[RawRow], Document]:
        """Returns the function that makes a document of a row."""
        return locate(self.reader) if isinstance(self.reader, str) else self.reader


_LISTED = yaml.safe_load(Path(__file__).with_name("formats.yaml").read_text(encoding="utf-8"))
# column of any format: rows of one name may share their beginning (data/tokens/trees.py)
GROUP = "group"
FORMATS = tuple(
    Format(name, row["kind"], tuple(row["columns"]), row["reader"], tuple(row.get("optional", ())))
    for name, row in _LISTED.items()
)


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
