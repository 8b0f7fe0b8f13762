"""Files that are complete or absent, also after a power cut: every write is fsynced, folders are renamed into place.

Everything that must survive a kill goes through these functions, so that a test can fail or kill each of them in turn.
"""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path

_CHUNK_BYTES = 1 << 22


def write_file(path: Path, text: str) -> None:
    """Writes and fsyncs a new file, as it is: whoever has free text in it has scrubbed that."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str) -> None:
    """The file has the old content or the new, never a part: temporary file, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_file(temporary, text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """fsync of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Renames within one folder, and makes the rename durable."""
    os.rename(old, new)
    sync(new.parent)


def remove_folder(folder: Path, trash: Path) -> None:
    """Renames the folder to `trash` before its files go: what is found under its own name is always whole."""
    rename(folder, trash)
    shutil.rmtree(trash, ignore_errors=True)


def checksum(path: Path) -> str:
    """CRC-32 of a file, 8 hex digits: finds flipped bits, not forgeries."""
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def free_bytes(folder: Path) -> int:
    """Disk space that this user may still fill."""
    return shutil.disk_usage(folder).free
