"""Images of rows: every form that people have, and files that are not what they should be."""

from __future__ import annotations

import base64
import io
import json
import os
import struct
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo

from automodel_lite.data.document import IMAGE
from automodel_lite.errors import DataError
from automodel_lite.parts.images.archives import index_archive, row_of_index
from automodel_lite.parts.images.sources import ImageLimits, ImageSource, source_of, take_images

RED = Image.new("RGB", (6, 4), (200, 30, 40))


def encoded(image: Image.Image = RED, kind: str = "PNG", **how: Any) -> bytes:
    whole = io.BytesIO()
    image.save(whole, kind, **how)
    return whole.getvalue()


URI = "data:image/png;base64," + base64.b64encode(encoded()).decode()
HI = {"type": "text", "text": "hi"}
FORMS: dict[str, tuple[dict[str, Any], Any, list[str]]] = {
    "a part with a path": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, HI]}]},
        [{"role": "user", "content": [{"type": "text", "text": IMAGE}, HI]}],
        ["a.png"],
    ),
    "a part of OpenAI's": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [HI, {"type": "image_url", "image_url": {"url": "file:///b.png"}}],
                }
            ]
        },
        [{"role": "user", "content": [HI, {"type": "text", "text": IMAGE}]}],
        ["/b.png"],
    ),
    "parts whose images stand in a column": (
        {
            "messages": [{"role": "user", "content": [{"type": "image"}, HI, {"type": "image"}]}],
            "images": ["a.png", "b.png"],
        },
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": IMAGE}, HI, {"type": "text", "text": IMAGE}],
            }
        ],
        ["a.png", "b.png"],
    ),
    "markers": (
        {
            "messages": [{"role": "user", "content": "<image>\nwhat? <image>"}],
            "images": ["a.png", {"path": "b.png", "bytes": None}],
        },
        [{"role": "user", "content": f"{IMAGE}\nwhat? {IMAGE}"}],
        ["a.png", "b.png"],
    ),
    "no markers": (
        {
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "what?"}],
            "image": "a.png",
        },
        [{"role": "system", "content": "s"}, {"role": "user", "content": f"{IMAGE}what?"}],
        ["a.png"],
    ),
    "The Cauldron": (
        {"texts": [{"user": "q", "assistant": "a", "source": "x"}], "images": ["a.png", "b.png"]},
        [{"role": "user", "content": f"{IMAGE * 2}q"}, {"role": "assistant", "content": "a"}],
        ["a.png", "b.png"],
    ),
    "text that speaks of markers": (
        {"messages": [{"role": "user", "content": "what does <image> mean?"}]},
        [{"role": "user", "content": "what does <image> mean?"}],
        [],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_images_become_marks(form: str) -> None:
    row, messages, paths = FORMS[form]
    before = json.dumps(row)
    marked, sources = take_images(row)
    assert marked == {"messages": messages}
    assert [source.path for source in sources] == paths
    assert json.dumps(row) == before


def pair(*paths: str) -> dict[str, Any]:
    """Whole chats, each with the image of the prompt."""
    answers = zip(("chosen", "rejected"), paths)
    return {
        name: [
            {"role": "user", "content": [{"type": "image", "image": path}]},
            {"role": "assistant", "content": name},
        ]
        for name, path in answers
    }


def test_both_answers_of_a_pair_have_the_images_of_the_prompt_once() -> None:
    marked, sources = take_images(pair("a.png", "a.png"))
    assert marked["rejected"][0]["content"] == [{"type": "text", "text": IMAGE}]
    assert [source.path for source in sources] == ["a.png"]
    with pytest.raises(DataError, match="column rejected has other images than the answer"):
        take_images(pair("a.png", "b.png"))


def test_columns_of_other_names() -> None:
    row = {"query": "q", "label": "a", "picture": "a.png"}
    marked, (source,) = take_images(row, ("picture",), ("query",))
    assert (marked, source.path) == ({"query": f"{IMAGE}q", "label": "a"}, "a.png")


def test_two_columns_of_other_images_are_refused_unless_one_is_named() -> None:
    row = {"text": "a", "images": ["a.png"], "image": "b.png"}
    with pytest.raises(DataError, match=r"other images in its column images than in image: name"):
        take_images(row)
    assert take_images({**row, "image": "a.png"})[1][0].path == "a.png"
    assert take_images(row, ("image", "images", "image"))[1][0].path == "b.png"


def test_samples_of_an_archive_stay_in_it(tmp_path: Path, limits: ImageLimits) -> None:
    files = {"a/1.jpg": encoded(kind="JPEG"), "a/1.json": b'{"question": "q", "answer": "a"}'}
    files |= {"a/2.txt": b"no image", "a/3.mp4": b"", "a/3.seg.png": encoded()}
    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    index_archive(tmp_path / "0.tar", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "0.tar.jsonl").read_text().splitlines()]
    rows = [row_of_index(row, tmp_path / "0.tar") for row in rows]
    (one,), (two,) = (take_images({"text": "", **rows[i]})[1] for i in (0, 2))
    assert (one.name, one.header(limits)[:2]) == ("a/1.jpg", (6, 4))
    assert two.pixels(limits).getpixel((5, 3)) == (200, 30, 40)
    assert (rows[0]["answer"], rows[1], rows[2]["video"]) == ("a", {"text": "no image"}, "mp4")


