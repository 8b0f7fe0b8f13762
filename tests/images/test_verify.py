"""recipes/verify.py compares packs with images with each document alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import recipes.verify
from automodel_lite.parts.images.packs import ImageReader
from tests.images.families import write_chats, write_model
from tests.images.test_exact import config_of_images
from tests.ranks import run_ranks
from tests.tiers import only_in_ci, rarely

SMALL = ["packed_sequence.packed_sequence_size=128", "model.train_towers=true"]


def verify(folder: Path, *more: str) -> int:
    return recipes.verify.main(config_of_images(folder, *SMALL, *more))


@pytest.mark.parametrize("family", ["qwen3_vl", *only_in_ci("gemma3"), *rarely("internvl")])
def test_one_process(
    family: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_chats(tmp_path, 12)
    write_model(family, tmp_path)
    assert verify(tmp_path) == 0
    said = capsys.readouterr().out
    assert "PASS: 7 checks" in said
    assert "fault: images change places" in said
    read = ImageReader.read

    def exchanged(*given: Any) -> Any:
        images = read(*given)
        return replace(images, rows=images.rows.flip(0))

    monkeypatch.setattr(ImageReader, "read", exchanged)
    assert verify(tmp_path) == 1


def verify_on_rank(rank: int, world_size: int, folder: Path) -> int:
    return verify(folder, "mesh.cp=2", "packed_sequence.slot_multiple=4")


@pytest.mark.slow
def test_ranks_that_share_images(tmp_path: Path) -> None:
    write_chats(tmp_path, 12)
    write_model("qwen3_vl", tmp_path)
    assert run_ranks(verify_on_rank, 2, tmp_path) == [0, 0]
