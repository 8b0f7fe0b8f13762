"""The turns of a chat, from the shapes that they have in the wild."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from automodel_lite.data.reading.files import FilesDataset


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )
    return str(path)


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]


def test_tools_and_calls_become_objects(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": {"default": None}}}}
    row = {
        "messages": [
            CHAT[0],
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        ],
        "tools": json.dumps([tool]),
    }
    document = FilesDataset(jsonl(tmp_path / "a.jsonl", [row])).train[0]
    assert document["tools"] == [tool]
    assert document["messages"][1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        "reasoning_content": "hm",
    }
