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

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from automodel_lite import compat
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

    copies  see `WritesCopies`
    """

    copies: Mapping[Tensor, Tensor] = MappingProxyType({})
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def writes_copy(self, parameter: Tensor) -> bool:
        """See `WritesCopies`."""
        return True

    def _init_group(  # type: ignore[override]
        self, group: dict[str, Any], *lists: list[Tensor]
    ) -> bool:
        has_complex = super()._init_group(group, *lists)  # type: ignore[arg-type]
        # What is stepped here is left out of the lists: torch's kernel has one dtype for all.
        written = {i for i, parameter in enumerate(lists[0]) if parameter in self.copies}
        if written:
            self._step_and_copy(group, *([x[i] for i in sorted(written)] for x in lists if x))
        for tensors in lists:
            tensors[:] = [local(x) for i, x in enumerate(tensors) if i not in written]
        return has_complex

    def _step_and_copy(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        firsts: list[Tensor],
        seconds: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        settings = settings_of_step(self, group, parameters[0].device)
        # in fp64, as torch's kernel has them: 1 - 0.999 has 4 digits in fp32
        corrections = corrections_of(torch.stack(steps).double(), group["betas"]).unbind()
        for parameter, gradient, first, second, of_step in zip(
            parameters, gradients, firsts, seconds, corrections
        ):
            step_flat(
                parameter,
                gradient,
                {"exp_avg": first, "exp_avg_sq": second},
                self.copies[parameter],
                corrections=of_step,
                **settings,
            )
        _count_step(steps, settings["skipped"])


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
# one step
def _count_step(steps: list[Tensor], skipped: Tensor) -> None:
    """Adds a step to all counts, unless it is skipped."""
    # a list of tensors: torch reads the value of a single one on the host, which waits for it
    torch._foreach_add_(steps, [(~skipped).to(steps[0].dtype)] * len(steps))


def scale_and_skip(
    optimizer: LocalAdamW | SmallAdamW, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns what gradients are divided by, and whether nothing may change."""
    scale = optimizer.grad_scale
    found_inf = optimizer.found_inf
    scale = torch.ones((), device=device) if scale is None else scale
    found_inf = torch.zeros((), device=device) if found_inf is None else found_inf
    return scale, found_inf > 0


