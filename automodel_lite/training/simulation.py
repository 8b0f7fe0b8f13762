"""The real set-up, step, checkpoint and export of one rank of any world: fake tensors in a fake process group.

Nothing is allocated and nothing is sent, but the real code runs: shapes, sharding, collectives, recomputation, the loss
and the optimizer are those of that world, so what is counted is what a GPU will hold. The allocator's slack and the
kernels' workspaces come on top. Weights are not read here: a whole tensor beside the shards stands for it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fully_shard as fsdp
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_lite.attention.interface import install
from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.attention.varlen import VarlenAttention
from automodel_lite.config.sizes import global_batch_size_of, mesh_shape
from automodel_lite.models.balance import balance_of
from automodel_lite.models.layers import (
    cast_trained,
    chosen_tile,
    decoder_layers,
    freeze_towers,
    recompute_layers,
    tile_layers,
)
from automodel_lite.models.loss import LossModel
from automodel_lite.models.sharded import Spread, described_shards
from automodel_lite.models.source import CausalLM, chosen_experts, model_class
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import AXES, Mesh, MeshShape
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.run.checkpoint import flat_state
from automodel_lite.run.weight_files import gathered_weights, groups_of, plan_files
from automodel_lite.thd import AttentionOptions, Segments, ThdBatch
from automodel_lite.training import optimizers
from automodel_lite.training.build import assemble, full_batch, plan_model
from automodel_lite.training.memory import gib
from automodel_lite.training.optimizers import apply_gradients
from automodel_lite.training.plan import ModelPlan, Parts

if TYPE_CHECKING:
    from automodel_lite.models.lora import Lora, LoraAdapter

GPU = torch.device("cpu", 0)
"""Fake tensors tell it from the host, which is "cpu" without a number, and copy between the two."""
GPUS_GB = (16, 24, 40, 48, 80, 96, 141, 192)  # that are sold
SLACK = 3 << 30  # bytes of a GPU that the driver, the allocator and the kernels' workspaces take
_LARGEST = 4  # kinds of tensors that are named


@dataclass(frozen=True)
class Simulation:
    """What one rank holds and sends when the optimizer's states exist. Bytes."""

    weights: int  # this rank's part
    gradients: int
    optimizer: int
    peaks: dict[str, int]  # phase -> most that is held at one time: load, forward, backward, optimizer, save, export
    at_peak: dict[str, int]  # kind of tensor -> held when most is held, the largest first
    sent: dict[str, int]  # mesh axes -> leaves this rank in an optimizer step of at most two micro-batches

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def smallest_gpu_gb(self) -> int | None:
        """The smallest of GPUS_GB that the run fits; None when it fits none."""
        return next((size for size in GPUS_GB if self.peak + SLACK <= size * 10**9), None)

    def __str__(self) -> str:
        peaks = ", ".join(f"{phase} {gib(value)}" for phase, value in self.peaks.items())
        held = ", ".join(f"{kind} {gib(value)}" for kind, value in [*self.at_peak.items()][: 2 + _LARGEST])
        axes = ", ".join(f"{axis} {gib(value)}" for axis, value in self.sent.items())
        sent = f"over {axes}" if axes else "nothing"
        fits = f"GPUs of {self.smallest_gpu_gb} GB and more" if self.smallest_gpu_gb else "no GPU of today"
        return (
            f"at most {gib(self.peak)} ({peaks}): weights {gib(self.weights)}, gradients {gib(self.gradients)}, "
            f"optimizer {gib(self.optimizer)}\nmost is held by {held}\nsends {sent}\nfits {fits}"
        )


def simulate_gpus(parts: Parts, model_config: PretrainedConfig, gpus: int) -> Simulation:
    """Of so many GPUs; data-parallel ranks beyond those of the global batch bring a micro-batch each of their own."""
    shape = mesh_shape(replace(parts.mesh, dp_shard=-1), gpus)
    training = parts.training
    if (training.global_batch_size or 0) % (training.micro_batch_size * shape.dp):
        training = replace(training, global_batch_size=None)
    return simulate(replace(parts, training=training), model_config, shape)


