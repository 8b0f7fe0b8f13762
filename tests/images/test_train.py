"""Whole runs on packs with images."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from automodel_lite.config.schema import DataloaderConfig
from automodel_lite.data.feeding.feed import read_batches
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.parts.images.rows import find
from recipes import inspect_data, train_ft
from tests.images.families import draw, write_chats, write_model
from tests.images.test_exact import batches_of, config_of_images, data_of
from tests.runs import config_of, losses, rows_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3_vl")
    write_chats(made, num=12)
    return write_model("qwen3_vl", made)


def train(folder: Path, run: Path, *more: str) -> list[tuple[float, float]]:
    config = config_of_images(
        folder,
        f"output_dir={run}",
        "packed_sequence.packed_sequence_size=128",
        "training.log_every_steps=1",
        "training.num_threads=1",
        "checkpoint.export_hf=false",
        "optimizer.lr=0.01",
        *more,
    )
    assert train_ft.main(config) == 0
    return losses(rows_of(run)) if not config.dry_run else []


@pytest.mark.parametrize("towers", ["false", "true"])
def test_a_run_trains_the_language_model_and_the_tower_if_asked(
    towers: str, folder: Path, tmp_path: Path
) -> None:
    got = train(folder, tmp_path, f"model.train_towers={towers}")
    assert len(got) == 3
    assert got[-1][0] < got[0][0]


def test_what_is_trained_on_is_shown_with_its_images(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_data.main(config_of_images(folder), tmp_path / "page.html") == 0
    screen = capsys.readouterr().out
    assert "train: 15 images of 125,020 pixels are 84 tokens (22%), text is 297" in screen
    assert "<|vision_start|> <|image_pad|> × 4 <|vision_end|>" in screen
    shown = re.findall(r"image (chats.jsonl:\d+ \d+.png: \d+ × \d+, \d tokens)", screen)
    assert len(shown) == 15  # of the twelve documents of a page
    page = (tmp_path / "page.html").read_text()
    assert page.count('<img src="data:image/jpeg;base64,') == 15
    assert all(f", {caption}</span>" in page for caption in shown)


def broken(folder: Path, tmp_path: Path, **rows: Any) -> Path:
    """A data file beside those of the folder, with a row more."""
    path = tmp_path / "more.jsonl"
    lines = (folder / "chats.jsonl").read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps(rows)]))
    return path


SAID = [{"role": "user", "content": "<image>a"}, {"role": "assistant", "content": "b"}]


def test_a_bad_image_is_an_error_with_its_row_or_dropped_and_counted(
    folder: Path, tmp_path: Path
) -> None:
    data_file = broken(folder, tmp_path, messages=SAID, images=["nowhere.png"])
    damaged = bytearray((folder / "0.png").read_bytes())
    damaged[200:600] = bytes(400)  # which only decoding finds
    (tmp_path / "damaged.png").write_bytes(damaged)
    row = {"messages": SAID, "images": [str(tmp_path / "damaged.png")]}
    data_file.write_text(f"{data_file.read_text()}\n{json.dumps(row)}")
    given = [f"dataset.path={data_file}", f"dataset.image_dir={folder}"]
    with pytest.raises(DataError, match=r"more.jsonl:13: image nowhere.png cannot be read"):
        data_of(config_of_images(folder, *given))
    data = data_of(
        config_of_images(folder, *given, "dataset.bad_image=drop", "tokenize.max_bad_frac=0.5")
    )
    assert data.counts["data/train/num_bad"] == 2
    assert data.counts["data/train/num_rows"] == 12
    assert batches_of(data)


def test_a_file_that_was_replaced_is_named(tmp_path: Path, folder: Path) -> None:
    draw(tmp_path / "a.png", 56, 56, seed=0)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": SAID, "image": "a.png"}))
    data = data_of(config_of_images(folder, f"dataset.path={tmp_path}/a.jsonl"))
    assert len(batches_of(data)) == 1
    draw(tmp_path / "a.png", 56, 56, seed=1)
    problem = r"^a.jsonl:1: image a.png .* file was replaced"
    with pytest.raises(DataError, match=problem):
        batches_of(data)
    one_pack = [np.array([[[0]]])]
    with pytest.raises(DataError, match=problem):  # of a worker, too
        next(iter(read_batches(data.packs_of(0), one_pack, 0, DataloaderConfig(num_workers=1))))


def test_held_out_rows_of_the_same_words_are_others_by_their_pictures(
    tmp_path: Path, folder: Path
) -> None:
    for name, seeds in {"train": [0, 1], "val": [1, 2]}.items():
        lines = []
        for seed in seeds:
            draw(tmp_path / f"{name}{seed}.png", 56, 56, seed=seed)
            lines.append(json.dumps({"messages": SAID, "image": f"{name}{seed}.png"}))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    given = [f"dataset.path={tmp_path}/train.jsonl", f"dataset.val_path={tmp_path}/val.jsonl"]
    notes = "\n".join(data_of(config_of_images(folder, *given)).notes)
    assert "val: 1 of 2 rows is also trained on" in notes


def test_pictures_in_other_colors_are_noted(tmp_path: Path, folder: Path) -> None:
    lines = []
    for name, mode in {"plain": "RGB", "printed": "CMYK"}.items():
        Image.new(mode, (56, 56)).save(tmp_path / f"{name}.jpg")
        lines.append(json.dumps({"messages": SAID, "image": f"{name}.jpg"}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    notes = data_of(config_of_images(folder, f"dataset.path={tmp_path}/a.jsonl")).notes
    assert (
        "NOTE: train: 1 document has images in other colors than sRGB's, which are read as they are "
        "stored (first: a.jsonl:2: CMYK without a profile): as transformers and vLLM read them; "
        "convert them to sRGB where their colors matter"
    ) in notes


@pytest.mark.system
def test_a_mixture_of_images_and_text(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"prompt": "ab", "completion": "c"}) for _ in range(9)))
    images = "_target_: automodel_lite.parts.images.dataset.ImageFiles"
    plain = "_target_: automodel_lite.data.reading.files.FilesDataset"
    sources = [
        f"text: {{dataset: {{{plain}, path: {text}}}}}",
        f"one: {{dataset: {{{images}, path: {folder}/chats.jsonl}}}}",
        f"two: {{dataset: {{{images}, path: {folder}/chats.jsonl, max_documents: 1}}}}",
    ]
    config = config_of(
        "finetune",
        tmp_path,
        "name=images",
        "dataset=mixture",
        f"dataset.sources={{{', '.join(sources)}}}",
        f"model.pretrained={folder}",
        "packed_sequence.packed_sequence_size=1024",
        "training.global_batch_size=1",
        "training.max_steps=3",
    )
    (batch,) = batches_of(data_of(config))
    numbers = batch.columns["image"].unique().tolist()
    assert {find(number)[0] for number in numbers[1:]} == {0, 1}
    images_of_batch: Any = batch.images
    # of the second set, the image is another file's row, and read again
    assert len(images_of_batch.rows) == images_of_batch.num_rows
    assert len(numbers) == 1 + 15 + 1


def names_of(packs: Any) -> list[str]:
    """The images of all packs; the stamp of each was that of its document's."""
    names = []
    for number in range(len(packs)):
        batch = packs.__getitems__([number])
        for image in np.unique(batch.row["image"])[1:]:
            which, row, place = find(int(image))
            names.append(packs.reader.sets[which].name(row, place).split()[1])
    return names


