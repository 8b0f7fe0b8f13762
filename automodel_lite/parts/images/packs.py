"""Packs with images: whoever reads a micro-batch decodes its images, each of them once.

A token of the column `image` belongs to a feature row of its image: by its place among the image's
tokens, document by document. Where rows of a tree branch at the end of an image, its last token is
copied; the copy takes the last row.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.config.schema import Config
from automodel_lite.data.document import IMAGE
from automodel_lite.data.packing.packs import PackBatch, PackedDataset, Packer, lay_out_packs
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.token_rows import (
    DocumentReader,
    LabelSpans,
    TokenizedDocuments,
    flatten,
)
from automodel_lite.errors import DataError
from automodel_lite.evaluation.samples import Prompt, text_prompt
from automodel_lite.launched import rank, world_size
from automodel_lite.parallel.document_owners import document_owners
from automodel_lite.parts.datasets.mixture import MixedRows
from automodel_lite.parts.datasets.streams import WorkerError
from automodel_lite.parts.images.ahead import TYPES, Rules, ahead_of, types_of
from automodel_lite.parts.images.costs import TowerCosts
from automodel_lite.parts.images.rows import find, placed_images
from automodel_lite.parts.images.sources import IN_PROMPT, blank_image, sources_in
from automodel_lite.parts.images.tokens import (
    ImageEncoder,
    ImageJob,
    ImageProcessor,
    ImageRenderer,
    Images,
)
from automodel_lite.parts.images.tower import PackedImages
from automodel_lite.thd import ThdBatch, to_thd

FREE = TowerCosts()
BLANK = (64, 64)
"""Pixels of what a tower gets where no image is: it runs as often on all ranks."""


class Share(NamedTuple):
    """Which images of a pack a rank reads, of those that read the same pack."""

    rank: int
    size: int


def share_of(config: Config) -> Share | None:
    """Returns the share of this rank; None where no other reads its packs."""
    cp = config.mesh.cp
    is_shared = cp > 1 and (world_size() > 1 or config.dry_run)
    return Share(rank() // config.mesh.tp % cp, cp) if is_shared else None


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of packs.

    sets   that their documents are of
    share  of this rank; None: all images
    costs  by which images are shared
    """

    processor: ImageProcessor
    sets: Sequence[Any]
    share: Share | None = None
    costs: TowerCosts = FREE

    def with_images(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a batch of packs with its images; raises WorkerError."""
        try:
            return {**row, "images": self.read(row)}
        except DataError as error:
            raise WorkerError(str(error)) from error

    def read(
        self, columns: Mapping[str, Tensor], processed: PackedImages | None = None
    ) -> PackedImages:
        """Decodes the images of a batch of packs, each once, or a rank's share of them; of none, a
        blank one of which no row is taken. `processed` has what was made of the same images before.

        Raises DataError for an image that is not what it was when its tokens were counted.
        """
        if "image" not in columns:
            columns = {**columns, "image": torch.zeros_like(columns["input_ids"])}
        numbers, nth = rows_of_images(columns)
        images, which = _as_they_come(numbers)
        lens = np.zeros(len(images), np.int64)
        np.maximum.at(lens, which, nth + 1)
        starts = np.cumsum(lens) - lens
        rows = starts[which] + np.where(nth < 0, lens[which] - 1, nth)
        work = self.costs.of(lens)
        owners = self._owners(work, lens)
        if processed is None:
            own = owners == (self.share.rank if self.share else 0)
            record, num_rows = self._decoded(columns, images[own], lens[own])
        else:
            record = processed.record
            num_rows = processed.num_rows
        types, seen = _types_and_ahead(columns, self.processor.rules)
        return PackedImages(
            record,
            num_rows,
            torch.from_numpy(rows),
            types,
            seen,
            work=float(work.sum()),
            owner=torch.from_numpy(np.repeat(owners, lens)) if self.share else None,
        )

    def _owners(self, work: np.ndarray, lens: np.ndarray) -> np.ndarray:
        """Returns the rank that reads each image, int64 [images]."""
        if self.share is None:
            return np.zeros(len(lens), np.int64)
        costs = [int(flops) or num for flops, num in zip(work.tolist(), lens.tolist())]
        return np.array(document_owners(costs, self.share.size), np.int64)

    def _decoded(
        self, columns: Mapping[str, Tensor], numbers: np.ndarray, lens: np.ndarray
    ) -> tuple[Any, int]:
        """Returns what the tower gets for these images, and its feature rows."""
        pixels = self._pixels(numbers, stamps_of(columns))
        record, texts = self.processor.process(pixels or [blank_image(*BLANK)])
        counts = [text.count(self.processor.token) for text in texts]
        assert not pixels or counts == lens.tolist()
        return record, sum(counts)

    def _pixels(self, numbers: np.ndarray, stamps: Mapping[int, int]) -> list[Any]:
        pixels = []
        for number in numbers.tolist():
            which_set, row, place = find(number)
            pixels.append(self.sets[which_set].pixels(row, place, stamps.get(number)))
        return pixels

    def inputs_alone(self, ids: np.ndarray, image: np.ndarray) -> dict[str, Tensor]:
        """Returns what plain transformers is given of a document beside its ids [L], where `image`
        [L] has the numbers of its images: what the processor makes of these, and which tokens are
        theirs.
        """
        numbers, _ = _as_they_come(image[image > 0])
        pixels = self._pixels(numbers, {})
        is_image = torch.from_numpy(ids == self.processor.token_id)
        known = inspect.signature(type(self.processor.described).forward).parameters
        inputs = {name: is_image.long()[None] for name in TYPES if name in known}
        if pixels:
            inputs |= self.processor.process(pixels)[0]
        return inputs


class ImagePacker(Packer):
    """A packer whose packs hold images."""

    reader: ImageReader

    @classmethod
    def of(cls, packer: Packer, reader: ImageReader) -> ImagePacker:
        made = cls.__new__(cls)
        vars(made).update(vars(packer) | {"reader": reader})
        return made

    def for_document_kind(self, kind: str, padding_id: int = 0) -> Packer:
        """See `Packer`; text with images is never split."""
        whole = super().for_document_kind("other", padding_id)
        whole.can_cut = False
        return whole

    def pack_of(self, rows: TokenizedDocuments) -> dict[str, Any]:
        """See `Packer`; a pack of a stream brings its images."""
        return self.reader.with_images(super().pack_of(rows))

    def prompt(self, job: TokenizeJob, text: str) -> Prompt:
        """See `PromptPacker`; `![](a.png) What is it?` has an image."""
        processor = self.reader.processor
        limits = self.reader.sets[0].limits
        sources = sources_in(text)
        if not sources:
            return text_prompt(job, text)
        assert isinstance(job, ImageJob)
        images = placed_images(0, 0, sources, limits)
        rendering = ImageRenderer(job).question(IN_PROMPT.sub(IMAGE, text), images)
        encoder = ImageEncoder(job)
        columns, _ = encoder.encode([rendering])
        pictures = Pictures([[source.pixels(limits) for source in sources]])
        stream = PromptStream(encoder, rendering.images, columns["image"], pictures, processor)
        return columns["input_ids"].tolist(), stream

    def packs(
        self, rows: DocumentReader, epoch: int = 0, shared: tuple[Path, str] | None = None
    ) -> PackedDataset:
        packs = super().packs(rows, epoch, shared)
        return ImagePacks(packs, self.reader)


class ImagePacks(PackedDataset):
    """Packs that bring the images of their documents."""

    def __init__(self, packs: PackedDataset, reader: ImageReader) -> None:
        super().__init__(packs.rows, packs.plan, packs.padding_idx)
        self.reader = reader

    def tower_flops(self) -> np.ndarray:
        of_documents = document_flops(self.rows, self.reader.costs)[self.plan.doc_ids]
        if not len(self.plan):
            return np.zeros(0)
        return np.add.reduceat(of_documents, self.plan.offsets[:-1])

    def __getitems__(self, indices: Sequence[int]) -> PackBatch:
        batch = super().__getitems__(indices)
        return PackBatch(self.reader.with_images(batch.row), batch.num_segments)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """A pack for looking at: its tokens alone."""
        return PackedDataset(self.rows, self.plan, self.padding_idx)[index]


@dataclass(frozen=True)
class Pictures:
    """Images in memory as a set, those of each row."""

    rows: Sequence[Sequence[Any]]

    def pixels(self, row: int, place: int, stamp: int | None = None) -> Any:
        return self.rows[row][place]


@dataclass
class PromptStream:
    """Makes the stream of a prompt with images and of what has been answered so far.

    placed     the images of the prompt, with their tokens
    numbers    of each of its tokens, that of the token's image, int [L]
    processed  what the towers get, once for all new tokens
    """

    encoder: ImageEncoder
    placed: Images
    numbers: np.ndarray
    pictures: Pictures
    processor: ImageProcessor
    processed: PackedImages | None = None

    def __call__(self, ids: list[int]) -> ThdBatch:
        image = np.zeros(len(ids), np.int64)
        image[: len(self.numbers)] = self.numbers
        row = {
            "input_ids": np.array(ids),
            "labels": np.full(len(ids), IGNORE_INDEX),
            "image": image,
        }
        for shift in self.encoder.shifts([self.placed], row, np.array([len(ids)])):
            row["rope_shift"] = shift
        batch = stream_of_rows([row], self.processor, self.pictures, self.processed)
        assert isinstance(batch.images, PackedImages)
        self.processed = batch.images
        return batch


def stream_of_rows(
    rows: Sequence[Mapping[str, np.ndarray]],
    processor: ImageProcessor,
    pictures: Any,
    processed: PackedImages | None = None,
) -> ThdBatch:
    """Returns a stream of token rows whose images are these, which may be processed already."""
    flat = flatten(rows)
    size = int(flat.lengths.sum())
    batch = lay_out_packs(flat, flat.offsets[:-1], flat.lengths, np.array([len(flat)]), size)
    images = ImageReader(processor, [pictures]).read(batch.row, processed)
    return to_thd({**batch.row, "images": images})


def document_flops(rows: DocumentReader, costs: TowerCosts) -> np.ndarray:
    """Returns the work of the towers for the images of each document, float64 [N]."""
    if isinstance(rows, MixedRows):
        found = np.zeros(len(rows))
        for number, of_source in enumerate(rows.sources):
            mine = rows.source_ids == number
            found[mine] = document_flops(of_source, costs)[rows.row_ids[mine]]
        return found
    flat = rows.flat
    image = flat.columns.get("image")
    if image is None:
        return np.zeros(len(rows))
    runs = image if isinstance(image, LabelSpans) else LabelSpans.of(image)
    is_image = runs.values > 0
    lengths = np.diff(np.append(runs.at, runs.num_tokens))[is_image]
    numbers = runs.values[is_image]
    documents = np.searchsorted(flat.offsets, runs.at[is_image], side="right") - 1
    # runs of one image of a document are neighbors
    first = np.flatnonzero(run_starts(documents, numbers))
    if not len(first):
        return np.zeros(len(rows))
    work = costs.of(np.add.reduceat(lengths, first))
    return np.bincount(documents[first], weights=work, minlength=len(rows))


def _as_they_come(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the different ones of some numbers in the order in which they come, and which of
    these each number is.
    """
    different, first, which = np.unique(numbers, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return different[order], np.argsort(order)[which]


def _types_and_ahead(
    columns: Mapping[str, Tensor], rules: Rules
) -> tuple[Tensor, dict[bool, Tensor]]:
    """Returns what each token is, and what those of images see behind them, of the stream."""
    image, labels, positions = (
        columns[name].reshape(-1) for name in ("image", "labels", "position_ids")
    )
    # positions go back where a document, or a branch of one, begins
    starts = torch.ones_like(image, dtype=torch.bool)
    starts[1:] = positions.diff() < 1
    types = types_of(image, labels, starts, any(rule.of_prompt for rule in rules.values()))
    return types, {kind: ahead_of(types, starts, rule) for kind, rule in rules.items()}


def run_starts(*keys: np.ndarray) -> np.ndarray:
    """Returns bool [N]: where one of some keys is another than before."""
    starts = np.zeros(len(keys[0]), bool)
    starts[:1] = True
    for key in keys:
        starts[1:] |= np.diff(key) != 0
    return starts


def stamps_of(columns: Mapping[str, Tensor]) -> dict[int, int]:
    """Returns number -> stamp of the images of a batch."""
    if "image_stamp" not in columns:
        return {}
    numbers, stamps = (columns[name].reshape(-1).numpy() for name in ("image", "image_stamp"))
    firsts = np.unique(numbers, return_index=True)[1]
    return dict(zip(numbers[firsts].tolist(), stamps[firsts].tolist()))


def rows_of_images(columns: Mapping[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the image of each placeholder of a batch, and which of the image's rows it takes; -1
    is the last one. int64 [R] each.

        image    0 7 7 7 0 | 7 0      (a branch begins with a copy of the last token)
        returns  7 7 7 7 and 0 1 2 -1
    """
    image, positions = (columns[name].reshape(-1).numpy() for name in ("image", "position_ids"))
    at = np.flatnonzero(image)
    numbers = image[at]
    # positions go back where a document, or a branch of one, begins
    node = np.cumsum(np.diff(positions, prepend=-1) < 1)[at]
    begins = run_starts(node, numbers)
    first = np.flatnonzero(begins)
    run = np.cumsum(begins) - 1
    nth = np.arange(len(at)) - first[run]
    sizes = np.diff(np.append(first, len(at)))
    # a run of one token, of an image that has more, is such a copy
    images, which = np.unique(numbers[first], return_inverse=True)
    largest = np.zeros_like(images)
    np.maximum.at(largest, which, sizes)
    is_copy = (sizes == 1) & (largest[which] > 1)
    return numbers, nth - is_copy[run]