def simulate(parts: Parts, model_config: PretrainedConfig, shape: MeshShape, reduces_every: bool = False) -> Simulation:
    """Runs set-up, an optimizer step, a checkpoint and the export of rank 0 of a world of `shape`, on GPUs.

    reduces_every   gradients, after every micro-batch
    Raises what the run would raise, NotImplementedError for adapters without FSDP. No process group may exist: one is
    made, and destroyed.
    """
    plan = plan_model(replace(parts, attention=_CountedAttention()), model_config, shape, torch.device("cuda"))
    if parts.peft and plan.strategy != "fsdp":
        raise NotImplementedError("adapters without FSDP")
    parts, dtype = plan.parts, plan.dtype
    batch = full_batch(parts, num_ids=1)  # the most that a step can hold; boundaries do not change it
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    held = _Held(shape, _routed_tokens(batch, model_config, shape), model_config.get_text_config().vocab_size)
    with _fake_world(shape) as mesh, _watching_resizes(held), _as_on_a_gpu():
        of_rank = cp_shard(batch, mesh.cp, parts.mesh.cp_exchange)
        drawn = _Drawn(parts.model, model_config, fake, held)
        if plan.strategy == "fsdp":
            adapters: Any = _Adapters(parts.peft) if parts.peft else None
            model, _ = assemble(replace(parts, model=drawn, peft=adapters), _NO_TOKENIZER, mesh, "fsdp", dtype)
            model = replace(model, reduces_every=reduces_every or parts.mesh.reduce_every_micro_batch is True)
        else:
            with fake, held:
                model = _whole(plan, drawn, held)
        optimizer = parts.optimizer(model.loss_model)  # looks up where its shards lie
        with fake, held:
            inputs = of_rank.map_tensors(lambda tensor: fake.from_tensor(tensor).to(GPU))
            return _run(parts, model, optimizer, inputs, held, shape)


def _run(
    parts: Parts, model: ParallelModel, optimizer: Optimizer, inputs: ThdBatch, held: _Held, shape: MeshShape
) -> Simulation:
    lm = model.loss_model.lm
    install(lm, _CountedAttention())
    tile_layers(decoder_layers(lm), chosen_tile(parts.training, len(inputs.labels)))
    recompute_layers(decoder_layers(lm), parts.training.activation_checkpointing, parts.training.recompute_every_layers)
    held.enter("optimizer")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()  # makes its states
    optimizer.zero_grad()
    held.forget("optimizer")
    num_micro_batches = min(
        2, global_batch_size_of(parts.training, shape.dp) // (parts.training.micro_batch_size * shape.dp)
    )
    loss_sum = torch.zeros((), device=GPU)
    for number in range(1, num_micro_batches + 1):
        if isinstance(model.module, _Buckets):
            model.module.is_last = number == num_micro_batches
        with model.accumulate(is_last=number == num_micro_batches):
            held.enter("forward")
            loss = model(inputs)
            held.enter("backward")
            (loss * model.mean_ranks).backward()
        loss_sum += loss.detach()
    gradients = sum(_local_bytes(p.grad) for p in model.parameters() if p.grad is not None)
    held.enter("optimizer")
    apply_gradients(optimizer, model.parameters(), loss_sum, parts.training.max_grad_norm)
    optimizer.zero_grad()
    sent = dict(held.sent)
    held.enter("save")
    flat_state(model.loss_model, optimizer)
    held.enter("export")
    if parts.peft is None:
        dtypes = {name: value.dtype for name, value in lm.state_dict().items()}
        files = plan_files(groups_of(lm, dtypes), shape.world_size)
        for _, weight in gathered_weights(lm, files, dtypes, rank=0):
            del weight
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return Simulation(
        weights=sum(map(_local_bytes, model.parameters())),
        gradients=gradients,
        optimizer=sum(map(_local_bytes, states)),
        peaks=dict(held.peaks),
        at_peak=held.at_peak(),
        sent=sent,
    )


class _Adapters:
    """Adapters without memory, in sight when the weights are given some."""

    def __init__(self, peft: Lora) -> None:
        self._peft, self.check = peft, peft.check

    def adapt(self, model: transformers.PreTrainedModel, base: str) -> LoraAdapter:
        adapter = self._peft.adapt(model, base)
        for parameter in model.parameters():
            if not parameter.is_meta:
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, empty)
        object.__setattr__(adapter, "hidden", contextlib.nullcontext)
        return adapter


class _Drawn(CausalLM):
    """Weights that are never read: described, sharded, fake tensors."""

    def __init__(self, source: CausalLM, model_config: PretrainedConfig, fake: FakeTensorMode, held: _Held) -> None:
        vars(self).update(vars(source))
        self.dtype = torch.float32
        self._modes = fake, held
        self._make = partial(model_class(model_config).from_config, model_config, dtype=torch.float32)

    def build_sharded(
        self, tokenizer: PreTrainedTokenizerBase, spread: Spread, device: torch.device
    ) -> transformers.PreTrainedModel:
        def spread_text(lm: transformers.PreTrainedModel) -> None:
            freeze_towers(lm, self.dtype)
            spread(lm)

        model, _ = described_shards(self._make, spread_text, device)
        fake, held = self._modes
        with fake, held:
            model.to_empty(device=device)
            torch.empty(max(p.numel() for p in model.parameters()), device=device)  # the one that is read
        return model.train()

    def build_whole(self, masters: torch.dtype) -> transformers.PreTrainedModel:
        """Not sharded. What is tied stays tied."""
        with torch.device("meta"):
            lm = self._make()
        freeze_towers(lm, self.dtype)
        cast_trained(lm, masters)
        made: dict[Tensor, Tensor] = {}
        for module in lm.modules():
            for values in (module._parameters, module._buffers):
                for name, value in values.items():
                    if value is not None and value not in made:
                        empty = torch.empty(value.shape, dtype=value.dtype, device=GPU)
                        is_trained = isinstance(value, nn.Parameter)
                        made[value] = nn.Parameter(empty, value.requires_grad) if is_trained else empty
                    values[name] = None if value is None else made[value]  # type: ignore[assignment]
        return lm.train()


