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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig
from transformers.image_processing_base import ImageProcessingMixin

from automodel_lite.attention.spec import config_value
from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.data.document import IMAGE, Document, Message
from automodel_lite.data.reading.documents import DocumentSet
from automodel_lite.data.tokens.chat import ChatRenderer
from automodel_lite.data.tokens.chunks import DocumentTokenizer, TokenizeJob
from automodel_lite.data.tokens.encode import Encoder, Remarks, Renderer
from automodel_lite.data.tokens.rendering import Rendering
from automodel_lite.errors import ConfigError, DataError, DroppedError, counted, explained
from automodel_lite.evaluation.questions import IMAGES, PROBE, parts_of, probe_turn
from automodel_lite.models.source import describe
from automodel_lite.parts.images.ahead import Rules, find_rules
from automodel_lite.parts.images.axes import axes_of, num_axes, packed_shift, rope_shifts
from automodel_lite.parts.images.rows import PlacedImage, first_alike
from automodel_lite.parts.images.sizes import NUM_COMPARED, ImageTokens, SizeTable

Images = Sequence[tuple[PlacedImage, int, ImageTokens]]
"""Each image of a document, its stamp and its tokens."""


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

        load: dict[str, Any] = {
            "image_processor": transformers.AutoImageProcessor,
            "tokenizer": transformers.AutoTokenizer,
        }
        with explained(  # whatever a family's code asks for, packages too
            f"dataset.processor={self.path} cannot be loaded as the processor of a "
            f"{self.config.model_type} model",
            Exception,
            cure="name a folder that has its files, and install the packages that it asks for",
        ):
            name = PROCESSOR_MAPPING_NAMES.get(self.config.model_type) or self._named_by_files
            kind = name and processor_class_from_name(name)
            attributes = kind.get_attributes() if kind else ()
            if not kind or "image_processor" not in attributes:
                raise ConfigError(
                    f"model_type={self.config.model_type} has no processor of images in "
                    "transformers: take a vision-language model, automodel-lite docs models lists "
                    "them."
                )

            class OfImages(kind):  # type: ignore[misc, valid-type]
                def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
                    """Lets the processors of other senses be missing."""

            parts = [
                load[name].from_pretrained(self.path, **self.options) if name in load else None
                for name in attributes
            ]
            settings, _ = kind.get_processor_dict(self.path, **self.options)
            made = OfImages.from_args_and_dict(parts, settings)
        if not isinstance(getattr(made, "image_token", None), str):
            raise ConfigError(
                f"the processor of model_type={self.config.model_type} names no token for the "
                "place of an image, so its text cannot be expanded: take another family."
            )
        plain = transformers.ProcessorMixin
        is_plain = made._process_images.__func__ is plain._process_images
        if is_plain and made.replace_image_token.__func__ is plain.replace_image_token:
            raise ConfigError(
                f"the processor of model_type={self.config.model_type} writes the text of an image "
                "inside its call alone (it has no replace_image_token): take another family, "
                "automodel-lite docs models lists them."
            )
        return made

    @property
    def _named_by_files(self) -> str | None:
        """The class of a processor that a family borrows from another one, as GLM-OCR does from
        GLM-4.6V; None where no file names it.
        """
        found, _ = transformers.ProcessorMixin.get_processor_dict(self.path, **self.options)
        if "processor_class" not in found:
            with suppress(OSError):  # of a model of text
                found, _ = ImageProcessingMixin.get_image_processor_dict(self.path, **self.options)
        return found.get("processor_class")

    @cached_property
    def marker(self) -> str:
        """What stands for an image in a text before it is expanded."""
        return self.own.image_token

    @cached_property
    def token_id(self) -> int:
        """The placeholder, whose embedding the model takes from an image."""
        config = self.config
        of_model = config_value(config, "image_token_id", config_value(config, "image_token_index"))
        if of_model is None:
            raise ConfigError(
                f"model_type={config.model_type} names no token for the place of an image "
                "(image_token_id): take another family, automodel-lite docs models lists them."
            )
        return int(of_model)

    @cached_property
    def token(self) -> str:
        """The placeholder's text."""
        return self.own.tokenizer.convert_ids_to_tokens(self.token_id)

    @cached_property
    def accepted(self) -> tuple[str, ...]:
        """Names of what the model's tower takes."""
        check_tower(self.described)
        model = self.described.base_model
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

    @property
    def rope_rule(self) -> Any:
        """The model's own rule for positions of several axes; None of a family without one."""
        return getattr(self.described.base_model, "get_rope_index", None)

    def process(self, images: Sequence[Any], **options: Any) -> tuple[dict[str, Tensor], list[str]]:
        """Returns what the tower takes for some images in one call, and the text of each."""
        made, texts = self.own._process_images(list(images), **self._settings | options)
        record = {}
        for name in self.accepted:
            if name in made:
                record[name] = torch.as_tensor(made[name])
        return record, texts

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """Settings of the image processor, which are the same for all images; and those of the
        whole processor that a family's code wants beside them (LFM2-VL).
        """
        merged = self.own._merge_kwargs(
            self.own.valid_processor_kwargs, tokenizer_init_kwargs={}, return_tensors="pt"
        )
        known = inspect.signature(self.own._process_images).parameters
        wanted = [n for n, p in known.items() if p.kind is not p.VAR_KEYWORD]
        of_text = {name: merged[name] for name in wanted if name in merged}
        return of_text | merged["images_kwargs"]

    @cached_property
    def sizes(self) -> SizeTable:
        return SizeTable(self.own, self.process, self.token)


