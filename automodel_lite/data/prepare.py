"""From files to packs: everything that happens to data before a process group or a model exists.

documents ─▶ tokenizer ─▶ token rows (cached, once a node) ─▶ pack plan ─▶ packs read lazily
"""

from __future__ import annotations

from typing import Any

from automodel_lite.attention.positions import LENGTH_DEPENDENT
from automodel_lite.attention.spec import config_value
from automodel_lite.config.components import build, build_with
from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.order import BatchShape, batch_shape
from automodel_lite.data.feeding.planned import PlannedPacks
from automodel_lite.data.feeding.source import PackingDataset, PackSource
from automodel_lite.data.packing.packs import Packer
from automodel_lite.errors import ConfigError
from automodel_lite.models.source import CausalLM
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


def prepare_first_documents(config: Config, packer: Packer) -> PlannedPacks:
    """`prepare_data` for looking at it: of a stream, its first documents as if they were all."""
    return PlannedPacks.prepare(
        config, build(config.dataset), packer, batch_shape(config.training, dp_size=1)
    )


def check_positions(data: PackSource, model: CausalLM, teacher: CausalLM | None = None) -> None:
    """Raises ConfigError when a document has more tokens than a model has positions (each document
    starts at 0), or when the rows of a tree may need different rotations for the tokens that they
    share.
    """
    models = {"model": model} if teacher is None else {"model": model, "teacher": teacher}
    for name, config in {name: of.config(data.tokenizer) for name, of in models.items()}.items():
        longest = data.longest
        text = config.get_text_config()
        limit = config_value(text, "max_position_embeddings")
        rope = config_value(text, "rope_parameters", {})
        for parameters in (
            rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]
        ):
            kind = parameters.get("rope_type")
            at_top = config_value(text, "original_max_position_embeddings", limit)
            original = parameters.get("original_max_position_embeddings") or at_top
            if data.has_trees and kind in LENGTH_DEPENDENT and longest > original:
                raise ConfigError(
                    f"{name}.config.rope_parameters.rope_type={kind} rotates rows over {original} "
                    f"tokens differently, and rows of up to {longest} share their beginnings: set "
                    "packed_sequence.tree=off."
                )
        if limit is not None and longest > limit:
            raise ConfigError(
                f"the longest document has {longest} tokens, the {name} "
                f"max_position_embeddings={limit}: set "
                f"packed_sequence.packed_sequence_size={limit} (packed_sequence.overlong drops, "
                f"truncates or splits longer ones), or scale its positions by {name}.config."
            )


def check_same_data(saved: dict[str, Any], now: dict[str, Any], accept_changes: bool) -> None:
    """Raises ConfigError when a checkpoint's position does not mean the same documents any more."""
    if saved != now and not accept_changes:
        changed = ", ".join(
            f"{key}: was {saved[key]}, now {now[key]}"
            for key in saved
            if saved[key] != now.get(key)
        )
        raise ConfigError(
            f"the data changed since the checkpoint was written ({changed}): restore the old files "
            "or settings, start a new run with name=..., or continue on the new data with "
            "checkpoint.accept_changes=true."
        )
