"""What a rank holds in memory, by arithmetic, before the run; and what to change when it was too much.

    weights       masters in fp32 or bf16 (a frozen base: the compute dtype), over the ranks that shard them
    gradients     like masters; with several micro-batches FSDP2 adds them up unsharded, in fp32
    optimizer     its state, AdamW's two moments: fp32, bf16 or 8 bits
    working copy  what is gathered or cast for the layer at work
    activations   of one micro-batch, in the compute dtype; with activation checkpointing one input per layer
    logits        of the rows that the loss has at one time

The allocator's slack, the kernels' workspaces and communication buffers come on top: some 1 to 3 GiB on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from automodel_lite.attention.spec import layer_shapes
from automodel_lite.data.feeding.order import batch_shape
from automodel_lite.errors import ConfigError
from automodel_lite.launched import launched
from automodel_lite.models.flops import ModelSize
from automodel_lite.models.layers import chosen_tile
from automodel_lite.models.loss import LossShape
from automodel_lite.models.source import chosen_experts
from automodel_lite.parallel.mesh import MeshShape
from automodel_lite.parallel.sharding import copies_of_experts
from automodel_lite.training.plan import ModelPlan, Parts

_FP32 = 4  # bytes
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
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name.replace('_', ' ')} {gib(value)}" for name, value in asdict(self).items() if value)
        return f"about {gib(self.total)} per rank: {parts}"


def estimate_memory(plan: ModelPlan, adapter: int | None, reduces_every: bool = False) -> MemoryEstimate:
    """adapter: trained weights beside a frozen model, None without; reduces_every: gradients, every micro-batch."""
    parts, shape, size = plan.parts, plan.shape, plan.size
    compute, master = plan.dtype.itemsize, 2 if parts.training.master_weights == "bf16" else _FP32
    is_fsdp, is_trained = plan.strategy == "fsdp", adapter is None
    shards = shape.world_size // shape.dp_replicate if is_fsdp else 1
    copied = (expert_copies(shape, size) - 1) * size.all_experts if is_fsdp else 0
    trained = size.parameters - size.towers if adapter is None else adapter
    held_trained = trained + copied if is_trained else trained
    frozen = (size.towers if is_trained else size.parameters + copied) * compute
    on_gpu = 0.0 if parts.mesh.cpu_offload else 1.0
    stream = compute if is_fsdp else max(compute, master if is_trained else 2)
    kept, layer = _activations(plan, stream)
    held = MemoryEstimate(
        weights=(master * held_trained + frozen) / shards * on_gpu,
        gradients=master * held_trained / shards * on_gpu,
        optimizer=optimizer_bytes(parts.optimizer, master) * held_trained / shards * on_gpu,
        working_copy=0.0,
        activations=kept + layer,
        logits=_logits(plan, is_frozen=not is_trained),
    )
    accumulates = batch_shape(parts.training, shape.dp).micro_steps > 1
    if is_fsdp:
        summed = held.gradients if reduces_every or shape.tp > 1 else _FP32 * trained
        moments = _moments(plan, held, summed if accumulates else 0.0, kept, is_trained)
    else:
        # those of DDP are views of its buckets; before the last micro-batch they are tensors of their own
        stays = (accumulates + (plan.strategy == "ddp")) * held.gradients
        moments = _whole_moments(plan, held, stays, stream, kept)
    return max(moments, key=lambda moment: moment.total)


def _moments(
    plan: ModelPlan, held: MemoryEstimate, before: float, kept: float, is_trained: bool
) -> list[MemoryEstimate]:
    """The moments of an FSDP step at which the most may be held.

    before   bytes of gradients that are there when the backward pass begins
    FSDP holds what it gathers twice, as one buffer and as parameters, and the last gradients that it reduces until the
    next are: those of the head while the last layer is at work, then those of the layer behind.
    """
    shape, size, compute = plan.shape, plan.size, plan.dtype.itemsize
    local, hidden = plan.tokens / shape.cp, plan.config.get_text_config().hidden_size
    experts, copies = size.expert_weights / shape.ep, expert_copies(shape, size)
    layer = (size.largest_layer - size.expert_weights) / shape.tp + experts
    apart = experts if copies > 1 else 0.0  # gathered and reduced by themselves, while the rest of the layer waits
    head, table = size.head_weights / shape.tp, _table(size) / shape.tp
    shards = shape.dp_shard * shape.cp
    gathers = 2 if shape.world_size > shape.dp_replicate else 1
    inputs = compute * hidden * local
    at_work = held.activations - kept
    rows = local * hidden * (_FP32 + 4 * compute)  # the last norm, the rows of the loss and their gradient
    whole_head = compute * size.head_weights if shape.tp > 1 else 0
    reduced = _FP32 if is_trained else 0
    at_loss = replace(
        held,
        gradients=before + (reduced * table if before == held.gradients else 0.0),
        working_copy=gathers * compute * head + whole_head,
        activations=kept + rows,
    )
    made = compute * (experts or _inner_width(plan) * hidden / shape.tp) if is_trained else 0.0
    of_layer = reduced * (layer + (copies - 1) * experts) / shards
    of_layers = [max(held.gradients - number * of_layer - reduced * table / shards, 0.0) for number in (1, 2)]
    last = replace(
        held,
        gradients=before + reduced * head + made,
        working_copy=compute * (gathers * (layer - apart) + apart),
        activations=kept + at_work + inputs,
        logits=0.0,
    )
    behind = replace(last, gradients=before + reduced * (layer - apart) + made, activations=last.activations - inputs)
    second = replace(
        behind, gradients=max(before, of_layers[1]) + reduced * (layer - apart) + made, activations=at_work + 3 * inputs
    )
    first = replace(  # nothing is gathered ahead
        second,
        gradients=second.gradients - max(before, of_layers[1]) + max(before, of_layers[0]),
        working_copy=compute * layer,
        activations=at_work + 2 * inputs,
    )
    end = replace(held, gradients=held.gradients + reduced * table, activations=0.0, logits=0.0)
    return [at_loss, last, first, end, *([behind, second] if size.num_layers > 2 else [])]


def _whole_moments(
    plan: ModelPlan, held: MemoryEstimate, stays: float, stream: int, kept: float
) -> list[MemoryEstimate]:
    """The moments of a step at which the most may be held by a rank that has the whole model.

    stays   bytes of gradients that are there all the time
    Autocast casts a weight where it is used, and holds the cast until its gradient is there: that of a layer that is
    not recomputed for the whole pass.
    """
    size, training, compute = plan.size, plan.parts.training, plan.dtype.itemsize
    local, hidden = plan.tokens / plan.shape.cp, plan.config.get_text_config().hidden_size
    is_cast, is_trained = stream > compute, held.gradients > 0 and not plan.parts.peft
    master = held.gradients / (size.parameters - size.towers) if is_trained else 0.0
    casts = compute if is_cast else 0
    layer, head, table = size.largest_layer * is_trained, size.head_weights, _table(size)
    is_tied = table == size.embedding
    num_layers = size.num_layers
    is_plain = training.activation_checkpointing == "none"
    num_plain = num_layers if is_plain else num_layers - -(-num_layers // training.recompute_every_layers)
    rows = local * hidden * (4 * stream + 2 * compute if is_cast else _FP32 + 4 * compute)
    at_loss = replace(held, gradients=stays, working_copy=casts * (num_plain * layer + head), activations=kept + rows)
    made = (casts + master) * (size.expert_weights or _inner_width(plan) * hidden) * is_trained
    last = replace(
        held,
        gradients=max(master * head, stays) + made,
        working_copy=casts * max(num_plain, 1) * layer,
        logits=0.0,
    )
    first = replace(
        last,
        gradients=max(held.gradients - master * (layer + (0 if is_tied else table)), stays) + made,
        working_copy=casts * layer,
        activations=held.activations - kept * max(num_layers - 2, 0) / num_layers,  # that of the layer behind goes late
    )
    added = master * table if stays or is_tied else 0.0  # a gradient of its own first
    end = replace(held, gradients=max(held.gradients, stays) + added, activations=0.0, logits=0.0)
    return [at_loss, last, first, end]


def _table(size: ModelSize) -> int:
    """Weights of the embedding, and what else is outside the layers; a tied head is a part of it. By its size: a
    composite's text config may not know whether it is tied.
    """
    return size.embedding - (0 if size.embedding < 2 * size.head_weights else size.head_weights)


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


def _activations(plan: ModelPlan, stream: int) -> tuple[float, float]:
    """What the layers keep for the backward pass, and what the layer at work holds beside it.

    stream   bytes of a value of the residual stream: under autocast it has the masters' dtype, and each linear layer
             keeps a cast of its own
    """
    parts, shape, size, tokens = plan.parts, plan.shape, plan.size, plan.tokens
    text, compute = plan.config.get_text_config(), plan.dtype.itemsize
    local, hidden = tokens / shape.cp, text.hidden_size
    attended, kv = _attention_widths(plan)
    inner = _inner_width(plan)
    tile = min(local, chosen_tile(parts.training, int(local)) or local)
    of_norm = compute if tile < local else _FP32 + 2 * compute  # its input; untiled in fp32, with the normed and scaled
    norms = 2 * (of_norm + (compute if tile < local else 0)) * hidden
    if stream > compute:  # all in fp32, and the casts of q, k, v, gate and up
        norms = (4 * stream + (3 if tile < local else 5) * compute) * hidden
    if size.has_head_norms:
        norms += of_norm * (attended + kv) / 2 / shape.tp
    copies = 3 * (chosen_experts(text) or 1) * hidden if size.expert_weights else 0  # of tokens, for each expert
    mlp_tokens = local if copies else tile
    layer = (
        local * (norms + compute * ((attended + kv) / shape.tp + copies)) + mlp_tokens * compute * 4 * inner / shape.tp
    )
    if shape.cp > 1 and parts.mesh.cp_exchange in ("auto", "all_gather"):
        layer += tokens * compute * kv  # gathered keys and values
    elif shape.cp > 1 and parts.mesh.cp_exchange == "all_to_all":
        layer += local * compute * attended / 2  # outputs that have come back
    how = parts.training.activation_checkpointing
    num_layers = size.num_layers
    num_recomputed = 0 if how == "none" else -(-num_layers // parts.training.recompute_every_layers)
    kept = 0 if how == "offload" else stream * hidden  # the layer's input
    if how == "selective":  # the results of matrix products and attention too
        kept += compute * (attended + kv + 2 * inner + 2 * hidden)
    slopes = (
        mlp_tokens * compute * (-2 * inner - copies / 3 if copies else 2 * inner) / shape.tp
    )  # experts' are made last
    if tile < local:
        slopes += local * compute * hidden  # of the MLP's input, filled tile by tile
    at_work = layer if num_recomputed else 0.0
    return (num_layers - num_recomputed) * layer + num_recomputed * local * kept, at_work + slopes


def _attention_widths(plan: ModelPlan) -> tuple[float, float]:
    """Of queries and outputs, and of keys and values: the mean over the layers."""
    shapes = layer_shapes(plan.config)
    attended = sum(layer.num_heads * (layer.head_dim + layer.value_head_dim) for layer in shapes)
    kv = sum(layer.num_kv_heads * (layer.head_dim + layer.value_head_dim) for layer in shapes)
    return attended / plan.size.num_layers, kv / plan.size.num_layers


def _inner_width(plan: ModelPlan) -> float:
    """Of a gated MLP, or of all experts that a token visits."""
    hidden = plan.config.get_text_config().hidden_size
    of_attention = hidden * sum(_attention_widths(plan))
    return max(plan.size.layer_weights / plan.size.num_layers - of_attention, 0) / (3 * hidden)


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
    accumulates = (training.global_batch_size or 0) > training.micro_batch_size
    if accumulates and parts.mesh.strategy == "fsdp" and parts.mesh.reduce_every_micro_batch is not True:
        found.append("mesh.reduce_every_micro_batch=true (no unsharded sum of gradients)")
    if training.activation_checkpointing == "full":
        found.append("training.activation_checkpointing=offload (layer inputs are kept in host memory)")
    found.append(f"mesh.cp={2 * parts.mesh.cp} on more processes (each holds half of a pack's tokens)")
    if not parts.peft and parts.model.pretrained:
        found.append("peft=lora (no gradients and optimizer states of the model itself)")
    found.append(f"packed_sequence.packed_sequence_size={size // 2} (longer documents are dropped or cut)")
    return found[:3]


def out_of_memory_text(parts: Parts, estimate: MemoryEstimate | None) -> str:
    """What a rank holds, and three things to change."""
    held = [f"The run is estimated to need {estimate}."] if estimate else []
    numbered = [f"  {number}. {text}" for number, text in enumerate(remedies(parts), start=1)]
    return "\n".join([*held, "Try, in this order:", *numbered])


def gib(num_bytes: float) -> str:
    """`11.2 GiB`, or `4.0 MiB` below half a GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"
