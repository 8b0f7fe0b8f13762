"""Samples of WebDataset's archives as rows of JSON lines, whose images are stretches of the file.

    0001.jpg 0001.json 0002.jpg 0002.json    files of one name, without what follows its first dot
    {"messages": [...], "__stretches__": [["0001.jpg", 1024, 5123]]}

An archive is read once, header by header; its images stay where they are. The column of stretches
is read of our own index alone: in a row of anyone else it is a column like others.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from automodel_lite.data.document import RawRow
from automodel_lite.data.strict_json import read_json
from automodel_lite.errors import DataError, explained
from automodel_lite.parts.images.sources import ImageSource

KEY = "__key__"
"""The column of a sample that `datasets` has read."""
STRETCHES = "__stretches__"
"""The column of an index: name, offset and bytes of each image in the archive."""
PICTURES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "image")
TEXTS = ("txt", "text", "caption")
_OTHERS = {"mp4": "video", "webm": "video", "avi": "video", "mkv": "video"}
_OTHERS |= {"wav": "audio", "mp3": "audio", "flac": "audio", "ogg": "audio"}
MOST_TEXT_BYTES = 2**24


def row_of_sample(parts: Iterable[tuple[str, Any]]) -> RawRow:
    """Makes a row of the files of a sample: (ending, content) of each.

    >>> row_of_sample([("jpg", "a.jpg"), ("json", {"question": "q", "answer": "a"})])
    {'question': 'q', 'answer': 'a', 'images': ['a.jpg']}
    """
    row: RawRow = {}
    images = []
    for ending, content in parts:
        kind = ending.lower().rpartition(".")[2]
        if kind in PICTURES:
            images.append(content)
        elif kind == "json":
            own = content
            if isinstance(content, (str, bytes)):
                own = read_json(content if isinstance(content, str) else content.decode())
            row |= own if isinstance(own, dict) else {"messages": own}
        elif kind in TEXTS:
            row["text"] = content.decode() if isinstance(content, bytes) else content
        else:
            row[_OTHERS.get(kind, kind)] = ending
    return {**row, "images": images} if images else row


def rows_of_hub_sample(row: Mapping[str, Any]) -> RawRow:
    """Makes a row of a sample that `datasets` has read, whose columns are endings."""
    return row_of_sample((name, x) for name, x in row.items() if not name.startswith("__"))


def index_archive(path: Path, folder: Path) -> None:
    """Writes a line for each sample of an archive to a folder; raises DataError for one that cannot
    be read.
    """
    with (
        explained(
            f"{path.name} cannot be read as an archive of samples",
            *(OSError, ValueError, tarfile.TarError),
            kind=DataError,
            cure="it must be a .tar, not compressed, of images, .json and .txt files",
        ),
        tarfile.open(path, "r:") as archive,
        (folder / index_name(path)).open("w", encoding="utf-8") as lines,
    ):
        for _, members in groupby(_files(archive), lambda member: _split(member.name)[0]):
            row = row_of_sample(_content(archive, member) for member in members)
            own = [one for one in row.get("images", ()) if isinstance(one, _Stretch)]
            if own:
                del row["images"]
            # behind what a .json has under this name
            row[STRETCHES] = [(one.name, one.offset, one.num_bytes) for one in own]
            lines.write(json.dumps(row) + "\n")


def row_of_index(row: RawRow, archive: Path) -> RawRow:
    """Returns a row of an archive's index with its images.

    >>> row_of_index({"text": "t", STRETCHES: [["1.png", 512, 70]]}, Path("a.tar"))["images"]
    [ImageSource(name='1.png', path='a.tar', folder=None, span=(512, 70), known=b'')]
    """
    images = []
    for name, offset, num_bytes in row[STRETCHES]:
        images.append(ImageSource(name, str(archive), span=(offset, num_bytes)))
    own = {name: value for name, value in row.items() if name != STRETCHES}
    return {**own, "images": images} if images else own


def index_name(archive: Path) -> str:
    return f"{archive.name}.jsonl"


def _files(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in archive:
        # which would be as many as there are files
        archive.members = []  # type: ignore[attr-defined]
        if member.isfile():
            yield member


def _split(name: str) -> tuple[str, str]:
    """`a/0001.seg.png` -> (`a/0001`, `seg.png`)."""
    folder, slash, own = name.rpartition("/")
    key, _, ending = own.partition(".")
    return f"{folder}{slash}{key}", ending


@dataclass(frozen=True)
class _Stretch:
    """An image in an archive."""

    name: str
    offset: int
    num_bytes: int


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> tuple[str, Any]:
    ending = _split(member.name)[1]
    kind = ending.lower().rpartition(".")[2]
    if kind in PICTURES:
        return ending, _Stretch(member.name, member.offset_data, member.size)
    if kind != "json" and kind not in TEXTS:
        return ending, member.name
    if member.size > MOST_TEXT_BYTES:
        raise ValueError(f"{member.name} has {member.size:,} bytes of text")
    file = archive.extractfile(member)
    return ending, file.read() if file else b""
