"""What an image is in tokens: asked from the family's own processor, for a size, once.

    template        <|user|>IMAGE_TOKEN What is it?<|end|>
    expanded        <|user|><row_1_col_1>IMAGE_TOKEN × 64 ... What is it?<|end|>
    column image    0 0 0 n n n ... n 0 0 0          n: the number of the image in the data

The text of an image follows from its size alone, so a blank image of the same size stands for it,
and nothing is decoded before a pack is read. Positions of several axes (mRoPE) are those that the
model's own rule gives the document alone, stored as shifts against its plain positions.
"""

from __future__ import annotations

import inspect
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from automodel_lite.attention.spec import config_value
from automodel_lite.data.reading.documents import IMAGE, Document, Message
from automodel_lite.data.tokens.encode import ChatRenderer, Encoder, Renderer, Rendering
from automodel_lite.data.tokens.tokenize import Job
from automodel_lite.errors import ConfigError, DataError, DroppedError, one_line
from automodel_lite.models.source import describe
from automodel_lite.parts.images.ahead import Rules, find_rules
from automodel_lite.parts.images.rows import IMAGES, PlacedImage
from automodel_lite.parts.images.sources import blank_image

MOST_SIZES = 100_000  # that are remembered
_PROBE = "PROBE"


@dataclass(frozen=True)
class ImageTokens:
    """An image of some size: its text, how many placeholders that holds, what positions follow
    from.
    """

    text: str
    num_rows: int
    grid: dict[str, Tensor]


@dataclass(frozen=True)
class ImageProcessor:
    """A family's processor; pickled as the folder that it is loaded from.

    path    folder or hub name
    config  of the model
    """

    path: str
    config: PretrainedConfig
    options: Mapping[str, Any] = field(default_factory=dict)  # of from_pretrained

    def __reduce__(self) -> tuple:
        return ImageProcessor, (self.path, self.config, self.options)

    @cached_property
    def own(self) -> Any:
        """The processor of transformers, without those of other senses, which have no work here
        and may need packages.
        """
        # with the names of all families
        from transformers.models.auto.processing_auto import (
            PROCESSOR_MAPPING_NAMES,
            processor_class_from_name,
        )

        name = PROCESSOR_MAPPING_NAMES.get(self.config.model_type)
        kind = name and processor_class_from_name(name)
        if not kind or "image_processor" not in kind.get_attributes():
            raise ConfigError(
                f"model_type={self.config.model_type} has no processor of images in transformers: "
                "take a vision-language model, docs/models.md lists them."
            )
        load: dict[str, Any] = {
            "image_processor": transformers.AutoImageProcessor,
            "tokenizer": transformers.AutoTokenizer,
        }

        class OfImages(kind):  # type: ignore[misc, valid-type]
            def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
                """Lets the processors of other senses be missing."""

        try:
            parts = [
                load[name].from_pretrained(self.path, **self.options) if name in load else None
                for name in kind.get_attributes()
            ]
            settings, _ = kind.get_processor_dict(self.path, **self.options)
            made = OfImages.from_args_and_dict(parts, settings)
        except Exception as error:  # whatever a family's code asks for
            raise ConfigError(
                f"dataset.processor={self.path} cannot be loaded as the processor of a "
                f"{self.config.model_type} model: {one_line(error)}"
            ) from error
        if not isinstance(getattr(made, "image_token", None), str):
            raise ConfigError(
                f"the processor of model_type={self.config.model_type} names no token for the "
                "place of an image, so its text cannot be expanded: take another family."
            )
        return made

    @cached_property
    def marker(self) -> str:
        """What stands for an image in a text before it is expanded."""
        return str(self.own.image_token)

    @cached_property
    def token_id(self) -> int:
        """The placeholder, whose embedding the model takes from an image."""
        config = self.config
        of_model = config_value(config, "image_token_id", config_value(config, "image_token_index"))
        if of_model is None:
            raise ConfigError(
                f"model_type={config.model_type} names no token for the place of an image "
                "(image_token_id): take another family, docs/models.md lists them."
            )
        return int(of_model)

    @cached_property
    def token(self) -> str:
        """The placeholder's text."""
        return str(self.own.tokenizer.convert_ids_to_tokens(self.token_id))

    @cached_property
    def accepted(self) -> tuple[str, ...]:
        """Names of what the model's tower takes."""
        check_tower(self.described)
        model: Any = self.described.base_model
        known = inspect.signature(model.get_image_features).parameters
        return tuple(n for n, p in known.items() if p.kind is not p.VAR_KEYWORD)

    @cached_property
    def described(self) -> Any:
        """The model without weights, whose rules are asked."""
        return describe(self.config)

    @cached_property
    def rules(self) -> Rules:
        """Which tokens see those behind them."""
        return find_rules(describe(self.config))

    def process(self, images: Sequence[Any]) -> tuple[dict[str, Tensor], list[str]]:
        """Returns what the tower takes for some images in one call, and the text of each."""
        how = self.own._merge_kwargs(tokenizer_init_kwargs={}, return_tensors="pt")
        made, texts = self.own._process_images(list(images), **how["images_kwargs"])
        record = {}
        for name in self.accepted:
            if name in made:
                record[name] = torch.as_tensor(made[name])
        return record, texts

    def of_size(self, width: int, height: int) -> ImageTokens:
        """Returns what an image of this size is; raises DataError for one that the processor
        refuses.
        """
        return self._of_size(width, height)

    @cached_property
    def _of_size(self) -> Any:
        @lru_cache(maxsize=MOST_SIZES)
        def of_size(width: int, height: int) -> ImageTokens:
            try:
                record, (text,) = self.process([blank_image(width, height)])
            except Exception as error:  # of sizes that a family's code has not thought of
                raise DataError(
                    f"an image of {width} x {height} pixels is refused by the processor "
                    f"({one_line(error)})."
                ) from error
            grid = {n: x for n, x in record.items() if n.endswith("grid_thw")}
            if (num_rows := text.count(self.token)) == 0:
                raise ConfigError(
                    f"dataset.processor={self.path} writes {text[:40]!r} for an image, without the "
                    f"token {self.token} (id {self.token_id}) that the model expects: use the "
                    "model's own processor."
                )
            return ImageTokens(text, num_rows, grid)

        return of_size


