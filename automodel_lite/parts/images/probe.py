"""At start-up: what the family's code does with images, seen on two small ones.

    stream    B | A | B            A and B are chats with an image each
    again     B | A' | B           another picture of the same size in A
    alone     B                    in a call of processor and tower of its own

The logits of B may depend neither on its place nor on the picture in A; those of A must.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from automodel_lite.attention.documents import runs_by_rows
from automodel_lite.attention.isolation import tolerance_std
from automodel_lite.attention.kernel import AHEAD_CURE, AheadKernel, refuse
from automodel_lite.attention.spec import UNPACKED
from automodel_lite.data.document import IMAGE
from automodel_lite.data.feeding.source import PackSource
from automodel_lite.data.tokens.chunks import DocumentTokenizer
from automodel_lite.errors import ConfigError
from automodel_lite.evaluation.questions import IMAGES
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parts.images.ahead import Rules
from automodel_lite.parts.images.packs import Pictures, stream_of_rows
from automodel_lite.parts.images.rows import placed_images
from automodel_lite.parts.images.sources import ImageLimits, noise_image, source_of
from automodel_lite.parts.images.tokens import ImageJob
from automodel_lite.thd import ThdBatch
from automodel_lite.training.build import BuiltModel

SIZES = ((96, 64), (64, 112))


@torch.no_grad()
def check_model(data: PackSource, built: BuiltModel, mesh: Mesh) -> None:
    """Raises ConfigError for a model that cannot be trained on packs with images; every rank calls
    it.
    """
    job = data.job
    model = built.model
    lm = model.loss_model.lm
    assert isinstance(job, ImageJob)
    check_family(lm, job.processor.rules, built.decided.kernel)
    was_training = model.module.training
    model.module.eval()
    streams = [_stream(job, *seeds) for seeds in ((1, 2, 1), (1, 3, 1), (1,))]
    logits = [model.logits(batch.to(mesh.device)).float() for batch in streams]
    model.module.train(was_training)
    model.free_gathered()
    lens = streams[0].cu_seqlens.diff().tolist()[:3]
    check_images_apart(type(lm).__name__, logits, lens, tolerance_std(model.compute_dtype))


def check_family(lm: transformers.PreTrainedModel, rules: Rules, kernel: Any) -> None:
    """Raises ConfigError for a family whose code shows that it cannot be trained on packs with
    images.
    """
    name = type(lm).__name__
    if runs_by_rows(lm):
        raise ConfigError(
            f"{name} mixes tokens in its own code, which packs with images do not support: "
            f"{UNPACKED}."
        )
    check_forward(type(lm))
    if rules and not isinstance(kernel, AheadKernel):
        raise refuse(kernel, f"the images of {name}, whose tokens see each other", AHEAD_CURE)


def check_forward(kind: type[transformers.PreTrainedModel]) -> None:
    """Raises ConfigError for a class of models whose forward does not take features of images in
    place of pixels.
    """
    known = inspect.signature(kind.forward).parameters
    if "mm_encoder_outputs" not in known:
        raise ConfigError(
            f"{kind.__name__}: its forward does not take features of images (mm_encoder_outputs), "
            f"in this version of transformers ({transformers.__version__}): {UNPACKED}."
        )
    for name, parameter in known.items():
        is_named = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if is_named and name != "self" and parameter.default is parameter.empty:
            raise ConfigError(
                f"{kind.__name__}: its forward asks for {name} of every document, also of text: "
                f"{UNPACKED}."
            )


def check_images_apart(
    name: str, logits: Sequence[Tensor], lens: Sequence[int], limit_std: float
) -> None:
    """Raises ConfigError unless images act on their own documents alone.

    logits  [T, V] of the three streams; `lens` are the lengths of the documents of the first
    """
    (first, changed, last), (_, of_other, behind_other) = (
        stream[: sum(lens)].split(list(lens)) for stream in logits[:2]
    )
    alone = logits[2][: lens[0]]
    limit = limit_std * float(last.std())
    if not float((alone - first).abs().max()) < limit:
        raise ConfigError(
            f"{name}: what its processor and towers make of an image depends on the images beside "
            f"it: {UNPACKED}."
        )
    if not max(float((x - first).abs().max()) for x in (last, behind_other)) < limit:
        raise ConfigError(
            f"{name}: the images of a pack change the logits of other documents: {UNPACKED}."
        )
    if torch.equal(changed, of_other):
        raise ConfigError(
            f"{name}: the pixels of an image do not change the logits of its document."
        )


def _stream(job: ImageJob, *seeds: int) -> ThdBatch:
    sizes = (SIZES[1], SIZES[0], SIZES[1])
    pictures = [noise_image(*size, seed) for size, seed in zip(sizes, seeds)]
    limits = ImageLimits(Path(), most_pixels=max(width * height for width, height in SIZES))
    tokenizer = DocumentTokenizer(job)
    rows = []
    for row, image in enumerate(pictures):
        placed = placed_images(0, row, [source_of(image, "picture")], limits)
        said = [{"role": "user", "content": f"{IMAGE}a"}, {"role": "assistant", "content": "b"}]
        chunk = tokenizer.chunk([("start-up", {"messages": said, IMAGES: placed})])
        rows.append({name: np.asarray(x) for name, x in chunk.columns.items()})
    return stream_of_rows(rows, job.processor, Pictures([[image] for image in pictures]))
