"""Images of a raw row: where each one is, its size from its header, its pixels.

Everything people have becomes text with a mark (`IMAGE`) at the place of each image, and a list of
sources in the order of the marks:

    {"type": "image", "image": "a.png"}      a part of a message: path, address, data URI, bytes
    "<image>\\nWhat is it?" + image(s)        markers in a text, and a column
    question, answer + image(s)              no markers: the images stand before the first text
    texts: [{"user", "assistant"}] + images  The Cauldron, FineVision
"""

from __future__ import annotations

import base64
import io
import math
import os
import re
import stat
import warnings
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from automodel_lite.data.document import IMAGE, RawRow
from automodel_lite.data.reading.remote import PROTOCOLS
from automodel_lite.errors import DataError, counted, explained, one_line
from automodel_lite.parts.images.colors import as_shown, bits_of, unread_profile

RULES_VERSION = 4
"""Of what rows and images become: tokens that were cached under others are made anew."""
COLUMNS = ("images", "image")
REJECTED = "rejected"
IN_PROMPT = re.compile(r"!\[[^]]*\]\(([^)]+)\)")
"""An image in a prompt of `samples`: `![](a.png) What is it?`."""
SIDE = 200
"""Pixels of a thumbnail."""
MARKER = "<image>"
"""What stands for an image in texts of LLaVA's, ShareGPT's and many other files."""
PARTS = ("image", "image_url", "input_image")
KEYS = ("image", "image_url", "bytes", "url", "path", "base64", "source", "data")
BEGINNINGS = ("iVBORw0KGgo", "/9j/", "UklGR", "R0lGOD")
"""Of the bytes of a PNG, JPEG, WebP and GIF in base64."""
LONGEST_START = 80
"""Characters of a path that could begin so; whole images have more."""
FIRST_TEXTS = ("state", "prompt", "question", "instruction", "text")
"""Columns of single texts, before which images without markers stand."""
_BAD_IMAGE = "dataset.bad_image"  # what a cure sets
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""That are opened, AVIF from Pillow 11.3 on. Of others, Pillow starts a program (Ghostscript for
EPS), or has a parser that nobody's pictures need.
"""
MOST_LEVELS = 64
"""Of lists and objects inside each other, in a row with images."""
MOST_PIXELS = 64_000_000
"""Of an image that is decoded: a bomb of some kilobytes is refused from its header."""
_ROTATED = (5, 6, 7, 8)
_ORIENTATION = 0x0112
_WIDTH_AND_LENGTH = (0x0100, 0x0101)
_HEAD_BYTES = 2**12
_TAIL_BYTES = 2**16
_NUM_BLOCKS = 16  # between both, as of files of rows
_BLOCK_BYTES = 2**12
PIXEL_BITS = 26
"""Of an image's stamp: the lowest are the number of its pixels."""
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}


