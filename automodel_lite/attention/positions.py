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

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from automodel_lite.attention.documents import NOW
from automodel_lite.attention.spec import config_value
from automodel_lite.compat import pytree
from automodel_lite.errors import ConfigError

LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""Types of rotation whose frequencies depend on the length of the document."""


def length_dependent_rotations(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules of `model` that compute rotations by the length of what they are called
    with.
    """
    for module in model.modules():
        kind: Any = vars(module).get("rope_type")
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


class RotationByDocument:
    """The forward of a rotation module, called once for each choice that the documents of the
    stream make.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.forward = module.forward
        functools.update_wrapper(self, module.forward)

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        batch = NOW.get()
        layer_type = args[0] if args else kwargs.get("layer_type")
        kind = self.module.rope_type if layer_type is None else self.module.rope_type[layer_type]
        if batch is None or kind not in LENGTH_DEPENDENT:
            return self.forward(x, position_ids, *args, **kwargs)
        own = vars(self.module)
        if kind == "dynamic":
            original = int(self.module.original_max_seq_len)
        else:
            rope = self.module.config.rope_parameters
            original = int(
                (rope if layer_type is None else rope[layer_type])[
                    "original_max_position_embeddings"
                ]
            )
        lens_T = batch.document_lens
        prefix = "" if layer_type is None else f"{layer_type}_"

        def rotation_of(length: int) -> Any:
            """Of all tokens, as if each belonged to a document of `length` tokens."""
            # it keeps the frequencies of the longest call so far for calls that are shorter
            if kind == "dynamic":
                own[f"{prefix}max_seq_len_cached"] = original
                kept, first = (
                    getattr(self.module, f"{prefix}{name}")
                    for name in ("inv_freq", "original_inv_freq")
                )
                setattr(self.module, f"{prefix}inv_freq", first.to(kept.device))
            # One more position, the document's last, makes transformers' code choose by it; those
            # beyond are other documents' or padding, whose results nobody takes.
            last = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
            seen = torch.cat([position_ids.clamp(max=length - 1), last], -1)
            return pytree.tree_map(lambda y: y[..., :-1, :], self.forward(x, seen, *args, **kwargs))

        result = rotation_of(original)
        # LongRoPE has one set of frequencies for all that is longer; dynamic scaling one for every
        # length, which must be known on the host.
        is_long_T = lens_T > original
        longer = [batch.max_seqlen] if kind == "longrope" else lens_T[is_long_T].unique().tolist()
        for length in longer:
            if length > original:
                is_its_T = is_long_T if kind == "longrope" else lens_T == length
                pick = functools.partial(torch.where, is_its_T[:, None])
                result = pytree.tree_map(pick, rotation_of(length), result)
        return result


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
    configs: list[PretrainedConfig] = []
    for module in model.modules():
        holders[id(module)] = vars(module)
        config = vars(module).get("config")
        for part in (
            (config, config.get_text_config()) if isinstance(config, PretrainedConfig) else ()
        ):
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