def check_tower(lm: transformers.PreTrainedModel) -> None:
    """Raises ConfigError for a model without a tower of images that can be called alone."""
    if not hasattr(lm.base_model, "get_image_features"):
        raise ConfigError(
            f"model_type={lm.config.model_type} has no tower of images that can be called alone "
            "(get_image_features): take another family, docs/models.md lists them."
        )


@dataclass(frozen=True)
class ImageRendering(Rendering):
    """A rendering whose placeholders stand for these images."""

    images: tuple[tuple[int, ImageTokens], ...] = ()


class ImageChatRenderer(ChatRenderer):
    """Renders chats whose contents have marks: as lists of parts, where the template takes them."""

    def __init__(self, *args: Any, marker: str) -> None:
        self.marker = marker
        self._by_template: dict[str, bool] = {}
        super().__init__(*args)

    def _render(
        self, tools: list[Any] | None, template: str, messages: list[Message], prompt: bool = False
    ) -> str:
        if not self._takes_parts(template):
            texts = [m["content"].replace(IMAGE, self.marker) for m in messages]
            plain = [{**m, "content": text} for m, text in zip(messages, texts)]
            return super()._render(tools, template, plain, prompt)
        parts = [{**m, "content": parts_of(m["content"])} for m in messages]
        return super()._render(tools, template, parts, prompt)

    def _takes_parts(self, template: str) -> bool:
        known = self._by_template
        if template not in known:
            content = [{"type": "image"}, {"type": "text", "text": _PROBE}]
            try:
                asked: list[Message] = [{"role": "user", "content": content}]
                text = super()._render(None, template, asked)
            except DataError:
                text = ""
            is_said = _PROBE in text and "'type'" not in text
            known[template] = is_said and self.marker in text
        return known[template]


