"""What a decoded image shows: RGB, upright, on white where it is transparent.

    (0, 0, 0, alpha 255) -> (0, 0, 0)      (0, 0, 0, alpha 0) -> (255, 255, 255)

White is what viewers, vLLM and the processors of transformers that think of it show behind a
drawing; without it, black strokes on a transparent ground are one black square.
"""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np
from PIL import Image, ImageCms, ImageOps
from PIL.ImageFile import ImageFile

from automodel_lite.errors import DataError, printable

_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr")
_WHITE = (255, 255, 255, 255)
# of 255 levels: small profiles write the curve of sRGB as a power or a few points
_SEEN_AS_SAME = 6
_KEY = "dataset.bad_image"
_CURE = f"write it with 8 bits per channel, 0 to 255, or set {_KEY}=drop"


def bits_of(image: Image.Image, name: str) -> int:
    """Returns the bits per channel that an image is stored with: 8, 12 or 16; raises DataError for
    pixels without a known white, which are 32-bit integers and floats, and for other color spaces.
    """
    stored = ""
    for tile in image.tile if isinstance(image, ImageFile) else ():
        raw = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        stored = str(raw[0]) if raw else ""
    if ";12" in stored:  # of a TIFF, which Pillow holds in 16
        return 12
    if image.mode.startswith("I;16") or ";16" in stored:
        return 16
    if image.mode not in _MODES:
        raise DataError(
            f"image {name} has pixels of mode {image.mode}, of which nobody knows what is white",
            key=_KEY,
            cure=_CURE,
        )
    return 8


def unread_profile(image: Image.Image) -> str:
    """Returns the name of an image's colors where its numbers are not sRGB's, `Adobe RGB (1998)`,
    and "" where they are: as in transformers and vLLM, no profile is applied.
    """
    profile = image.info.get("icc_profile")
    if not isinstance(profile, bytes) or not profile:
        return "CMYK without a profile" if image.mode == "CMYK" else ""
    return _profile_name(profile, image.mode == "CMYK")


@lru_cache(maxsize=64)
def _profile_name(profile: bytes, is_cmyk: bool) -> str:
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        name = ImageCms.getProfileDescription(opened).strip()
    except (OSError, ImageCms.PyCMSError):
        return "a damaged profile"
    # gray has tones alone, which hardly move
    is_plain = "srgb" in name.lower() or opened.profile.xcolor_space.strip() == "GRAY"
    is_plain = not is_cmyk and (is_plain or _moves_no_color(opened))
    return "" if is_plain else printable(name)[:60] or "a profile without a name"


def _moves_no_color(profile: ImageCms.ImageCmsProfile) -> bool:
    """Returns whether colors of a profile are those of sRGB, by what it makes of some: its name
    does not tell ("c2", of the small profile in many pictures of the web, is sRGB).
    """
    levels = np.linspace(0, 255, 5).round().astype(np.uint8)
    colors = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(1, -1, 3)
    try:
        to_srgb = ImageCms.buildTransform(profile, ImageCms.createProfile("sRGB"), "RGB", "RGB")
        shown = ImageCms.applyTransform(Image.fromarray(colors), to_srgb)
    except ImageCms.PyCMSError:  # CMYK
        return False
    moved = np.abs(np.asarray(shown).astype(int) - colors)
    return bool(moved.max() <= _SEEN_AS_SAME)


def as_shown(image: Image.Image, name: str) -> Image.Image:
    """Returns the RGB image that a viewer shows; raises DataError where nearly all would be black,
    since values of 12 bits or fewer are stored in 16.
    """
    bits = bits_of(image, name)
    upright = ImageOps.exif_transpose(image)
    clear = upright.info.get("transparency")
    alpha = None
    if upright.mode.startswith("I"):
        # Pillow clips these to white, and knows no transparency of them
        values = np.asarray(upright)
        if isinstance(clear, int):
            alpha = Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8))
        upright = Image.fromarray((values >> (bits - 8)).astype(np.uint8))
    elif bits == 16 and isinstance(clear, tuple):
        upright.info["transparency"] = tuple(value >> 8 for value in clear)
    if bits == 16 and max(high for _, high in _extrema(upright)) < 16:
        raise DataError(
            f"image {name} has 16 bits per channel and no value above 4,095, as values of 12 bits "
            "have in them, and would be nearly black",
            key=_KEY,
            cure=_CURE,
        )
    if alpha is None and upright.has_transparency_data:
        upright = upright.convert("RGBA")
        alpha = upright.getchannel("A")
    shown = upright.convert("RGB")
    if alpha is None:
        return shown
    shown.putalpha(alpha)
    ground = Image.new("RGBA", shown.size, _WHITE)
    return Image.alpha_composite(ground, shown).convert("RGB")


def _extrema(image: Image.Image) -> list[tuple[int, int]]:
    """Returns the smallest and the largest value of each channel."""
    found = image.getextrema()
    return [found] if len(image.getbands()) == 1 else [*found]  # type: ignore[list-item]
