"""What pictures show that have more, or other, pixels than RGB of 8 bits."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from automodel_lite.errors import DataError
from automodel_lite.parts.images.sources import ImageLimits, ImageSource

LIMITS = ImageLimits(Path())


def source(image: Image.Image, kind: str = "PNG", **how: Any) -> ImageSource:
    whole = io.BytesIO()
    image.save(whole, kind, **how)
    return ImageSource("x", content=whole.getvalue())


def stroke(mode: str = "RGBA") -> Image.Image:
    """A black pixel beside a transparent black one, and one half transparent."""
    image = Image.new("RGBA", (3, 1))
    image.putpixel((0, 0), (0, 0, 0, 255))
    image.putpixel((2, 0), (0, 0, 0, 128))
    return image.convert(mode)


def of_palette() -> Image.Image:
    """A black pixel beside a transparent one of a palette with two blacks."""
    image = Image.new("P", (2, 1))
    image.putpalette([0, 0, 0, 0, 0, 0])
    image.putpixel((1, 0), 1)
    return image


ON_WHITE = {
    "RGBA": (source(stroke()), [0, 255, 127]),
    "LA": (source(stroke("LA")), [0, 255, 127]),
    "WebP": (source(stroke(), "WEBP", lossless=True, exact=True), [0, 255, 127]),
    "TIFF": (source(stroke(), "TIFF"), [0, 255, 127]),
    "palette": (source(of_palette(), transparency=1), [0, 255]),
    "GIF": (source(of_palette(), "GIF", transparency=1, optimize=False), [0, 255]),
    "gray of which one value is clear": (
        source(Image.fromarray(np.array([[0, 9, 90]], np.uint8)), transparency=9),
        [0, 255, 90],
    ),
    "16 bits of which one value is clear": (
        source(Image.fromarray(np.array([[0, 9, 90 << 8]], np.uint16)), transparency=9),
        [0, 255, 90],
    ),
}


@pytest.mark.parametrize("kind", ON_WHITE)
def test_what_is_transparent_shows_white(kind: str) -> None:
    made, red = ON_WHITE[kind]
    assert np.asarray(made.pixels(LIMITS))[0, :, 0].tolist() == red


@pytest.mark.parametrize("dtype", [np.int32, np.float32], ids=["integers", "floats"])
def test_pixels_without_a_known_white_are_refused_from_the_header(dtype: Any) -> None:
    made = source(Image.fromarray(np.array([[0, 200]], dtype)), "TIFF")
    for ask in (made.header, made.pixels):
        with pytest.raises(DataError, match=r"image x has pixels of mode [IF], .*8 bits per chan"):
            ask(LIMITS)


@pytest.mark.parametrize(
    "values", [[0, 4095], [0, 255], [0, 0]], ids=["12 bits", "8 bits", "black"]
)
def test_few_bits_in_16_are_refused_before_training(values: list[int]) -> None:
    made = source(Image.fromarray(np.array([values], np.uint16)))
    with pytest.raises(DataError, match=r"16 bits per channel and no value above 4,095"):
        made.header(LIMITS)


def test_16_bits_that_are_used_show_their_upper_8() -> None:
    made = source(Image.fromarray(np.array([[0, 4096, 65535]], np.uint16)))
    assert made.header(LIMITS)[:2] == (3, 1)
    assert np.asarray(made.pixels(LIMITS))[0, :, 0].tolist() == [0, 16, 255]


def tiff_of_12_bits(values: tuple[int, int]) -> bytes:
    """A TIFF of two gray pixels, packed into three bytes, as scanners and microscopes write."""
    first, second = values
    packed = ((first << 12) | second).to_bytes(3, "big")
    # width, length, bits per sample, compression, photometric, offset, samples, rows, bytes
    tags = {256: 2, 257: 1, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: 3}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    head = b"II*\0" + struct.pack("<I", 12)
    return head + packed + b"\0" + struct.pack("<H", len(tags)) + entries + bytes(4)


def test_12_bits_of_a_tiff_show_their_upper_8() -> None:
    made = ImageSource("x", content=tiff_of_12_bits((4095, 0x123)))
    assert made.header(LIMITS)[:2] == (2, 1)
    assert np.asarray(made.pixels(LIMITS))[0, :, 0].tolist() == [255, 0x12]
