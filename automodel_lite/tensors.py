"""What the tensors of all rooms share: dataclasses of them that move as one, boundaries, and the
precision that sums and logits are kept in: fp32, or that of the model where it is wider. A model in
fp64 then has a loss and gradients in fp64, in which exactness can be judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

ON_HOST = {"stays": "on the host"}
"""Metadata of a field that `map_tensors` leaves as it is."""


@dataclass(frozen=True)
class Tensors:
    """A dataclass of tensors, plain values, and more of its kind."""

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same with `function` of its tensors, but for what stays on the host; what was one
        tensor stays one.
        """
        return _mapped(self, function, {})


def _mapped(value: Any, function: Callable[[Tensor], Tensor], known: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in known:
            known[id(value)] = function(value)
        return known[id(value)]
    if isinstance(value, dict):
        return {name: _mapped(part, function, known) for name, part in value.items()}
    if isinstance(value, tuple):
        make = getattr(value, "_make", tuple)  # a NamedTuple's own
        return make([_mapped(part, function, known) for part in value])
    if isinstance(value, Tensors):
        given = [each.name for each in fields(value) if each.metadata != ON_HOST]
        return replace(
            value, **{name: _mapped(getattr(value, name), function, known) for name in given}
        )
    return value


def cumulative(lengths: Tensor) -> Tensor:
    """Returns running sums from 0: int64 [N] -> int32 [N + 1]."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def at_least_fp32(x: Tensor) -> Tensor:
    """Returns `x` itself where it is fp32 or fp64, else in fp32."""
    return x.to(wide_dtype(x.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns fp64 for fp64, else fp32."""
    return torch.promote_types(dtype, torch.float32)


def hash32(value: Tensor) -> Tensor:
    """A hash of 32 bits whose every output bit depends on every input bit alike (Wellons'
    lowbias32).
    """
    value = (value ^ ((value >> 16) & 0xFFFF)) * 0x7FEB352D
    value = (value ^ ((value >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return value ^ ((value >> 16) & 0xFFFF)