def parts_of(content: str) -> list[dict[str, str]]:
    """`"IMAGE What?"` as templates take it: an image, and a text."""
    parts = []
    for piece in re.split(f"({IMAGE})", content):
        if piece == IMAGE:
            parts.append({"type": "image"})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts or [{"type": "text", "text": ""}]


class ImageRenderer(Renderer):
    """Renders documents with images: a chat template's placeholders, or the marks of a plain text,
    become the texts of the images.
    """

    def __init__(self, job: ImageJob) -> None:
        self.job = job
        self.marker = job.processor.marker
        self.chat_renderer = partial(ImageChatRenderer, marker=self.marker)
        self.placeholder = re.compile(f"{re.escape(self.marker)}|{IMAGE}")
        super().__init__(job.tokenizer, job.settings.train_on, job.settings.template_kwargs)

    def renderings(self, document: Document) -> list[Rendering]:
        found = super().renderings(document)
        if IMAGES not in document:  # an answer of a document, all of which is expanded below
            return found
        placed: list[PlacedImage] = document[IMAGES]
        images = [(image.number, self._tokens(image)) for image in placed]
        expanded = [self._expanded(rendering, images) for rendering in found]
        if images and not any(len(one.images) == len(images) for one in expanded):
            raise DataError(
                f"has {len(images)} images, and the chat template writes "
                f"{max(len(one.images) for one in expanded)} of them: use the model's own template."
            )
        return [*expanded]

    def _tokens(self, image: PlacedImage) -> ImageTokens:
        try:
            return self.job.processor.of_size(*image.source.size(image.limits))
        except DataError as error:
            raise (DroppedError if self.job.drops_bad else DataError)(str(error)) from error

    def _expanded(
        self, rendering: Rendering, images: Sequence[tuple[int, ImageTokens]]
    ) -> ImageRendering:
        """Replaces each placeholder by the text of its image, and moves the spans along."""
        found = list(self.placeholder.finditer(rendering.text))
        if len(found) > len(images):
            raise DataError(
                f"has {len(found)} times {self.marker} in its text and {len(images)} images: they "
                "must be as many."
            )
        own = images[: len(found)]
        # from a placeholder's second character on, all moves by what the images so far have grown
        edges = [0]
        grown = [0]
        parts = []
        end = 0
        for match, (_, tokens) in zip(found, own):
            parts += [rendering.text[end : match.start()], tokens.text]
            end = match.end()
            edges.append(match.start() + 1)
            grown.append(grown[-1] + len(tokens.text) - len(match[0]))
        parts.append(rendering.text[end:])

        def moved(at: int) -> int:
            return at + grown[bisect_right(edges, at) - 1]

        spans = tuple((moved(start), moved(stop)) for start, stop in rendering.spans)
        return ImageRendering("".join(parts), spans, rendering.answer, tuple(own))