def test_images_go_with_their_documents_wherever_these_go(folder: Path) -> None:
    """Held out by a fraction, left out by max_packs, in another order, packed anew: the same images, each once."""
    all_images = {f"{number}.png" for number in range(15)}
    more = ["dataset.val_frac=0.25", "packed_sequence.packed_sequence_size=64"]
    data = data_of(config_of_images(folder, *more))
    train = names_of(data.packs_of(0))
    (val,) = map(names_of, data.val_packs.values())
    assert sorted(train + val, key=lambda name: int(name[:-4])) == sorted(
        all_images, key=lambda name: int(name[:-4])
    )
    assert val
    few = data_of(config_of_images(folder, *more, "packed_sequence.max_packs=2")).packs_of(0)
    assert len(few) == 2
    assert set(names_of(few)) < set(train)
    again = data_of(config_of_images(folder, *more, "packed_sequence.repack_each_epoch=true"))
    first, second = (names_of(again.packs_of(epoch)) for epoch in (0, 1))
    assert first != second
    assert set(first) == set(second) == set(train)


def test_an_image_of_two_documents_is_read_once(folder: Path, tmp_path: Path) -> None:
    rows = [{"messages": SAID, "image": f"{number}.png"} for number in (0, 1, 0, 0)]
    path = tmp_path / "twice.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    given = [f"dataset.path={path}", f"dataset.image_dir={folder}"]
    (batch,) = batches_of(data_of(config_of_images(folder, *given)))
    images: Any = batch.images
    assert len(batch.columns["image"].unique()) == 1 + 2
    assert len(images.rows) > images.num_rows


