"""Applies FSDP2, HSDP or DDP to a model from outside; the model itself knows nothing of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel

from automodel_lite.compat import FsdpTrainingState
from automodel_lite.models.layers import decoder_layers, output_head, towers
from automodel_lite.models.loss import Loss, LossOutput
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel.compute_weights import ComputeWeights
from automodel_lite.parallel.mesh import SHARDS, Mesh, open_axes
from automodel_lite.thd import ThdBatch


def choose_precision(precision: str, device: torch.device) -> torch.dtype:
    """Returns the compute dtype; master weights, gradients and optimizer states stay fp32."""
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


@dataclass(frozen=True)
class ParallelModel:
    """A LossModel spread over the mesh.

    `mean_ranks` is the number of ranks whose gradients the wrapper averages: the loss is multiplied
    by it, so that gradients are sums.
    """

    module: nn.Module  # what a step calls: the LossModel, or FSDP's or DDP's wrapper of it
    loss_model: LossModel  # without the wrapper: its parameters have their own names
    mean_ranks: int
    compute_dtype: torch.dtype
    sharded_over: Mesh | None = None  # None: each rank has the whole model
    stays_gathered: bool = False  # layers stay whole from the first micro-batch to the last
    weights: ComputeWeights | None = None  # casts of one process that does not compute in fp32
    reduces_every: bool = False  # reduce gradients after each micro-batch: only shards are kept
    takes_turns: bool = False  # runs micro-batches two by two (turns.py)
    # called before each use of the model, to remake what depends on weights (models/fp8.py)
    refresh: Callable[[], None] | None = None

    def __call__(self, batch: ThdBatch, loss: Loss | None = None) -> LossOutput:
        """See LossModel.forward; every rank calls it."""
        with self._call(batch):
            return self.module(batch, loss)

    def logits(self, batch: ThdBatch, num_last: int = 0) -> Tensor:
        """See LossModel.logits; every rank calls it, and ranks that share a model each give their
        part of a batch.
        """
        with self._call(batch):
            return self.loss_model.logits(batch, num_last)

    def values(
        self, batch: ThdBatch, function: Callable[..., Tensor], columns: Sequence[str] = ()
    ) -> Tensor:
        """See LossModel.values; every rank calls it."""
        with self._call(batch):
            return self.loss_model.values(batch, function, columns)

    def probe(self, batch: ThdBatch) -> tuple[Tensor, bool]:
        """See LossModel.probe; every rank calls it with the same batch. Layers are gathered one at
        a time, as in any forward, and are shards again afterwards.
        """
        self.free_gathered()
        with self._call(batch):
            found = self.loss_model.probe(batch)
        self.free_gathered()
        return found

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        """See LossModel.generate; every rank calls it, those of a dp rank with the same prompts."""
        self.free_gathered()
        with self._call(input_ids):
            found = self.loss_model.generate(input_ids=input_ids, **options)
        self.free_gathered()
        return found

    def _call(self, tokens: ThdBatch | Tensor) -> AbstractContextManager[Any]:
        """Returns the context of one use of the model, in which it computes in `compute_dtype`.

        FSDP casts weights as it gathers them, one process has `weights`, and DDP autocasts, without
        a cache: the casts of an 8B model are 13 GiB, and recomputation does not read them.
        """
        if self.refresh is not None:
            self.refresh()
        if self.weights is not None:
            return self.weights.computing()
        of_device = tokens if isinstance(tokens, Tensor) else tokens.labels
        autocasts = self.sharded_over is None and self.compute_dtype != torch.float32
        return torch.autocast(
            of_device.device.type, self.compute_dtype, enabled=autocasts, cache_enabled=False
        )

    def accumulate(self, is_last: bool) -> AbstractContextManager[None]:
        """Returns the context of the forward and backward pass of one micro-batch.

        Gradients are reduced after the last micro-batch only, unless their sum would not fit; over
        replicas (HSDP) always after the last one.
        """
        if isinstance(self.module, FSDPModule):
            # Under tp the engine sums the gradients of norms inside heads in a hook. If they
            # waited for the last micro-batch, it would sum them a second time.
            has_tp = self.sharded_over is not None and self.sharded_over.shape.tp > 1
            self.module.set_requires_gradient_sync(is_last or has_tp or self.reduces_every)
            self.module.set_requires_all_reduce(is_last or has_tp)
            self.module.set_is_last_backward(is_last)
            if self.stays_gathered:
                self.module.set_reshard_after_backward(is_last)
            return nullcontext()
        if isinstance(self.module, DistributedDataParallel) and not is_last:
            return self.module.no_sync()
        return nullcontext() if self.weights is None else self.weights.accumulating(is_last)

    def add_up_gradients(self) -> None:
        """Adds to the sum over micro-batches what the second of two that took turns has left.

        FSDP adds up behind the backward pass of a layer that it knows of, the first one's. What
        comes later would be added in the compute dtype to the gradients of the next micro-batch.
        """
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                group = module._get_fsdp_state()._fsdp_param_group
                if group is not None:
                    group.post_backward()
                    group._training_state = FsdpTrainingState.IDLE

    def free_gathered(self) -> None:
        """Shards parameters again that a forward pass without a backward pass has left whole."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                # The head of a tied model shares its unit with the embedding. Where the head alone
                # was called, torch 2.11 believes that the forward pass is not over and does not
                # reshard: the optimizer would get the gathered weight.
                state = module._get_fsdp_state()
                if state._modules_to_run_forward and state._fsdp_param_group is not None:
                    state._modules_to_run_forward.clear()
                    state._fsdp_param_group._training_state = FsdpTrainingState.IDLE
                module.reshard()

    def gather_towers_once(self) -> None:
        """Gathers each tower and frees it again.

        A tower that no step calls (for sound, or without images) would never be gathered, and
        torch needs its whole weights once where gradients wait for the last micro-batch.
        """
        for tower in towers(self.loss_model.lm):
            if isinstance(tower, FSDPModule):
                tower.unshard()
                tower.reshard()

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.loss_model.parameters()


