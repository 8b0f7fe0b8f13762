"""The tokens of an image from its size alone, and positions joined from pieces: those of the whole processor and rule."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, ProcessorMixin
from transformers.utils import is_torchvision_available

from automodel_lite.errors import ConfigError
from automodel_lite.parts.images import tokens as of_tokens
from automodel_lite.parts.images.axes import axes_of
from automodel_lite.parts.images.sizes import SizeTable
from automodel_lite.parts.images.tokens import ImageProcessor
from tests.images.families import FAMILIES, write_chats, write_model
from tests.images.test_exact import config_of_images, data_of


def processor_of(family: str, folder: Path) -> ImageProcessor:
    write_model(family, folder)
    return ImageProcessor(str(folder), AutoConfig.from_pretrained(folder))


@pytest.fixture(autouse=True)
def as_before_transformers_5_23(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a processor have to be told which they may be."""
    merge = ProcessorMixin._merge_kwargs

    def older(self: Any, *kinds: Any, **given: Any) -> Any:
        asks = sys._getframe(1).f_globals["__name__"]
        assert kinds or not asks.startswith("automodel_lite."), asks
        return merge(self, *kinds, **given)

    monkeypatch.setattr(ProcessorMixin, "_merge_kwargs", older)


@pytest.mark.skipif(is_torchvision_available(), reason="its processor can be loaded")
def test_a_processor_whose_package_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"requires the Torchvision library.*install the pack"):
        ImageProcessor(str(tmp_path), AutoConfig.for_model("mistral3")).own  # noqa: B018


def test_a_model_of_text_has_no_processor_of_images(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_type=llama has no processor of images"):
        ImageProcessor(str(tmp_path), AutoConfig.for_model("llama")).own  # noqa: B018


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_one_key_are_asked_once(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("automodel_lite.parts.images.sizes.NUM_COMPARED", 0)
    processor = processor_of(family, tmp_path)
    fast, slow = processor.sizes, SizeTable(processor.own, processor.process, processor.token)
    slow.has_keys = False
    sizes = np.random.default_rng(0).integers(20, 200, (60, 2)).tolist()
    for width, height in sizes:
        assert fast.of_size(width, height).is_like(slow.of_size(width, height)), (width, height)
    assert fast.has_keys
    assert fast.num_asked < len(sizes) == slow.num_asked


def test_a_family_whose_sizes_differ_is_asked_for_each(tmp_path: Path) -> None:
    processor = processor_of("qwen3_vl", tmp_path)
    table = SizeTable(processor.own, processor.process, processor.token)
    table.resized = lambda width, height: (1, 1)
    processor.own._get_num_multimodal_tokens = lambda image_sizes: type(
        "Counted", (), {"num_image_tokens": [1], "num_image_patches": [1]}
    )
    found = [table.of_size(width, 60).num_rows for width in (60, 120, 180)]
    assert found == [4, 8, 4]
    assert not table.has_keys


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_positions_are_joined_as_the_rule_gives_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(family, tmp_path)
    write_chats(tmp_path, num=16)
    shifts = []
    for number in (0, 1000):
        monkeypatch.setattr(of_tokens, "NUM_COMPARED", number)
        data: Any = data_of(config_of_images(tmp_path, f"cache_dir={tmp_path}/{number}"))
        shifts.append(np.concatenate([row["rope_shift"] for row in data.tokens.train]))
    assert np.array_equal(*shifts)
    assert len(np.unique(axes_of(shifts[0], 3))) > 4
