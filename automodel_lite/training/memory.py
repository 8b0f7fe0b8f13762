"""What a rank holds in memory, roughly, before anything is built; and what to change when it was
too much.

    weights       masters in fp32 or bf16 (a frozen base: the compute dtype, or 4 bits), over the
                  ranks that shard them
    gradients     like masters; with several micro-batches FSDP2 adds them up unsharded, in fp32
    optimizer     its state, AdamW's two moments: fp32, bf16 or 8 bits
    working copy  what is gathered or cast for the layer at work, and its gradients
    activations   of one micro-batch, in the compute dtype; with activation checkpointing one input
                  per layer
    logits        of the rows that the loss has at one time

A coarse formula each, together within 40 % of what `simulation.py` counts by running the step:
enough for a line of the start block, and for leaving out plans that are far from fitting. Whatever
decides asks the simulation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from automodel_lite.config.sizes import ceil_div, global_batch_size_of
from automodel_lite.data.feeding.order import batch_shape
from automodel_lite.errors import ConfigError
from automodel_lite.launched import launch_variable
from automodel_lite.models.loss import LossShape
from automodel_lite.parallel.sharding import copies_of_experts
from automodel_lite.training.settings import Decided, RunParts

_FP32 = 4  # bytes
NF4_BYTES = 0.52  # of a weight, with its scales, themselves in 8 bits
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
        parts = ", ".join(
            f"{name.replace('_', ' ')} {gib(value)}"
            for name, value in asdict(self).items()
            if value
        )
        return f"about {gib(self.total)} per rank: {parts}"


def estimate_memory(
    decided: Decided, adapter: int | None, num_trained: int | None = None
) -> MemoryEstimate:
    """Adds up the table.

    adapter      trained weights beside a frozen model, None without
    num_trained  what `model.freeze` leaves, which are masters all the same; None = everything
    """
    shape = decided.shape
    size = decided.size
    is_fsdp = decided.strategy == "fsdp"
    compute = decided.dtype.itemsize
    master = 2 if decided.training.master_weights == "bf16" else _FP32
    shards = num_shards(decided)
    # more ranks than experts hold copies of them, unless tp or ep split the model
    is_copied = is_fsdp and shape.tp == shape.ep == 1
    copied = (
        (copies_of_experts(size.num_experts, shape.dp_shard * shape.cp) - 1)
        * size.all_experts
        * is_copied
    )
    towers = 0 if decided.model.train_towers else size.towers
    trains_all = adapter is None
    trained = size.parameters - towers + copied if adapter is None else adapter
    frozen = towers if trains_all else size.parameters + copied
    # frozen towers of a model that is trained stay as they are stored
    held = decided.model.stored_dtype(decided.config).itemsize if trains_all else compute
    # embedding, head, towers and stacked experts are not quantized
    in_layers = size.parameters - size.embedding - size.towers - size.all_experts
    spared = (compute - NF4_BYTES) * in_layers * decided.is_quantized
    on_gpu = 0.0 if decided.mesh.cpu_offload else 1.0
    learning = trained if num_trained is None else num_trained + copied
    gradients = master * learning / shards * on_gpu
    accumulates = batch_shape(decided.training, shape.dp).micro_steps > 1
    reduces_at_end = decided.advanced.reduce_every_micro_batch is not True and shape.tp == 1
    # FSDP leaves gradients whole until the last micro-batch, unless they are reduced after each
    if decided.strategy != "ddp" and accumulates and reduces_at_end:
        own_experts = 1 - (1 - 1 / shape.ep) * size.all_experts / size.parameters
        gradients = _FP32 * (learning - copied) * own_experts
    # DDP's buckets stay beside the gradients that are not reduced yet
    elif decided.strategy == "ddp":
        gradients *= 1 + accumulates
    of_matrix = optimizer_bytes(decided.optimizer, master)
    of_table = optimizer_bytes(decided.optimizer, master, of_table=True)
    # embedding, head and stacked experts
    tables = min(learning, (size.embedding + size.all_experts) * trains_all)
    states = of_matrix * (learning - tables) + of_table * tables
    text = decided.config.get_text_config()
    head_gradient = _FP32 * size.head_weights * trains_all
    loss = LossShape(
        decided.tokens / shape.cp, text.vocab_size, text.hidden_size, compute, head_gradient
    )
    weights = (master * trained + held * frozen - spared) / shards
    if teacher := decided.of_teacher:
        weights += compute * teacher.size.parameters / num_shards(teacher)
    return MemoryEstimate(
        weights=weights * on_gpu,
        gradients=gradients,
        optimizer=states / shards * on_gpu,
        working_copy=_working_copy(decided, master, trained, trains_all=trains_all),
        activations=_activations(
            decided, max(compute, master) if decided.strategy == "ddp" else compute
        ),
        logits=decided.loss.logits_bytes(loss),
    )


def _working_copy(decided: Decided, master: int, trained: float, trains_all: bool) -> float:
    """Returns the bytes of weights that are gathered or cast, and of their gradients.

    master   bytes of a weight
    trained  weights that have masters
    """
    shape = decided.shape
    size = decided.size
    compute = decided.dtype.itemsize
    layer = (size.largest_layer - size.expert_weights) / shape.tp + size.expert_weights / shape.ep
    if decided.strategy == "none":
        # copies in the compute dtype (parallel/compute_weights.py), and the largest one's gradient
        copied = compute * (trained + size.head_weights * trains_all) if compute < master else 0
        # the frozen layer at work is unpacked from its 4 bits
        return copied + compute * layer * (decided.is_quantized and not trains_all)
    if decided.strategy == "ddp":
        if not trains_all:
            return compute * layer * decided.is_quantized
        # autocast's casts live until the backward pass of their layer
        plain = size.num_layers if decided.training.activation_checkpointing == "none" else 1
        return (compute if compute < master else 0) * (plain * layer + size.head_weights)
    # one layer at work and one that is gathered ahead, the gradient of a third in fp32
    reduced = _FP32 if trains_all else 0
    found = (2 * compute + reduced) * layer + compute * size.head_weights / shape.tp
    if decided.advanced.reshard_after_forward is False:
        found += compute * size.parameters / shape.tp
    # each rank's shards as they are gathered (models/fp8.py)
    if decided.training.fp8 == "tensorwise" and not decided.mesh.cpu_offload:
        found += size.layer_weights / num_shards(decided)
    return found


def _activations(decided: Decided, stream: int) -> float:
    """Bytes that the layers keep for the backward pass, and those of one more, which is run again.

    stream   bytes of a value of the residual stream: under autocast it has the masters' dtype
    """
    size = decided.size
    hidden = decided.config.get_text_config().hidden_size
    local = decided.tokens / decided.shape.cp
    # products keep their inputs: as many values for a token as there are weights for each of its
    # channels, and some more; norms keep theirs in fp32
    products = (
        1.2
        * decided.dtype.itemsize
        * size.layer_weights
        / size.num_layers
        / hidden
        / decided.shape.tp
    )
    layer = local * (products + (4 * stream + 12) * hidden)
    how = decided.training.activation_checkpointing
    num_recomputed = (
        0 if how == "none" else ceil_div(size.num_layers, decided.advanced.recompute_every_layers)
    )
    kept = 0.0 if how == "offload" else local * stream * hidden
    of_one = (
        (size.num_layers - num_recomputed) * layer
        + num_recomputed * kept
        + layer * bool(num_recomputed)
    )
    return of_one * (1 + decided.mesh.ep_overlap)  # of two that take turns


def num_shards(decided: Decided) -> int:
    """Returns over how many ranks the weights are sharded."""
    shape = decided.shape
    return shape.world_size // shape.dp_replicate if decided.strategy == "fsdp" else 1


def gpu_bytes(device: torch.device) -> int | None:
    """None on a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def check_weights_fit(decided: Decided, device: torch.device) -> None:
    """Raises ConfigError for a model whose weights alone are more than the memory, by the smallest
    type that they may have: it would be noticed by the kernel, which kills processes without a
    message.
    """
    need = (0.5 if decided.is_quantized else 2) * decided.size.parameters / num_shards(decided)
    have = gpu_bytes(device)
    where = "GPU"
    if have is None or decided.mesh.cpu_offload:
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        where = "machine"
        limit = Path("/sys/fs/cgroup/memory.max")  # of the container that this process is in
        text = limit.read_text().strip() if limit.is_file() else ""
        have = min(have, int(text)) if text.isdecimal() else have
        need *= launch_variable("LOCAL_WORLD_SIZE", 1)
    if need > have:
        raise ConfigError(
            f"the model has {decided.size.parameters:,} parameters: its weights alone are "
            f"{gib(need)} on each {where}, which has {gib(have)}: use a smaller model, or more "
            "processes to shard it (mesh.dp_shard)."
        )


