"""At start-up: what the family's code does with images, seen on two small ones.

    stream    B | A | B            A and B are chats with an image each
    again     B | A' | B           another picture of the same size in A

The logits of B may depend neither on its place nor on the picture in A; those of A must.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from automodel_lite.attention.documents import runs_by_rows
from automodel_lite.attention.interface import tolerance_std
from automodel_lite.attention.spec import UNPACKED
from automodel_lite.data.feeding.source import PackSource
from automodel_lite.data.packing.packs import lay_out_packs
from automodel_lite.data.reading.documents import IMAGE
from automodel_lite.data.tokens.token_rows import flatten
from automodel_lite.data.tokens.tokenize import DocumentTokenizer
from automodel_lite.errors import ConfigError
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parts.images.packs import read_images
from automodel_lite.parts.images.rows import IMAGES, PlacedImage, number_of
from automodel_lite.parts.images.sources import ImageLimits, noise_image, source_of
from automodel_lite.parts.images.tokens import ImageJob
from automodel_lite.parts.images.tower import TYPES
from automodel_lite.thd import ThdBatch, TowerInputs, stream_of, to_thd
from automodel_lite.training.build import BuiltModel

SIZES = ((96, 64), (64, 112))
_QUESTIONS = ([0, 1, 1, 1, 0, 0, 1, 1, 0], [0] * 6 + [1] * 3)
"""Types of tokens of a document with two images, and of one with a prefix."""


@torch.no_grad()
def check_model(data: PackSource, built: BuiltModel, mesh: Mesh) -> None:
    """Raises ConfigError for a model that cannot be trained on packs with images; every rank calls
    it.
    """
    job = data.job
    lm = built.model.loss_model.lm
    assert isinstance(job, ImageJob)
    name = type(lm).__name__
    if runs_by_rows(lm):
        raise ConfigError(
            f"{name} mixes tokens in its own code, which packs with images do not support: "
            f"{UNPACKED}."
        )
    if "mm_encoder_outputs" not in inspect.signature(type(lm).forward).parameters:
        raise ConfigError(
            f"{name}: its forward does not take features of images (mm_encoder_outputs), in this "
            f"version of transformers ({transformers.__version__}): {UNPACKED}."
        )
    if sees_ahead(built, mesh):
        raise ConfigError(
            f"{name} lets the tokens of an image, or of a prompt, see what follows them, which "
            "packs with images do not support yet: use a family whose attention is causal."
        )
    model = built.model
    was_training = model.module.training
    model.module.eval()
    streams = _streams(job)
    one, other = (model.logits(batch.to(mesh.device)).float() for batch in streams)
    model.module.train(was_training)
    model.free_gathered()
    lens = streams[0].cu_seqlens.diff().tolist()[:3]
    first, changed, last = one[: sum(lens)].split(lens)
    _, of_other, behind_other = other[: sum(lens)].split(lens)
    limit = tolerance_std(model.compute_dtype) * float(last.std())
    if not max(float((first - last).abs().max()), float((last - behind_other).abs().max())) < limit:
        raise ConfigError(
            f"{name}: the images of a pack change the logits of other documents: {UNPACKED}."
        )
    if torch.equal(changed, of_other):
        raise ConfigError(
            f"{name}: the pixels of an image do not change the logits of its document."
        )


@dataclass(frozen=True)
class _Question(TowerInputs):
    """Types of tokens, without an image."""

    types: Tensor

    def model_inputs(self, lm: Any, batch: ThdBatch) -> dict[str, Any]:
        known = inspect.signature(type(lm).forward).parameters
        types = {name: self.types[None] for name in TYPES if name in known}
        return batch.model_inputs() | types


def sees_ahead(built: BuiltModel, mesh: Mesh) -> bool:
    """Asks the model's own mask code whether any token sees those behind it."""
    found: list[bool] = []

    def read(mask_function: Any, q_length: int, **kwargs: Any) -> None:
        places = torch.arange(q_length, device=mesh.device)
        zero = torch.zeros((), dtype=torch.long)
        zero = zero.to(mesh.device)
        visible = mask_function(zero, zero, places[:, None], places[None])
        found.append(bool(visible.expand(q_length, q_length).triu(1).any()))

    ALL_MASK_ATTENTION_FUNCTIONS.register(built.decided.kernel.name, read)
    try:
        with torch.no_grad():
            for question in _QUESTIONS:
                types = torch.tensor(question)
                batch = stream_of([torch.full_like(types, 5)])
                asked = replace(batch, images=_Question(types))
                built.model.logits(asked.to(mesh.device))
    finally:
        # with a mask function of any kind, transformers asks in every step whether positions are
        # those of several documents, which waits for the device
        del ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[built.decided.kernel.name]
    built.model.free_gathered()
    return any(found)


class _Pictures:
    """Images in memory, as a set of which the workers read."""

    def __init__(self, seeds: tuple[int, ...]) -> None:
        sizes = (SIZES[1], SIZES[0], SIZES[1])
        self.images = [noise_image(*size, seed) for size, seed in zip(sizes, seeds)]

    def pixels(self, row: int, place: int) -> Any:
        return self.images[row]


def _streams(job: ImageJob) -> list[ThdBatch]:
    """The two streams, on the host."""
    return [_stream(job, _Pictures(seeds)) for seeds in ((1, 2, 1), (1, 3, 1))]


def _stream(job: ImageJob, pictures: Any) -> ThdBatch:
    limits = ImageLimits(Path(), most_pixels=max(width * height for width, height in SIZES))
    tokenizer = DocumentTokenizer(job)
    rows = []
    for row, image in enumerate(pictures.images):
        source = source_of(image, "picture")
        placed = [PlacedImage(number_of(0, row, 0), source, limits)]
        said = [{"role": "user", "content": f"{IMAGE}a"}, {"role": "assistant", "content": "b"}]
        chunk = tokenizer.chunk([("start-up", {"messages": said, IMAGES: placed})])
        rows.append({name: np.asarray(x) for name, x in chunk.columns.items()})
    flat = flatten(rows)
    size = int(flat.lengths.sum())
    batch = lay_out_packs(flat, flat.offsets[:-1], flat.lengths, np.array([len(flat)]), size)
    images = read_images(batch.columns, job.processor, [pictures])
    return to_thd({**batch.collated(), "images": images})
