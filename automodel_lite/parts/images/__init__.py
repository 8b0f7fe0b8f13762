"""Images in packs: documents whose tokens are, in part, places of images (`dataset=images`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from automodel_lite.data.feeding.planned import PlannedPacks
from automodel_lite.data.feeding.source import PackSource
from automodel_lite.errors import ConfigError, counted
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.training.build import BuiltModel

if TYPE_CHECKING:
    from automodel_lite.evaluation.generator import ChatInputs, Generator
    from automodel_lite.parts.images.show import Picture

NONE = "train: no image"


def images_lines(data: PackSource) -> list[tuple[str, str]]:
    """Returns how many images the training data have and how many of its tokens are theirs, as a
    line of the start block; none for text.
    """
    planned = data.planned
    if not planned or "image" not in planned.columns:
        return []
    from automodel_lite.parts.datasets.mixture import MixedRows  # each part can be deleted
    from automodel_lite.parts.images.sources import PIXEL_BITS  # with Pillow

    num_images = num_pixels = num_places = 0
    rows = planned.tokens.train
    sources = rows.sources if isinstance(rows, MixedRows) else [rows]
    for source in sources:
        image, stamp = (source.flat.columns[name] for name in ("image", "image_stamp"))
        lengths = np.diff(np.append(image.at, image.num_tokens))
        num_places += int(lengths[image.values > 0].sum())
        num_images += int(np.count_nonzero(np.unique(image.values)))
        of_images = np.unique(stamp.values) & ((1 << PIXEL_BITS) - 1)
        num_pixels += int(of_images.sum())
    num_text = rows.num_tokens - num_places
    if not num_images:
        return [("images", NONE)]
    text = (
        f"train: {counted(num_images, 'image')} of {num_pixels:,} pixels are {num_places:,} tokens "
        f"({num_places / max(1, rows.num_tokens):.0%}), text is {num_text:,}"
    )
    return [("images", text)]


def shown_pictures(data: PlannedPacks, row: Mapping[str, np.ndarray]) -> list[Picture]:
    """Returns the images of a token row for looking at; none of text."""
    if "image" not in row:
        return []
    from automodel_lite.parts.images.show import pictures_of  # with Pillow

    return pictures_of(data, row)


def open_images(generator: Generator) -> ChatInputs:
    """Returns the function from a chat with images to the inputs of this generator's model."""
    from automodel_lite.parts.images.answer import inputs_of, processor_of  # with Pillow

    return partial(inputs_of, generator, processor_of(generator))


def check_images(data: PackSource, built: BuiltModel, mesh: Mesh) -> None:
    """Checks a model that is trained on packs with images at start-up; every rank calls it.

    Raises ConfigError for a model that cannot be, for towers that no data reach, and for settings
    of them that do nothing.
    """
    source = built.decided.model
    if data.job.reads_images:
        if source.mtp_loss:
            raise ConfigError(
                "model.mtp_loss with dataset=images: heads for further tokens read embeddings of "
                "text, and places of images have none: set model.mtp_loss=0."
            )
        from automodel_lite.parts.images.probe import check_model  # with Pillow

        if images_lines(data) == [("images", NONE)]:
            raise ConfigError(
                "dataset=images: no row has an image: name their column, "
                "dataset.columns.images=COLUMN, or use dataset=files."
            )
        check_model(data, built, mesh)
    elif source.train_towers:
        raise ConfigError(
            "model.train_towers=true trains what only images reach, and the data have none: set "
            "dataset=images, or model.train_towers=false."
        )
    if source.freeze:
        from automodel_lite.models.freezing import check_frozen  # each part can be deleted

        check_frozen(built.model.loss_model.lm, source.freeze, source.train_towers)