def archive_of(folder: Path, name: str, content: bytes) -> Path:
    path = folder / "0.tar"
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return path


STRETCH = {"__stretches__": [["x", 0, 1 << 40]], "__span__": [0, 1 << 40], "path": "/dev/zero"}


def test_no_row_names_a_stretch_of_a_file(tmp_path: Path, limits: ImageLimits) -> None:
    row = {"question": "q", "answer": "a", "image": STRETCH, **STRETCH}
    with pytest.raises(DataError, match=r"/dev/zero cannot be read \(neither a file nor a part"):
        take_images(row)[1][0].header(limits)
    assert take_images({"question": "q", **STRETCH})[1] == []
    content = json.dumps({"question": "q", "answer": "a", **STRETCH}).encode()
    index_archive(archive_of(tmp_path, "1.json", content), tmp_path)
    (line,) = (tmp_path / "0.tar.jsonl").read_text().splitlines()
    assert "images" not in row_of_index(json.loads(line), tmp_path / "0.tar")


def test_a_stretch_ends_with_its_file(tmp_path: Path, limits: ImageLimits) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    source = ImageSource("x", "a", span=(2, 1 << 50))
    assert source.read(limits).read() == b"345"


def test_the_json_of_an_archive_is_read_as_rows_are(tmp_path: Path) -> None:
    for content, problem in (("[" * 100_000, "a thousand deep"), ('{"a": 1, "a": 2}', "twice")):
        path = archive_of(tmp_path, "1.json", content.encode())
        with pytest.raises(DataError, match=rf"cannot be read as an archive.*{problem}"):
            index_archive(path, tmp_path)


def test_lists_that_are_nested_too_deep_are_named() -> None:
    deep: Any = "a.png"
    for _ in range(900):
        deep = [deep]
    for row in ({"text": deep}, {"text": "", "images": deep}):
        with pytest.raises(DataError, match=r"(text|images).* has lists or objects over 64 deep"):
            take_images(row)
    for _ in range(900):
        deep = {"url": deep}
    with pytest.raises(DataError, match=r"image\[0\] must be an image"):
        take_images({"text": "", "image": deep})


def test_an_address_of_a_file_is_its_path() -> None:
    assert source_of("file:///a/b%20c.png", "image").path == "/a/b c.png"
    assert source_of("b%20c.png", "image").path == "b%20c.png"


