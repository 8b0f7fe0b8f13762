"""Step time, memory and traffic by arithmetic, for a number of GPUs that nobody has at hand (docs/scaling.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from automodel_lite.attention.spec import layer_shapes
from automodel_lite.config.schema import Config
from automodel_lite.data.prepare import build_packer
from automodel_lite.models.flops import model_size, step_flops
from automodel_lite.parallel.mesh import mesh_shape
from automodel_lite.training.memory import estimate_memory

_BF16, _FP32 = 2, 4


@dataclass(frozen=True)
class Hardware:
    """Of one GPU; bandwidths in one direction."""

    peak_flops: float
    mfu_frac: float  # that compute alone reaches
    in_node_bytes_per_s: float
    between_nodes_bytes_per_s: float
    gpus_per_node: int = 8

    def bandwidth(self, num_ranks: int) -> float:
        """Of a ring over so many neighbouring ranks: its slowest link decides."""
        return self.in_node_bytes_per_s if num_ranks <= self.gpus_per_node else self.between_nodes_bytes_per_s


@dataclass(frozen=True)
class Estimate:
    """One optimizer step on `gpus` GPUs; bytes and seconds of one GPU."""

    gpus: int
    dp: int
    cp: int
    tokens: float  # of all GPUs
    compute_s: float
    gather_bytes: float  # parameters: forward and backward of every micro-batch
    reduce_bytes: float  # gradients: once
    exchange_bytes: float  # keys and values between context-parallel ranks
    exposed_s: float  # traffic that computing does not hide
    memory_bytes: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s

    def __str__(self) -> str:
        return (
            f"{self.gpus:4d}   {f'{self.dp} x {self.cp}':>7s}   {self.tokens:13,.0f}   {self.compute_s:9.3f}   "
            f"{self.exposed_s:17.3f}   {self.step_s:6.3f}   {self.tokens / self.step_s / self.gpus:12,.0f}   "
            f"{self.memory_bytes / 2**30:14.1f}"
        )


def estimates(
    config: Config, model: PretrainedConfig, hardware: Hardware, gpus: Sequence[int], document_tokens: int
) -> list[Estimate]:
    """Weak scaling: each data-parallel rank keeps its packs per step. `document_tokens` is the mean length."""
    return [estimate(config, model, hardware, number, document_tokens) for number in gpus]


def estimate(
    config: Config, model: PretrainedConfig, hardware: Hardware, gpus: int, document_tokens: int, micro_steps: int = 1
) -> Estimate:
    """A full fine-tuning step under FSDP2 in bf16; `mesh.dp_shard=-1` takes all ranks that remain.

    Raises ConfigError when the mesh does not fit the number of GPUs.
    """
    shape = mesh_shape(replace(config.mesh, dp_shard=-1), gpus)
    size = model_size(model)
    flops = step_flops(model, size, None)
    tokens = config.training.micro_batch_size * build_packer(config).packed_sequence_size * micro_steps  # a dp rank
    pairs = tokens / document_tokens * document_tokens * (document_tokens + 1) / 2
    recomputed = 4 / 3 if config.training.activation_checkpointing == "full" else 1.0
    work = flops.of(tokens, tokens, pairs) * recomputed / shape.cp
    compute_s = work / (hardware.peak_flops * hardware.mfu_frac)
    shards = shape.dp_shard * shape.cp
    part = (shards - 1) / shards
    gathered_twice = size.parameters - size.embedding  # the root's own parameters stay whole until its backward
    gather = micro_steps * _BF16 * (2 * gathered_twice + size.embedding) * part
    reduce = _FP32 * size.parameters * part
    replicas = 2 * _FP32 * size.parameters / shards * (shape.dp_replicate - 1) / shape.dp_replicate  # HSDP's all-reduce
    exchange = _exchange_bytes(model, tokens, shape.cp) * (3 if recomputed > 1 else 2)
    traffic_s = (gather + reduce) / hardware.bandwidth(shards) + replicas / hardware.bandwidth(gpus)
    num_layers = size.num_layers
    exposed_s = max(0.0, traffic_s - compute_s) + traffic_s / num_layers + exchange / hardware.bandwidth(shape.cp)
    one_step = replace(config, training=replace(config.training, global_batch_size=None))
    strategy = "fsdp" if gpus > 1 else "none"
    memory = estimate_memory(one_step, shape, strategy, model, size, None, torch.bfloat16)
    return Estimate(
        gpus,
        shape.dp,
        shape.cp,
        tokens * shape.dp,
        compute_s,
        gather,
        reduce + replicas,
        exchange,
        exposed_s,
        memory.total,
    )


def _exchange_bytes(model: PretrainedConfig, tokens: float, cp: int) -> float:
    """Keys and values that a rank receives in one pass over the layers; they meet nothing that would hide them."""
    kv_width = sum(layer.num_kv_heads * (layer.head_dim + layer.value_head_dim) for layer in layer_shapes(model))
    return float(tokens * kv_width * _BF16 * (cp - 1) / cp)
