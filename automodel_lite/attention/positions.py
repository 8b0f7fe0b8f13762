"""Makes layers that depend on places or lengths take them from each document, never from the
stream.

Two pieces of transformers' code read them from the call: Llama 4 scales the queries of its layers
without rotation by `arange` of the sequence dim, and rotations of type `longrope` and `dynamic`
choose their frequencies by the largest position in the call. On a stream the first scales by where
a document lies, and the second lets one long document, or the padding behind it, change the
frequencies of all others.

    documents of 5,000 and 300 tokens, LongRoPE trained on 4,096     long factors for the first,
    short for the second

The start-up probe sees what real packs would meet, though its documents have 16 tokens: lengths of
a model's own (windows, chunks, where scaling begins; 8,192 tokens in Llama 4) are shorter while it
runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from automodel_lite.attention.spec import config_value
from automodel_lite.errors import ConfigError

LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""Types of rotation whose frequencies depend on the length of the document."""


def length_dependent_rotations(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules of `model` that compute rotations by the length of what they are called
    with.
    """
    for module in model.modules():
        kind = vars(module).get("rope_type")
        # some families have one for each kind of layer
        kinds = kind.values() if isinstance(kind, dict) else [kind]
        if any(isinstance(name, str) and name in LENGTH_DEPENDENT for name in kinds):
            yield module


def refuse_rotations(model: nn.Module) -> None:
    """Raises ConfigError where documents run as rows beside each other, of which a rotation sees
    the longest only.
    """
    for module in length_dependent_rotations(model):
        raise ConfigError(
            f"model.config.rope_parameters.rope_type={vars(module)['rope_type']} selects "
            f"frequencies by the longest of the documents that {type(model).__name__} runs beside "
            "each other: set another rope_type."
        )


def scale_queries(module: nn.Module, q_THD: Tensor, positions_T: Tensor) -> Tensor:
    """Scales queries by their place in their document, in a layer of Llama 4 without rotation,
    whose own scaling the model's forward has turned off (arXiv:2501.19399); returns those of any
    other layer as they are.
    """
    own = vars(module)
    if (
        "floor_scale" not in own
        or own.get("use_rope", True)
        or not own["config"].attn_temperature_tuning
    ):
        return q_THD
    steps_T = torch.floor((positions_T.float() + 1.0) / own["floor_scale"])
    scales_T = torch.log1p(steps_T) * own["attn_scale"] + 1.0
    return (q_THD * scales_T[:, None, None]).to(q_THD.dtype)


SHORT = 6
_NAMES = re.compile(
    r"sliding_window|attention_chunk_size|floor_scale|original_max_position_embeddings"
)


@contextmanager
def short_lengths(model: nn.Module) -> Iterator[bool]:
    """Shortens the lengths in the configs and modules of `model` inside; yields whether it has any
    that can be.

    Attention reads windows when it is installed: install a kernel inside, and again behind.
    """
    holders: dict[int, dict[str, Any]] = {}
    configs = []
    for module in model.modules():
        holders[id(module)] = vars(module)
        config = vars(module).get("config")
        if not isinstance(config, PretrainedConfig):
            continue
        for part in (config, config.get_text_config()):
            configs.append(part)
            holders[id(part)] = vars(part)
            # of rotations: one kind, or one for each kind of layer
            ropes = vars(part).get("rope_parameters") or {}
            for rope in (ropes, *ropes.values()):
                if isinstance(rope, dict):
                    holders[id(rope)] = rope
    other_names = {
        of for part in configs for name, of in part.attribute_map.items() if _NAMES.fullmatch(name)
    }
    lengths = [
        (holder, name, value)
        for holder in holders.values()
        for name, value in holder.items()
        if (_NAMES.fullmatch(str(name)) or name in other_names)
        and isinstance(value, int)
        and value > SHORT
    ]
    for holder, name, _ in lengths:
        holder[name] = SHORT
    # A window that a config computes of something else would not be that of its layers.
    windows = {config_value(part, "sliding_window", SHORT) for part in configs}
    try:
        yield bool(lengths) and windows <= {SHORT, *range(SHORT)}
    finally:
        for holder, name, value in lengths:
            holder[name] = value
