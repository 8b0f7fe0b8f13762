"""What a rank holds in memory, by arithmetic, before the run; and what to change when it was too much.

    weights       fp32 masters (a frozen base: the compute dtype), over the ranks that shard them
    gradients     fp32, sharded alike; with several micro-batches FSDP2 adds them up unsharded
    optimizer     AdamW's two moments: fp32, or 8 bits
    working copy  what is gathered or cast for the layer at work
    activations   of one micro-batch, in the compute dtype; with activation checkpointing one input a layer
    logits        of the rows that the loss has at one time

The allocator's slack, the kernels' workspaces and communication buffers come on top: some 1 to 3 GiB on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from transformers import PretrainedConfig

from automodel_lite.config.schema import Config
from automodel_lite.data.source import batch_shape
from automodel_lite.models.flops import ModelSize, layer_shapes
from automodel_lite.models.loss import chunk_rows
from automodel_lite.parallel.mesh import MeshShape

_MASTER = 4  # bytes of an fp32 value


@dataclass(frozen=True)
class Trained:
    """What gradients and optimizer states exist for."""

    model: int  # weights of the model itself; frozen ones when `adapter` is not None
    adapter: int | None = None  # trained weights beside a frozen model

    @property
    def weights(self) -> int:
        return self.model if self.adapter is None else self.adapter


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float
    working_copy: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name.replace('_', ' ')} {_size(value)}" for name, value in asdict(self).items() if value)
        return f"about {_size(self.total)} a rank: {parts}"


def estimate_memory(
    config: Config,
    shape: MeshShape,
    strategy: str,
    model: PretrainedConfig,
    size: ModelSize,
    adapter: int | None,
    dtype: torch.dtype,
) -> MemoryEstimate:
    """adapter: trained weights beside a frozen model, None without."""
    compute = dtype.itemsize
    trained = Trained(size.parameters, adapter)
    shards = shape.dp_shard * shape.cp if strategy == "fsdp" else 1
    frozen = 0 if adapter is None else size.parameters * compute
    tokens = config.training.micro_batch_size * config.packed_sequence["packed_sequence_size"]
    gradients = _MASTER * trained.weights / shards
    if strategy == "fsdp" and batch_shape(config.training, shape.dp).micro_steps > 1:
        gradients += _MASTER * trained.weights
    return MemoryEstimate(
        weights=(_MASTER * trained.weights + frozen) / shards,
        gradients=gradients * (2 if strategy == "ddp" else 1),
        optimizer=_optimizer_bytes(config) * trained.weights / shards,
        working_copy=_working_copy(strategy, size, adapter, compute),
        activations=_activations(config, shape, model, size, tokens, compute),
        logits=_logits(config, model, size, tokens / shape.cp, compute, adapter is not None),
    )


def _working_copy(strategy: str, size: ModelSize, adapter: int | None, compute: int) -> float:
    """FSDP gathers two layers and what is outside of them; autocast keeps a cast copy of fp32 weights."""
    if strategy == "fsdp":
        return float(compute * (2 * size.largest_layer + size.embedding) + _MASTER * size.largest_layer)
    return float(compute * size.parameters) if compute < _MASTER and adapter is None else 0.0


def _activations(
    config: Config, shape: MeshShape, model: PretrainedConfig, size: ModelSize, tokens: int, compute: int
) -> float:
    text = model.get_text_config()
    local, hidden = tokens / shape.cp, text.hidden_size
    shapes = layer_shapes(model)
    num_layers = size.num_layers
    attended = sum(layer.num_heads * (layer.head_dim + layer.value_head_dim) for layer in shapes) / num_layers
    kv = sum(layer.num_kv_heads * (layer.head_dim + layer.value_head_dim) for layer in shapes) / num_layers
    attention_weights = hidden * (attended + kv)
    inner = max(size.layer_weights / num_layers - attention_weights, 0) / (3 * hidden)  # width of a gated MLP
    norms = 2 * (_MASTER + 2 * compute) * hidden  # each: its input in fp32, the normed, the scaled
    layer = local * (norms + compute * (attended + kv + 4 * inner))
    if shape.cp > 1:
        layer += tokens * compute * kv  # gathered keys and values
    how = config.training.activation_checkpointing
    num_recomputed = 0 if how == "none" else -(-num_layers // config.training.recompute_every_layers)
    kept = compute * hidden  # the layer's input; selective: the results of matrix products and attention too
    if how == "selective":
        kept += compute * (attended + kv + 2 * inner + 2 * hidden)
    at_work = layer if num_recomputed else 0.0
    return (num_layers - num_recomputed) * layer + at_work + num_recomputed * local * kept


def _logits(
    config: Config, model: PretrainedConfig, size: ModelSize, local: float, compute: int, is_frozen: bool
) -> float:
    vocabulary, hidden = model.get_text_config().vocab_size, model.get_text_config().hidden_size
    head_gradient = 0 if is_frozen else _MASTER * size.head_weights
    if "chunk_tokens" in config.loss:
        rows = min(local, chunk_rows(config.loss["chunk_tokens"], hidden))
        return rows * vocabulary * (compute + 2 * _MASTER) + head_gradient
    if _is_liger(config):  # its gradient takes the place of the logits; a chunk's share of the head's is made apart
        return liger_rows(local, vocabulary, hidden) * vocabulary * compute + 2 * head_gradient
    return local * vocabulary * (compute + 2 * _MASTER)


def liger_rows(tokens: float, vocabulary: int, hidden: int) -> int:
    """Rows of logits that Liger's kernel has at one time: about as much memory as its input (read in the source of
    liger-kernel 0.6.4 and 0.8.5).
    """
    least = math.ceil(tokens / math.ceil(vocabulary / hidden))
    return int(min(tokens, 2 ** math.ceil(math.log2(max(least, 1)))))


def _optimizer_bytes(config: Config) -> float:
    """Bytes of a weight's moments: two in fp32, or two codes and a scale for each block of them."""
    if _is_8bit(config):
        return 2 * (1 + _MASTER / config.optimizer["block_size"])
    return 2.0 * _MASTER