def parallelize(
    model: LossModel,
    mesh: Mesh,
    strategy: str,
    compute_dtype: torch.dtype,
    offloads: bool = False,
    reshards: bool = True,
) -> ParallelModel:
    """Wraps a model that every rank has whole, or on the meta device; `strategy` as
    `choose_strategy` gave it.
    """
    if strategy == "fsdp" and mesh.root is not None:
        gathered = None if compute_dtype == torch.float32 else compute_dtype
        fully_shard_model(model, mesh, gathered, offloads, reshards)
        # FSDP averages over all ranks that hold tokens; context-parallel ranks hold parts of one
        # batch.
        return ParallelModel(
            model,
            model,
            mesh.shape.dp * mesh.shape.cp,
            compute_dtype,
            sharded_over=mesh,
            stays_gathered=not reshards,
        )
    if not any(p.is_meta for p in model.parameters()):
        model.to(mesh.device)
    if strategy == "ddp":
        of_towers = [p for tower in towers(model.lm) for p in tower.parameters()]
        wrapped = DistributedDataParallel(
            model,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            # a tower may have a head, or last layers, behind the one that is read
            find_unused_parameters=any(p.requires_grad for p in of_towers),
        )
        return ParallelModel(wrapped, model, mesh.shape.world_size, compute_dtype)
    weights = None
    if compute_dtype != torch.float32:
        weights = ComputeWeights(model, compute_dtype)
    return ParallelModel(model, model, 1, compute_dtype, weights=weights)