def optimizer_bytes(
    optimizer: Callable[[nn.Module], Optimizer], master: int = _FP32, of_table: bool = False
) -> float:
    """Bytes that the optimizer keeps per trained weight: those of a matrix, or of a table of
    tokens, which Muon leaves to AdamW, that it has stepped once.
    """
    values = torch.zeros(_TRIED, _TRIED, dtype=torch.float32 if master == _FP32 else torch.bfloat16)
    table = nn.Embedding.from_pretrained(values, freeze=False)
    weight = table.weight
    weight.grad = torch.zeros_like(weight)
    stepped = optimizer(table if of_table else nn.ParameterList([weight]))
    # asked whether a stream is being recorded, torch opens GPU 0: half a GiB of it for each rank
    stepped._accelerator_graph_capture_health_check = lambda: None  # type: ignore[method-assign]
    stepped.step()
    state = (
        value
        for value in stepped.state[weight].values()
        if isinstance(value, torch.Tensor) and value.ndim
    )
    return sum(value.nbytes for value in state) / weight.numel()


def remedies(parts: RunParts) -> Iterator[str]:
    """Yields what to change when memory ran out, of what these parts have left, the cheapest
    first.
    """
    training = parts.training
    mesh = parts.mesh
    micro = training.micro_batch_size
    takes_turns = mesh.ep_overlap
    if takes_turns:
        yield "mesh.ep_overlap=false (activations of one micro-batch, not of two)"
    if micro > 1:
        yield f"training.micro_batch_size={micro // 2} (same numbers, more forward passes)"
    if parts.loss.needs_logits:
        yield "loss=fused_linear_cross_entropy (never holds the logits of the whole stream)"
    if training.activation_checkpointing == "none":
        yield "training.activation_checkpointing=full (about a third slower)"
    if mesh.strategy == "ddp":
        yield "mesh.strategy=fsdp (weights, gradients and optimizer states over all ranks)"
    if not parts.peft and optimizer_bytes(parts.optimizer) >= 2 * _FP32:
        yield "optimizer=adamw_8bit (moments of 2 bytes per weight instead of 8)"
    accumulates = global_batch_size_of(training, 1) > micro and mesh.strategy == "fsdp"
    if accumulates and parts.advanced.reduce_every_micro_batch is not True and not takes_turns:
        yield "advanced.reduce_every_micro_batch=true (no unsharded sum of gradients)"
    if training.activation_checkpointing == "full":
        yield "training.activation_checkpointing=offload (layer inputs are kept in host memory)"
    if not takes_turns:
        yield f"mesh.cp={2 * mesh.cp} on more processes (each holds half of a pack's tokens)"
    if not parts.peft and parts.model.pretrained and mesh.tp * mesh.ep == 1:
        yield "peft=lora (no gradients and optimizer states of the model itself)"
    half = parts.packed_sequence_size // 2
    yield f"packed_sequence.packed_sequence_size={half} (longer documents are dropped or cut)"


def out_of_memory_text(parts: RunParts, estimate: MemoryEstimate | None = None) -> str:
    """Says what a rank holds, and three things to change."""
    held = f"The run is estimated to need {estimate}.\n" if estimate else ""
    first = [f"  {number}. {text}" for number, text in zip((1, 2, 3), remedies(parts))]
    return held + "\n".join(["Try, in this order:", *first])


def gib(num_bytes: float) -> str:
    """`11.2 GiB`, `1.02 GiB`, or `4.03 MiB` below half a GiB."""
    if num_bytes >= 2**29:
        return f"{three_digits(num_bytes / 2**30)} GiB"
    return f"{three_digits(num_bytes / 2**20)} MiB"


def three_digits(value: float) -> str:
    """`1.02`, `11.2`, `1,024.5`: what a comparison of layouts needs."""
    return f"{value:,.{2 if value < 10 else 1}f}"
