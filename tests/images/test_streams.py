"""Streams with images: the images of every document, the same after a stop, read again where they were long ago."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_lite.config.schema import MeshConfig
from automodel_lite.data.feeding.source import Cursor
from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.extras.inspection import first_documents
from automodel_lite.models.flops import CostModel
from automodel_lite.parallel.mesh import init_mesh
from automodel_lite.parts.images import streams
from automodel_lite.thd import to_thd
from tests.images.families import draw, write_chats, write_model
from tests.images.test_exact import batches_of, config_of_images, data_of

STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stream")
    write_chats(made, num=24)
    return write_model("qwen3_vl", made)


def streamed(folder: Path, *more: str) -> Any:
    return data_of(
        config_of_images(
            folder,
            "dataset=images_streaming",
            "dataset.num_shards=2",
            "packed_sequence.packed_sequence_size=128",
            *more,
        )
    )


def steps_of(data: Any, cursor: Cursor | None = None, num: int = STEPS) -> list[tuple[Any, Cursor]]:
    found = []
    steps = data.steps(cursor or Cursor(), init_mesh(MeshConfig()), CostModel(1.0, 0.0))
    for _ in range(num):
        step = next(steps)
        (batch,) = step.micro_batches
        found.append((to_thd(batch), step.after))
    return found


def check_same(one: Any, other: Any) -> None:
    assert torch.equal(one.input_ids, other.input_ids)
    assert torch.equal(one.images.rows, other.images.rows)
    for name, value in one.images.record.items():
        assert torch.equal(value, other.images.record[name])


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.system)])
def test_a_stream_goes_on_with_its_images(num_workers: int, folder: Path) -> None:
    given = f"dataloader.num_workers={num_workers}"
    whole = steps_of(streamed(folder, given))
    assert sum(batch.images.num_rows for batch, _ in whole) > 40
    behind = steps_of(streamed(folder, given), whole[1][1], STEPS - 2)
    for (one, _), (other, _) in zip(whole[2:], behind, strict=True):
        check_same(one, other)


def test_a_stream_has_the_images_of_the_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row with its own; some are read again, as only the latest are remembered."""
    monkeypatch.setattr(streams, "MOST_KEPT", 2)
    found = {}
    for batch, _ in steps_of(streamed(folder)):
        found |= rows_by_document(batch)
    expected = {}
    for batch in batches_of(data_of(config_of_images(folder))):
        expected |= rows_by_document(batch)
    assert len(found) > 8
    for ids, record in found.items():
        assert torch.equal(record, expected[ids])


def rows_by_document(batch: Any) -> dict[tuple[int, ...], torch.Tensor]:
    """The patches of each document with images, by its tokens; of this family, 4 of each place."""
    patches = batch.images.record["pixel_values"].unflatten(0, (-1, 4))
    image = batch.columns["image"]
    row = torch.full_like(image, -1)
    row[image > 0] = batch.images.rows
    found = {}
    edges = batch.cu_seqlens.tolist()
    for start, stop in pairwise(edges):
        own = row[start:stop]
        if (own >= 0).any():
            found[tuple(batch.input_ids[start:stop].tolist())] = patches[own[own >= 0]]
    return found


def test_a_bad_image_of_a_stream_is_named_or_counted(folder: Path, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "<image>a"}, {"role": "assistant", "content": "b"}]
    draw(tmp_path / "a.png", 56, 56, seed=0)
    rows = [{"messages": said, "image": name} for name in ("a.png", "gone.png", "a.png")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = (f"dataset.path={tmp_path}/rows.jsonl", "dataset.num_shards=1")
    with pytest.raises(DataError, match=r"rows.jsonl:2: image gone.png cannot be read"):
        streamed(folder, *given)
    data = streamed(folder, *given, "dataset.bad_image=drop", "tokenize.max_bad_frac=0.5")
    ((batch, _),) = steps_of(data, num=1)
    assert batch.images.num_rows == 4


def test_packs_of_a_stream_with_images_are_read_one_by_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"micro_batch_size=2: a stream with images"):
        streamed(folder, "training.micro_batch_size=2", "training.global_batch_size=2")


def test_what_is_looked_at_is_a_data_set(folder: Path) -> None:
    config = config_of_images(folder, "dataset=images_streaming")
    data = first_documents(config)
    assert isinstance(data.packs_of(0), PackedDataset)
    assert sum(batch.images.num_rows for batch in batches_of(data)) > 40
