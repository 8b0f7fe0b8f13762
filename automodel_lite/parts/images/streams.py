"""Documents with images that are read, tokenized and packed while they are trained on.

A worker that packs documents decodes the images of its packs. It remembers where the images of the
latest documents are; those of an earlier one are found by reading its row again.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.source import Reading
from automodel_lite.data.reading.documents import DocumentList
from automodel_lite.data.reading.files import OpenedRows, ReadOptions
from automodel_lite.data.reading.readers import Placed, RawRows
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.evaluation.questions import IMAGES
from automodel_lite.parts.datasets.streams import ReadShard, StreamingDataset
from automodel_lite.parts.images.dataset import (
    ImageSettings,
    check_settings,
    image_reading,
    marked_rows,
    processor_of,
    undecoded,
)
from automodel_lite.parts.images.rows import (
    ImageDocuments,
    ImageSet,
    MarkedRows,
    PlacedImage,
    number_of,
    placed_images,
)
from automodel_lite.parts.images.sources import RULES_VERSION, ImageLimits, ImageSource

MOST_KEPT = 8192
MOST_KEPT_BYTES = 2**28
"""Images of the latest documents that a worker can read without reading their rows again."""
NUM_SAMPLED = 50  # documents of which some are compared with the whole processor


class MarkedRow(dict[str, Any]):
    """A raw row with marks in place of its images."""

    images: list[PlacedImage]


def read_marked(
    read: ReadShard,
    rows: MarkedRows,
    limits: ImageLimits,
    shard: int,
    num_shards: int,
    start: int,
) -> Iterator[Placed]:
    """Reads a shard with marks in place of images.

    rows  of the files that `read` reads; of other streams, none
    """
    for number, (place, row) in enumerate(read(shard, num_shards, start), start):
        if isinstance(row, DataError):
            yield place, row
            continue
        try:
            marked, sources = rows.mark(row, shard + number * num_shards, place)
        except DataError as error:
            yield place, error
            continue
        found = MarkedRow(marked)
        found.images = placed_images(shard, number, sources, limits)
        yield place, found


@dataclass
class ImageStream(ImageSettings, StreamingDataset):
    """Documents of a stream with images.

    Raises ConfigError as `StreamingDataset` does.
    """

    kept: dict[int, ImageSource] = field(init=False, default_factory=dict, repr=False)
    _num_bytes: int = field(init=False, default=0, repr=False)
    _is_adapted: bool = field(init=False, default=False, repr=False)

    def __post_init__(self) -> None:
        self.limits = self.limits_of_images()
        super().__post_init__()
        self.identity += f"(images {RULES_VERSION}, {self.limits})"
        self.content += f"(images, {self.max_image_pixels}, {self.bad_image})"

    def view(self, opened: OpenedRows) -> RawRows:
        return undecoded(opened.rows)

    def view_held_out(self, opened: OpenedRows) -> RawRows:
        return marked_rows(opened, self.image_dir)

    def _open(self, options: ReadOptions, held_out: Any) -> Any:
        stream = super()._open(options, held_out)
        rows = MarkedRows(DocumentList([], "stream"))
        if self.opened is not None:
            rows = marked_rows(self.opened, self.image_dir)
        return replace(stream, read=partial(read_marked, stream.read, rows, self.limits))

    def _document(self, one: Placed) -> Placed:
        place, document = super()._document(one)
        row = one[1]
        if isinstance(document, DataError) or not isinstance(row, MarkedRow):
            return place, document
        if not self._is_adapted:
            return place, document
        for image in row.images:
            self._keep(image)
        return place, {**document, IMAGES: row.images}

    def _keep(self, image: PlacedImage) -> None:
        known = self.kept.pop(image.number, None)
        self._num_bytes += len(image.source.content) - (len(known.content) if known else 0)
        self.kept[image.number] = image.source
        while len(self.kept) > MOST_KEPT or self._num_bytes > MOST_KEPT_BYTES:
            oldest = next(iter(self.kept))
            self._num_bytes -= len(self.kept.pop(oldest).content)

    def source(self, shard: int, row: int, place: int) -> ImageSource:
        """Returns where an image of a row is; reads the row again where it was long ago."""
        known = self.kept.get(number_of(shard, row, place))
        if known is not None:
            return known
        ((where, again),) = islice(self.stream.read(shard, self.num_shards, row), 1)
        if not isinstance(again, MarkedRow) or place >= len(again.images):
            raise DataError(f"{where}: is another row than when it was first read.")
        return again.images[place].source

    def adapt(self, config: Config, reading: Reading) -> Reading:
        """Returns the documents, the job and the packer of a run that read images; raises
        ConfigError for settings that do not go with images.
        """
        check_settings(config, reading.packer)
        if config.training.micro_batch_size > 1:
            raise ConfigError(
                f"training.micro_batch_size={config.training.micro_batch_size}: a stream with "
                "images reads them pack by pack: set training.micro_batch_size=1, and "
                "packed_sequence.packed_sequence_size larger."
            )
        processor = processor_of(config, reading.job, self.processor)
        adapted = copy(self)
        adapted.kept = {}
        adapted._is_adapted = True
        adapted.val = {
            name: ImageDocuments(documents, self.num_shards + number, self.limits, True)
            for number, (name, documents) in enumerate(self.val.items())
        }
        adapted.identity += f"(processor {processor.own.to_json_string()})"
        head = [one for _, one in adapted.head(NUM_SAMPLED) if not isinstance(one, DataError)]
        sample = DocumentList(head, self.stream.name)
        shards = [ShardImages(adapted, shard, self.limits) for shard in range(self.num_shards)]
        sets: list[Any] = [*shards, *adapted.val.values()]
        of_run = replace(reading, documents=adapted)
        return image_reading(config, of_run, processor, sets, sample)


@dataclass(frozen=True)
class ShardImages(ImageSet):
    """The images of a shard."""

    stream: ImageStream
    shard: int
    limits: ImageLimits

    def where(self, row: int) -> str:
        """Names a row: `stream.jsonl, shard 2, row 17`."""
        return f"{self.stream.stream.name}, shard {self.shard}, row {row + 1}"

    def source(self, row: int, place: int) -> ImageSource:
        return self.stream.source(self.shard, row, place)