def test_a_question_with_an_image() -> None:
    marked, sources = take_images({"question": "q", "answer": "a", "image": {"bytes": encoded()}})
    assert marked == {"question": f"{IMAGE}q", "answer": "a"}
    assert sources[0].content == encoded()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"messages": [{"role": "user", "content": "<image> <image>"}], "image": "a.png"},
            "has 2 image markers in its text and 1 image in its columns: they must be as many.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "has 1 image marker in its text and 0 images",
        ),
        (
            {"question": "<image>q", "answer": "a", "images": [None]},
            "has 1 image marker in its text and 0 images",
        ),
        ({"answer": "a", "image": "a.png"}, "no text of a user before which they would stand"),
        (
            {"messages": [{"role": "user", "content": None}], "image": "a.png"},
            "no text of a user before which they would stand",
        ),
        ({"texts": ["q"], "images": ["a.png"]}, r"texts\[0\] must have user and assistant"),
        ({"texts": [{"user": "q"}]}, r"texts\[0\] must have user and assistant"),
        ({"question": f"q{IMAGE}", "answer": "a"}, "has the character U\\+FDD2"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": f"q{IMAGE}"}]}]},
            "has the character U\\+FDD2",
        ),
        ({"question": "q", "image": 7}, r"image\[0\] must be an image: a path.*, not int"),
        (
            {"question": "q", "image": "data:image/png,xx"},
            "data URI that cannot be read .it is not base64.: write the image's bytes in base64",
        ),
    ],
)
def test_what_does_not_fit_is_named(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        take_images(row)


@pytest.fixture
def limits(tmp_path: Path) -> ImageLimits:
    return ImageLimits(tmp_path, most_pixels=10_000)


BARE = URI.partition(",")[2]
LINES = base64.encodebytes(encoded()).decode()
OF_MESSAGES = {"source": {"type": "base64", "media_type": "image/png", "data": BARE}}


VALUES = [URI, encoded(), {"bytes": encoded()}, {"base64": BARE}, RED, BARE, LINES, OF_MESSAGES]


@pytest.mark.parametrize("value", VALUES)
def test_an_image_in_a_row(value: Any, limits: ImageLimits) -> None:
    source = source_of(value, "image[0]")
    assert source.header(limits)[:2] == (6, 4)
    assert source.pixels(limits).getpixel((5, 3)) == (200, 30, 40)


def turned(kind: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(kind=kind, exif=exif.tobytes())


KINDS = {
    "gray": (encoded(RED.convert("L")), (6, 4), 82),
    "palette": (encoded(RED.convert("P")), (6, 4), 204),
    "cmyk": (encoded(RED.convert("CMYK"), "JPEG"), (6, 4), 200),
    "alpha": (encoded(RED.convert("RGBA")), (6, 4), 200),
    "16 bits": (encoded(Image.fromarray(np.full((4, 6), 200 * 256, np.uint16))), (6, 4), 200),
    "turned": (turned(), (4, 6), 200),
    "turned tiff": (turned("TIFF"), (4, 6), 200),
    "1 x 1": (encoded(RED.resize((1, 1))), (1, 1), 200),
}


@pytest.mark.parametrize("kind", KINDS)
def test_unusual_images_are_read_as_they_are_shown(kind: str, limits: ImageLimits) -> None:
    content, size, red = KINDS[kind]
    source = ImageSource("x", content=content)
    assert source.header(limits)[:2] == size
    pixels = source.pixels(limits)
    assert (pixels.mode, pixels.size) == ("RGB", size)
    assert abs(pixels.getpixel((0, 0))[0] - red) <= 2  # type: ignore[index]


def animated() -> bytes:
    return encoded(RED, "GIF", save_all=True, append_images=[Image.new("RGB", (6, 4))])


noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60, 3), np.uint8))


def huge() -> bytes:
    """A PNG of one pixel whose header says 20,000 x 20,000."""
    small = encoded(Image.new("1", (1, 1)))
    header = b"IHDR" + struct.pack(">II", 20_000, 20_000) + small[24:29]
    return small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:]


