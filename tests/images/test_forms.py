"""The same documents in every form that people have them in, through the whole recipe: the same numbers."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from automodel_lite.errors import ConfigError
from tests.images.families import SIZES, draw, write_model
from tests.images.test_train import train

NUM = 6
WORDS = ["a cat?", "what", "two.", "is it?", "hi", "who"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, pictures, and chats that name them."""
    made = tmp_path_factory.mktemp("forms")
    lines = []
    for row in range(NUM):
        draw(made / f"{row}.png", *SIZES[row % len(SIZES)], seed=row)
        parts = [{"type": "image", "image": f"{row}.png"}, {"type": "text", "text": WORDS[row]}]
        said = {"role": "assistant", "content": WORDS[-row]}
        lines.append(json.dumps({"messages": [{"role": "user", "content": parts}, said]}))
    (made / "chats.jsonl").write_text("\n".join(lines))
    return write_model("qwen3_vl", made)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[float, float]]:
    return train(folder, folder / "run")


def table(folder: Path, **columns: list[Any]) -> datasets.Dataset:
    """With a column of lists of pictures, as Hugging Face's sets have them: with their bytes."""
    pictures = [[str(folder / f"{row}.png")] for row in range(NUM)]
    made = datasets.Dataset.from_dict({"images": pictures, **columns})
    return made.cast_column("images", datasets.List(datasets.Image()))


def turns(marker: str = "") -> list[Any]:
    return [
        [
            {"role": "user", "content": marker + WORDS[row]},
            {"role": "assistant", "content": WORDS[-row]},
        ]
        for row in range(NUM)
    ]


def pairs(**more: str) -> list[Any]:
    return [[{"user": WORDS[row], "assistant": WORDS[-row], **more}] for row in range(NUM)]


def as_parquet(folder: Path, out: Path) -> Path:
    table(folder, messages=turns("<image>")).to_parquet(out / "train-00000-of-00001.parquet")
    return out / "train-00000-of-00001.parquet"


def as_one_image(folder: Path, out: Path) -> Path:
    pictures = [str(folder / f"{row}.png") for row in range(NUM)]
    columns = {"question": WORDS[:NUM], "answer": [WORDS[-row] for row in range(NUM)]}
    made = datasets.Dataset.from_dict({"image": pictures, **columns})
    made.cast_column("image", datasets.Image()).to_parquet(out / "rows.parquet")
    return out


def as_saved(folder: Path, out: Path) -> Path:
    datasets.DatasetDict({"train": table(folder, messages=turns())}).save_to_disk(out / "saved")
    return out / "saved"


def as_cauldron(folder: Path, out: Path) -> Path:
    (out / "data").mkdir()
    table(folder, texts=pairs(source="VQAv2")).to_parquet(out / "data/train-00000-of-00001.parquet")
    return out


def as_finevision(folder: Path, out: Path) -> Path:
    rated = {"source": ["x"] * NUM, "relevance_ratings": [[4]] * NUM, "relevance_min": [4] * NUM}
    table(folder, texts=pairs(), **rated).to_parquet(out / "rows.parquet")
    return out / "rows.parquet"


def as_webdataset(folder: Path, out: Path) -> Path:
    for shard in range(2):
        with tarfile.open(out / f"{shard:05d}.tar", "w") as archive:
            for row in range(NUM * shard // 2, NUM * (shard + 1) // 2):
                files = {
                    "png": (folder / f"{row}.png").read_bytes(),
                    "json": json.dumps({"messages": turns()[row]}).encode(),
                }
                for ending, content in files.items():
                    member = tarfile.TarInfo(f"{row:04d}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return out


def as_llava(folder: Path, out: Path) -> Path:
    rows = [
        {
            "id": str(row),
            "image": str(folder / f"{row}.png"),
            "conversations": [
                {"from": "human", "value": f"<image>{WORDS[row]}"},
                {"from": "gpt", "value": WORDS[-row]},
            ],
        }
        for row in range(NUM)
    ]
    (out / "llava.json").write_text(json.dumps(rows))
    return out / "llava.json"


FORMS = [
    as_parquet,
    as_one_image,
    as_saved,
    as_cauldron,
    as_finevision,
    as_webdataset,
    as_llava,
]


@pytest.mark.system
@pytest.mark.parametrize("write", FORMS, ids=[form.__name__ for form in FORMS])
@pytest.mark.parametrize("kind", ["images", "images_streaming"])
def test_a_form_gives_the_numbers_of_chats_with_paths(
    kind: str,
    write: Callable[[Path, Path], Path],
    folder: Path,
    expected: list[tuple[float, float]],
    tmp_path: Path,
) -> None:
    out = tmp_path / "data"
    out.mkdir()
    path = write(folder, out)
    how = [f"dataset={kind}", f"dataset.path={path}"]
    how += ["dataset.num_shards=1"] if kind == "images_streaming" else []
    if kind == "images_streaming" and write is as_webdataset:
        with pytest.raises(ConfigError, match="is a folder without data"):
            train(folder, tmp_path / "run", *how)
        return
    found = train(folder, tmp_path / "run", *how)
    if kind == "images":
        assert found == expected
        return
    # an epoch is a pack, of documents in another order
    for of_stream, of_files in zip(found, expected, strict=True):
        assert of_stream == pytest.approx(of_files, rel=1e-5)