def check_tower(lm: transformers.PreTrainedModel) -> None:
    """Raises ConfigError for a model without a tower of images that can be called alone."""
    if getattr(lm.base_model, "get_image_features", None) is None:
        raise ConfigError(
            f"model_type={lm.config.model_type} has no tower of images that can be called alone "
            "(get_image_features): take another family, automodel-lite docs models lists them."
        )


@dataclass(frozen=True)
class ImageRendering(Rendering):
    """A rendering whose placeholders stand for these images."""

    images: Images = ()


class ImageChatRenderer(ChatRenderer):
    """Renders chats whose contents have marks: as lists of parts, in turns of which the template
    takes them.
    """

    def __init__(self, *args: Any, marker: str) -> None:
        self.marker = marker
        self._takes: dict[tuple[str, str], bool] = {}
        super().__init__(*args)

    def _render(
        self, tools: list[Any] | None, template: str, messages: list[Message], prompt: bool = False
    ) -> str:
        turns: list[Message] = []
        for message in messages:
            content: Any = message["content"].replace(IMAGE, self.marker)
            if self._takes_parts(template, message["role"]):
                content = parts_of(message["content"])
            turns.append({**message, "content": content})
        return super()._render(tools, template, turns, prompt)

    def question(self, content: str) -> str:
        """Renders a user's turn, after which the model's begins."""
        asked: list[Message] = [{"role": "user", "content": content}]
        return self._render(None, self._templates[0][0], asked, prompt=True)

    def _takes_parts(self, template: str, role: str) -> bool:
        """Returns whether it takes them in turns of this role, and writes a user's images."""
        key = (template, role)
        if key not in self._takes:
            render = partial(super()._render, None, template)
            if role == "user":
                text = probe_turn(render, role, parts_of(f"{IMAGE}{PROBE}"))
                self._takes[key] = self.marker in text
            else:
                text = probe_turn(render, role, parts_of(PROBE))
                self._takes[key] = bool(text) and self._takes_parts(template, "user")
        return self._takes[key]


