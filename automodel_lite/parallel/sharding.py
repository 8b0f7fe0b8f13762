"""Applies FSDP2, HSDP or DDP to a model from outside; the model itself knows nothing of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from automodel_lite.errors import ConfigError
from automodel_lite.models.layers import decoder_layers, output_head, towers
from automodel_lite.models.loss import LossModel
from automodel_lite.parallel.mesh import Mesh, MeshShape
from automodel_lite.thd import ThdBatch


def choose_strategy(strategy: str, shape: MeshShape, is_gpu: bool, is_quantized: bool = False) -> str:
    """auto -> fsdp with several processes or on a GPU, else none; raises ConfigError for what cannot work.

    On one GPU, too: the numbers are those of many, and experts compute in bf16, where autocast leaves them in fp32.
    Quantized weights cannot be sharded: on one process auto leaves them alone.
    """
    if strategy == "auto":
        return "fsdp" if shape.world_size > 1 or (is_gpu and not is_quantized) else "none"
    if strategy == "none" and shape.world_size > 1:
        raise ConfigError(
            f"mesh.strategy=none with {shape.world_size} processes would train as many models: use fsdp or ddp."
        )
    if strategy == "ddp" and shape.dp_replicate > 1:
        raise ConfigError("mesh.strategy=ddp replicates over all ranks: set mesh.dp_replicate=1, or use fsdp for HSDP.")
    return strategy


def choose_precision(precision: str, device: torch.device) -> torch.dtype:
    """The compute dtype; master weights, gradients and optimizer states stay fp32."""
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


@dataclass(frozen=True)
class ParallelModel:
    """A LossModel spread over the mesh.

    `mean_ranks` is the number of ranks whose gradients the wrapper averages: the loss is multiplied by it, so that
    gradients are sums.
    """

    module: nn.Module  # what is called: LossModel, FSDP's or DDP's
    loss_model: LossModel  # what was wrapped: its parameters, its names
    mean_ranks: int
    compute_dtype: torch.dtype
    autocasts: bool
    sharded_over: Mesh | None = None  # None = each rank has all of it
    reduces_every: bool = False  # gradients after every micro-batch, so that their sum is sharded

    def __call__(self, batch: ThdBatch) -> Tensor:
        with self._autocast(batch):
            loss: Tensor = self.module(batch)
            return loss

    def logits(self, batch: ThdBatch, num_last: int = 0) -> Tensor:
        """See LossModel.logits; every rank calls it, and ranks that share a model each give their part of a batch."""
        with self._autocast(batch):
            return self.loss_model.logits(batch, num_last)

    def probe(self, batch: ThdBatch) -> tuple[Tensor, bool]:
        """See LossModel.probe; every rank calls it with the same batch. No weight of a linear layer is gathered."""
        self.free_gathered()
        with self._autocast(batch), _held_rows(self.module, self.compute_dtype, batch.labels.device):
            found = self.loss_model.probe(batch)
        self.free_gathered()
        return found

    def _autocast(self, batch: ThdBatch) -> torch.autocast:
        """Weights are cast once per use: a cache of the casts is 13 GiB of an 8B model, read by no recomputation."""
        return torch.autocast(batch.labels.device.type, self.compute_dtype, enabled=self.autocasts, cache_enabled=False)

    def accumulate(self, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch: gradients are reduced after the last one only, unless their sum
        would not fit; over replicas (HSDP) after the last one in any case.
        """
        if isinstance(self.module, FSDPModule):
            # the engine sums the gradients of norms inside heads over tp as they come: a second time, if they waited
            has_tp = self.sharded_over is not None and self.sharded_over.shape.tp > 1
            self.module.set_requires_gradient_sync(is_last or has_tp or self.reduces_every)
            self.module.set_requires_all_reduce(is_last or has_tp)
            self.module.set_is_last_backward(is_last)
            return nullcontext()
        if isinstance(self.module, DistributedDataParallel) and not is_last:
            return self.module.no_sync()
        return nullcontext()

    def free_gathered(self) -> None:
        """Parameters that a forward without a backward has left whole are shards again."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
                # torch 2.11 gathers a unit of several modules before the first of them, and took the head of a tied
                # model, called alone, for a pass that the embedding is still to join
                module._get_fsdp_state()._modules_to_run_forward.clear()

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.loss_model.parameters()


def parallelize(
    model: LossModel, mesh: Mesh, strategy: str, compute_dtype: torch.dtype, offloads: bool = False
) -> ParallelModel:
    """Wraps a model that every rank has whole, or on the meta device; `strategy` as `choose_strategy` gave it."""
    autocasts = compute_dtype != torch.float32
    if strategy == "fsdp" and mesh.root is not None:
        fully_shard_model(model, mesh, compute_dtype, offloads)
        num_batches = mesh.shape.dp * mesh.shape.cp
        return ParallelModel(model, model, num_batches, compute_dtype, autocasts=False, sharded_over=mesh)
    if not any(p.is_meta for p in model.parameters()):
        model.to(mesh.device)
    if strategy == "ddp":
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
        return ParallelModel(wrapped, model, mesh.shape.world_size, compute_dtype, autocasts)
    return ParallelModel(model, model, 1, compute_dtype, autocasts)


def fully_shard_model(model: LossModel, mesh: Mesh, compute_dtype: torch.dtype, offloads: bool = False) -> None:
    """FSDP2, in place: each decoder layer, the embedding and the head are gathered apart, the rest with the root.

    Not transformers' own wrapping: the root has to be the module that returns the loss, adapters and fp8 layers stand
    between the bare model and its shards, and families without an `fsdp_plan` are sharded too. `offloads`: shards and
    their gradients are held in host memory.
    """
    policy = MixedPrecisionPolicy()
    if compute_dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    is_split = mesh.shape.tp > 1 or mesh.shape.ep > 1
    if is_split:
        from automodel_lite.parallel.engine import split_layers  # which transformers has since 5.21

        fsdp_mesh = split_layers(model, mesh, policy)
    else:
        fsdp_mesh = _fsdp_mesh(mesh)
    held = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if offloads else OffloadPolicy()
    shard = partial(fully_shard, mesh=fsdp_mesh, mp_policy=policy, offload_policy=held)
    experts, num_experts = _stacked_experts(model.lm)
    copies = copies_of_experts(num_experts, mesh.shape.dp_shard * mesh.shape.cp)
    if copies > 1 and not is_split:
        of_experts = _fsdp_mesh(mesh, copies)
        for module in experts:
            shard(module, mesh=of_experts)
    for unit in _units([*decoder_layers(model.lm), *towers(model.lm)]):  # towers are never gathered
        shard(unit)
    embedding, head = model.lm.get_input_embeddings(), output_head(model.lm)
    if _share_a_parameter(embedding, head):
        shard([embedding, head], reshard_after_forward=False)
    else:
        shard(embedding).set_unshard_in_backward(
            not isinstance(embedding, nn.Embedding)
        )  # its gradient needs no weight
        shard(head, reshard_after_forward=False)  # the backward pass begins with it
    shard(model)
    for method in ("logits", "plain_logits", "probe"):
        register_fsdp_forward_method(model, method)
    if dist.get_backend() == "gloo":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(BroadcastGather())  # type: ignore[arg-type]


class BroadcastGather:
    """All-gather over gloo: each rank broadcasts its part into its place. Gloo's own gathers into a second buffer and
    takes 5 times as long (50 MB over 4 ranks of one host: 0.52 against 0.10 s).
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        parts = output_tensor.chunk(group.size())
        mine = parts[group.rank()]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        pending = [dist.broadcast(part, group_src=rank, group=group, async_op=True) for rank, part in enumerate(parts)]
        for work in pending:
            work.wait()


