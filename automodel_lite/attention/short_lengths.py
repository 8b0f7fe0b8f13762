"""Lengths of a model's own (windows, chunks, where scaling begins) shorter than the documents of the start-up probe.

A layer that takes the place in the stream for the place in the document differs only beyond such a length: 8,192 tokens
in Llama 4. The probe's documents have 16; with the lengths below that, it sees what real packs would meet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from automodel_lite.attention.spec import config_value

SHORT = 6
_NAMES = re.compile(r"sliding_window|attention_chunk_size|floor_scale|original_max_position_embeddings")


@contextmanager
def short_lengths(model: nn.Module) -> Iterator[bool]:
    """Shortens the lengths in the configs and modules of `model` inside; yields whether it has any that can be.

    Attention reads windows when it is installed: install a kernel inside, and again behind.
    """
    holders: dict[int, dict[str, Any]] = {}
    configs: list[PretrainedConfig] = []
    for module in model.modules():
        holders[id(module)] = vars(module)
        config = vars(module).get("config")
        for part in (config, config.get_text_config()) if isinstance(config, PretrainedConfig) else ():
            configs.append(part)
            holders[id(part)] = vars(part)
            # of rotations: one kind, or one for each kind of layer
            ropes = vars(part).get("rope_parameters") or {}
            for rope in (ropes, *ropes.values()):
                if isinstance(rope, dict):
                    holders[id(rope)] = rope
    other_names = {of for part in configs for name, of in part.attribute_map.items() if _NAMES.fullmatch(name)}
    lengths = [
        (holder, name, value)
        for holder in holders.values()
        for name, value in holder.items()
        if (_NAMES.fullmatch(str(name)) or name in other_names) and isinstance(value, int) and value > SHORT
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