class ImageRenderer(Renderer):
    """Renders documents with images: a chat template's placeholders, or the marks of a plain text,
    become the texts of the images.
    """

    def __init__(self, job: ImageJob) -> None:
        self.job = job
        self.marker = job.processor.marker
        self._is_inner = False
        self._profile = ""  # of the document's images, the first that is not applied
        self.chat_renderer = partial(ImageChatRenderer, marker=self.marker)
        self.placeholder = re.compile(f"{re.escape(self.marker)}|{IMAGE}")
        kwargs = job.settings.template_kwargs
        super().__init__(job.tokenizer, job.settings.train_on, kwargs, decisions=job.decisions)

    @cached_property
    def _in_text(self) -> str:
        """What the chat template writes for an image, which plain text has too."""
        if self._chat is None:
            return self.marker
        parts = [{"type": "text", "text": PROBE}, {"type": "image"}] * 2
        asked: list[Message] = [{"role": "user", "content": [*parts[:3]]}]
        template = self.job.tokenizer.chat_template
        try:
            text = ChatRenderer._render(self._chat, None, template, asked)
        except DataError:
            return self.marker
        written = text.split(PROBE)
        return written[1] if len(written) == 3 and self.marker in written[1] else self.marker

    def unexpanded(self, document: Document) -> list[Rendering]:
        """Renders a document whose images are one placeholder each, or a mark."""
        if IMAGE in document.get("text", ""):
            document = {**document, "text": document["text"].replace(IMAGE, self._in_text)}
        self._is_inner = True
        try:
            return super().renderings(document)
        finally:
            self._is_inner = False

    def renderings(self, document: Document) -> list[Rendering]:
        if self._is_inner:  # an answer of a document, all of which is expanded below
            return super().renderings(document)
        self._profile = ""
        found = self.unexpanded(document)
        placed: list[PlacedImage] = document.get(IMAGES, [])
        images = [self._asked(image) for image in placed]
        expanded = [self._expanded(rendering, images) for rendering in found]
        if images and not any(len(one.images) == len(images) for one in expanded):
            raise DataError(
                f"has {counted(len(images), 'image')}, and the chat template writes "
                f"{max(len(one.images) for one in expanded)} of them: use the model's own template."
            )
        return [*expanded]

    def remarks(self, document: Document, renderings: Sequence[Rendering]) -> Remarks:
        found = super().remarks(document, renderings)
        return replace(found, noted=found.noted | {"color_profile": self._profile})

    def question(self, content: str, images: Sequence[PlacedImage]) -> ImageRendering:
        """Renders a prompt with marks, which waits for the model's answer."""
        text = content
        if isinstance(self._chat, ImageChatRenderer):
            text = self._chat.question(content)
        return self._expanded(Rendering(text, ()), [self._asked(image) for image in images])

    def _asked(self, image: PlacedImage) -> tuple[PlacedImage, int, ImageTokens]:
        try:
            width, height, stamp, profile = image.source.header(image.limits)
            self._profile = self._profile or profile
            tokens = self.job.processor.sizes.of_size(width, height)
            return replace(image, source=image.source.without_bytes()), stamp, tokens
        except DataError as error:
            if not image.limits.drops_bad:
                raise
            raise DroppedError(error.text, key=error.key, cure=error.cure) from error

    def _expanded(self, rendering: Rendering, images: Images) -> ImageRendering:
        """Replaces each placeholder by the text of its image, in which one placeholder stands for a
        run of them, and moves the spans along.
        """
        found = list(self.placeholder.finditer(rendering.text))
        if len(found) > len(images):
            raise DataError(
                f"has {counted(len(found), 'time')} {self.marker} in its text and "
                f"{counted(len(images), 'image')}: they must be as many."
            )
        token = self.job.processor.token
        if token != self.marker and token in rendering.text:
            raise DataError(
                f"has {token} in its text, which stands for a part of an image: remove it."
            )
        own = images[: len(found)]
        # from a placeholder's second character on, all moves by what the images so far have grown
        edges = [0]
        grown = [0]
        parts = []
        end = 0
        for match, (*_, tokens) in zip(found, own):
            parts += [rendering.text[end : match.start()], tokens.short]
            end = match.end()
            edges.append(match.start() + 1)
            grown.append(grown[-1] + len(tokens.short) - len(match[0]))
        parts.append(rendering.text[end:])

        def moved(at: int) -> int:
            return at + grown[bisect_right(edges, at) - 1]

        spans = tuple((moved(start), moved(stop)) for start, stop in rendering.spans)
        return ImageRendering(
            "".join(parts), spans, rendering.answer, choices=rendering.choices, images=tuple(own)
        )