BAD = {
    "text": (b"not an image", "image x is not an image that Pillow can read"),
    "empty": (b"", "image x is not an image that Pillow can read"),
    "cut": (
        encoded(noise, "JPEG")[:-200],
        "image x is cut off, as it has [0-9,]+ bytes and no end",
    ),
    "cut png": (encoded(noise)[:-200], "image x is cut off"),
    "animated": (animated(), "image x is animated: keep one of its frames"),
    "a bomb": (
        huge(),
        r"image x (has 20000 x 20000 pixels, over|is too large)",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_image_is_named_from_its_header(kind: str, limits: ImageLimits) -> None:
    content, problem = BAD[kind]
    with pytest.raises(DataError, match=problem):
        ImageSource("x", content=content).header(limits)


def test_a_large_image_is_scaled_down_in_its_shape(tmp_path: Path) -> None:
    source, few = ImageSource("x", content=encoded(noise)), ImageLimits(tmp_path, most_pixels=1000)
    assert source.header(few)[:2] == source.pixels(few).size == (31, 31)


def test_a_missing_file_and_an_address_are_named(limits: ImageLimits) -> None:
    with pytest.raises(DataError, match=r"image a.png cannot be read \(No such file"):
        source_of("a.png", "image").header(limits)
    with pytest.raises(DataError, match=r"on the network, which is not read: .*allow_remote=true"):
        source_of("https://example.com/a.png", "image").header(limits)


@pytest.mark.parametrize(
    "address",
    ["ftp://127.0.0.1:9/x.png", "zip://a.png::file:///b.zip", "simplecache::https://127.0.0.1:9/a"],
)
def test_no_row_uses_another_protocol(address: str, limits: ImageLimits) -> None:
    """Also where addresses are allowed."""
    with pytest.raises(DataError, match="that images are not read from: use s3, gs, hf, https"):
        source_of(address, "image").header(replace(limits, allow_remote=True))


def test_what_an_address_answers_is_not_printed(limits: ImageLimits) -> None:
    """It may be a service of this machine, where addresses are allowed."""
    with pytest.raises(DataError, match="is not an image that Pillow can read") as refused:
        ImageSource("http://127.0.0.1/a.png", content=b"token: swordfish").header(limits)
    assert "swordfish" not in str(refused.value)


def test_a_pipe_and_a_device_are_not_opened(tmp_path: Path, limits: ImageLimits) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("pipe", "/dev/zero", "."):
        with pytest.raises(DataError, match=r"cannot be read \(neither a file nor a part of one"):
            source_of(path, "image").header(limits)


def test_no_image_starts_a_program(
    tmp_path: Path, limits: ImageLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow would run `gs` for an EPS."""
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    source = ImageSource("x", content=encoded(kind="EPS"))
    for ask in (source.header, replace(source).pixels):
        with pytest.raises(DataError, match="not an image that Pillow can read of PNG, JPEG"):
            ask(limits)
    with pytest.raises(DataError, match="Pillow can read of PNG"):
        source.header(replace(limits, drops_bad=True))
    assert not (tmp_path / "ran").exists()


def test_why_a_picture_cannot_be_read_is_said(limits: ImageLimits) -> None:
    info = PngInfo()
    info.add_text("Comment", "x" * (2 << 20), zip=True)
    with pytest.raises(DataError, match=r"image x cannot be read \(Decompressed data too large"):
        ImageSource("x", content=encoded(pnginfo=info)).header(limits)


def test_a_picture_changed_in_its_middle_has_another_stamp(limits: ImageLimits) -> None:
    before = Image.new("RGB", (300, 300))
    after = before.copy()
    after.paste((9, 9, 9), (0, 100, 300, 200))
    stamps = [
        ImageSource("x", content=encoded(one, "TIFF")).header(limits) for one in (before, after)
    ]
    assert stamps[0] != stamps[1]


def test_damage_in_the_middle_is_named_when_it_is_decoded(limits: ImageLimits) -> None:
    content = bytearray(encoded(noise))
    content[200:600] = bytes(400)
    source = ImageSource("x", content=bytes(content))
    assert source.header(limits)[:2] == (60, 60)
    with pytest.raises(DataError, match="image x cannot be decoded"):
        source.pixels(limits)
    with pytest.raises(DataError, match="image x cannot be decoded"):
        source.header(replace(limits, drops_bad=True))


def test_of_a_jpeg_that_is_looked_through_size_and_stamp_are_those_of_its_header(
    limits: ImageLimits,
) -> None:
    content = bytearray(encoded(noise, "JPEG"))
    found = ImageSource("x", content=bytes(content)).header(replace(limits, drops_bad=True))
    assert found == ImageSource("x", content=bytes(content)).header(limits)
    content[900:910] = b"\xff\xc0" * 5  # a header where pixels are
    source = ImageSource("x", content=bytes(content))
    assert source.header(limits)[:2] == found[:2]
    with pytest.raises(DataError, match="image x cannot be decoded"):
        source.header(replace(limits, drops_bad=True))


# of Display P3's red, green and blue, X Y Z each, under the light of profiles
P3 = (0.5151, 0.2412, -0.0011, 0.2920, 0.6922, 0.0419, 0.1571, 0.0666, 0.7841)


def profile_named(name: str, primaries: Sequence[float] = P3) -> bytes:
    """The sRGB profile of Pillow under another name of as many letters, with other primaries."""
    content = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for encoding in ("ascii", "utf-16-be"):
        content = content.replace("sRGB built-in".encode(encoding), name.encode(encoding))
    found = bytearray(content)
    for number in range(len(primaries) // 3):
        entry = content.index(b"rgb"[number : number + 1] + b"XYZ")  # of the table: name, start
        start = int.from_bytes(content[entry + 4 : entry + 8]) + 8
        values = (round(x * 65536) for x in primaries[3 * number : 3 * number + 3])
        found[start : start + 12] = struct.pack(">3i", *values)
    return bytes(found)


@pytest.mark.parametrize(
    ("mode", "kind", "profile", "said"),
    [
        ("RGB", "PNG", "", ""),
        ("RGB", "PNG", "sRGB built-in", ""),
        ("RGB", "JPEG", "c2 of the web", ""),  # sRGB by another name
        ("L", "JPEG", "c2 of the web", ""),
        ("RGB", "PNG", "Display P3 v4", "Display P3 v4"),
        ("RGB", "JPEG", "Adobe RGB 98.", "Adobe RGB 98."),
        ("CMYK", "JPEG", "", "CMYK without a profile"),
        ("CMYK", "TIFF", "Coated FOGRA9", "Coated FOGRA9"),
        ("RGB", "WEBP", "damaged", "a damaged profile"),
    ],
)
def test_colors_that_are_not_srgb_are_named(
    limits: ImageLimits, mode: str, kind: str, profile: str, said: str
) -> None:
    buffer = io.BytesIO()
    primaries = () if profile in ("sRGB built-in", "c2 of the web") else P3
    content = b"no profile" if profile == "damaged" else profile_named(profile, primaries)
    options = {"icc_profile": content} if profile else {}
    Image.new(mode, (8, 8)).save(buffer, kind, **options)
    assert ImageSource("x", content=buffer.getvalue()).header(limits).profile == said