class ImageEncoder(Encoder):
    """Tokenizes such renderings, with the columns `image` and, where positions have several axes,
    `rope_shift`.
    """

    def __init__(self, job: ImageJob) -> None:
        super().__init__(job.tokenizer)
        self.processor = job.processor

    def encode(self, renderings: Sequence[Rendering]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        columns, lengths = super().encode(renderings)
        ids = columns["input_ids"]
        places = np.flatnonzero(ids == self.processor.token_id)
        numbers = []
        counts = []
        for rendering in renderings:
            for number, tokens in getattr(rendering, IMAGES):
                numbers.append(number)
                counts.append(tokens.num_rows)
        if len(places) != sum(counts):
            raise DataError(
                f"{sum(counts)} placeholders of images became {len(places)} tokens "
                f"{self.processor.token}: tokenizer.path must be that of dataset.processor."
            )
        columns["image"] = np.zeros(len(ids), np.int64)
        columns["image"][places] = np.repeat(np.array(numbers, np.int64), counts)
        shifts = list(self._shifts(renderings, columns, lengths))
        if shifts:
            columns["rope_shift"] = np.concatenate(shifts)
        return columns, lengths

    def _shifts(
        self,
        renderings: Sequence[Rendering],
        columns: Mapping[str, np.ndarray],
        lengths: np.ndarray,
    ) -> Iterator[np.ndarray]:
        """Yields int64 [L] of each rendering; nothing of a family without a rule of its own."""
        rule = getattr(self.processor.described.base_model, "get_rope_index", None)
        if rule is None:
            return
        ends = np.cumsum(lengths)
        for rendering, start, stop in zip(renderings, (ends - lengths).tolist(), ends.tolist()):
            grids = [tokens.grid for _, tokens in getattr(rendering, IMAGES)]
            ids = torch.from_numpy(columns["input_ids"][start:stop].astype(np.int64))
            is_image = torch.from_numpy((columns["image"][start:stop] > 0).astype(np.int64))
            yield rope_shifts(rule, ids, is_image, grids)


def rope_shifts(
    rule: Any, ids: Tensor, is_image: Tensor, grids: Sequence[Mapping[str, Tensor]]
) -> np.ndarray:
    """Returns positions of several axes by a model's own rule, of one document, less its plain
    ones: int64 [L], `axis_bits` per axis.
    """
    if not grids:
        return np.zeros(len(ids), np.int64)
    known = inspect.signature(rule).parameters
    given: dict[str, Any] = {"mm_token_type_ids": is_image[None]}
    given["attention_mask"] = torch.ones_like(ids[None])
    given |= {name: torch.cat([grid[name] for grid in grids]) for name in grids[0]}
    positions = rule(ids[None], **{name: x for name, x in given.items() if name in known})[0][:, 0]
    shifts = positions.long() - torch.arange(len(ids))
    bits = axis_bits(len(positions))
    if int(shifts.abs().max()) >> (bits - 1):
        raise DataError(
            f"its images move positions by {int(shifts.abs().max()):,}, over the "
            f"{1 << (bits - 1):,} that {len(positions)} axes have room for: shorten it."
        )
    mask = (1 << bits) - 1
    packed = torch.zeros_like(shifts[0])
    for axis, shift in enumerate(shifts):
        packed |= (shift & mask) << (bits * axis)
    return np.asarray(packed, np.int64)


def axis_bits(num_axes: int) -> int:
    """Returns the bits of a shift along an axis: of three, up to a million tokens."""
    return 63 // num_axes


def num_axes(config: PretrainedConfig) -> int:
    """Returns how many axes a family's positions have: as many as its rotation has sections."""
    found = config_value(config.get_text_config(), "rope_parameters") or {}
    nested = [found, *(value for value in found.values() if isinstance(value, dict))]
    sections = [part["mrope_section"] for part in nested if part.get("mrope_section")]
    return len(sections[0]) if sections else 3


def rope_positions(shift_T: Tensor, position_ids: Tensor, num_axes: int) -> Tensor:
    """Returns int64 [axes, T] of a stream."""
    axes = []
    bits = axis_bits(num_axes)
    for axis in range(num_axes):
        up = 64 - bits * (axis + 1)
        # the sign of each part, by shifts of the whole
        axes.append((shift_T << up) >> (64 - bits))
    return torch.stack(axes) + position_ids


@dataclass(frozen=True)
class ImageJob(Job):
    """How documents with images are tokenized."""

    processor: ImageProcessor = None  # type: ignore[assignment]
    drops_bad: bool = False

    def renderer(self) -> Renderer:
        return ImageRenderer(self)

    def encoder(self) -> Encoder:
        return ImageEncoder(self)


def image_job(job: Job, processor: ImageProcessor, drops_bad: bool) -> ImageJob:
    """Returns the job with images; its chat template is the processor's, unless one was set."""
    settings = {name: getattr(job, name) for name in Job.__dataclass_fields__}
    made = ImageJob(**settings, processor=processor, drops_bad=drops_bad)
    own = processor.own.chat_template
    if made.tokenizer.chat_template is None and own is not None:
        made.tokenizer.chat_template = own
    vocab = made.tokenizer.get_vocab()
    if vocab.get(processor.token) != processor.token_id:
        raise ConfigError(
            f"the tokenizer has no token {processor.token}, which dataset.processor="
            f"{processor.path} writes for an image: use the model's own tokenizer."
        )
    return made
