"""From files to packs: everything that happens to data before a process group or a model exists.

documents ─▶ tokenizer ─▶ token rows (cached, once a node) ─▶ pack plan ─▶ packs read lazily
"""

from __future__ import annotations

from automodel_lite.config.components import build, build_with
from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.order import BatchShape, batch_shape
from automodel_lite.data.feeding.planned import PlannedPacks
from automodel_lite.data.feeding.source import PackingDataset, PackSource
from automodel_lite.data.packing.packs import Packer
from automodel_lite.parallel.mesh import mesh_shape


def check_sizes(config: Config, num_processes: int) -> BatchShape:
    """Returns the batches of this many processes; raises ConfigError for sizes that do
    not divide.
    """
    return batch_shape(config.training, mesh_shape(config.mesh, num_processes).dp)


def build_packer(config: Config) -> Packer:
    """Raises ConfigError for sizes that do not divide."""
    return build_with(config.packed_sequence, cp_size=config.mesh.cp)


def prepare_data(config: Config, batches: BatchShape, packer: Packer) -> PackSource:
    """Returns the packs of a run; tokenizes what is not in the cache, once per node."""
    documents = build(config.dataset)
    if isinstance(documents, PackingDataset):
        return documents.packs(config, packer, batches)
    return PlannedPacks.prepare(config, documents, packer, batches)