def settings_of_step(
    optimizer: LocalAdamW | SmallAdamW, group: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Returns the arguments of `update` that all parameters of a group share."""
    scale, skipped = scale_and_skip(optimizer, device)
    own = {name: group[name] for name in ("betas", "eps", "weight_decay")}
    return {
        "rate": torch.full((), group["lr"], device=device),
        "scale": scale,
        "skipped": skipped,
    } | own


# -------------------------------------------------------------------------------------------------
# small states
class SmallAdamW(Optimizer):
    """AdamW whose moments take 4, 2 or 1 bytes a value, on weights in fp32 or bf16; `found_inf` and
    `grad_scale` as torch's fused AdamW has them.

    Values in bf16 are rounded up or down by chance (Gupta et al., 2015, arXiv:1502.02551): rounding
    to the nearest one drops every change of less than 1/256. The chance is a hash of step,
    parameter and place, so that replicas stay equal, another layout of ranks rounds alike, and a
    resumed run needs no state for it.

    copies  see `WritesCopies`
    """

    copies: Mapping[Tensor, Tensor] = MappingProxyType({})
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
        self._places = {p: place_of(p) for p in parameters}
        self._numbers = {p: number for number, p in enumerate(parameters)}
        self._numbers_there: dict[Tensor, Tensor] = {}
        self._books = {
            p.device: (codebook(True, p.device), codebook(False, p.device)) for p in parameters
        }

    def writes_copy(self, parameter: Tensor) -> bool:
        """See `WritesCopies`."""
        return True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient; `closure` is not called."""
        for group in self.param_groups:
            self.step_group(group, [p for p in group["params"] if p.grad is not None])

    def step_group(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """Steps parameters that share their settings."""
        for device, here in _by_device(parameters).items():
            settings = settings_of_step(self, group, device)
            for parameter in here:
                state = self.state[parameter]
                if not state:
                    state.update(self._new_state(parameter))
            steps = [local(self.state[parameter]["step"]) for parameter in here]
            numbers = torch.stack([self._number_there(parameter) for parameter in here])
            before = torch.stack(steps)
            corrections = corrections_of(before, group["betas"]).unbind()
            seeds = seeds_of(numbers, before).unbind()
            for parameter, of_step, of_streams in zip(here, corrections, seeds):
                # A rank may hold no part of it; its count of steps may be the one that is saved.
                if not local(parameter).numel():
                    continue
                # beside the average of the weights, which is not the optimizer's
                moments = {
                    name: local(value)
                    for name, value in self.state[parameter].items()
                    if name.startswith("exp_avg")
                }
                step_flat(
                    local(parameter),
                    local(parameter.grad),  # type: ignore[arg-type]
                    moments,
                    self.copies.get(parameter),
                    corrections=of_step,
                    place=self._places[parameter],
                    seeds=of_streams,
                    codebooks=self._books[device],
                    **settings,
                )
            _count_step(steps, settings["skipped"])

    def _number_there(self, parameter: Tensor) -> Tensor:
        """Returns a parameter's number on its device, made there at its first step: a copy to a
        device would wait for what runs on it.
        """
        if parameter not in self._numbers_there:
            number = self._numbers[parameter]  # type: ignore[index]
            self._numbers_there[parameter] = torch.full((), number, device=parameter.device)
        return self._numbers_there[parameter]

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


def _by_device(parameters: list[nn.Parameter]) -> dict[torch.device, list[nn.Parameter]]:
    found: dict[torch.device, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.device, []).append(parameter)
    return found


def place_of(parameter: Tensor) -> Tensor:
    """Returns `runs_of` this rank's part of a parameter, int64 on its device: a kernel is compiled
    once more for other integers.
    """
    shape = tuple(parameter.shape)
    here = shape
    offsets = (0,) * len(shape)
    if isinstance(parameter, DTensor):
        here, offsets = local_shape_and_offset(shape, parameter.device_mesh, parameter.placements)
    return torch.tensor(runs_of(shape, here, offsets), device=local(parameter).device)


def runs_of(shape: Sequence[int], here: Sequence[int], offsets: Sequence[int]) -> list[int]:
    """Returns where a part of a tensor lies in the whole one: [first], the index there of its first
    value, or, where its values are no single run, [first, length, stride] of the runs.

    here, offsets  the part's shape, and where it begins along each dim
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides))
    # Cut along dim 0, the values are one run. Cut along a further one, each index of the dims
    # before it has a run of its own.
    cut = [dim for dim in range(1, len(shape)) if here[dim] != shape[dim]]
    if not cut:
        return [first]
    (dim,) = cut
    return [first, math.prod(here[dim:]), math.prod(shape[dim:])]


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


def step_flat(
    parameter: Tensor,
    gradient: Tensor,
    moments: dict[str, Tensor],
    copy: Tensor | None = None,
    **settings: Any,
) -> None:
    """Calls `update`, on a GPU as one kernel, on rows of 256 values, or of the block of 8-bit
    moments: of them there is one graph for all shapes, and a thread reads several values at a time.
    """
    # detached, as dynamo looks at a parameter's own gradient, which may have another dtype
    tensors = {"parameter": parameter.detach(), "gradient": gradient, **moments}
    if copy is not None:
        tensors["copy"] = copy
    if all(x.is_contiguous() for x in tensors.values()):
        scales = moments.get("exp_avg_scale")
        width = BLOCK if scales is None else parameter.numel() // scales.numel()
        width = math.gcd(parameter.numel(), width)
        for name, values in tensors.items():
            rows = values.view(-1) if name.endswith("_scale") else values.view(-1, width)
            # the first graph would be for this number of rows alone
            compat.dynamo.maybe_mark_dynamic(rows, 0)
            tensors[name] = rows
    step = compiled(update) if parameter.device.type == "cuda" else update
    parameter, gradient = tensors.pop("parameter"), tensors.pop("gradient")
    step(parameter, gradient, tensors, tensors.pop("copy", None), **settings)


def update(
    parameter: Tensor,
    gradient: Tensor,
    moments: dict[str, Tensor],
    copy: Tensor | None = None,
    *,
    corrections: Tensor,
    rate: Tensor,
    scale: Tensor,
    skipped: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    place: Tensor | None = None,
    seeds: Tensor | None = None,
    codebooks: tuple[Codebook | None, Codebook | None] = (None, None),  # signed, unsigned
) -> None:
    """AdamW in fp32 on this rank's part of one parameter, in place; nothing changes where
    `skipped`. Shapes may be any, as long as values are in their order.

    copy         of the parameter, in the dtype that it computes in
    corrections  [2], see `corrections_of`
    place, seeds, codebooks  of what is rounded by chance, or has codes: see `runs_of`, `seeds_of`
    """

    def draw(stream: int) -> Tensor:
        assert place is not None
        assert seeds is not None
        return random_bits(place, tuple(parameter.shape), seeds, stream)

    beta1, beta2 = betas
    gradient = gradient.float() / scale
    first = _moment(moments, "exp_avg", codebooks[0]).lerp(gradient, 1 - beta1)
    second = _moment(moments, "exp_avg_sq", codebooks[1]).lerp(gradient.square(), 1 - beta2)
    size = (first / corrections[0]) / (second.sqrt() / corrections[1] + eps)
    updated = parameter.float() * (1 - rate * weight_decay) - rate * size
    # each tensor that is rounded draws from a stream of its own
    after = {}
    for stream, (name, value, book) in enumerate(
        (("exp_avg", first, codebooks[0]), ("exp_avg_sq", second, codebooks[1])), 1
    ):
        if moments[name].dtype == torch.uint8:
            assert book is not None
            shape = moments[f"{name}_scale"].shape
            after[name], after[f"{name}_scale"] = encoded(value, shape, book)
        else:
            after[name] = rounded(value, moments[name].dtype, draw, stream)
    stepped = torch.where(skipped, parameter, rounded(updated, parameter.dtype, draw, 0))
    parameter.copy_(stepped)
    if copy is not None:
        copy.copy_(stepped)
    for name, value in after.items():
        moments[name].copy_(torch.where(skipped, moments[name], value))


def _moment(state: dict[str, Tensor], name: str, book: Codebook | None) -> Tensor:
    """fp32 values."""
    kept = state[name]
    if kept.dtype != torch.uint8:
        return kept.float()
    assert book is not None
    return decoded(kept, state[f"{name}_scale"], book)


def corrections_of(steps: Tensor, betas: tuple[float, float]) -> Tensor:
    """Returns fp32 [P, 2]: what the moments of P parameters are divided by, as they began at 0; of
    the second one the root.

    steps  [P], the number of steps before this one
    """
    beta1, beta2 = betas
    now = steps + 1
    return torch.stack([1 - beta1**now, (1 - beta2**now).sqrt()], 1).float()


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


def seeds_of(numbers: Tensor, steps: Tensor) -> Tensor:
    """Returns int32 [P, 3]: the seed of each stream of P parameters, of one for each tensor that is
    rounded.

    numbers  int64 [P], of the parameters in their optimizer
    steps    [P], the number of steps before this one
    """
    streams = torch.arange(3, dtype=torch.int32, device=steps.device)
    of_step = hash32(steps.to(torch.int32)[:, None] * 4 + streams)
    return of_step ^ hash32(numbers.to(torch.int32))[:, None]


def random_bits(place: Tensor, shape: tuple[int, ...], seeds: Tensor, stream: int) -> Tensor:
    """16 random bits for each element, int32: a hash of where it lies in the whole parameter, alike
    on all layouts.

    place  see `runs_of`
    shape  any, of this rank's values in their order
    """
    first, *runs = place.unbind()
    index = torch.arange(math.prod(shape), device=place.device)
    if runs:
        length, stride = runs
        index = index // length * stride + index % length
    index = (index + first).view(shape)
    # The mask ends what inductor takes for an index. The width of an index is its own choice, a
    # cast of one is dropped, and with symbolic sizes the whole hash would run in 64 bits: other
    # bits, which cannot be viewed as fp32.
    return hash32((index & 0xFFFFFFFF).to(torch.int32) ^ seeds[stream]) & 0xFFFF


class Codebook(NamedTuple):
    """The values of codes, fp32 [256], rising, and what lies between each two."""

    values: Tensor
    midpoints: Tensor


def codebook(is_signed: bool, device: torch.device) -> Codebook:
    """The 256 values of dynamic tree quantization, 0 and 1 among them: fine near 0, where most
    moments are.

    A decimal exponent in unary (leading zero bits) and a linear fraction in the bits that are left.
    """
    parts = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for exponent in range(7):
        num_steps = 2 ** (exponent + (0 if is_signed else 1))
        edges = torch.linspace(0.1, 1.0, num_steps + 1, dtype=torch.float64)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)
        parts += [means, -means] if is_signed else [means]
    values = torch.cat(parts).sort().values.float().to(device)
    return Codebook(values, (values[:-1] + values[1:]) / 2)


def decoded(codes: Tensor, scales: Tensor, book: Codebook) -> Tensor:
    """fp32 values, shaped like the codes."""
    return (book.values[codes.int()].view(*scales.shape, -1) * scales[..., None]).view(codes.shape)


def encoded(values: Tensor, scale_shape: torch.Size, book: Codebook) -> tuple[Tensor, Tensor]:
    """The nearest codes (uint8, shaped like the values) and each block's largest magnitude."""
    blocks = values.reshape(*scale_shape, -1)
    scales = blocks.abs().amax(-1)
    relative = blocks / scales.clamp(min=1e-12)[..., None]
    codes = torch.bucketize(relative, book.midpoints, right=True)
    return codes.to(torch.uint8).view(values.shape), scales
