"""Images of the data for looking at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from automodel_lite.data.feeding.planned import PlannedPacks
from automodel_lite.parts.images.packs import ImagePacker
from automodel_lite.parts.images.rows import find
from automodel_lite.parts.images.sources import thumbnail


@dataclass(frozen=True)
class Picture:
    """An image of a document: what it is, and a small copy of it as a data URI."""

    caption: str
    thumbnail: str


def pictures_of(data: PlannedPacks, row: Mapping[str, np.ndarray]) -> list[Picture]:
    """Returns the images of a token row, in the order of their places."""
    assert isinstance(data.packer, ImagePacker)
    pictures = []
    counts = Counter(row["image"][row["image"] > 0].tolist())
    for number, num_tokens in counts.items():
        which, place, image = find(number)
        documents = data.packer.reader.sets[which]
        pixels = documents.pixels(place, image)
        width, height = pixels.size
        caption = f"{documents.name(place, image)}: {width} × {height}, {num_tokens} tokens"
        pictures.append(Picture(caption, thumbnail(pixels)))
    return pictures
