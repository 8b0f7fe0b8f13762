"""Step time and traffic of one optimizer step on any number of GPUs, by formulas (docs/planning.md): traffic is compared with gloo."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from automodel_lite.attention.spec import LayerShape, layer_shapes
from automodel_lite.models.flops import ModelSize, model_size, step_flops
from automodel_lite.parallel.mesh import mesh_shape
from automodel_lite.parallel.sharding import choose_strategy, copies_of_experts
from automodel_lite.training.memory import estimate_memory
from automodel_lite.training.plan import Decided, Parts

_BF16, _FP32 = 2, 4  # bytes


@dataclass(frozen=True)
class Hardware:
    """Of one GPU; bandwidths in one direction."""

    peak_flops: float
    mfu_frac: float  # that compute alone reaches
    in_node_bytes_per_s: float
    between_nodes_bytes_per_s: float
    gpus_per_node: int = 8

    def bandwidth(self, num_ranks: int) -> float:
        """Of a ring over so many neighboring ranks: its slowest link decides."""
        return (
            self.in_node_bytes_per_s
            if num_ranks <= self.gpus_per_node
            else self.between_nodes_bytes_per_s
        )


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
    # keys and values between context-parallel ranks, activations between tensor-parallel ones
    exchange_bytes: float
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


def estimate(
    parts: Parts,
    model: PretrainedConfig,
    hardware: Hardware,
    gpus: int,
    document_tokens: int,
    micro_steps: int = 1,
) -> Estimate:
    """A full fine-tuning step under FSDP2 in bf16; `mesh.dp_shard=-1` takes all ranks that remain.

    Raises ConfigError when the mesh does not fit the number of GPUs.
    """
    shape = mesh_shape(replace(parts.mesh, dp_shard=-1), gpus)
    size = model_size(model)
    flops = step_flops(model, size, None)
    tokens = parts.training.micro_batch_size * parts.packed_sequence_size * micro_steps  # a dp rank
    pairs = tokens / document_tokens * document_tokens * (document_tokens + 1) / 2
    recomputed = 4 / 3 if parts.training.activation_checkpointing in ("full", "offload") else 1.0
    work = flops.of(tokens, tokens, pairs) * recomputed / (shape.cp * shape.tp)
    compute_s = work / (hardware.peak_flops * hardware.mfu_frac)
    shards = shape.dp_shard * shape.cp
    part = (shards - 1) / shards
    # the root's own parameters stay whole until its backward
    gathered_twice = size.parameters - size.embedding
    gather = micro_steps * _BF16 * (2 * gathered_twice + size.embedding) * part / shape.tp
    reduce = _FP32 * size.parameters * part / shape.tp
    replicas = (
        2
        * _FP32
        * size.parameters
        / (shards * shape.tp)
        * (shape.dp_replicate - 1)
        / shape.dp_replicate
    )  # HSDP's all-reduce
    copies = copies_of_experts(size.num_experts, shards) if shape.tp == shape.ep == 1 else 1
    replicas += 2 * _FP32 * size.all_experts * (copies - 1) / shards
    in_layers = _exchange_bytes(
        parts.mesh.cp_exchange, model, tokens / shape.tp, shape.cp, recomputed > 1
    )
    in_layers += micro_steps * _tensor_parallel_bytes(
        model, size, tokens / micro_steps / shape.cp, shape.tp, recomputed > 1
    )
    exchange_s = in_layers / hardware.bandwidth(shape.cp * shape.tp)
    traffic_s = (gather + reduce) / hardware.bandwidth(shards) + replicas / hardware.bandwidth(gpus)
    num_layers = size.num_layers
    exposed_s = max(0.0, traffic_s - compute_s) + traffic_s / num_layers + exchange_s
    one_step = replace(parts, training=replace(parts.training, global_batch_size=None))
    strategy = choose_strategy(parts.mesh.strategy, shape, is_gpu=True)
    memory = estimate_memory(
        Decided.of(
            one_step, config=model, size=size, shape=shape, strategy=strategy, dtype=torch.bfloat16
        ),
        None,
    )
    return Estimate(
        gpus,
        shape.dp,
        shape.cp,
        tokens * shape.dp,
        compute_s,
        gather,
        reduce + replicas,
        in_layers,
        exposed_s,
        memory.total,
    )


def _exchange_bytes(
    exchange: str, model: PretrainedConfig, tokens: float, cp_size: int, is_recomputed: bool
) -> float:
    """What a rank receives from the others of its context-parallel group, in all layers; nothing hides it. An exchange
    that is not chosen yet is taken to be all_gather.
    """
    name = exchange if exchange in ("all_to_all", "ring") else "all_gather"
    sent = [
        sent_bytes(name, layer, int(tokens), cp_size, _BF16)
        for layer in layer_shapes(model)
        if layer.num_heads
    ]
    return float(
        sum(forward * (2 if is_recomputed else 1) + backward for forward, backward in sent)
    )


def sent_bytes(
    exchange: str, layer: LayerShape, num_tokens: int, cp_size: int, value_bytes: int
) -> tuple[int, int]:
    """Returns the bytes that leave a rank in the forward and in the backward pass of one attention layer.

    num_tokens  of the whole stream
    """
    own = num_tokens // cp_size * value_bytes
    if exchange == "all_to_all":
        # where ranks outnumber the key heads, each head is sent to several of them
        heads, kv_heads = layer.num_heads, max(layer.num_kv_heads, cp_size)
        features = (heads + kv_heads) * (layer.head_dim + layer.value_head_dim)
        traded = own * features * (cp_size - 1) // cp_size
        return traded, traded
    gathered = own * layer.num_kv_heads * (layer.head_dim + layer.value_head_dim) * (cp_size - 1)
    return gathered, gathered * (2 if exchange == "ring" else 1)


def _tensor_parallel_bytes(
    model: PretrainedConfig, size: ModelSize, local: float, tp: int, is_recomputed: bool
) -> float:
    """All-reduces of a micro-batch: the embedding's, of each layer two results and the gradients of five inputs (of q,
    k, v, gate and up), one result again when it is recomputed; and the head, which each rank gathers.
    """
    all_reduces = size.num_layers * (8 if is_recomputed else 7) + 1
    hidden = _BF16 * local * model.get_text_config().hidden_size
    return (2 * all_reduces * hidden + _BF16 * size.head_weights) * (tp - 1) / tp