def _whole(plan: ModelPlan, drawn: _Drawn, held: _Held) -> ParallelModel:
    """As `parallelize` gives it to each rank without FSDP."""
    parts = plan.parts
    lm = drawn.build_whole(torch.bfloat16 if parts.training.master_weights == "bf16" else torch.float32)
    model = LossModel(lm, parts.loss, balance_of(lm, parts.model.router_aux_loss))
    held.enter("backward")  # what the buckets belong to
    module = _Buckets(model) if plan.strategy == "ddp" else model
    return ParallelModel(module, model, plan.shape.world_size, plan.dtype, autocasts=plan.dtype != torch.float32)


class _Buckets(nn.Module):
    """Stands for DistributedDataParallel, whose reducer does not take fake tensors: gradients are views of buckets that
    stay; before the last micro-batch they are tensors of their own beside them.
    """

    def __init__(self, model: LossModel) -> None:
        super().__init__()
        self.model, self.is_last = model, True
        for parameter in model.parameters():
            if parameter.requires_grad:
                bucket = torch.empty_like(parameter)
                parameter.register_post_accumulate_grad_hook(partial(self._reduce, bucket))

    def forward(self, batch: ThdBatch) -> Tensor:
        loss: Tensor = self.model(batch)
        return loss

    def _reduce(self, bucket: Tensor, parameter: Tensor) -> None:
        if self.is_last and parameter.grad is not None:
            parameter.grad = bucket.copy_(parameter.grad).detach()
            dist.all_reduce(bucket)


_NO_TOKENIZER: Any = None  # a drawn model's source needs no vocabulary


class _CountedAttention(VarlenAttention):
    """FlashAttention's memory, whatever the layer needs."""

    def check(self, spec: AttentionSpec) -> None:
        """Nothing is refused."""

    def __call__(
        self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, segments: Segments, options: AttentionOptions
    ) -> Tensor:
        return super().__call__(q_THD, k_THD, v_THD, segments, replace(options, softcap=None, sinks=None))


