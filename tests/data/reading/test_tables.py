"""Tables of Arrow and Parquet: nulls, and files that change while they are read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest

from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.errors import DataError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]


# ---------------------------------------------------------------------------------------------------------- files
ROWS = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(5)]


DOCUMENTS = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(5)]


def documents(path: str, **options: Any) -> list[dict]:
    rows = FilesDataset(path, **options).train
    return [rows[i] for i in range(len(rows))]


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def test_a_file_that_is_cut_short_while_it_is_read(tmp_path: Path) -> None:
    """A mapped file would end the process by SIGBUS."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES * 1000)
    rows = FilesDataset(str(path)).train
    assert rows[4999] == DOCUMENTS[4]
    os.truncate(path, len(LINES))
    assert rows[4] == DOCUMENTS[4]
    with pytest.raises(
        DataError,
        match=r"a.jsonl:6: the file was truncated while it was being read: it had 175,000 bytes",
    ):
        rows[5]
    with pytest.raises(DataError, match=r"a.jsonl:5000: the file was truncated"):
        rows[4999]


def test_nulls_that_arrow_fills_in_are_taken_out(tmp_path: Path) -> None:
    tools = [{"name": "f", "x": 1}, {"name": "g", "y": 2}]
    rows = [{"messages": CHAT, "tools": [tool]} for tool in tools]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert [document["tools"] for document in documents(str(tmp_path / "a.parquet"))] == [
        [tool] for tool in tools
    ]
