"""fp8 linear layers, by torchao, and FSDP gathers that send their weights in fp8. Imported only
with training.fp8.

FSDP gathers weights in the compute dtype, and each rank then rounds all of them to fp8, in the
forward pass and again in the backward pass. Here each rank rounds its own shards, once per
optimizer step: to the compute dtype, then to fp8, by the scale of the whole weight. That is what
the layers would do, so products have the same bits and half is sent.

FSDP looks for two hooks on a shard. torchao has them on a tensor subclass
(`enable_fsdp_float8_all_gather`), which optimizers, checkpoints and adapters would meet; here they
are attributes of the plain tensor.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale

from automodel_lite.errors import ConfigError


def use_fp8(layers: list[nn.Module], recipe: str, emulate: bool = False) -> None:
    """Replaces the linear layers inside `layers` by torchao's, in place; adapters and the output
    head stay as they are.

    emulate  rounds to fp8 and multiplies in fp32, on any device: for tests
    Raises ConfigError on GPUs whose tensor cores do not have it.
    """
    if not emulate and (
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9)
    ):
        raise ConfigError(
            f"training.fp8={recipe} needs a GPU of compute capability 8.9 or later: set "
            "training.fp8=none."
        )
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=fits_fp8)


def fits_fp8(module: nn.Module, name: str) -> bool:
    """Returns whether torchao's layer can take the place of `module`, and wins by it."""
    # An adapter's matrices are too thin to win, and stay in fp32; the product wants multiples of 16
    # in both dims.
    sizes = (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (1,)
    return "lora_" not in name and not any(size % 16 for size in sizes)


class Fp8Gathers:
    """The weights of `model` that FSDP gathers in fp8: those of torchao's layers whose rows divide
    evenly, all sharded over one mesh. Made when the weights are loaded, before the first forward.

    compute_dtype  in which FSDP gathers the other weights
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        self.compute_dtype = compute_dtype
        self.version = -1
        linears = [
            x
            for x in model.modules()
            if isinstance(x, Float8Linear) and isinstance(x.weight, DTensor)
        ]
        # an uneven shard is padded by FSDP, which makes a new tensor of it
        self.linears = [x for x in linears if len(x.weight) % x.weight.device_mesh.size(-1) == 0]
        self.shards: list[Tensor] = [linear.weight._local_tensor for linear in self.linears]
        self.rounded: list[Float8TrainingTensor] = []
        for number, (linear, shard) in enumerate(zip(self.linears, self.shards)):
            hooks: Any = shard
            hooks.fsdp_pre_all_gather = partial(self._before_gather, number)
            hooks.fsdp_post_all_gather = partial(_after_gather, linear.linear_mm_config)

    @torch.no_grad()
    def refresh(self) -> None:
        """Rounds the shards again if they have changed; every rank calls it before a forward pass.

        Whatever writes into a weight (`apply_gradients`, the average, a checkpoint) raises its
        tensor's version.
        """
        version = sum(shard._version for shard in self.shards)
        if version == self.version or not self.shards:
            return
        self.version = version
        # rounding is monotonic: the largest rounded weight is the largest weight, rounded
        largest = torch.stack(torch._foreach_norm(self.shards, math.inf)).to(self.compute_dtype)
        # replicas of the shards are an axis before the last
        mesh = self.linears[0].weight.device_mesh
        dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group(mesh.ndim - 1))
        dtype = self.linears[0].config.cast_config_weight.target_dtype
        scales = amax_to_scale(largest, dtype)
        self.rounded.clear()
        self.rounded += [
            hp_tensor_and_scale_to_float8(shard.to(self.compute_dtype), scale, dtype)
            for shard, scale in zip(self.shards, scales.unbind())
        ]

    def _before_gather(self, number: int, mesh: Any) -> tuple[tuple[Tensor], Tensor]:
        """What is sent, and what is not: FSDP's `fsdp_pre_all_gather`."""
        return (self.rounded[number]._data,), self.rounded[number]._scale


def _after_gather(
    config: Any, gathered: tuple[Tensor], scale: Tensor, dtype: torch.dtype, out: Any = None
) -> Any:
    """FSDP's `fsdp_post_all_gather`: the weight as torchao's layer takes it, the first time; then
    its new scale.
    """
    if out is not None:
        out._scale = scale
        return None
    (data,) = gathered
    return Float8TrainingTensor(data, scale, dtype, config, GemmInputRole.WEIGHT), ()