NUM_SAMPLES = 4
MOST_LOOKED_AT = 200


def check_sample(job: ImageJob, documents: DocumentSet) -> None:
    """Compares the tokens of some documents with what the whole processor makes of their text and
    their decoded images.

    Raises ConfigError where they differ. Documents that cannot be read are named later.
    """
    # Documents spread over the set, until enough of them have images and can be read.
    tokenizer = DocumentTokenizer(job)
    renderer = ImageRenderer(job)
    own = job.processor.own
    num_left = NUM_SAMPLES
    step = max(1, len(documents) // MOST_LOOKED_AT)
    for index in range(0, len(documents), step):
        try:
            document = documents[index]
            pixels = [image.source.pixels(image.limits) for image in document[IMAGES]]
            chunk = tokenizer.chunk([(documents.where(index), document)])
            plain = renderer.unexpanded(document)
        except DataError:
            continue
        if not pixels or len(plain) != len(chunk.lengths):
            continue
        # The whole processor gets the text with its own markers, and decoded pixels; here the ids
        # were counted from the sizes of the images alone.
        for rendering, ids in zip(
            plain, np.split(chunk.columns["input_ids"], np.cumsum(chunk.lengths)[:-1])
        ):
            text, num = renderer.placeholder.subn(lambda _: renderer.marker, rendering.text)
            if not num:  # a text alone, which some families' processors refuse
                continue
            how = {"add_special_tokens": False, "return_tensors": "pt"}  # some need tensors
            # some families' processors want more around an image than its placeholder
            with explained(
                f"{documents.where(index)}: the processor {job.processor.path} refuses the text "
                "that the chat template makes of this document",
                *(ValueError, TypeError),
                key="tokenizer.chat_template",
                cure="write images in the template as the processor asks for, or use the model's "
                "own template",
            ):
                whole = own(text=[text], images=pixels[:num], **how)
            expected = whole["input_ids"][0].tolist()
            if expected != ids.tolist():
                raise ConfigError(
                    f"{documents.where(index)}: the processor {job.processor.path} makes "
                    f"{len(expected)} tokens of this document, and {len(ids)} were counted from "
                    "the sizes of its images: this family is not supported."
                )
        num_left -= 1
        if not num_left:
            return


class ImageEncoder(Encoder):
    """Tokenizes such renderings, with the columns `image` and, where positions have several axes,
    `rope_shift`.
    """

    def __init__(self, job: ImageJob) -> None:
        super().__init__(job.tokenizer)
        self.processor = job.processor
        self.text_id = int(job.processor.token_id == 0)  # of any other token
        self._joins = True
        self._num_checked = 0
        self._pieces: dict[int, tuple[ImageTokens, np.ndarray, int]] = {}

    def encode(self, renderings: Sequence[Rendering]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        columns, lengths = super().encode(renderings)
        images = [getattr(rendering, IMAGES, ()) for rendering in renderings]
        columns, lengths = self._with_runs(images, columns, lengths)
        shifts = list(self.shifts(images, columns, lengths))
        if shifts:
            columns["rope_shift"] = np.concatenate(shifts)
        return columns, lengths

    def _with_runs(
        self, images: Sequence[Images], columns: dict[str, np.ndarray], lengths: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Writes the runs of placeholders, for each of which a document has one so far."""
        places = np.flatnonzero(columns["input_ids"] == self.processor.token_id)
        numbers = []
        stamps = []
        runs: list[int] = []
        # an image that several of these documents have is read once; one document's are apart
        of_stamp: dict[tuple[int, str, int], list[PlacedImage]] = {}
        for of_document in images:
            times: Counter[int] = Counter()
            for image, stamp, tokens in of_document:
                alike = of_stamp.setdefault((stamp, tokens.text, times[stamp]), [])
                times[stamp] += 1
                numbers += [first_alike(alike, image).number] * len(tokens.runs)
                stamps += [stamp] * len(tokens.runs)
                runs += tokens.runs
        if len(places) != len(runs):
            raise DataError(
                f"{len(runs)} placeholders of images became {len(places)} tokens "
                f"{self.processor.token}: tokenizer.path must be that of dataset.processor."
            )
        copies = np.ones(len(columns["input_ids"]), np.int64)
        copies[places] = runs
        ends = np.cumsum(copies)
        for name, values in {"image": numbers, "image_stamp": stamps}.items():
            columns[name] = np.zeros(len(copies), np.int64)
            columns[name][places] = values
        columns = {name: np.repeat(values, copies) for name, values in columns.items()}
        # placeholders are no text that a model learns to write
        labels = columns["labels"]
        is_last = np.zeros(len(labels), bool)
        is_last[ends - 1] = True
        labels[~is_last | (labels == self.processor.token_id)] = IGNORE_INDEX
        if "answers" in columns:
            columns["answers"][labels == IGNORE_INDEX] = 0
        of_documents = np.append(0, ends)[np.append(0, np.cumsum(lengths))]
        return columns, np.diff(of_documents)

    def shifts(
        self, images: Sequence[Images], columns: Mapping[str, np.ndarray], lengths: np.ndarray
    ) -> Iterator[np.ndarray]:
        """Yields int64 [L] of each document; nothing of a family without a rule of its own."""
        rule = self.processor.rope_rule
        if rule is None:
            return
        ends = np.cumsum(lengths)
        for own, start, stop in zip(images, (ends - lengths).tolist(), ends.tolist()):
            if not own:
                yield np.zeros(stop - start, np.int64)
                continue
            ids, numbers = (columns[name][start:stop] for name in ("input_ids", "image"))
            joined = self._joined(rule, own, numbers > 0) if self._joins else None
            if joined is None or self._num_checked < NUM_COMPARED:
                whole = rope_shifts(rule, ids, numbers > 0, [tokens.grid for *_, tokens in own])
                self._num_checked += 1
                self._joins &= joined is None or np.array_equal(joined, whole)
                joined = whole
            yield joined

    def _joined(self, rule: Any, images: Images, is_image: np.ndarray) -> np.ndarray | None:
        """Returns what `rope_shifts` does, joined from what the rule gives each image between two
        tokens of text; None where images have several runs.
        """
        axes = num_axes(self.processor.config)
        shifts = np.zeros((axes, len(is_image)), np.int64)
        at = behind = 0
        places = np.flatnonzero(is_image)
        for *_, tokens in images:
            if len(tokens.runs) > 1:
                return None
            if id(tokens) not in self._pieces:
                ids = np.full(tokens.num_rows + 2, self.processor.token_id)
                ids[[0, -1]] = self.text_id
                packed = rope_shifts(rule, ids, ids != self.text_id, [tokens.grid])
                piece = np.stack(axes_of(packed, axes))
                # tokens stay while they are a key
                self._pieces[id(tokens)] = tokens, piece[:, 1:-1], int(piece[0, -1])
            _, piece, grown = self._pieces[id(tokens)]
            first = int(places[at])
            end = first + tokens.num_rows
            shifts[:, first:end] = piece + behind
            at += tokens.num_rows
            # of text, an axis is like the others
            behind += grown
            shifts[:, end:] = behind
        return packed_shift(shifts)


@dataclass(frozen=True)
class ImageJob(TokenizeJob):
    """How documents with images are tokenized."""

    processor: ImageProcessor = None  # type: ignore[assignment]
    reads_images: ClassVar[bool] = True

    def renderer(self) -> Renderer:
        return ImageRenderer(self)

    def encoder(self) -> Encoder:
        return ImageEncoder(self)


def image_job(job: TokenizeJob, processor: ImageProcessor) -> ImageJob:
    """Returns the job with images; its chat template is the processor's, unless one was set."""
    settings = {one.name: getattr(job, one.name) for one in fields(TokenizeJob)}
    made = ImageJob(**settings, processor=processor)
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