def test_images_that_differ_in_the_middle_are_two(folder: Path, tmp_path: Path) -> None:
    """Pictures without compression, of one size, whose first and last bytes are the same."""
    for number in range(3):
        picture = Image.new("RGB", (200, 200), "white")
        picture.paste(("red", "blue", "red")[number], (90, 90, 110, 110))
        picture.save(tmp_path / f"{number}.bmp")
    given: list[Any] = ["0.bmp", "1.bmp", "2.bmp"]
    given.append("data:;base64," + base64.b64encode((tmp_path / "1.bmp").read_bytes()).decode())
    rows = [{"messages": SAID, "image": one} for one in given]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = f"dataset.path={tmp_path}/rows.jsonl"
    (batch,) = batches_of(data_of(config_of_images(folder, path)))
    places = {find(number)[1] for number in batch.columns["image"].unique().tolist()[1:]}
    assert places == {0, 1}  # the third is the first, the fourth the second


def test_an_image_is_decoded_once_in_a_batch(folder: Path) -> None:
    batch = batches_of(data_of(config_of_images(folder)))[0]
    assert batch.images is not None
    images: Any = batch.images
    assert len(images.rows) == images.num_rows == int((batch.columns["image"] > 0).sum())
    assert isinstance(images.record["pixel_values"], torch.Tensor)


@pytest.mark.parametrize("how", ["images", "images_streaming"])
def test_documents_over_a_pack_are_told_of_no_cut(how: str, folder: Path) -> None:
    small = [f"dataset={how}", "packed_sequence.packed_sequence_size=8"]
    with pytest.raises(DataError, match=r"over packed_sequence\.packed_sequence_size=8") as error:
        data_of(config_of_images(folder, *small))
    assert "split" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["packed_sequence.overlong=split"], "overlong=split: documents with images are not cut"),
        (
            ["packed_sequence.strategy=wrapped"],
            "strategy=wrapped: documents with images are not cut",
        ),
        (["tokenizer=bpe"], "goes with the tokenizer of its processor"),
    ],
)
def test_what_images_are_not_crossed_with_is_refused(
    settings: list[str], problem: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        data_of(config_of_images(folder, *settings))


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({}, "its rows are tokens, and dataset=images makes those of its documents itself"),
        ({"image": "0.png"}, "bring messages or texts, of which the tokens are made here"),
    ],
)
def test_rows_of_tokens_are_refused(
    more: dict[str, str], problem: str, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.jsonl"
    path.write_text(json.dumps({"input_ids": [3, 4], "labels": [3, 4], **more}))
    with pytest.raises(ValueError, match=problem):
        data_of(config_of_images(folder, f"dataset.path={path}"))


def test_towers_that_no_data_reach_are_refused(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"prompt": "ab", "completion": "c"}) for _ in range(9)))
    more = ["dataset=files", f"dataset.path={text}", "model.train_towers=true"]
    with pytest.raises(ConfigError, match=r"model.train_towers=true trains what only images reach"):
        train(folder, tmp_path / "run", *more)


def test_towers_that_no_step_calls_wait_for_no_gradient(folder: Path, tmp_path: Path) -> None:
    """Text trains a sharded model whose towers it does not meet, over two micro-batches in bf16; and is counted."""
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"prompt": "ab", "completion": "c"}) for _ in range(40)))
    more = ["dataset=files", f"dataset.path={text}", "training.global_batch_size=2"]
    more += ["training.max_steps=2", "mesh.strategy=fsdp"]
    plain = train(folder, tmp_path / "fp32", *more)
    assert len(plain) == 2
    got = train(folder, tmp_path / "bf16", *more, "training.precision=bf16")
    assert got[0][0] == pytest.approx(plain[0][0], rel=1e-2)
    train(folder, tmp_path / "counted", *more, "dry_run=true")


@pytest.mark.system
def test_a_family_whose_prompts_see_themselves_is_refused(tmp_path: Path) -> None:
    write_chats(tmp_path, num=4)
    write_model("paligemma", tmp_path)
    with pytest.raises(ConfigError, match="model_type=paligemma: its prompts see themselves"):
        train(tmp_path, tmp_path / "run")
