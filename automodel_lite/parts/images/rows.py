"""Rows whose images are marks in their text, and the images of each row.

A token row holds the places of an image, and the image's *number*: the set, the row and the image
of the row, from which whoever serves a pack finds its bytes again. Pixels are never stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_lite.data.document import Document, RawRow
from automodel_lite.data.reading.readers import ConcatenatedRows, RawRows
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.evaluation.questions import IMAGES
from automodel_lite.parts.images.archives import KEY, row_of_index, rows_of_hub_sample
from automodel_lite.parts.images.sources import (
    COLUMNS,
    FIRST_TEXTS,
    ImageLimits,
    ImageSource,
    take_images,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_OF_ROW = 8
_OF_SET = 40  # bits of a number: images of a row, rows of a set
MOST_IMAGES = 1 << _OF_ROW


@dataclass(frozen=True)
class PlacedImage:
    """An image of a document: its number in the data, where it is, and what it may be."""

    number: int
    source: ImageSource
    limits: ImageLimits

    def bytes_hash(self) -> bytes:
        """Returns what only an image of the same bytes has."""
        if self.source.known:
            return self.source.known
        with self.source.read(self.limits) as file:
            return blake2b(file.read()).digest()

    def __str__(self) -> str:
        """Names its file, from any folder."""
        folder = self.source.folder or self.limits.folder
        return str(folder / self.source.path) if self.source.path else self.source.name


def placed_images(
    which: int, row: int, sources: Sequence[ImageSource], limits: ImageLimits
) -> list[PlacedImage]:
    """Returns the images of a row of a set with their numbers."""
    return [
        PlacedImage(number_of(which, row, place), source, limits)
        for place, source in enumerate(sources)
    ]


def first_alike(known: list[PlacedImage], image: PlacedImage) -> PlacedImage:
    """Returns the one of some images of one stamp that has the same bytes; adds an image that is
    like none.
    """
    for other in known:
        is_same = image.source == other.source
        if is_same or image.bytes_hash() == other.bytes_hash():
            return other
    known.append(image)
    return image


@dataclass
class MarkedRows:
    """Raw rows with marks in place of images; remembers the last one, whose images are asked for
    next.

    columns      of images
    first_texts  columns before whose text images without markers stand
    folders      where relative paths begin: of each file, or one; none: where the limits say
    archives     of which a file is our own index; None of a file that is data; none: no file is
    """

    raw: RawRows
    columns: tuple[str, ...] = COLUMNS
    first_texts: tuple[str, ...] = FIRST_TEXTS
    folders: tuple[Path, ...] = ()
    archives: tuple[Path | None, ...] = ()
    _last: tuple[int, RawRow, list[ImageSource]] | None = None

    def __reduce__(self) -> tuple:
        own = (self.columns, self.first_texts, self.folders, self.archives)
        return MarkedRows, (self.raw, *own)

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, index: int) -> RawRow:
        return self._read(int(index))[1]

    def images(self, index: int) -> list[ImageSource]:
        return self._read(int(index))[2]

    def where(self, index: int) -> str:
        return self.raw.where(index)

    def mark(self, row: RawRow, index: int, where: str) -> tuple[RawRow, list[ImageSource]]:
        """Returns the row of an index with marks, and its images; raises DataError with its
        place.
        """
        file = 0
        if isinstance(self.raw, ConcatenatedRows):
            file = bisect_right(self.raw.cumulative_sizes, index)
        archive = self.archives[file] if self.archives else None
        try:
            if archive is not None:
                row = row_of_index(row, archive)
            elif KEY in row:
                row = rows_of_hub_sample(row)
            marked, sources = take_images(row, self.columns, self.first_texts)
        except DataError as error:
            raise error.at(where) from error
        if self.folders:
            sources = [replace(source, folder=self.folders[file]) for source in sources]
        return marked, sources

    def _read(self, index: int) -> tuple[int, RawRow, list[ImageSource]]:
        if self._last is None or self._last[0] != index:
            self._last = (index, *self.mark(self.raw[index], index, self.where(index)))
        return self._last


class ImageSet(ABC):
    """A set whose images are found by their row and their place in it.

    limits  what an image may be
    """

    limits: ImageLimits

    @abstractmethod
    def where(self, row: int) -> str:
        """Names a row: `chats.jsonl:17`."""

    @abstractmethod
    def source(self, row: int, place: int) -> ImageSource:
        """Returns where an image is."""

    def name(self, row: int, place: int) -> str:
        """Names an image: `chats.jsonl:17 a.png`."""
        return f"{self.where(row)} {self.source(row, place).name}"

    def pixels(self, row: int, place: int, stamp: int | None = None) -> Image:
        """Decodes an image of a row; raises DataError with the place of the row, also for an image
        that is another than the one of this stamp.
        """
        source = self.source(row, place)
        try:
            return source.pixels(self.limits, stamp)
        except DataError as error:
            raise DataError(f"{self.where(row)}: {error}") from error


@dataclass(frozen=True)
class ImageDocuments(ImageSet):
    """Documents of a set with their images.

    normalized  the same documents, whose images are marks in their text
    number      of the set

    Raises ConfigError where the text would be read without its images.
    """

    normalized: Any
    number: int
    limits: ImageLimits
    is_adapted: bool = False  # to a processor, which reads the marks

    def __len__(self) -> int:
        return len(self.normalized)

    def where(self, index: int) -> str:
        return self.normalized.where(index)

    def __getitem__(self, index: int) -> Document:
        if not self.is_adapted:
            raise ConfigError(
                "dataset=images goes with the tokenizer of its processor: set tokenizer=pretrained."
            )
        document = self.normalized[index]
        sources = self._sources(index)
        if len(sources) > MOST_IMAGES:
            raise DataError(
                f"{self.where(index)}: has {len(sources)} images, over the {MOST_IMAGES} that a "
                "row may hold: make several rows of it."
            )
        return {**document, IMAGES: placed_images(self.number, index, sources, self.limits)}

    def source(self, row: int, place: int) -> ImageSource:
        return self._sources(row)[place]

    def _sources(self, index: int) -> list[ImageSource]:
        raw: MarkedRows = self.normalized.raw
        return raw.images(int(self.normalized.indices[index]))


def number_of(which: int, row: int, place: int) -> int:
    """Returns the number of an image of a row of a set; 0 is none."""
    return ((which << _OF_SET) + row) * MOST_IMAGES + place + 1


def find(number: int) -> tuple[int, int, int]:
    """Returns the set, the row and the place of the image with this number."""
    row, place = divmod(number - 1, MOST_IMAGES)
    return *divmod(row, 1 << _OF_SET), place
