"""From files to packs: everything that happens to data before a process group or a model exists.

documents ─▶ tokenizer ─▶ token rows (cached, once a node) ─▶ pack plan ─▶ packs read lazily
"""

from __future__ import annotations

from contextvars import copy_context

from automodel_lite.config.components import build, build_with
from automodel_lite.config.schema import Config
from automodel_lite.data.cache import CACHE_DIR
from automodel_lite.data.feeding.order import BatchShape, batch_shape
from automodel_lite.data.feeding.planned import PlannedPacks
from automodel_lite.data.feeding.source import PackSource, packing_dataset
from automodel_lite.data.packing.packs import Packer
from automodel_lite.data.reading.documents import Documents
from automodel_lite.errors import ConfigError
from automodel_lite.parallel.mesh import mesh_shape


def check_sizes(config: Config, num_processes: int) -> BatchShape:
    """Returns the batches of this many processes; raises ConfigError for sizes that do
    not divide.
    """
    return batch_shape(config.training, mesh_shape(config.mesh, num_processes).dp)


def build_packer(config: Config) -> Packer:
    """Raises ConfigError for sizes that do not divide."""
    return build_with(config.packed_sequence, cp_size=config.mesh.cp)


def build_documents(config: Config) -> Documents:
    """Opens the documents of a run; what is copied to be read lies in its cache."""
    context = copy_context()
    context.run(CACHE_DIR.set, config.cache_dir)
    return context.run(build, config.dataset)


def prepare_data(config: Config, batches: BatchShape, packer: Packer) -> PackSource:
    """Returns the packs of a run; tokenizes what is not in the cache, once per node."""
    documents = build_documents(config)
    if (packing := packing_dataset(documents)) is not None:
        if step_documents := config.training.global_batch_documents:
            raise ConfigError(
                f"training.global_batch_documents={step_documents} needs packs that are planned, "
                "and those of a stream are not: set training.global_batch_size instead."
            )
        return packing.packs(config, packer, batches)
    return PlannedPacks.prepare(config, documents, packer, batches)