def _is_8bit(config: Config) -> bool:
    return str(config.optimizer["_target_"]).endswith(".adamw_8bit")


def _is_liger(config: Config) -> bool:
    return str(config.loss["_target_"]).endswith(".LigerLinearCrossEntropy")


def remedies(config: Config) -> list[str]:
    """What to change when memory ran out: the first three that this configuration has left, the cheapest first."""
    training, size = config.training, config.packed_sequence["packed_sequence_size"]
    found = []
    if training.micro_batch_size > 1:
        found.append(f"training.micro_batch_size={training.micro_batch_size // 2} (the same numbers, more forwards)")
    if "chunk_tokens" not in config.loss and not _is_liger(config):
        found.append("loss=fused_linear_cross_entropy (no logits of the whole stream)")
    if training.activation_checkpointing == "none":
        found.append("training.activation_checkpointing=full (about a third slower)")
    if config.mesh.strategy == "ddp":
        found.append("mesh.strategy=fsdp (weights, gradients and optimizer states over all ranks)")
    if not config.peft and not _is_8bit(config):
        found.append("optimizer=adamw_8bit (moments of 2 bytes a weight instead of 8)")
    found.append(f"mesh.cp={2 * config.mesh.cp} on more processes (each holds half of a pack's tokens)")
    if not config.peft and config.model["pretrained"]:
        found.append("peft=lora (no gradients and optimizer states of the model itself)")
    found.append(f"packed_sequence.packed_sequence_size={size // 2} (longer documents are dropped or cut)")
    return found[:3]


def out_of_memory_text(config: Config, estimate: MemoryEstimate | None) -> str:
    """What a rank holds, and three things to change."""
    held = [f"By arithmetic the run needs {estimate}."] if estimate else []
    numbered = [f"  {number}. {text}" for number, text in enumerate(remedies(config), start=1)]
    return "\n".join([*held, "Try, in this order:", *numbered])


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"
