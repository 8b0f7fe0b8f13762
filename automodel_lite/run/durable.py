"""Files that are complete or absent, also after a power cut: every write is fsynced, folders are
renamed into place.

Everything that must survive a kill goes through these functions, so that a test can fail or kill
each of them in turn.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from automodel_lite.errors import explained

_CHUNK_BYTES = 1 << 22
Digests = dict[str, str]
"""`crc32`, 8 hex digits, finds flipped bits; `sha256`, 64, forgeries."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an error of the system the file that it is about: of a write or an fsync it names
    none.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_file(path: Path, text: str) -> None:
    """Writes and fsyncs a new file, as it is: whoever has free text in it has scrubbed that."""
    with naming(path), open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """Returns what a file of JSON holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_atomically(path: Path, text: str) -> None:
    """The file has the old content or the new, never a part: temporary file, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_file(temporary, text)
        os.replace(temporary, path)
    except BaseException as error:  # a full memory or a signal leaves as little as a full disk
        if isinstance(error, OSError):
            error.filename = str(path)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


_NO_PLACE = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError)


def write_named(path: Path, text: str) -> None:
    """Writes a text file and its folders; raises ConfigError where there can be none.

    A disk that is full or may not be written has sentences of its own (run/limits.yaml).
    """
    no_place = explained(f"{path} cannot be written", *_NO_PLACE, cure="choose another place")
    with no_place, naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)


def sync(path: Path) -> None:
    """fsync of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Renames within one folder, and makes the rename durable."""
    os.rename(old, new)
    sync(new.parent)


def json_line(row: Mapping[str, Any]) -> str:
    """Returns one line; NaN and infinities as text, so that it is valid JSON."""
    safe = {
        k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
    }
    return json.dumps(safe) + "\n"


def checksum(path: Path) -> str:
    """Returns the CRC-32 of a file, 8 hex digits: finds flipped bits, not forgeries."""
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Digest:
    """Both digests of content that comes in pieces."""

    def __init__(self) -> None:
        self._crc32 = 0
        self._sha256 = hashlib.sha256()

    def add(self, content: bytes | memoryview) -> None:
        self._crc32 = zlib.crc32(content, self._crc32)
        self._sha256.update(content)

    @property
    def result(self) -> Digests:
        return {"crc32": f"{self._crc32:08x}", "sha256": self._sha256.hexdigest()}


def digests(path: Path) -> Digests:
    """Returns both digests of a file."""
    digest = Digest()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.add(chunk)
    return digest.result


def free_bytes(folder: Path) -> int:
    """Returns the disk space that this user may still fill."""
    return shutil.disk_usage(folder).free