def fully_shard_model(
    model: LossModel,
    mesh: Mesh,
    gathered: torch.dtype | None,
    offloads: bool = False,
    reshards: bool = True,
) -> None:
    """Applies FSDP2, in place: each decoder layer, the embedding and the head are gathered apart,
    the rest with the root.

    Not transformers' own wrapping: the root has to be the module that returns the loss, adapters
    and fp8 layers stand between the bare model and its shards, and families without an `fsdp_plan`
    are sharded too.

    gathered  the dtype that weights have while they are whole; None = that of the shards
    offloads  shards and their gradients are held in host memory
    reshards  layers are freed after their forward pass, and gathered again for the backward pass
    """
    shape = mesh.shape
    assert mesh.root is not None

    # 1. Choose the precision. Without a compute dtype, gradients are reduced in the dtype of the
    # shards; with one, in fp32. What a module is given is not cast: some families give their layers
    # fp32, and columns of a batch must not be rounded (in bf16, log-probabilities of a reference
    # are off by more than a step moves them), nor the weights of routing.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if gathered is not None:
        policy = replace(policy, param_dtype=gathered, reduce_dtype=torch.float32)
    # But for what a tower or the head is given by code that has asked for its dtype before it was
    # gathered: that of the shards.
    cast_inputs = replace(policy, cast_forward_inputs=True)

    # 2. Apply tensor and expert parallelism. The latter shards the experts itself.
    is_split = shape.tp > 1 or shape.ep > 1
    if is_split:
        from automodel_lite.parallel.engine import split_layers  # which transformers has since 5.22

        split_layers(model, mesh, policy)

    # 3. Choose the mesh: shards over dp_shard x cp, replicas over dp_replicate (HSDP).
    axes = ("dp_replicate", SHARDS) if shape.dp_replicate > 1 else (SHARDS,)
    offload = OffloadPolicy()
    if offloads:
        offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    shard = partial(fully_shard, mesh=mesh.root[axes], mp_policy=policy, offload_policy=offload)

    # 4. Shard experts before the layers they are in: a unit inside another one keeps its own mesh.
    experts, num_experts = _stacked_experts(model.lm)
    num_shards = shape.dp_shard * shape.cp
    copies = copies_of_experts(num_experts, num_shards)
    if copies > 1 and not is_split:
        # Ranks that share one copy stand side by side, on one host where it has room: gathers
        # inside a copy are more traffic than reductions over copies.
        sizes = {"dp_replicate": shape.dp_replicate * copies, SHARDS: num_shards // copies}
        expert_mesh = open_axes(mesh.device, sizes, mesh.timeout)
        for module in experts:
            shard(module, mesh=expert_mesh)

    # 5. Shard each decoder layer and each tower. Modules that share parameters are one unit.
    layers = decoder_layers(model.lm)
    encoders = towers(model.lm)
    units = _units([*layers, *encoders])  # a tower shares no parameters: it is a unit alone
    for unit in units:
        of_unit = cast_inputs if unit in encoders else policy
        shard(unit, mp_policy=of_unit, reshard_after_forward=reshards)

    # 6. Gather two layers ahead where layers stay whole: torch gathers one. Two take no more memory
    # there, and keep the device busy while the host is late.
    has_plain_layers = all(unit in layers for unit in units[: len(layers)])
    if not reshards and has_plain_layers:
        for number, layer in enumerate(layers):
            next_layers = layers[number + 1 : number + 3]
            layer.set_modules_to_forward_prefetch(next_layers)  # type: ignore[operator]

    # 7. Shard the embedding and the head. The head stays whole after the forward pass: the backward
    # pass begins with it.
    embedding = model.lm.get_input_embeddings()
    head = output_head(model.lm)
    if _share_a_parameter(embedding, head):
        # A tied weight must be one unit: FSDP would shard and reduce it twice.
        shard([embedding, head], mp_policy=cast_inputs, reshard_after_forward=False)
    else:
        # The gradient of a plain embedding is computed without its weight.
        needs_weight = not isinstance(embedding, nn.Embedding)
        shard(embedding).set_unshard_in_backward(needs_weight)
        shard(head, mp_policy=cast_inputs, reshard_after_forward=False)

    # 8. Shard what is left, norms and adapters outside layers, with the root. Its methods other
    # than `forward` gather it, too.
    shard(model)
    vars(model.lm.base_model)["most_calls"] = mesh.largest  # of one that runs by rows
    for method in ("logits", "plain_logits", "probe", "before_head", "values", "generate"):
        register_fsdp_forward_method(model, method)


def _units(modules: list[nn.Module]) -> list[nn.Module | list[nn.Module]]:
    """Returns what is gathered together: one module, or all that share parameters (Zamba's shared
    transformer).
    """
    groups: list[list[nn.Module]] = []
    for module in modules:
        # A module that shares parameters with several groups joins them into one.
        joined = []
        others = []
        for group in groups:
            if any(_share_a_parameter(module, member) for member in group):
                joined += group
            else:
                others.append(group)
        groups = [*others, [*joined, module]]
    return [group[0] if len(group) == 1 else group for group in groups]


def _share_a_parameter(one: nn.Module, other: nn.Module) -> bool:
    return not {id(p) for p in one.parameters()}.isdisjoint({id(p) for p in other.parameters()})


def copies_of_experts(num_experts: int, num_shards: int) -> int:
    """Returns the number of copies of a mixture's experts on the ranks that share a model.

    Experts are sharded whole. Over more ranks than experts, the ranks without one hold padding, and
    every gather brings it along: with the 128 experts of Qwen3-30B-A3B on 1,024 ranks, each rank
    gathers 8 times the experts and holds 42.7 GiB instead of 10.
    """
    if num_experts == 0:
        return 1
    # As many copies as leave each at least one rank per expert, and divide the ranks evenly.
    most = max(1, num_shards // num_experts)
    return max(copies for copies in range(1, most + 1) if num_shards % copies == 0)


def _stacked_experts(lm: nn.Module) -> tuple[list[nn.Module], int]:
    """Returns the modules that hold all experts of a layer, each weight a tensor of three dims; and
    their number.
    """
    of_layers = (named for layer in decoder_layers(lm) for named in layer.named_modules())
    modules = [
        m for name, m in of_layers if name.endswith("experts") and not isinstance(m, nn.ModuleList)
    ]
    rows = [p.shape[0] for module in modules for p in module.parameters() if p.ndim == 3]
    return modules, min(rows, default=0)
