"""The dataset `images`: files whose rows hold images."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from automodel_lite.config.components import build
from automodel_lite.config.rules import OneOf, PathStr, Positive
from automodel_lite.config.schema import Config
from automodel_lite.data.cache import build_once, cache_root
from automodel_lite.data.document import NAMES, RawRow
from automodel_lite.data.feeding.source import Reading
from automodel_lite.data.packing.packs import Packer
from automodel_lite.data.reading.documents import DocumentSet
from automodel_lite.data.reading.files import FilesDataset, OpenedRows, sniff_columns
from automodel_lite.data.reading.paths import KINDS, kind_of, stamp
from automodel_lite.data.reading.readers import RawRows, placed
from automodel_lite.data.reading.tables import DatasetRows
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.errors import ConfigError, DataError, printable
from automodel_lite.models.source import CausalLM
from automodel_lite.parts.images.archives import KEY, STRETCHES, index_archive, index_name
from automodel_lite.parts.images.rows import ImageDocuments, ImageSet, MarkedRows
from automodel_lite.parts.images.sources import (
    COLUMNS,
    FIRST_TEXTS,
    RULES_VERSION,
    ImageLimits,
    problem_of_question,
    sources_in,
)

if TYPE_CHECKING:
    from automodel_lite.parts.images.tokens import ImageProcessor

ARCHIVE = ".tar"
BadImage = Annotated[str, OneOf(("error", "drop"))]


@dataclass
class ImageSettings:
    """How the images of a dataset are read."""

    # of relative paths of images; null = the folder of their data file
    image_dir: PathStr | None = None
    # folder or hub name of the processor; null = model.pretrained
    processor: PathStr | None = None
    # larger images are scaled down to so many pixels before the processor; null = its own limits
    max_image_pixels: Positive | None = None
    # drop = leave such documents out, and count them as bad; each image is decoded to find them
    bad_image: BadImage = "error"
    allow_remote: bool = False  # read images at addresses on the network

    def limits_of_images(self) -> ImageLimits:
        """Returns what an image may be, and where relative paths begin."""
        folder = Path.cwd()
        if self.image_dir is not None:
            folder = Path(self.image_dir).expanduser().absolute()
        drops_bad = self.bad_image == "drop"
        return ImageLimits(folder, self.max_image_pixels, self.allow_remote, drops_bad)


@dataclass
class ImageFiles(ImageSettings, FilesDataset):
    """Documents with images from files: JSON lines, JSON, CSV, Parquet, Arrow, WebDataset's
    archives; or from the hub.

    Raises ConfigError as `FilesDataset` does.
    """

    sets: list[ImageDocuments] = field(init=False)

    def __post_init__(self) -> None:
        columns = dict(self.columns or {})
        named = [columns.pop(name) for name in COLUMNS if name in columns]
        self._image_columns = (*named, *COLUMNS)
        first_texts = []
        for name in FIRST_TEXTS:
            first_texts += [columns[name]] if name in columns else []
            first_texts += [name, *NAMES["columns"].get(name, ())]
        self._first_texts = tuple(first_texts)
        self.columns = columns or None
        # index -> what was indexed
        self._archives: dict[Path, Path] = {}
        given = (self.path, self.val_path)
        self.path = self._indexed(self.path)
        if isinstance(self.val_path, Mapping):
            self.val_path = {name: self._indexed(path) for name, path in self.val_path.items()}
        elif self.val_path is not None:
            self.val_path = self._indexed(self.val_path)
        super().__post_init__()
        self.path, self.val_path = given
        if self.kind == "tokens":
            raise ConfigError(
                f"dataset.path={self.path}: its rows are tokens, and dataset=images makes those of "
                "its documents itself: bring messages or texts, or use dataset=files."
            )
        if self.format == "verdict":
            raise ConfigError(
                "dataset.format=verdict puts the answers of rows beside other prompts, and "
                "dataset=images does not: use dataset=files, for texts without images."
            )
        self._check_columns(named)
        limits = self.limits_of_images()
        self.sets = [ImageDocuments(self.train, 0, limits)]
        for number, documents in enumerate(self.val.values(), start=1):
            self.sets.append(ImageDocuments(documents, number, limits))
        self._name_sets()
        self.identity += f"(images {RULES_VERSION}, {limits}, {named})"

    def _check_columns(self, named: Sequence[str]) -> None:
        """Raises ConfigError for a column of images that no row has."""
        documents: Any = self.train
        # without marks in place of images
        rows = documents.raw.raw
        has = sniff_columns(placed(rows), "the file") if named else ()
        for column in named:
            if column not in has and not {KEY, STRETCHES} & {*has}:  # of an archive's sample
                raise ConfigError(
                    f"dataset.columns: {column} is not a column of the data, which has "
                    f"{printable(', '.join(has))}."
                )

    def _name_sets(self) -> None:
        self.train, *val = self.sets
        self.val = dict(zip(self.val, val))

    def _indexed(self, path: str | Sequence[str]) -> str | list[str]:
        """Returns the files to read in place of a path: of archives, the lines of their samples."""
        if not isinstance(path, str):
            files = []
            for one in path:
                indexed = self._indexed(one)
                files += [indexed] if isinstance(indexed, str) else indexed
            return files
        archives = [Path(one) for one in sorted(glob.glob(path)) if one.endswith(ARCHIVE)]
        if Path(path).is_dir():
            inside = sorted(one for one in Path(path).rglob("*") if one.is_file())
            if not any(kind_of(one) in KINDS for one in inside):
                archives = [one for one in inside if one.suffix == ARCHIVE]
        if not archives:
            return path
        lines = []
        for archive in archives:
            key = {"archive": str(stamp(archive)), "as": "2"}
            write = partial(index_archive, archive)
            entry = build_once(cache_root(), "archives", archive.name, key, write)
            lines.append(entry.folder / index_name(archive))
            self._archives[lines[-1]] = archive.absolute()
        return [str(one) for one in lines]

    def view(self, opened: OpenedRows) -> RawRows:
        marked = marked_rows(opened, self.image_dir, self._archives)
        return replace(marked, columns=self._image_columns, first_texts=self._first_texts)

    def adapt(self, config: Config, reading: Reading) -> Reading:
        """Returns the documents, the job and the packer of a run that read images; raises
        ConfigError for settings that do not go with images.
        """
        from automodel_lite.parts.images.packs import ImagePacker  # with the models' code

        packer = reading.packer
        check_settings(config, packer)
        processor = processor_of(config, reading.job, self.processor)
        adapted = copy(self)
        # of a mixture, other datasets of images may have come before
        others = packer.reader.sets if isinstance(packer, ImagePacker) else ()
        adapted.sets = [
            replace(of_set, is_adapted=True, number=len(others) + of_set.number)
            for of_set in self.sets
        ]
        adapted._name_sets()
        adapted.identity += f"(processor {processor.own.to_json_string()}, set {len(others)})"
        sets = [*others, *adapted.sets]
        return image_reading(
            config, replace(reading, documents=adapted), processor, sets, adapted.sets[0]
        )


def image_reading(
    config: Config,
    reading: Reading,
    processor: ImageProcessor,
    sets: Sequence[ImageSet],
    sample: DocumentSet,
) -> Reading:
    """Returns the reading of a run with the images of these sets; raises ConfigError where the
    processor makes other tokens of the sample.
    """
    # with the models' code
    from automodel_lite.parts.images.costs import work_of_towers
    from automodel_lite.parts.images.packs import ImagePacker, ImageReader, share_of
    from automodel_lite.parts.images.tokens import check_sample, image_job

    if any(rule.of_prompt for rule in processor.rules.values()):
        raise ConfigError(
            f"model_type={processor.config.model_type}: its prompts see themselves, which is not "
            "trained: take another family, automodel-lite docs models lists them."
        )
    made = image_job(reading.job, processor)
    check_sample(made, sample)
    costs = work_of_towers(config, processor, sample)
    reader = ImageReader(processor, sets, share_of(config), costs)
    return replace(reading, job=made, packer=ImagePacker.of(reading.packer, reader))


def marked_rows(
    opened: OpenedRows, image_dir: str | None = None, archives: Mapping[Path, Path] | None = None
) -> MarkedRows:
    """Returns the rows of files with marks in place of images, whose relative paths begin in
    `image_dir`, or beside their file, or beside the archive of which it is the index.
    """
    of_files = tuple((archives or {}).get(path) for path in opened.paths)
    begin = []
    if image_dir is None:
        for path, archive in zip(opened.paths, of_files):
            begin.append((archive or path).absolute().parent)
    return MarkedRows(undecoded(opened.rows), folders=tuple(begin), archives=of_files)


@dataclass(frozen=True)
class Undecoded:
    """Rows of a `datasets.Dataset` as it holds them: images are their bytes and paths."""

    table: Any

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> RawRow:
        (row,) = self.table[index].to_pylist()
        return dict(row)


def undecoded(rows: RawRows) -> RawRows:
    """Returns the rows of `datasets` with the bytes of their images, which it would decode."""
    if not isinstance(rows, DatasetRows):
        return rows
    return replace(rows, rows=Undecoded(rows.rows.with_format("arrow")))


def processor_of(config: Config, job: TokenizeJob, path: str | None) -> ImageProcessor:
    """Returns the processor in a folder, or that of the model; raises ConfigError for none."""
    from automodel_lite.parts.images.tokens import ImageProcessor  # with the models' code

    source: CausalLM = build(config.model)
    path = path or source.pretrained
    if path is None:
        raise ConfigError(
            "dataset.processor=null with a model from scratch: name the folder of a processor."
        )
    options = source.source if path == source.pretrained else {}
    return ImageProcessor(path, source.config(job.tokenizer), options)


def check_settings(config: Config, packer: Packer) -> None:
    """Raises ConfigError for what does not go with images, and for a prompt whose image cannot be
    read.
    """
    for prompt in config.samples.prompts:
        try:
            for image in sources_in(prompt):
                image.header(ImageLimits(Path.cwd()))
        except DataError as error:
            raise ConfigError(f"samples.prompts: {problem_of_question(error)}") from error
    packer.keep_whole("documents with images are not cut", ("truncate", "split"))
