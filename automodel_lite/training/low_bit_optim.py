"""AdamW whose two moments are kept in 8 bits: 2 bytes a weight instead of 8 (Dettmers et al., 2022, arXiv:2110.02861).

The numbers are torchao's AdamW8bit, which the slow suite holds it against. What it keeps is different: plain tensors,
codes (uint8) shaped like the parameter and one scale for each block of a row. So they are sharded as the parameter is,
saved and loaded to the bit on any number of ranks, and a step can be skipped by a flag on the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from automodel_lite.config.rules import Positive
from automodel_lite.graphs import strict_graphs
from automodel_lite.training.optimizers import Betas, Eps, Rate, local, param_groups

LEAST_BLOCK = 32
LEAST_VALUES = 4096  # of a parameter; smaller ones keep fp32 moments, as in torchao and bitsandbytes


def adamw_8bit(
    model: nn.Module,
    lr: Rate,
    betas: Betas | None = None,
    eps: Eps = 1e-8,
    weight_decay: Rate = 0.01,
    block_size: Positive = 256,
) -> AdamW8bit:
    """`block_size` values share one scale, fewer where a row is no multiple of it. Vectors and tensors below 4096
    values stay in fp32.
    """
    beta1, beta2 = map(float, betas or (0.9, 0.999))
    defaults = {"lr": lr, "betas": (beta1, beta2), "eps": eps}
    return AdamW8bit(param_groups(model, weight_decay), defaults, block_size)


class AdamW8bit(Optimizer):
    """See `adamw_8bit`. Takes `found_inf` and `grad_scale` as torch's fused AdamW does."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], block_size: int) -> None:
        super().__init__(groups, defaults)
        self.block_size = block_size
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient; `closure` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        block = block_of(tuple(parameter.shape), self.block_size)
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.uint8 if block else None)
                if block:
                    state[f"{name}_scale"] = _scales_like(parameter, block)
        if not local(parameter).numel():
            return
        rate = torch.full((), group["lr"], device=parameter.device)
        one = torch.ones((), device=parameter.device)
        scale = one if self.grad_scale is None else self.grad_scale
        skipped = torch.zeros_like(one) if self.found_inf is None else self.found_inf
        tensors = [local(t) for t in (parameter, parameter.grad, *state.values())]  # type: ignore[arg-type]
        update = _update(parameter.device.type)
        books = codebook(True, parameter.device), codebook(False, parameter.device)
        update(*tensors, books=books, rate=rate, scale=scale, skipped=skipped > 0, block=block, **_settings(group))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch casts states to their parameter's dtype; codes are small whole numbers, so they come back exactly."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            if block_of(tuple(parameter.shape), self.block_size):
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = state[name].to(torch.uint8)


def block_of(shape: tuple[int, ...], block_size: int) -> int:
    """Values that share a scale: the largest common divisor with a row, so that no block is cut by sharding; 0 for
    what stays in fp32. By the whole parameter's shape, so that all ranks and all numbers of ranks agree.
    """
    if len(shape) < 2 or math.prod(shape) < LEAST_VALUES:
        return 0
    block = math.gcd(math.prod(shape[1:]), block_size)
    return block if block >= LEAST_BLOCK else 0


def _scales_like(parameter: Tensor, block: int) -> Tensor:
    """[rows, blocks of a row], sharded over rows as the parameter is."""
    shape = (parameter.shape[0], math.prod(parameter.shape[1:]) // block)
    here = local(parameter).new_zeros(len(local(parameter)), shape[1], dtype=torch.float32)
    if not isinstance(parameter, DTensor):
        return here
    layout = (parameter.device_mesh, parameter.placements)
    return DTensor.from_local(here, *layout, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))


def _settings(group: dict[str, Any]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    return {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "weight_decay": group["weight_decay"]}


@functools.cache
def _update(device_type: str) -> Callable[..., None]:
    """On a GPU in one kernel; elsewhere as written."""
    if device_type != "cuda":
        return update
    strict_graphs()
    compiled: Callable[..., None] = torch.compile(update, fullgraph=True)
    return compiled


def update(
    parameter: Tensor,
    gradient: Tensor,
    step: Tensor,
    exp_avg: Tensor,
    *moments: Tensor,  # 8 bits: exp_avg_scale, exp_avg_sq, exp_avg_sq_scale; fp32: exp_avg_sq
    books: tuple[Tensor, Tensor],  # signed, unsigned
    rate: Tensor,
    scale: Tensor,
    skipped: Tensor,
    block: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW in fp32 on one parameter, in place; nothing changes where `skipped`."""
    signed, unsigned = books
    if block:
        exp_avg_scale, exp_avg_sq, exp_avg_sq_scale = moments
        first, second = decoded(exp_avg, exp_avg_scale, signed), decoded(exp_avg_sq, exp_avg_sq_scale, unsigned)
    else:
        (exp_avg_sq,) = moments
        first, second = exp_avg, exp_avg_sq
    gradient = gradient.float() / scale
    first = first.lerp(gradient, 1 - beta1)
    second = second.lerp(gradient.square(), 1 - beta2)
    now = step + 1
    size = (first / (1 - beta1**now)) / (second.sqrt() / (1 - beta2**now).sqrt() + eps)
    moved = parameter.float() * (1 - rate * weight_decay) - rate * size
    parameter.copy_(torch.where(skipped, parameter, moved.to(parameter.dtype)))
    step.copy_(torch.where(skipped, step, now))
    if not block:
        exp_avg.copy_(torch.where(skipped, exp_avg, first))
        exp_avg_sq.copy_(torch.where(skipped, exp_avg_sq, second))
        return
    for codes, scales, value, book in (
        (exp_avg, exp_avg_scale, first, signed),
        (exp_avg_sq, exp_avg_sq_scale, second, unsigned),
    ):
        new_codes, new_scales = encoded(value, scales.shape, book)
        codes.copy_(torch.where(skipped, codes, new_codes))
        scales.copy_(torch.where(skipped, scales, new_scales))


@functools.cache
def codebook(is_signed: bool, device: torch.device) -> Tensor:
    """The 256 values of dynamic tree quantization, rising, 0 and 1 among them: fine near 0, where most moments are.

    A decimal exponent in unary (leading zero bits) and a linear fraction in the bits that are left.
    """
    values = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for exponent in range(7):
        num_steps = 2 ** (exponent + (0 if is_signed else 1))
        edges = torch.linspace(0.1, 1.0, num_steps + 1, dtype=torch.float64)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)
        values += [means, -means] if is_signed else [means]
    return torch.cat(values).sort().values.float().to(device)


def decoded(codes: Tensor, scales: Tensor, book: Tensor) -> Tensor:
    """fp32 values, shaped like the codes."""
    return (book[codes.int()].view(*scales.shape, -1) * scales[..., None]).view(codes.shape)


def encoded(values: Tensor, scale_shape: torch.Size, book: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest codes (uint8, shaped like the values) and each block's largest magnitude."""
    blocks = values.reshape(*scale_shape, -1)
    scales = blocks.abs().amax(-1)
    midpoints = (book[:-1] + book[1:]) / 2
    codes = torch.bucketize(blocks / scales.clamp(min=1e-12)[..., None], midpoints, right=True)
    return codes.to(torch.uint8).view(values.shape), scales
