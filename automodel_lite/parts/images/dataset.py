"""The dataset `images`: files whose rows hold images."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from automodel_lite.config.components import build
from automodel_lite.config.rules import OneOf, PathStr, Positive
from automodel_lite.config.schema import Config
from automodel_lite.data.packing.packs import Packer
from automodel_lite.data.reading.documents import Documents, DocumentSet
from automodel_lite.data.reading.files import FilesDataset, OpenedRows
from automodel_lite.data.reading.readers import RawRows
from automodel_lite.data.tokens.tokenize import Job
from automodel_lite.errors import ConfigError
from automodel_lite.launched import rank, world_size
from automodel_lite.models.source import CausalLM
from automodel_lite.parts.images.rows import ImageDocuments, MarkedRows
from automodel_lite.parts.images.sources import ImageLimits

BadImage = Annotated[str, OneOf(("error", "drop"))]


@dataclass
class ImageFiles(FilesDataset):
    """Documents with images from files: JSON lines, JSON, CSV, Parquet, Arrow; or from the hub.

    Raises ConfigError as `FilesDataset` does.
    """

    # of relative paths of images; null = the folder of the data file
    image_dir: PathStr | None = None
    # folder or hub name of the processor; null = model.pretrained
    processor: PathStr | None = None
    # pixels of an image after decoding; a larger one is refused from its header
    max_image_pixels: Positive = 64_000_000
    bad_image: BadImage = "error"  # drop = leave such documents out, and count them as bad
    allow_remote: bool = False  # read images at addresses on the network

    sets: list[ImageDocuments] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        train_dir = self._folder([stamp.path for stamp in self.train_files])
        val_dir = self._folder([stamp.path for stamp in self.val_files]) or train_dir
        limits = ImageLimits(train_dir or Path.cwd(), self.max_image_pixels, self.allow_remote)
        of_val = replace(limits, folder=val_dir or limits.folder)
        self.sets = [ImageDocuments(self.train, 0, limits)]
        self.train = self.sets[0]
        val: dict[str, DocumentSet] = {}
        for number, (name, documents) in enumerate(self.val.items(), start=1):
            is_own_file = self.val_path is not None
            of_set = ImageDocuments(documents, number, of_val if is_own_file else limits)
            self.sets.append(of_set)
            val[name] = of_set
        self.val = val
        self.identity += f"(images, {limits}, bad_image={self.bad_image})"

    def _folder(self, files: list[Path]) -> Path | None:
        if self.image_dir is not None:
            return Path(self.image_dir).expanduser().absolute()
        return files[0].absolute().parent if files else None

    def view(self, opened: OpenedRows) -> RawRows:
        return MarkedRows(opened.rows)

    def adapt(self, config: Config, job: Job, packer: Packer) -> tuple[Documents, Job, Packer]:
        """Returns the documents, the job and the packer of a run that read images; raises
        ConfigError for settings that do not go with images.
        """
        # with the models' code
        from automodel_lite.parts.images.packs import ImagePacker, Share
        from automodel_lite.parts.images.tokens import ImageProcessor, image_job

        _check_settings(config, packer)
        source: CausalLM = build(config.model)
        path = self.processor or source.pretrained
        if path is None:
            raise ConfigError(
                "dataset.processor=null with a model from scratch: name the folder of a processor."
            )
        options = source.source if path == source.pretrained else {}
        processor = ImageProcessor(path, source.config(job.tokenizer), options)
        adapted = copy(self)
        adapted.sets = [replace(of_set, is_adapted=True) for of_set in self.sets]
        adapted.train, *val = adapted.sets
        adapted.val = dict(zip(self.val, val))
        adapted.identity += f"(processor {processor.own.to_json_string()})"
        made = image_job(job, processor, self.bad_image == "drop")
        cp = config.mesh.cp
        tp = config.mesh.tp
        share = Share(rank() // tp % cp, cp) if cp > 1 and world_size() > 1 else None
        return adapted, made, ImagePacker.of(packer, processor, adapted.sets, share)


def _check_settings(config: Config, packer: Packer) -> None:
    if config.evaluation:
        raise ConfigError(
            "evaluation asks questions of text alone, and the data have images: set "
            "evaluation=none."
        )
    cuts = packer.overlong in ("truncate", "split") or packer.cuts_documents
    if cuts:
        raise ConfigError(
            f"packed_sequence.strategy={packer.strategy} overlong={packer.overlong} would cut "
            "images: use exact_fill, best_fit or next_fit, and overlong=drop or error."
        )
    if config.mesh.tp * config.mesh.ep > 1:
        raise ConfigError(
            f"mesh.tp={config.mesh.tp} mesh.ep={config.mesh.ep} with images is not supported: use "
            "mesh.dp_shard or mesh.cp."
        )
