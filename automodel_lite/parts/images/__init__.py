"""Images in packs: documents whose tokens are, in part, places of images (`dataset=images`)."""

from __future__ import annotations

import numpy as np

from automodel_lite.data.feeding.planned import PlannedPacks
from automodel_lite.data.feeding.source import PackSource
from automodel_lite.errors import ConfigError
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.training.build import BuiltModel


def images_line(data: PackSource) -> str:
    """Returns how many images the training data have and how many of its tokens are theirs; nothing
    for text.
    """
    if not isinstance(data, PlannedPacks) or "image" not in data.columns:
        return ""
    rows = data.tokens.train
    numbers = rows.flat.columns["image"]
    places, of_token = numbers.positive()
    num_images = len(np.unique(of_token))
    return (
        f"train: {num_images:,} images are {len(places):,} of {rows.num_tokens:,} tokens "
        f"({len(places) / max(1, rows.num_tokens):.0%})"
    )


def check_images(data: PackSource, built: BuiltModel, mesh: Mesh) -> None:
    """Checks a model that is trained on packs with images at start-up; every rank calls it.

    Raises ConfigError for a model that cannot be, and for towers that no data reach.
    """
    if "image" in (data.columns or ()):
        if built.decided.model.mtp_loss:
            raise ConfigError(
                "model.mtp_loss with dataset=images: heads for further tokens read embeddings of "
                "text, and places of images have none: set model.mtp_loss=0."
            )
        from automodel_lite.parts.images.probe import check_model  # with Pillow

        check_model(data, built, mesh)
    elif built.decided.model.train_towers:
        raise ConfigError(
            "model.train_towers=true trains what only images reach, and the data have none: set "
            "dataset=images, or model.train_towers=false."
        )
