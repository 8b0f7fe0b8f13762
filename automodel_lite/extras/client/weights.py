"""Whole weights, one after the other, for who keeps them elsewhere than in files."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from automodel_lite.run.weight_files import as_saved, groups_of, unique_weights


def whole_weights(
    lm: transformers.PreTrainedModel, dtypes: dict[str, torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    """Yields name and whole tensor of every weight, as files have them, one after the other; every
    rank of the job iterates.
    """
    state = unique_weights(lm)
    for group in groups_of(lm, dtypes):
        whole = {}
        for name in group.parameters:
            value = state[name].to(dtypes.get(name, state[name].dtype))
            whole[name] = value.full_tensor() if isinstance(value, DTensor) else value
        saved = as_saved(lm, whole)
        yield from ((name, saved[name].to(meta.dtype)) for name, meta in group.weights.items())
