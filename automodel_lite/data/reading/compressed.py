"""Compressed files, unpacked once."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow

from automodel_lite.errors import DataError, explained

PLAUSIBLE_BYTES = 2**30  # of any file, however small it was packed
MAX_RATIO = 200  # else of a file's size to its compressed one


def max_plain_bytes(packed_bytes: int) -> int:
    """Returns how large a compressed file may become: text is seldom a hundredth of its size."""
    return max(PLAUSIBLE_BYTES, MAX_RATIO * packed_bytes)


def decompress(path: Path, name: str, folder: Path) -> None:
    """Writes the plain content of a file as `data` of the folder."""
    # the others are lzma's
    codec = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}.get(path.suffix.lower())
    most = max_plain_bytes(path.stat().st_size)
    # what fails in writing is the cache's, and no damage of the file
    with (folder / "data").open("wb") as plain:
        for block in _blocks(path, name, codec):
            plain.write(block)
            if plain.tell() > most:
                raise DataError(
                    f"{name}: unpacks to over {most:,} bytes, {MAX_RATIO} times its size: "
                    "unpack it yourself, and name the file."
                )


def _blocks(path: Path, name: str, codec: str | None) -> Iterator[bytes]:
    """Yields the plain content of a file; raises DataError for a damaged one."""
    damages = (OSError, EOFError, ValueError, lzma.LZMAError)
    with ExitStack() as opened:
        with explained(f"{name}: cannot be decompressed", *damages, kind=DataError):
            if codec:
                packed = opened.enter_context(pyarrow.CompressedInputStream(str(path), codec))
            else:
                packed = opened.enter_context(lzma.open(path))
        while True:
            with explained(f"{name}: cannot be decompressed", *damages, kind=DataError):
                block = packed.read(2**20)
            if not block:
                return
            yield block