class HeldRows(Tensor):
    """A weight [N, ...] of which this rank holds some rows: a linear layer multiplies by them, an embedding looks ids
    up in them, and the results are gathered, which are small where tokens are few. Whatever else reads it gets the
    whole.
    """

    shard: Any  # a DTensor

    def __new__(cls, shard: DTensor, dtype: torch.dtype, device: torch.device) -> HeldRows:
        self: HeldRows = Tensor._make_wrapper_subclass(cls, shard.shape, dtype=dtype, device=device)
        self.shard = shard
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and isinstance(args[1], cls) and not isinstance(args[0], cls):
            return args[1].linear(args[0], *args[2:], **kwargs)
        if func is F.embedding and isinstance(args[1], cls) and kwargs.get("max_norm") is None:
            return args[1].look_up(args[0])
        if func.__name__ == "__get__" or func in (Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point):
            return super().__torch_function__(func, types, args, kwargs)
        return func(*tree_map_only(cls, cls.whole, args), **tree_map_only(cls, cls.whole, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*tree_map_only(cls, cls.whole, args), **tree_map_only(cls, cls.whole, kwargs or {}))

    def whole(self) -> Tensor:
        return self.shard.full_tensor().to(self.device, self.dtype)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear(x, whole, bias)`; x is the same on all ranks."""
        group, rows, start, per_rank = self._held()
        own_bias = None if bias is None else bias[start : start + len(rows)]
        own_TN = F.linear(x.reshape(-1, x.shape[-1]), rows, own_bias)
        padded_NT = own_TN.new_zeros(per_rank, len(own_TN))
        padded_NT[: len(rows)] = own_TN.t()
        all_NT = own_TN.new_empty(per_rank * group.size(), len(own_TN))
        gather = BroadcastGather() if dist.get_backend(group) == "gloo" else dist.all_gather_into_tensor
        gather(all_NT, padded_NT, group=group)
        return all_NT[: self.shape[0]].t().contiguous().view(*x.shape[:-1], self.shape[0])

    def look_up(self, ids: Tensor) -> Tensor:
        """`F.embedding(ids, whole)`; ids are the same on all ranks."""
        group, rows, start, _ = self._held()
        is_own = (ids >= start) & (ids < start + len(rows))
        found = torch.zeros(*ids.shape, *self.shape[1:], device=ids.device)
        found[is_own] = rows[ids[is_own] - start].float()
        dist.all_reduce(found, group=group)  # one rank has it, the others add zeros
        return found.to(self.dtype)

    def _held(self) -> tuple[dist.ProcessGroup, Tensor, int, int]:
        """The ranks that share it, the rows of this one, the first of them, and the most that a rank holds."""
        group = self.shard.device_mesh.get_group(len(self.shard.placements) - 1)
        per_rank = -(-self.shape[0] // group.size())
        return group, self.shard.to_local().to(self.device, self.dtype), per_rank * group.rank(), per_rank


@contextmanager
def _held_rows(model: nn.Module, compute_dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Inside, FSDP gathers all but the weights of linear layers and embeddings, which are `HeldRows`: a check of some
    hundred tokens then sends products of some hundred rows, where the weights are the whole model.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model._get_fsdp_state()._lazy_init()  # remembers every parameter's dtype; otherwise the first forward does it
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = {id(group): group for unit in units if (group := unit._get_fsdp_state()._fsdp_param_group)}
    managed = {id(param.sharded_param) for group in groups.values() for param in group.fsdp_params}
    owners = [m for unit in units for m in _outside_lists(unit) if _is_plain(m)]
    held: dict[int, Any] = {}
    for owner in owners:
        weight: Any = owner._parameters["weight"]
        if id(weight) in managed and _is_split_by_rows(weight):
            dtype = weight.dtype if compute_dtype == torch.float32 else compute_dtype
            owner._parameters["weight"] = held.setdefault(id(weight), HeldRows(weight, dtype, device))
    gathered = {key: group.fsdp_params for key, group in groups.items()}
    for group in groups.values():
        group.fsdp_params = [param for param in group.fsdp_params if id(param.sharded_param) not in held]
        if not group.fsdp_params:
            group.unshard = lambda async_op=False: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        for key, group in groups.items():
            group.fsdp_params = gathered[key]
            vars(group).pop("unshard", None)
        for owner in owners:
            weight = owner._parameters["weight"]
            if isinstance(weight, HeldRows):
                owner._parameters["weight"] = weight.shard


def _outside_lists(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that every token meets: experts in a list run where tokens were sent, and a rank that rounds otherwise
    would send them elsewhere.
    """
    yield module
    for child in module.children():
        if not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _outside_lists(child)


def _is_plain(module: nn.Module) -> bool:
    """A linear layer (in fp8 it has a product of its own) or an embedding."""
    return type(module).forward is nn.Linear.forward or isinstance(module, nn.Embedding)


def _is_split_by_rows(weight: DTensor) -> bool:
    """By FSDP alone, over more than one rank."""
    *replicated, last = weight.placements
    has_peers = weight.device_mesh.size(len(replicated)) > 1
    return type(last) is Shard and last.dim == 0 and has_peers and all(p.is_replicate() for p in replicated)


def _units(modules: list[nn.Module]) -> list[nn.Module | list[nn.Module]]:
    """What is gathered together: one module, or all that share parameters (Zamba's shared transformer)."""
    groups: list[list[nn.Module]] = []
    for module in modules:
        alike = [group for group in groups if any(_share_a_parameter(module, other) for other in group)]
        groups = [group for group in groups if group not in alike] + [[*(m for group in alike for m in group), module]]
    return [group[0] if len(group) == 1 else group for group in groups]


def _share_a_parameter(one: nn.Module, other: nn.Module) -> bool:
    return not {id(p) for p in one.parameters()}.isdisjoint({id(p) for p in other.parameters()})


def copies_of_experts(num_experts: int, num_shards: int) -> int:
    """How often a mixture's experts lie on the ranks that share a model. They are sharded one by one: over more ranks
    than there are experts, each would gather padding for all that have none (Qwen3-30B-A3B, 128 experts on 1,024 ranks:
    8 times the experts, 42.7 GiB held where 10 do).
    """
    most = num_shards // num_experts if num_experts else 1
    return max((copies for copies in range(1, most + 1) if num_shards % copies == 0), default=1)


def _stacked_experts(lm: nn.Module) -> tuple[list[nn.Module], int]:
    """The modules that hold all experts of a layer, each weight as one tensor of three dims; and how many experts."""
    of_layers = (named for layer in decoder_layers(lm) for named in layer.named_modules())
    modules = [
        module for name, module in of_layers if name.endswith("experts") and not isinstance(module, nn.ModuleList)
    ]
    rows = [p.shape[0] for module in modules for p in module.parameters() if p.ndim == 3]
    return (modules, min(rows)) if rows else ([], 0)


def _fsdp_mesh(mesh: Mesh, copies: int = 1) -> DeviceMesh:
    """Parameters are sharded over dp_shard x cp, and replicated over dp_replicate (HSDP); ranks in the mesh's order."""
    num_replicas, num_shards = mesh.shape.dp_replicate * copies, mesh.shape.dp_shard * mesh.shape.cp // copies
    first = 1 if num_replicas == 1 else 0
    sizes, names = (num_replicas, num_shards), ("dp_replicate", "dp_shard_cp")
    return init_device_mesh(mesh.device.type, sizes[first:], mesh_dim_names=names[first:])
