"""Compressed files, unpacked once."""

from __future__ import annotations

import lzma
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
    damages = (OSError, EOFError, ValueError, lzma.LZMAError)
    with (
        explained(f"{name}: cannot be decompressed", *damages, kind=DataError),
        pyarrow.CompressedInputStream(str(path), codec) if codec else lzma.open(path) as packed,
        (folder / "data").open("wb") as plain,
    ):
        while block := packed.read(2**20):
            plain.write(block)
            if plain.tell() > most:
                raise DataError(
                    f"{name}: unpacks to over {most:,} bytes, {MAX_RATIO} times its size: "
                    "unpack it yourself, and name the file."
                )
