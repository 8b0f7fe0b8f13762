"""AdamW with moments of 8, 4 or 2 bytes a weight, and which parameters decay.

    moments fp32   8 bytes of state per weight: torch's fused kernel over each rank's own shards
            bf16   4: rounded by chance
            8bit   2: (Dettmers et al., 2022, arXiv:2110.02861), as near to fp32 as torchao's
                AdamW8bit, whose numbers are others

States are plain tensors that are sharded as their parameters are: saved and loaded to the bit on
any number of ranks. torchao's classes are not used: their states cannot be written by the
checkpoint, and their random numbers would differ between replicas of a weight.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from automodel_lite.compat import local_shape_and_offset
from automodel_lite.config.rules import PAIR, Auto, OneOf, Range
from automodel_lite.errors import ConfigError
from automodel_lite.graphs import compiled
from automodel_lite.models.layers import local
from automodel_lite.tensors import hash32

Rate = Annotated[float, Range(0)]
# Adam moves each weight by about the rate in every step: 1e-5 to 1e-3 are usual, and above 1 no
# model is left; auto (resolved before) = by the kind of training
LearningRate = Annotated[float, Range(0, 1)] | Auto
Betas = Annotated[Sequence[Annotated[float, Range(0, below=1)]], PAIR]
# a weight without a gradient is divided by it alone; in fp32 less is 0
Eps = Annotated[float, Range(1e-30)]

BLOCK = 256  # values of an 8-bit moment that share one scale
LEAST_BLOCK = 32
# of a parameter; smaller ones keep fp32 moments, as in torchao and bitsandbytes
LEAST_VALUES = 4096

_NORM = re.compile("(Layer|RMS)Norm")
_ELEMENTWISE = re.compile(r".*bias|A_log|D|scale")


def adamw(
    model: nn.Module,
    lr: LearningRate,
    betas: Betas = (0.9, 0.95),  # decay rates of the first and second moment
    eps: Eps = 1e-8,  # added to the denominator
    weight_decay: Rate = 0.01,  # of matrices
    # as they are held: 8, 4 or 2 bytes per weight
    moments: Annotated[str, OneOf(("fp32", "bf16", "8bit"))] = "fp32",
) -> Optimizer:
    """AdamW (Loshchilov & Hutter, 2019) over `param_groups`; small moments of matrices of at least
    4096 values.
    """
    groups = param_groups(model, weight_decay)
    shared = dict[str, Any](lr=lr, betas=tuple(map(float, betas)), eps=eps)
    if moments == "fp32":
        return LocalAdamW(groups, fused=True, **shared)
    return SmallAdamW(groups, shared, {"bf16": torch.bfloat16, "8bit": torch.uint8}[moments])


class LocalAdamW(torch.optim.AdamW):
    """AdamW that works on each rank's own shards: 0.6 to 1.4 ms of host time for 291 parameters,
    where DTensors take 9 to 26 ms in which the device waits. Its state stays DTensors, as
    checkpoints need it.
    """

    def _init_group(  # type: ignore[override]
        self, group: dict[str, Any], *lists: list[Tensor]
    ) -> bool:
        has_complex = super()._init_group(group, *lists)  # type: ignore[arg-type]
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return has_complex


def param_groups(
    model: nn.Module, weight_decay: float, left_out: Iterable[nn.Parameter] = ()
) -> list[dict[str, Any]]:
    """Two groups: `matrices` decay, the rest (norms, biases, sinks) does not. Frozen parameters are
    left out.

    Raises ValueError when nothing is trainable.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("no parameter of the model is trainable.")
    decaying = set(matrices(model))
    decayed = decaying.difference(left_out)
    decay = [p for p in trainable if p in decayed]
    keep = [p for p in trainable if p not in decaying]
    groups = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": keep, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Trained weights of products and embeddings: of two dimensions and more, but not what is a
    bias, a norm or a scale of each head, expert or channel.
    """
    found: dict[nn.Parameter, None] = {}
    for module in model.modules():
        is_norm = _NORM.search(type(module).__name__)
        for name, parameter in module.named_parameters(recurse=False):
            is_product = parameter.ndim >= 2 and not is_norm and not _ELEMENTWISE.fullmatch(name)
            if parameter.requires_grad and is_product:
                found[parameter] = None
    return list(found)


# -------------------------------------------------------------------------------------------------
# small states
class SmallAdamW(Optimizer):
    """AdamW whose moments take 4, 2 or 1 bytes a value, on weights in fp32 or bf16; `found_inf` and
    `grad_scale` as torch's fused AdamW has them.

    Values in bf16 are rounded up or down by chance (Gupta et al., 2015, arXiv:1502.02551): rounding
    to the nearest one drops every change of less than 1/256. The chance is a hash of step,
    parameter and place, so that replicas stay equal, another layout of ranks rounds alike, and a
    resumed run needs no state for it.
    """

    rounds_by_chance = True  # so weights in bf16 learn
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        moments: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(groups, defaults)
        self.moments = moments
        self._step_supports_amp_scaling = True
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            check_blocks(parameter, moments)
        self._places = {p: place_of(p, number) for number, p in enumerate(parameters)}
        self._books = {
            p.device: (codebook(True, p.device), codebook(False, p.device)) for p in self._places
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient; `closure` is not called."""
        for group in self.param_groups:
            self.step_group(group, [p for p in group["params"] if p.grad is not None])

    def scale_and_skip(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns what gradients are divided by, and whether nothing may change."""
        scale = torch.ones((), device=device) if self.grad_scale is None else self.grad_scale
        skipped = torch.zeros((), device=device) if self.found_inf is None else self.found_inf
        return scale, skipped > 0

    def step_group(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """Steps parameters that share their settings."""
        for parameter in parameters:
            state = self.state[parameter]
            device = parameter.device
            if not state:
                state.update(self._new_state(parameter))
            scale, skipped = self.scale_and_skip(device)
            # beside the average of the weights, which is not the optimizer's
            mine = {
                name: local(value)
                for name, value in state.items()
                if name.startswith(("step", "exp_avg"))
            }
            if not local(parameter).numel():  # its count of steps may be the one that is saved
                mine["step"] += ~skipped
                continue
            step = compiled(update) if device.type == "cuda" else update  # on a GPU in one kernel
            step(
                local(parameter),
                local(parameter.grad),  # type: ignore[arg-type]
                mine,
                place=self._places[parameter],
                codebooks=self._books[device],
                rate=torch.full((), group["lr"], device=device),
                scale=scale,
                skipped=skipped,
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        dtype, block = moments_of(tuple(parameter.shape), self.moments)
        state = {"step": torch.zeros((), device=parameter.device)}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=dtype)
            if block:
                state[f"{name}_scale"] = _scales_like(parameter, block)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch casts states to their parameter's dtype: codes and bf16 values come back exactly
        from fp32.
        """
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            for name, made in self._new_state(parameter).items():
                if name in state:  # Muon's matrices have no moments
                    state[name] = state[name].to(made.dtype)


@dataclass(frozen=True)
class ShardOffset:
    """Where this rank's part of a parameter lies in the whole one."""

    number: int  # of the parameter in its optimizer
    offsets: tuple[int, ...]
    strides: tuple[int, ...]  # of the whole tensor, contiguous


def place_of(parameter: Tensor, number: int) -> ShardOffset:
    """Returns the place of this rank's shard."""
    shape = tuple(parameter.shape)
    offsets = (0,) * len(shape)
    if isinstance(parameter, DTensor):
        _, offsets = local_shape_and_offset(shape, parameter.device_mesh, parameter.placements)
    return ShardOffset(
        number, tuple(offsets), tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    )


def moments_of(shape: tuple[int, ...], wanted: torch.dtype) -> tuple[torch.dtype, int]:
    """Returns the dtype of a parameter's moments, and how many values share a scale (0: none do).

    By the whole parameter's shape, so that all ranks and all numbers of ranks agree.
    """
    if len(shape) < 2 or math.prod(shape) < LEAST_VALUES:
        return torch.float32, 0
    if wanted != torch.uint8:
        return wanted, 0
    # a common divisor with a row: no block is cut by sharding over rows
    block = math.gcd(shape[-1], BLOCK)
    return (torch.uint8, block) if block >= LEAST_BLOCK else (torch.float32, 0)


def _scales_like(parameter: Tensor, block: int) -> Tensor:
    """[..., rows, blocks of a row], sharded as the parameter is."""
    *rows, length = parameter.shape
    shape = torch.Size((*rows, length // block))
    mine = local(parameter)
    here = mine.new_zeros(*mine.shape[:-1], mine.shape[-1] // block, dtype=torch.float32)
    if not isinstance(parameter, DTensor):
        return here
    layout = (parameter.device_mesh, parameter.placements)
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(here, *layout, run_check=False, shape=shape, stride=stride)
    # from_local moves shards of mesh.cpu_offload to the mesh's device
    return whole.to(parameter.device)


def check_blocks(parameter: Tensor, moments: torch.dtype) -> None:
    """Raises ConfigError where tensor parallelism cuts a row inside a block."""
    _, block = moments_of(tuple(parameter.shape), moments)
    length = local(parameter).shape[-1] if block else 0
    if block and length % block:
        raise ConfigError(
            f"optimizer=adamw_8bit: mesh.tp cuts rows of {parameter.shape[-1]} weights to {length},"
            f" which are not whole blocks of {block}: use optimizer=adamw_bf16, or a smaller "
            "mesh.tp."
        )


def update(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    *,
    place: ShardOffset,
    codebooks: tuple[Tensor, Tensor],  # signed, unsigned
    rate: Tensor,
    scale: Tensor,
    skipped: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW in fp32 on this rank's part of one parameter, in place; nothing changes where
    `skipped`.
    """
    beta1, beta2 = betas
    draw = functools.partial(random_bits, place, tuple(parameter.shape), state["step"])
    gradient = gradient.float() / scale
    first = _moment(state, "exp_avg", codebooks[0]).lerp(gradient, 1 - beta1)
    second = _moment(state, "exp_avg_sq", codebooks[1]).lerp(gradient.square(), 1 - beta2)
    now = state["step"] + 1
    size = (first / (1 - beta1**now)) / (second.sqrt() / (1 - beta2**now).sqrt() + eps)
    updated = parameter.float() * (1 - rate * weight_decay) - rate * size
    # each tensor that is rounded draws from a stream of its own
    after = {"step": now}
    for stream, (name, value, book) in enumerate(
        (("exp_avg", first, codebooks[0]), ("exp_avg_sq", second, codebooks[1])), 1
    ):
        if state[name].dtype == torch.uint8:
            after[name], after[f"{name}_scale"] = encoded(value, state[f"{name}_scale"].shape, book)
        else:
            after[name] = rounded(value, state[name].dtype, draw, stream)
    parameter.copy_(torch.where(skipped, parameter, rounded(updated, parameter.dtype, draw, 0)))
    for name, value in after.items():
        state[name].copy_(torch.where(skipped, state[name], value))


def _moment(state: dict[str, Tensor], name: str, book: Tensor) -> Tensor:
    """fp32 values."""
    kept = state[name]
    return (
        decoded(kept, state[f"{name}_scale"], book) if kept.dtype == torch.uint8 else kept.float()
    )


def rounded(
    value: Tensor, dtype: torch.dtype, draw: Callable[[int], Tensor], stream: int
) -> Tensor:
    """Returns fp32 as it is, and bf16 rounded up with the chance that makes the value its mean."""
    if dtype != torch.bfloat16:
        return value.to(dtype)
    # random bits below the last one that bf16 keeps are added before they are cut off
    return (
        ((value.contiguous().view(torch.int32) + draw(stream)) & -65536)
        .view(torch.float32)
        .to(dtype)
    )


def random_bits(place: ShardOffset, shape: tuple[int, ...], step: Tensor, stream: int) -> Tensor:
    """16 random bits for each element, int32: a hash of where it lies in the whole parameter, alike
    on all layouts.
    """
    index = torch.zeros((), dtype=torch.int64, device=step.device)
    for dim, size in enumerate(shape):
        along = (torch.arange(size, device=step.device) + place.offsets[dim]) * place.strides[dim]
        index = index + along.view(-1, *(1 for _ in shape[dim + 1 :]))
    seed = hash32(step.to(torch.int32) * 4 + stream) ^ hash32(
        torch.full_like(step, place.number, dtype=torch.int32)
    )
    # The mask ends what inductor takes for an index. The width of an index is its own choice, a
    # cast of one is dropped, and with symbolic sizes the whole hash would run in 64 bits: other
    # bits, which cannot be viewed as fp32.
    return hash32((index & 0xFFFFFFFF).to(torch.int32) ^ seed) & 0xFFFF


def codebook(is_signed: bool, device: torch.device) -> Tensor:
    """The 256 values of dynamic tree quantization, rising, 0 and 1 among them: fine near 0, where
    most moments are.

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