class _Held(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and those that collectives send."""

    def __init__(self, shape: MeshShape, routed_tokens: int, vocab_size: int) -> None:
        super().__init__()
        self._routed_tokens, self._vocab_size = routed_tokens, vocab_size
        self.phase, self.now = "load", 0
        self.peaks: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self._shape = shape
        self._axes: dict[str, tuple[str, int]] = {}  # name of a process group -> mesh axes, number of ranks
        self._sizes: dict[int, int] = {}  # storage -> bytes
        self._kinds: dict[int, str] = {}  # storage -> what made it
        self._events: list[tuple[str, int]] = []  # kind, bytes more or less
        self._peak, self._num_at_peak = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and self._routed_tokens:
            return self._routed_tokens  # the one number that expert parallelism reads from the device
        result = func(*args, **(kwargs or {}))
        for value in _tensors(result):
            self.watch(value, func)
        if func.overloadpacket is torch.ops._c10d_functional.wait_tensor:
            self._waited(args[0], result)
        elif func.namespace in ("c10d", "_c10d_functional"):
            self._count_sent(func, args, kwargs or {}, result)
        return result

    def watch(self, value: Tensor, func: Any) -> None:
        """A storage counts from its first tensor on until it is freed."""
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = 0
        self._kinds[key] = self._kind_of(value, func)
        self.resized(key, storage.nbytes())
        weakref.finalize(storage, self._freed, key)

    def resized(self, key: int, num_bytes: int) -> None:
        """FSDP frees a gathered parameter by a storage of no bytes."""
        if key in self._sizes:
            self._change(self._kinds[key], num_bytes - self._sizes[key])
            self._sizes[key] = num_bytes

    def _waited(self, pending: Tensor, result: Tensor) -> None:
        """What was waited for is the same memory; that of a fake collective is another."""
        first, second = pending.untyped_storage()._cdata, result.untyped_storage()._cdata
        if first != second:
            self.resized(first, 0)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.peaks[phase] = max(self.peaks[phase], self.now)

    def forget(self, phase: str) -> None:
        """Drops this phase: the work before the first step does not belong to a step."""
        del self.peaks[phase]
        self.sent.clear()
        self._peak = 0

    def at_peak(self) -> dict[str, int]:
        """What was alive when most was held, the largest kinds first."""
        held: Counter[str] = Counter()
        for kind, num_bytes in self._events[: self._num_at_peak]:
            held[kind] += num_bytes
        return {kind: num_bytes for kind, num_bytes in held.most_common() if num_bytes > 0}

    def _kind_of(self, value: Tensor, func: Any) -> str:
        if self.phase == "load":
            return "weights"
        if self.phase == "optimizer":
            return "optimizer states"
        is_gathered = func.overloadpacket._qualified_op_name in _GATHERED
        is_logits = value.ndim > 1 and value.shape[-1] == self._vocab_size
        name = "gathered" if is_gathered else "logits" if is_logits else _MADE_IN[self.phase]
        return f"{name} {[*value.shape]} {str(value.dtype).removeprefix('torch.')}"

    def _change(self, kind: str, num_bytes: int) -> None:
        self.now += num_bytes
        self._events.append((kind, num_bytes))
        self.peaks[self.phase] = max(self.peaks[self.phase], self.now)
        if self.now > self._peak:
            self._peak, self._num_at_peak = self.now, len(self._events)

    def _freed(self, key: int) -> None:
        self._change(self._kinds.pop(key), -self._sizes.pop(key))

    def _count_sent(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        given = [*args, *kwargs.values()]
        groups = [dist.ProcessGroup.unbox(x) for x in given if isinstance(x, torch.ScriptObject) and _is_group(x)]
        group_name = groups[0].group_name if groups else next(x for x in reversed(given) if isinstance(x, str))
        axes, ranks = self._axes_of(group_name)
        largest = max((t.numel() * t.element_size() for t in _tensors([*given, result])), default=0)
        times = 2 if "allreduce" in name or "all_reduce" in name else 1  # a reduce-scatter and an all-gather
        self.sent[axes] += times * largest * (ranks - 1) // ranks

    def _axes_of(self, group_name: str) -> tuple[str, int]:
        """Along which axes of the mesh the ranks of a group lie."""
        if group_name not in self._axes:
            group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
            ranks = dist.get_process_group_ranks(group)
            names: list[str] = []
            stride = 1
            for axis in reversed(AXES):
                size = getattr(self._shape, axis)
                if len({rank // stride % size for rank in ranks}) > 1:
                    names.insert(0, axis)
                stride *= size
            self._axes[group_name] = (" x ".join(names), len(ranks))
        return self._axes[group_name]


_MADE_IN = {  # phase -> what its tensors are
    "forward": "activations",
    "backward": "gradients and recomputed activations",
    "save": "states to save",
    "export": "weights to export",
}
_GATHERED = frozenset({"aten::empty", "aten::new_empty"})  # where collectives put what they gather


def _is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())


def _routed_tokens(batch: ThdBatch, model_config: PretrainedConfig, shape: MeshShape) -> int:
    """How many times a token goes from one rank to another's experts in a layer, if experts are asked equally often."""
    if shape.ep == 1:
        return 0
    return len(batch.labels) * (chosen_experts(model_config.get_text_config()) or 1) // (shape.cp * shape.tp * shape.ep)


@contextlib.contextmanager
def _fake_world(shape: MeshShape) -> Iterator[Mesh]:
    """Rank 0 of a process group in which nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shape.world_size)
    try:
        sizes = (shape.dp_replicate, shape.dp_shard, shape.cp, shape.tp)
        yield Mesh(shape, GPU, init_device_mesh("cpu", sizes, mesh_dim_names=AXES))
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # plans name the groups of this world


@contextlib.contextmanager
def _watching_resizes(held: _Held) -> Iterator[None]:
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        held.resized(storage._cdata, size)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """FSDP's device is the GPU; an update in place is one kernel there, which allocates nothing."""
    of_mesh, update = fsdp._get_device_from_mesh, optimizers.update
    fsdp._get_device_from_mesh, optimizers.update = lambda mesh: GPU, lambda *args, **kwargs: None
    try:
        yield
    finally:
        fsdp._get_device_from_mesh, optimizers.update = of_mesh, update


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, DTensor):
        yield from _tensors(value.to_local())
    elif isinstance(value, FakeTensor) and value.device == GPU:
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _local_bytes(value: Tensor) -> int:
    """On the GPU."""
    return sum(part.nbytes for part in _tensors(value))
