"""What a file is by its first bytes, where its name says that it holds lines of text."""

from __future__ import annotations

from pathlib import Path

from automodel_lite.errors import DataError

_SHEET = "save the table as .csv in its program"
_PICTURE = (
    'name it in a row of a .jsonl file, {"prompt": ..., "completion": ..., "images": [...]}, with '
    "dataset=images"
)
_SIGNATURES: list[tuple[bytes, str, str]] = [
    (
        b"PK\x03\x04",
        "a zip archive, as Excel's .xlsx and LibreOffice's .ods are",
        f"{_SHEET}, or unpack the archive",
    ),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a document of Office before 2007", _SHEET),
    (b"PAR1", "a Parquet file", "let its name end in .parquet"),
    (b"ARROW1", "an Arrow file", "let its name end in .arrow"),
    (b"%PDF-", "a PDF document", "write its text into a .txt file, as pdftotext does"),
    (b"SQLite format 3\x00", "a SQLite database", "export a table of it as .csv"),
    (b"\x89PNG\r\n", "a picture", _PICTURE),
    (b"\xff\xd8\xff", "a picture", _PICTURE),
    (b"\x1f\x8b", "compressed by gzip", "let its name end in .gz"),
    (b"BZh91AY&SY", "compressed by bzip2", "let its name end in .bz2"),
    (b"\xfd7zXZ\x00", "compressed by xz", "let its name end in .xz"),
    (b"\x28\xb5\x2f\xfd", "compressed by Zstandard", "let its name end in .zst"),
]
"""First bytes, what the file is, what to do."""


def check_signature(path: Path, name: str) -> None:
    """Raises DataError where the file is of a kind that is no text, whatever its name is.

    A table of Excel that is named .csv decodes as text up to a point, so that a reader of lines
    would name a byte or a column in the middle of it.
    """
    with path.open("rb") as file:
        first = file.read(16)
    for signature, what, cure in _SIGNATURES:
        if first.startswith(signature):
            raise DataError(f"{name}: it is {what}", cure=cure)
