"""Secrets are found by value: whatever the environment calls a key, token, secret or password is
never written.

By value, because a name says little: `tokenizer` is not a secret, and a resolved
`${oc.env:HF_TOKEN}` has no name. Only free text is searched, and before it becomes JSON: names of
tensors, files and settings are nobody's secret, and a checkpoint whose index was scrubbed does not
load.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TextIO
from urllib.parse import quote

_ANYWHERE = (
    "KEY|TOKEN|SECRET|PASSW|PWD|PASSPHRASE|CREDENTIAL|WEBHOOK|COOKIE|BEARER|AUTHORIZATION|"
    "CONNECTION_STRING"
)
_AS_WORD = "PASS|PAT|PATS|AUTH|JWT|DSN|SAS|OTP|HOOK|SIGNATURE"  # PAT, but not PATH
_NAMES = re.compile(rf"{_ANYWHERE}|(?<![A-Z])({_AS_WORD})(?![A-Z])", re.IGNORECASE)
_FOLDERS = ("PWD", "OLDPWD")  # the shell's: where it is and was
_IN_URL = re.compile(r"(\w+://)[^/\s:@]*:[^/\s@]+@")
_PASSWORD_IN_URL = re.compile(r"\w+://[^/\s:@]*:([^/\s@]+)@")
_SHORTEST = 6  # shorter values, such as `false`, are not secrets and would blot out ordinary words


def secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Value -> name of the variable; not of paths that exist (`SSL_KEY_FILE`), but of passwords in
    addresses.
    """
    found = {}
    for name, value in environment.items():
        if match := _PASSWORD_IN_URL.search(value):
            found[match[1]] = name
        is_named = _NAMES.search(name) and name not in _FOLDERS
        if is_named and not ("/" in value and os.path.exists(value)):
            found[value.strip()] = name
    return {value: name for value, name in found.items() if len(value) >= _SHORTEST}


@lru_cache(maxsize=4)
def _search(
    environment: tuple[tuple[str, str], ...],
) -> tuple[re.Pattern[str], dict[str, str]] | None:
    """Returns one pattern for all spellings of all secrets, the longest first, and spelling ->
    name.
    """
    names = {
        form: name
        for value, name in secrets(dict(environment)).items()
        for form in _spellings(value)
    }
    if not names:
        return None
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))), names


def _spellings(value: str) -> set[str]:
    """A value as itself, inside JSON (umlauts as they are or escaped), in a Python repr, in an
    address, on one line.
    """
    in_json = [json.dumps(value, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False)]
    in_json += [json.dumps(text)[1:-1] for text in in_json]  # JSON inside JSON
    return {
        value,
        *in_json,
        repr(value)[1:-1],
        quote(value),
        quote(value, safe=""),
        " ".join(value.split()),
    }


def scrub(text: str) -> str:
    """The text with every secret replaced by `<NAME>`, and `user:password@` in addresses by
    `<credentials>@`.
    """
    if found := _search(tuple(os.environ.items())):
        pattern, names = found
        text = pattern.sub(lambda match: f"<{names[match[0]]}>", text)
    return _IN_URL.sub(r"\1<credentials>@", text) if "://" in text else text


def scrub_tree(value: Any, kept: Collection[str] = ()) -> Any:
    """The same for the strings in nested dicts and lists. Keys are names, not text: they stay, and
    so do `kept`.
    """
    if isinstance(value, str):
        return value if value in kept else scrub(value)
    if isinstance(value, dict):
        return {key: scrub_tree(item, kept) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub_tree(item, kept) for item in value]
    return value


def secret_in(text: str) -> str | None:
    """The environment variable whose value stands in a text that must be kept as it is, such as a
    chat template. Values of letters or digits alone are words and numbers (`SORT_KEY=messages`), no
    secrets.
    """
    found = (
        name
        for value, name in secrets().items()
        if value in text and not value.isalpha() and not value.isdigit()
    )
    return next(found, None)


@contextmanager
def _lost_when_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise


class ScrubbedStream(io.TextIOBase):
    """A screen or log that never shows a secret, whoever writes to it: tracebacks and warnings of
    libraries too.

    A terminal that was closed, or a full disk below a log, takes nothing more; that ends no run.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _lost_when_full():
            self._stream.write(scrub(text))
        return len(text)

    def flush(self) -> None:
        with _lost_when_full():
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding
