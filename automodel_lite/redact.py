"""Secrets are found by value: whatever the environment calls a key, token, secret or password is never written.

By value, because a name says little: `tokenizer` is no secret, and a resolved `${oc.env:HF_TOKEN}` has no name at all.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from typing import Any, TextIO

_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_IN_URL = re.compile(r"(\w+://)[^/\s:@]+:[^/\s@]+@")
_SHORTEST = 6  # shorter values, such as `false`, are no secrets and would blot out ordinary words


def secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Value -> name of the environment variable; paths that exist are no secrets (`SSL_KEY_FILE`)."""
    return {
        value: name
        for name, value in environment.items()
        if _NAMES.search(name) and len(value) >= _SHORTEST and not os.path.exists(value)
    }


def scrub(text: str) -> str:
    """The text with every secret replaced by `<NAME>`, and `user:password@` in addresses by `<credentials>@`."""
    found = secrets()
    for value in sorted(found, key=len, reverse=True):
        text = text.replace(value, f"<{found[value]}>")
    return _IN_URL.sub(r"\1<credentials>@", text) if "://" in text else text


def scrub_tree(value: Any) -> Any:
    """The same for the strings of nested dicts and lists, keys included."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {scrub_tree(key): scrub_tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub_tree(item) for item in value]
    return value


class ScrubbedStream(io.TextIOBase):
    """A screen or log that never shows a secret, whoever writes to it: tracebacks and warnings of libraries too."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(scrub(text))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding
