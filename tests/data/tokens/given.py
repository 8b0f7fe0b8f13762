"""Documents of tests, and the token rows that become of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel_lite.config.schema import TokenizeConfig
from automodel_lite.data.reading.documents import DocumentList
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.token_rows import TokenizedData
from automodel_lite.data.tokens.tokenize import tokenize_documents
from tests.data.templates import MARKED, Family, byte_tokenizer

HI, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
USER, ASSISTANT, END = 256, 257, 260  # ids of the special tokens of MARKED


@dataclass
class Given:
    """Documents of a test."""

    train: DocumentList
    kind: str = "messages"
    val: dict[str, DocumentList] = field(default_factory=dict)
    questions: list = field(default_factory=list)
    description: str = "given"

    @property
    def identity(self) -> str:
        return f"given({json.dumps(self.train.rows)})"


def chats(*documents: Any) -> Given:
    return Given(DocumentList([{"messages": messages} for messages in documents], "given"))


def tokenized(
    documents: Any, tmp_path: Path, family: Family = MARKED, **options: Any
) -> TokenizedData:
    return tokenize_documents(
        documents, TokenizeJob(byte_tokenizer(family), TokenizeConfig(**options)), tmp_path
    )


def token_file(path: Path, *rows: dict) -> FilesDataset:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FilesDataset(str(path))
