"""Sizes that have to divide one another, checked together before data is read: every problem is said at once."""

from __future__ import annotations

from transformers import PretrainedConfig

from automodel_lite.attention.spec import config_value
from automodel_lite.config.components import build_with
from automodel_lite.config.schema import Config
from automodel_lite.data.pack_order import BatchShape
from automodel_lite.data.plan import batch_shape
from automodel_lite.errors import ConfigError
from automodel_lite.parallel.mesh import MeshShape, mesh_shape


def check_sizes(config: Config, num_processes: int) -> tuple[MeshShape, BatchShape]:
    """The mesh and the batches of this many processes; raises one ConfigError with a line a problem."""
    problems = []
    shape = batches = None
    try:
        shape = mesh_shape(config.mesh, num_processes)
        batches = batch_shape(config.training, shape.dp)
    except ConfigError as error:
        problems.append(str(error))
    try:
        build_with(config.packed_sequence, cp_size=config.mesh.cp)
    except ConfigError as error:
        problems.append(str(error))
    if shape is None or batches is None or problems:
        raise ConfigError("\n".join(problems))
    return shape, batches


def check_positions(longest: int, model_config: PretrainedConfig) -> None:
    """Raises ConfigError when a document has more tokens than the model has positions (each document starts at 0)."""
    limit = config_value(model_config.get_text_config(), "max_position_embeddings")
    if limit is not None and longest > limit:
        raise ConfigError(
            f"the longest document has {longest} tokens, the model max_position_embeddings={limit}: set "
            f"packed_sequence.packed_sequence_size={limit} (packed_sequence.overlong drops, truncates or splits longer "
            "ones), or scale the model's positions by model.config."
        )
