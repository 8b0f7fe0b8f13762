"""Positions of several axes (mRoPE) in one column of numbers: their shifts against plain positions,
side by side in an int64.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_lite.attention.spec import config_value
from automodel_lite.errors import DataError


def rope_shifts(
    rule: Any, ids: np.ndarray, is_image: np.ndarray, grids: Sequence[Mapping[str, Tensor]]
) -> np.ndarray:
    """Returns positions of several axes by a model's own rule, of one document with images, less
    its plain ones: int64 [L], `axis_bits` per axis.
    """
    known = inspect.signature(rule).parameters
    ids_T = torch.from_numpy(ids.astype(np.int64))
    given: dict[str, Any] = {"mm_token_type_ids": torch.from_numpy(is_image.astype(np.int64))[None]}
    given["attention_mask"] = torch.ones_like(ids_T[None])
    given |= {name: torch.cat([grid[name] for grid in grids]) for name in grids[0]}
    positions = rule(ids_T[None], **{name: x for name, x in given.items() if name in known})[0]
    return packed_shift(np.asarray(positions[:, 0].long()) - np.arange(len(ids)))


def packed_shift(shifts: np.ndarray) -> np.ndarray:
    """int64 [axes, L] -> [L]; raises DataError for a shift that has no room."""
    bits = axis_bits(len(shifts))
    largest = int(np.abs(shifts).max(initial=0))
    if largest >> (bits - 1):
        raise DataError(
            f"its images move positions by {largest:,}, over the {1 << (bits - 1):,} that "
            f"{len(shifts)} axes have room for: shorten it."
        )
    packed = np.zeros(shifts.shape[1], np.int64)
    for axis, shift in enumerate(shifts):
        packed |= (shift & ((1 << bits) - 1)) << (bits * axis)
    return packed


def axes_of(packed: Any, num_axes: int) -> list[Any]:
    """Returns the shifts of `packed_shift` along each axis, of arrays or tensors."""
    bits = axis_bits(num_axes)
    ups = [64 - bits * (axis + 1) for axis in range(num_axes)]
    # the sign of each part, by shifts of the whole
    return [(packed << up) >> (64 - bits) for up in ups]


def axis_bits(num_axes: int) -> int:
    """Returns the bits of a shift along an axis: of three, up to a million tokens."""
    return 63 // num_axes


def num_axes(config: PretrainedConfig) -> int:
    """Returns how many axes a family's positions have: as many as its rotation has sections."""
    found = config_value(config.get_text_config(), "rope_parameters") or {}
    nested = [found, *(value for value in found.values() if isinstance(value, dict))]
    sections = [part["mrope_section"] for part in nested if part.get("mrope_section")]
    return len(sections[0]) if sections else 3
