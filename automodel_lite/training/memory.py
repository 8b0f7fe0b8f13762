"""What a rank holds in memory, roughly, before anything is built; and what to change when it was too much.

    weights       masters in fp32 or bf16 (a frozen base: the compute dtype), over the ranks that shard them
    gradients     like masters; with several micro-batches FSDP2 adds them up unsharded, in fp32
    optimizer     its state, AdamW's two moments: fp32, bf16 or 8 bits
    working copy  what is gathered or cast for the layer at work, and its gradients
    activations   of one micro-batch, in the compute dtype; with activation checkpointing one input per layer
    logits        of the rows that the loss has at one time

A coarse formula each, together within 40 % of what `simulation.py` counts by running the step: enough for a line of the
start block, and for leaving out plans that are far from fitting. Whatever decides asks the simulation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from automodel_lite.attention.spec import layer_shapes
from automodel_lite.config.sizes import global_batch_size_of
from automodel_lite.data.feeding.order import batch_shape
from automodel_lite.errors import ConfigError
from automodel_lite.launched import launched
from automodel_lite.models.flops import ModelSize
from automodel_lite.models.layers import choose_tile
from automodel_lite.models.loss import LossShape
from automodel_lite.models.source import experts_per_token
from automodel_lite.parallel.mesh import MeshShape
from automodel_lite.parallel.sharding import copies_of_experts
from automodel_lite.training.plan import ModelPlan, Parts

_FP32 = 4  # bytes
PLANNED_GPU = 80 * 10**9  # bytes of a GPU that is only planned
USABLE_FRAC = 0.9  # of a GPU's memory: the rest is the allocator's and the kernels'
_TRIED = 256  # rows and columns of the matrix that an optimizer is tried on


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
        """The loss and the layer at work come one after the other."""
        return sum(asdict(self).values()) - min(self.working_copy, self.logits)

    def __str__(self) -> str:
        parts = ", ".join(f"{name.replace('_', ' ')} {gib(value)}" for name, value in asdict(self).items() if value)
        return f"about {gib(self.total)} per rank: {parts}"


def estimate_memory(plan: ModelPlan, adapter: int | None, reduces_every: bool = False) -> MemoryEstimate:
    """adapter: trained weights beside a frozen model, None without; reduces_every: gradients, every micro-batch."""
    parts, shape, size, is_fsdp = plan.parts, plan.shape, plan.size, plan.strategy == "fsdp"
    compute, master = plan.dtype.itemsize, 2 if parts.training.master_weights == "bf16" else _FP32
    shards = shape.world_size // shape.dp_replicate if is_fsdp else 1
    copied = (expert_copies(shape, size) - 1) * size.all_experts if is_fsdp else 0
    trained = size.parameters - size.towers + copied if adapter is None else adapter
    frozen = size.towers if adapter is None else size.parameters + copied
    on_gpu = 0.0 if parts.mesh.cpu_offload else 1.0
    gradients = master * trained / shards * on_gpu
    # FSDP leaves gradients whole until the last micro-batch, unless they are reduced after each
    accumulates = batch_shape(parts.training, shape.dp).micro_steps > 1
    if is_fsdp and accumulates and not reduces_every and shape.tp == 1:
        gradients = _FP32 * (trained - copied)
    # DDP's buckets stay beside the gradients that are not reduced yet
    elif plan.strategy == "ddp":
        gradients *= 1 + accumulates
    layer = (size.largest_layer - size.expert_weights) / shape.tp + size.expert_weights / shape.ep
    if is_fsdp:  # one layer at work and one that is gathered ahead, the gradient of a third in fp32
        reduced = _FP32 if adapter is None else 0
        working_copy = (2 * compute + reduced) * layer + compute * size.head_weights / shape.tp
    else:  # autocast's casts live until the backward pass of their layer
        plain = size.num_layers if parts.training.activation_checkpointing == "none" else 1
        working_copy = (compute if compute < master else 0) * (plain * layer + size.head_weights)
    return MemoryEstimate(
        weights=(master * trained + compute * frozen) / shards * on_gpu,
        gradients=gradients,
        optimizer=optimizer_bytes(parts.optimizer, master) * trained / shards * on_gpu,
        working_copy=working_copy,
        activations=_activations(plan, compute if is_fsdp else max(compute, master)),
        logits=_logits(plan, is_frozen=adapter is not None),
    )


def _activations(plan: ModelPlan, stream: int) -> float:
    """Bytes that the layers keep for the backward pass, and those of one more, which is run again.

    stream   bytes of a value of the residual stream: under autocast it has the masters' dtype
    """
    training, shape, size, compute = plan.parts.training, plan.shape, plan.size, plan.dtype.itemsize
    text = plan.config.get_text_config()
    local, hidden, chosen = plan.tokens / shape.cp, text.hidden_size, experts_per_token(text) or 1
    # queries, keys, values and outputs: the mean over the layers; the rest of a layer's weights are three of its MLP
    shapes = layer_shapes(plan.config)
    heads = sum((one.num_heads + one.num_kv_heads) * (one.head_dim + one.value_head_dim) for one in shapes)
    attended = heads / size.num_layers
    inner = max(size.layer_weights / size.num_layers - hidden * attended, 0) / (3 * hidden)
    copies = 3 * chosen * hidden if size.expert_weights else 0  # a token's, for each of its experts
    tile = min(local, choose_tile(training, int(local)) or local)
    # two norms keep their input in fp32, and what they make of it
    of_token = stream * 4 * hidden + compute * (4 * hidden + attended / shape.tp + copies)
    layer = local * of_token + tile * compute * 5 * inner / shape.tp
    if shape.cp > 1 and plan.parts.mesh.cp_exchange in ("auto", "all_gather"):
        layer += plan.tokens * compute * attended / 2  # gathered keys and values
    how = training.activation_checkpointing
    num_recomputed = 0 if how == "none" else -(-size.num_layers // training.recompute_every_layers)
    kept = 0.0 if how == "offload" else stream * hidden
    if how == "selective":  # the results of products and of attention too
        kept += compute * (attended + 2 * inner + 2 * hidden)
    return (size.num_layers - num_recomputed) * layer + num_recomputed * local * kept + layer * bool(num_recomputed)


def expert_copies(shape: MeshShape, size: ModelSize) -> int:
    is_split = shape.tp > 1 or shape.ep > 1
    return 1 if is_split else copies_of_experts(size.num_experts, shape.dp_shard * shape.cp)


def plan_memory(plan: ModelPlan, adapter: int | None, available: int | None) -> tuple[MemoryEstimate, str]:
    """What a rank holds, and why gradients are reduced after every micro-batch (empty: they are not).

    available   bytes of the GPU; None = not known, as on a CPU
    """
    summed, reduced = (estimate_memory(plan, adapter, reduces_every) for reduces_every in (False, True))
    wish = plan.parts.mesh.reduce_every_micro_batch
    if plan.strategy != "fsdp" or summed.total <= reduced.total or wish is False:
        return summed, ""
    if wish is True:
        return reduced, "gradients are reduced after every micro-batch, as set"
    if available is None or summed.total <= USABLE_FRAC * available:
        return summed, ""
    whole = _FP32 * (plan.size.parameters - plan.size.towers if adapter is None else adapter)
    return reduced, (
        f"gradients are reduced after every micro-batch: with their unsharded sum of {gib(whole)} the run would need "
        f"{gib(summed.total)} of {gib(available)} (mesh.reduce_every_micro_batch=auto)"
    )


def gpu_bytes(device: torch.device) -> int | None:
    """None on a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def host_bytes() -> int:
    """Of this machine, or of the container that this process is in."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(found, int(text)) if text.isdecimal() else found


def check_weights_fit(plan: ModelPlan, device: torch.device) -> None:
    """Raises ConfigError for a model whose weights alone are more than the memory, by the smallest type that they may
    have: it would be noticed by the kernel, which kills processes without a message.
    """
    shards = plan.shape.world_size / plan.shape.dp_replicate if plan.strategy == "fsdp" else 1
    need = (0.5 if plan.parts.is_quantized else 2) * plan.size.parameters / shards
    have, where = gpu_bytes(device), "GPU"
    if have is None or plan.parts.mesh.cpu_offload:
        have, where = host_bytes(), "machine"
        need *= launched("LOCAL_WORLD_SIZE", 1)
    if need > have:
        raise ConfigError(
            f"the model has {plan.size.parameters:,} parameters: its weights alone are {gib(need)} on each {where}, "
            f"which has {gib(have)}: use a smaller model, or more processes to shard it (mesh.dp_shard)."
        )


def _logits(plan: ModelPlan, is_frozen: bool) -> float:
    text, loss = plan.config.get_text_config(), plan.parts.loss
    head_gradient = 0 if is_frozen else _FP32 * plan.size.head_weights
    local = plan.tokens / plan.shape.cp
    shape = LossShape(local, text.vocab_size, text.hidden_size, plan.dtype.itemsize, head_gradient)
    return loss.logits_bytes(shape)


def optimizer_bytes(optimizer: Callable[[nn.Module], Optimizer], master: int = _FP32) -> float:
    """Bytes that the optimizer keeps per trained weight: those of a matrix that it has stepped once."""
    dtype = torch.float32 if master == _FP32 else torch.bfloat16
    layer = torch.nn.utils.skip_init(torch.nn.Linear, _TRIED, _TRIED, bias=False, dtype=dtype)  # nothing is drawn
    layer.weight.data.zero_()
    layer.weight.grad = torch.zeros_like(layer.weight)
    stepped = optimizer(layer)
    stepped.step()
    state = stepped.state[layer.weight].values()
    return sum(value.nbytes for value in state if isinstance(value, torch.Tensor) and value.ndim) / layer.weight.numel()


def remedies(parts: Parts) -> list[str]:
    """What to change when memory ran out: the first three that these parts have left, the cheapest first."""
    training, size = parts.training, parts.packed_sequence_size
    found = []
    if training.micro_batch_size > 1:
        found.append(f"training.micro_batch_size={training.micro_batch_size // 2} (same numbers, more forward passes)")
    if parts.loss.needs_logits:
        found.append("loss=fused_linear_cross_entropy (never holds the logits of the whole stream)")
    if training.activation_checkpointing == "none":
        found.append("training.activation_checkpointing=full (about a third slower)")
    if parts.mesh.strategy == "ddp":
        found.append("mesh.strategy=fsdp (weights, gradients and optimizer states over all ranks)")
    if not parts.peft and optimizer_bytes(parts.optimizer) >= 2 * _FP32:
        found.append("optimizer=adamw_8bit (moments of 2 bytes per weight instead of 8)")
    accumulates = global_batch_size_of(training, 1) > training.micro_batch_size
    if accumulates and parts.mesh.strategy == "fsdp" and parts.mesh.reduce_every_micro_batch is not True:
        found.append("mesh.reduce_every_micro_batch=true (no unsharded sum of gradients)")
    if training.activation_checkpointing == "full":
        found.append("training.activation_checkpointing=offload (layer inputs are kept in host memory)")
    found.append(f"mesh.cp={2 * parts.mesh.cp} on more processes (each holds half of a pack's tokens)")
    if not parts.peft and parts.model.pretrained:
        found.append("peft=lora (no gradients and optimizer states of the model itself)")
    found.append(f"packed_sequence.packed_sequence_size={size // 2} (longer documents are dropped or cut)")
    return found[:3]


def out_of_memory_text(parts: Parts, estimate: MemoryEstimate | None = None) -> str:
    """What a rank holds, and three things to change."""
    held = [f"The run is estimated to need {estimate}."] if estimate else []
    numbered = [f"  {number}. {text}" for number, text in enumerate(remedies(parts), start=1)]
    return "\n".join([*held, "Try, in this order:", *numbered])


def gib(num_bytes: float) -> str:
    """`11.2 GiB`, or `4.0 MiB` below half a GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"