@dataclass(frozen=True)
class ImageLimits:
    """What an image may be.

    folder        of relative paths, where their source has none
    most_pixels   that the processor gets: larger images are scaled down to them; None = any number
    allow_remote  may addresses on the network be read?
    drops_bad     are documents with a bad image left out?
    """

    folder: Path
    most_pixels: int | None = None
    allow_remote: bool = False
    drops_bad: bool = False

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size of an image of at most `most_pixels`, of the same shape.

        >>> ImageLimits(Path(), most_pixels=1000).scaled(200, 50)
        (63, 15)
        """
        if self.most_pixels is None or width * height <= self.most_pixels:
            return width, height
        scale = math.sqrt(self.most_pixels / (width * height))
        return max(1, int(width * scale)), max(1, int(height * scale))


class Header(NamedTuple):
    """What the header of an image says.

    width, height  as the processor gets the image
    stamp          of its file
    profile        its colors, where they are not sRGB's and are read as if they were
    """

    width: int
    height: int
    stamp: int
    profile: str = ""


@dataclass(frozen=True)
class ImageSource:
    """Where an image is: in a file (a path or an address), in a part of a file, or in its row.

    name    for messages: the path, or `images[1]`
    folder  of a relative path; None: that of the limits
    span    offset and bytes in the file, of a member of an archive; None: all of it
    known   the hash of bytes in a row that are not held any more
    """

    name: str
    path: str = ""
    content: bytes = field(default=b"", repr=False)
    folder: Path | None = None
    span: tuple[int, int] | None = None
    known: bytes = b""

    def without_bytes(self) -> ImageSource:
        """Returns the source by which an image is compared, while its row is not held."""
        if not self.content:
            return self
        return replace(self, content=b"", known=blake2b(self.content).digest())

    def read(self, limits: ImageLimits) -> io.BytesIO | io.BufferedReader:
        """Opens the bytes; raises DataError when there is no such file."""
        if not self.path:
            return io.BytesIO(self.content)
        if "://" in self.path:
            return io.BytesIO(_fetched(self.path, limits))
        folder = self.folder or limits.folder
        try:
            path = folder / Path(self.path).expanduser()
            found = path.stat()
            # to open a pipe waits for its writer, and a device has no end
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("neither a file nor a part of one")
            file = path.open("rb")
            if self.span is None:
                return file
            with file:
                start, num_bytes = self.span
                file.seek(start)
                return io.BytesIO(file.read(min(num_bytes, found.st_size)))
        except (OSError, ValueError) as error:  # ValueError: of a path with a null
            reason = getattr(error, "strerror", None) or error
            raise DataError(
                f"image {self.name} cannot be read ({reason}; relative paths begin in {folder})",
                key="dataset.image_dir",
                cure="set dataset.image_dir, or dataset.bad_image=drop",
            ) from error

    def header(self, limits: ImageLimits) -> Header:
        """Returns what the header of an image says; nothing is decoded but where bad images are
        left out, and damage inside has to be found.

        Raises DataError for what is not an image, is cut off, is animated or too large.
        """
        with self.read(limits) as file, self._opened(file) as image:
            stamp = self._checked_stamp(file, image)
            width, height = image.size
            if isinstance(image, TiffImageFile):  # whose size newer Pillows turn, too
                width, height = (image.tag_v2[tag] for tag in _WIDTH_AND_LENGTH)
            # of a PNG without it in its header, Pillow would decode the whole
            has_exif = image.format != "PNG" or "exif" in image.info
            is_rotated = has_exif and image.getexif().get(_ORIENTATION) in _ROTATED
            if is_rotated:
                width, height = height, width
            bits = bits_of(image, self.name)
            if limits.drops_bad or bits > 8:  # whose values tell whether they fill their bits
                with self._decoding():
                    image.draft(None, (1, 1))  # of a JPEG, all is read and little computed
                    if bits > 8:
                        as_shown(image, self.name)
                    image.load()
            return Header(*limits.scaled(width, height), stamp, unread_profile(image))

    def pixels(self, limits: ImageLimits, stamp: int | None = None) -> Image.Image:
        """Decodes the image as it is shown: RGB, upright, on white. Raises DataError as `header`
        does, and for another image than the one of this stamp.
        """
        with self.read(limits) as file, self._opened(file) as image:
            if stamp is not None and self._checked_stamp(file, image) != stamp:
                raise DataError(
                    f"image {self.name} is another one than when the documents were tokenized: its "
                    "file was replaced. Restore it, or clear the cache, so that the documents are "
                    "tokenized again."
                )
            with self._decoding():
                shown = as_shown(image, self.name)
                size = limits.scaled(*shown.size)
                return shown if size == shown.size else shown.resize(size)

    def _decoding(self) -> AbstractContextManager[None]:
        """Makes a DataError of what Pillow says of damage inside an image."""
        return explained(
            f"image {self.name} cannot be decoded",
            *(OSError, SyntaxError, ValueError),
            kind=DataError,
            key=_BAD_IMAGE,
            cure=f"repair it, or set {_BAD_IMAGE}=drop",
        )

    def _opened(self, file: Any) -> Image.Image:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                Image.init()  # all plugins, once
                image = Image.open(file, formats=[one for one in FORMATS if one in Image.OPEN])
        except Image.DecompressionBombError as error:
            raise DataError(
                f"image {self.name} is too large ({one_line(error)})",
                key=_BAD_IMAGE,
                cure=f"make it smaller, or set {_BAD_IMAGE}=drop",
            ) from error
        except UnidentifiedImageError as error:
            raise DataError(
                f"image {self.name} is not an image that Pillow can read of {', '.join(FORMATS)}",
                key=_BAD_IMAGE,
                cure=f"repair or convert it, or set {_BAD_IMAGE}=drop",
            ) from error
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(
                f"image {self.name} cannot be read ({one_line(error)})",
                key=_BAD_IMAGE,
                cure=f"repair it, or set {_BAD_IMAGE}=drop",
            ) from error
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise DataError(
                f"image {self.name} has {width} x {height} pixels, over the {MOST_PIXELS:,} that "
                "are decoded",
                key=_BAD_IMAGE,
                cure=f"make it smaller, or set {_BAD_IMAGE}=drop",
            )
        if image.format != "MPO" and getattr(image, "is_animated", False):
            raise DataError(
                f"image {self.name} is animated",
                key=_BAD_IMAGE,
                cure=f"keep one of its frames, or set {_BAD_IMAGE}=drop",
            )
        return image

    def _checked_stamp(self, file: Any, image: Image.Image) -> int:
        """Returns what tells the image from others, from the number of its bytes, the first and
        last of them and some in between; raises DataError for a file that was cut off and has lost
        its end, which costs no decoding to see.
        """
        end = _ENDS.get(image.format or "")
        num_bytes = file.seek(0, os.SEEK_END)
        # some cameras write more behind the end
        file.seek(max(0, num_bytes - _TAIL_BYTES))
        tail = file.read()
        if end is not None and end not in tail:
            raise DataError(
                f"image {self.name} is cut off, as it has {num_bytes:,} bytes and no end",
                key=_BAD_IMAGE,
                cure=f"copy it again, or set {_BAD_IMAGE}=drop",
            )
        file.seek(0)
        content = zlib.crc32(file.read(_HEAD_BYTES), zlib.crc32(tail))
        if num_bytes > _HEAD_BYTES + _TAIL_BYTES:
            for number in range(1, _NUM_BLOCKS + 1):
                file.seek(num_bytes * number // (_NUM_BLOCKS + 1))
                content = zlib.crc32(file.read(_BLOCK_BYTES), content)
        width, height = image.size
        return (content << PIXEL_BITS | width * height) ^ (num_bytes << PIXEL_BITS)


def _fetched(address: str, limits: ImageLimits) -> bytes:
    if not limits.allow_remote:
        raise DataError(
            f"image {address[:80]} is on the network, which is not read",
            key="dataset.allow_remote",
            cure="download it, or set dataset.allow_remote=true",
        )
    protocol = address.partition("://")[0].lower()
    # a chain (zip://a.png::s3://b/c.zip) hands on to any of them
    if protocol not in PROTOCOLS or "::" in address:
        raise DataError(
            f"image {address[:80]} is at an address that images are not read from: use "
            f"{', '.join(PROTOCOLS)}, or download it."
        )
    import fsspec

    with (  # of any protocol's package
        explained(f"image {address[:80]} cannot be read", Exception, kind=DataError),
        fsspec.open(address, "rb") as file,
    ):
        return bytes(file.read())


def source_of(value: Any, name: str) -> ImageSource:
    """Returns the source that a value of a row describes; raises DataError for none."""
    if isinstance(value, ImageSource):  # of our own index of an archive
        return value
    key = ""
    for _ in range(MOST_LEVELS):
        if not isinstance(value, Mapping):
            break
        fields = value
        key = next((key for key in KEYS if fields.get(key)), "")
        value = fields.get(key)
    if isinstance(value, str) and key in ("base64", "data") and not value.startswith("data:"):
        value = f"data:;base64,{value}"
    if isinstance(value, (bytes, bytearray)):
        return ImageSource(name, content=bytes(value))
    if isinstance(value, Image.Image):
        whole = io.BytesIO()
        value.save(whole, "PNG")
        return ImageSource(name, content=whole.getvalue())
    if not isinstance(value, str) or not value:
        raise DataError(
            f"{name} must be an image: a path, an address, a data URI or bytes, not "
            f"{type(value).__name__}."
        )
    if value.startswith(BEGINNINGS) and len(value) > LONGEST_START:
        value = f"data:;base64,{value}"
    if not value.startswith("data:"):
        is_address = value.startswith("file://")
        path = unquote(value.removeprefix("file://")) if is_address else value
        return ImageSource(value[:200], path=path)
    head, _, content = value.partition(",")
    cure = "write the image's bytes in base64 behind its comma"
    with explained(
        f"{name} is a data URI that cannot be read", ValueError, kind=DataError, cure=cure
    ):
        if not head.endswith(";base64"):
            raise ValueError("it is not base64")
        lines = content.split()  # as command-line tools write it
        return ImageSource(
            f"{name} ({head[5:40]})", content=base64.b64decode("".join(lines), validate=True)
        )


def take_images(
    row: RawRow,
    columns: Sequence[str] = COLUMNS,
    first_texts: Sequence[str] = FIRST_TEXTS,
) -> tuple[RawRow, list[ImageSource]]:
    """Returns the row with marks in place of its images, and their sources in the marks' order.

    columns      of images
    first_texts  before which images without markers stand

    Raises DataError when the markers in the text are not as many as the images of the row.
    """
    # 1. The images of a column; `images` and `image` may both be there, with the same ones.
    filled = [name for name in columns if row.get(name) not in (None, [], "")]
    listed = _flat([row[name] for name in filled[:1]], "".join(filled[:1]))
    if tuple(filled) == COLUMNS and listed != _flat([row["image"]], "image"):
        raise DataError(
            "has other images in its column images than in image: name the one that is meant, "
            "dataset.columns.image=image, or remove the other."
        )
    waiting = [source_of(value, f"{filled[0]}[{i}]") for i, value in enumerate(listed)]
    # 2. A mark for each image in the other columns: a part of a turn that brings its image, or a
    # marker whose image is in the column.
    kept = {name: value for name, value in row.items() if name not in columns}
    if isinstance(kept.get("texts"), list):
        kept["messages"] = _turns_of_pairs(kept.pop("texts"))
    # an empty column has none of the images that its markers name
    has_column = any(name in row for name in columns)
    found = _Found(has_column)
    of_rejected = _Found(has_column)
    marked = {}
    for name, value in kept.items():
        marked[name] = (of_rejected if name == REJECTED else found).marked(value, name)
    # whole chats of a pair: both begin with the prompt, and its images
    if of_rejected.places() not in ([], found.places()):
        raise DataError(f"column {REJECTED} has other images than the answer that is preferred.")
    # 3. Markers take the images of the column in their order; without any marker they stand in
    # front of the first text.
    num_open = found.sources.count(None)
    if waiting and not found.sources:
        return _in_front(marked, len(waiting), first_texts), waiting
    if num_open != len(waiting):
        raise DataError(
            f"has {counted(num_open, 'image marker')} in its text and "
            f"{counted(len(waiting), 'image')} in its columns: "
            "they must be as many."
        )
    rest = iter(waiting)
    return marked, [next(rest) if source is None else source for source in found.sources]


class _Found:
    """The images of a row in the order of their marks; None of a marker, whose image is in a
    column.
    """

    def __init__(self, has_column: bool) -> None:
        self.has_column = has_column
        self.sources: list[ImageSource | None] = []

    def places(self) -> list[tuple[str, bytes] | None]:
        """Returns where the images are, whatever they are called."""
        return [
            source if source is None else (source.path, source.content) for source in self.sources
        ]

    def marked(self, value: Any, name: str, level: int = 0) -> Any:
        """Returns a value with marks for its image parts, and for markers where there is a
        column.
        """
        if level > MOST_LEVELS:
            raise _too_deep(name)
        if isinstance(value, str) and IMAGE in value:
            raise DataError("has the character U+FDD2, which stands for images here: remove it.")
        if isinstance(value, str) and self.has_column and MARKER in value:
            self.sources += [None] * value.count(MARKER)
            return value.replace(MARKER, IMAGE)
        if isinstance(value, list):
            items = enumerate(value)
            return [self.marked(item, f"{name}[{place}]", level + 1) for place, item in items]
        if not isinstance(value, dict):
            return value
        if value.get("type") in PARTS:
            has_own = any(value.get(key) for key in KEYS)
            self.sources.append(source_of(value, name) if has_own else None)
            return {"type": "text", "text": IMAGE}
        # what a turn says, and lists of such; arguments of calls are no text of the chat
        said = ("content", "value", "text")
        found = {}
        for key, inner in value.items():
            found[key] = self.marked(inner, f"{name}.{key}", level + 1) if key in said else inner
        return found


def _flat(values: Any, name: str, level: int = 0) -> list[Any]:
    if level > MOST_LEVELS:
        raise _too_deep(name)
    flat = []
    for value in values:
        flat += _flat(value, name, level + 1) if isinstance(value, (list, tuple)) else [value]
    return [value for value in flat if value is not None]


def _too_deep(name: str) -> DataError:
    column = name[:40]
    return DataError(
        f"{column} has lists or objects over {MOST_LEVELS} deep: write them with fewer levels."
    )


def _turns_of_pairs(pairs: list[Any]) -> list[dict[str, Any]]:
    turns = []
    for place, pair in enumerate(pairs):
        for role in ("user", "assistant"):
            if not isinstance(pair, dict) or role not in pair:
                raise DataError(
                    f"texts[{place}] must have user and assistant: name them so, or write the row "
                    "as messages."
                )
            turns.append({"role": role, "content": pair[role]})
    return turns


def _in_front(row: RawRow, num: int, first_texts: Sequence[str]) -> RawRow:
    """Marks images before the first text of a row that has no markers."""
    for name, value in row.items():
        is_turns = isinstance(value, list) and value and isinstance(value[0], dict)
        if is_turns and {"role", "from"} & value[0].keys():
            turns = [dict(turn) for turn in value]
            asks = [
                turn for turn in turns if turn.get("role", turn.get("from")) in ("user", "human")
            ]
            if asks:
                key = "content" if "content" in asks[0] else "value"
                said = asks[0].get(key)
                if isinstance(said, str):
                    asks[0][key] = IMAGE * num + said
                    return {**row, name: turns}
                if isinstance(said, list):
                    asks[0][key] = [{"type": "text", "text": IMAGE * num}, *said]
                    return {**row, name: turns}
    for name in first_texts:
        if isinstance(row.get(name), str):
            return {**row, name: IMAGE * num + row[name]}
    cure = "name the columns, dataset.columns.question=... dataset.columns.answer=..."
    if "input_ids" in row:
        cure = "bring messages or texts, of which the tokens are made here"
    raise DataError(
        f"has {counted(num, 'image')}, and no text of a user before which they would stand: {cure}."
    )


def problem_of_question(error: DataError) -> str:
    """Returns what is wrong with an image of a question, which no setting of a data set changes."""
    return f"{error.text}: name another file." if error.key else str(error)


def sources_in(prompt: str) -> list[ImageSource]:
    """Returns the images of a prompt for samples, whose paths begin in the working folder."""
    found = [source_of(path, "image") for path in IN_PROMPT.findall(prompt)]
    return [replace(source, folder=Path.cwd()) for source in found]


def thumbnail(pixels: Image.Image) -> str:
    """Returns a small copy as a data URI."""
    small = pixels.copy()
    small.thumbnail((SIDE, SIDE))
    whole = io.BytesIO()
    small.save(whole, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(whole.getvalue()).decode()}"


def pieces_of_prompt(prompt: str, limits: ImageLimits) -> list[tuple[str, str]]:
    """Returns the texts and the images of a prompt in order, of each its words and, of an image
    that can be read, a thumbnail.
    """
    pieces = []
    end = 0
    for found in IN_PROMPT.finditer(prompt):
        pieces.append((prompt[end : found.start()], ""))
        end = found.end()
        try:
            shown = thumbnail(source_of(found[1], "image").pixels(limits))
        except DataError:  # it was moved since
            shown = ""
        pieces.append((found[0], shown))
    pieces.append((prompt[end:], ""))
    return pieces


def blank_image(width: int, height: int) -> Image.Image:
    """Returns a black image."""
    return Image.new("RGB", (width, height))


def noise_image(width: int, height: int, seed: int) -> Image.Image:
    """Returns an image of random pixels."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)
