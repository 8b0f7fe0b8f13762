"""Images for a step that is planned: those of the packs with the most of them, or, without data,
images that are half of all tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto.image_processing_auto import (
    IMAGE_PROCESSOR_MAPPING_NAMES,
    get_image_processor_class_from_name,
)

from automodel_lite.attention.spec import config_value
from automodel_lite.config.sizes import ceil_div
from automodel_lite.errors import ConfigError
from automodel_lite.parts.images.costs import count_tower
from automodel_lite.parts.images.sources import blank_image
from automodel_lite.parts.images.tokens import ImageProcessor
from automodel_lite.parts.images.tower import PackedImages
from automodel_lite.thd import ThdBatch

PIXELS = 1 << 20  # of an image, where nothing limits them
_MOST_VALUES = 1 << 26
_OF_VISION = {"patch_size": "patch_size", "merge_size": "spatial_merge_size"}


class AssumedImages:
    """Images of one size, of a model's family.

    described   the model without weights, of whose towers is trained what requires a gradient
    num_pixels  of an image at most
    num_tokens  that an image may have at most
    Raises ConfigError for a family whose image processor cannot be built without its files.
    """

    def __init__(self, described: Any, num_pixels: int | None, num_tokens: int) -> None:
        self.described = described
        self.processor = ImageProcessor("", described.config)
        self.own = _image_processor(described.config)
        pixels = num_pixels or PIXELS
        while True:
            side = max(1, math.isqrt(pixels))
            self.size = (side, side)
            self.num_rows, self.flops = count_tower(described, self._record(1))
            if self.num_rows <= num_tokens or side < 16:
                return
            pixels = min(pixels // 2, pixels * num_tokens // self.num_rows)

    def __str__(self) -> str:
        width, height = self.size
        return f"images of {width} x {height} pixels, {self.num_rows:,} tokens each"

    def of(self, num_tokens: int, num_ranks: int) -> PackedImages:
        """Returns images that have half of the tokens, of which rank 0 of those that share them
        runs its part.
        """
        num_images = max(1, num_tokens // 2 // self.num_rows)
        num_own = ceil_div(num_images, num_ranks)
        owner = torch.arange(num_images * self.num_rows) // self.num_rows % num_ranks
        return PackedImages(
            self._of_many(num_own),
            num_own * self.num_rows,
            torch.arange(num_images * self.num_rows),
            types=torch.zeros(num_tokens, dtype=torch.long),
            work=num_images * self.flops,
            owner=owner if num_ranks > 1 else None,
        )

    def _record(self, num: int) -> dict[str, Tensor]:
        made = self.own(images=[blank_image(*self.size)] * num, return_tensors="pt")
        return {name: made[name] for name in self.processor.accepted if name in made}

    def _of_many(self, num: int) -> dict[str, Tensor]:
        """Returns the record of equal images, whose pixels nobody has computed."""
        one = self._record(1)
        two = self._record(2)
        found = {}
        for name, value in one.items():
            sizes = zip(value.shape, two[name].shape)
            dim = next(place for place, (of_one, of_two) in enumerate(sizes) if of_one != of_two)
            shape = list(value.shape)
            shape[dim] += (num - 1) * (two[name].shape[dim] - shape[dim])
            if not value.is_floating_point():
                found[name] = torch.cat([value] * num, dim)
            elif math.prod(shape) > _MOST_VALUES:
                found[name] = torch.ones(()).expand(shape)
            else:
                found[name] = torch.ones(shape)
        return found


def _image_processor(config: PretrainedConfig) -> Any:
    """Returns a family's image processor as its code sets it, with the patches of the model."""
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(config.model_type) or {}
    name = names.get("pil") or names.get("torchvision")
    kind = name and get_image_processor_class_from_name(name)
    if not kind:
        raise ConfigError(
            f"model_type={config.model_type} has no processor of images in transformers: name data "
            "to plan with, dataset.path=..."
        )
    vision = config.vision_config
    own = {key: config_value(vision, of) for key, of in _OF_VISION.items()}
    return kind(**{key: value for key, value in own.items() if value is not None})


def with_images(batch: ThdBatch, images: PackedImages, config: PretrainedConfig) -> ThdBatch:
    """Returns a batch whose first tokens are the places of images."""
    num_places = len(images.rows)
    ids = batch.input_ids.clone()
    processor = ImageProcessor("", config)
    ids[:num_places] = processor.token_id
    places = torch.zeros_like(ids)
    places[:num_places] = 1
    columns = {**batch.columns, "image": places}
    if processor.rope_rule is not None:
        columns["rope_shift"] = torch.zeros_like(ids)
    images = replace(images, types=places, seen={})
    return replace(batch, input_ids=ids, columns=columns, images=images)
