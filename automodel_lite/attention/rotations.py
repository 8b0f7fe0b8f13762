"""Rotations whose frequencies depend on the length of a document (`longrope`, `dynamic`)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from automodel_lite.attention.documents import NOW
from automodel_lite.attention.positions import LENGTH_DEPENDENT
from automodel_lite.compat import pytree


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
