"""metrics.jsonl: one object a line, written at once, so that a killed run keeps what it has logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from automodel_lite.redact import scrub


class JsonlLogger:
    """Appends rows to a file. NaN and infinities are written as text, so that every line is valid JSON."""

    def __init__(self, path: Path, is_silent: bool = False) -> None:
        self._file = None if is_silent else open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the run

    def log(self, row: dict[str, Any]) -> None:
        if self._file:
            self._file.write(scrub(json.dumps({key: _json_value(value) for key, value in row.items()})) + "\n")

    def close(self) -> None:
        if self._file:
            self._file.close()


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
