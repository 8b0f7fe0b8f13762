"""The real set-up and step of one rank of any world, on any machine: fake tensors in a fake process group.

Nothing is allocated and nothing is sent, but the real code runs: shapes, sharding, collectives, recomputation, the loss
and the optimizer are those of that world, so what is counted is what a GPU will hold. The allocator's slack and the
kernels' workspaces come on top; loading, checkpoints and the export hold a shard and one tensor, and are not simulated.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from automodel_lite.attention.adapter import install
from automodel_lite.attention.varlen import VarlenAttention
from automodel_lite.config.components import build
from automodel_lite.config.schema import Config
from automodel_lite.data.loader import packed_sequence_thd_collater
from automodel_lite.models.adapter import Peft, cast_frozen
from automodel_lite.models.layers import decoder_layers, recompute_layers
from automodel_lite.models.loss import LossModel
from automodel_lite.parallel.mesh import Mesh, MeshShape
from automodel_lite.parallel.shard import cp_shard
from automodel_lite.parallel.sharding import parallelize
from automodel_lite.thd import ThdBatch, to_thd
from automodel_lite.training.optimizers import apply_gradients

DOCUMENT_TOKENS = 2048  # of each simulated document; boundaries do not change what is held


@dataclass
class Simulation:
    """What one rank holds and sends in the second optimizer step, when the optimizer's states exist. Bytes."""

    weights: int  # this rank's part
    gradients: int
    optimizer: int
    peaks: dict[str, int] = field(default_factory=dict)  # phase -> most that is held at one time
    sent: dict[str, int] = field(default_factory=dict)  # mesh axis -> moved by this rank's collectives

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    def __str__(self) -> str:
        peaks = ", ".join(f"{phase} {_size(value)}" for phase, value in self.peaks.items())
        sent = ", ".join(f"{axis} {_size(value)}" for axis, value in self.sent.items()) or "nothing"
        return (
            f"at most {_size(self.peak)} ({peaks}): weights {_size(self.weights)}, gradients {_size(self.gradients)}, "
            f"optimizer {_size(self.optimizer)}\nsends {sent} per step of at most two micro-batches"
        )


class _CountedAttention(VarlenAttention):
    """FlashAttention's memory, whatever the layer asks for."""

    def __call__(self, *args: Any, softcap: float | None, sinks: Tensor | None, **kwargs: Any) -> Tensor:
        return super().__call__(*args, softcap=None, sinks=None, **kwargs)


class _Held(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and those that collectives move."""

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__()
        self.phase, self.now = "load", 0
        self.peaks: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self._axes = axes  # process group's name -> mesh axis
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in _tensors(result):
            self.watch(value)
        if func.namespace == "c10d":
            self._count_sent(func, args, kwargs or {})
        return result

    def watch(self, value: Tensor) -> None:
        """A storage counts from its first tensor on until it is freed."""
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = 0
        self.resized(key, storage.nbytes())
        weakref.finalize(storage, self._freed, key)

    def resized(self, key: int, num_bytes: int) -> None:
        """FSDP frees a gathered parameter by a storage of no bytes."""
        if key in self._sizes:
            self.now += num_bytes - self._sizes[key]
            self._sizes[key] = num_bytes
            self.peaks[self.phase] = max(self.peaks[self.phase], self.now)

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def _count_sent(self, func: Any, args: Any, kwargs: Any) -> None:
        groups = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.ScriptObject)]
        moved = max((t.numel() * t.element_size() for t in _tensors(args)), default=0)
        for group in groups[:1]:
            name = dist.ProcessGroup.unbox(group).group_name
            self.sent[self._axes.get(name, "all ranks")] += moved


def simulate(config: Config, model_config: PretrainedConfig, shape: MeshShape, dtype: torch.dtype) -> Simulation:
    """Runs set-up and two optimizer steps of rank 0 of a world of `shape`; `dtype` is the compute dtype.

    Raises what the run would raise. No process group may exist: one is made, and destroyed.
    """
    batch = _whole_batch(config, shape)
    with _fake_world(shape) as mesh:
        part = cp_shard(batch, mesh.cp, config.mesh.cp_exchange)
        return _run(config, model_config, mesh, part, dtype)


def _run(config: Config, model_config: PretrainedConfig, mesh: Mesh, part: ThdBatch, dtype: torch.dtype) -> Simulation:
    strategy = "fsdp" if mesh.shape.world_size > 1 else "none"
    with torch.device("meta"):
        lm = transformers.AutoModelForCausalLM.from_config(model_config, dtype=torch.float32).train()
        if config.peft:
            peft: Peft = build(config.peft)
            peft.adapt(lm, str(config.model["pretrained"]))
    cast_frozen(lm, dtype)
    install(lm, _CountedAttention())
    lm.tie_weights()
    model = parallelize(LossModel(lm, build(config.loss)), mesh, strategy, dtype)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _Held(_axes(mesh)) as held, _watching_resizes(held):
        model.loss_model.to_empty(device="cpu")
        recompute_layers(
            decoder_layers(lm), config.training.activation_checkpointing, config.training.recompute_every_layers
        )
        optimizer = build(config.optimizer, model.loss_model)
        inputs = part.map_tensors(mode.from_tensor)
        micro_steps = max(
            1, (config.training.global_batch_size or 0) // (config.training.micro_batch_size * mesh.shape.dp)
        )
        for _ in range(2):
            held.peaks.clear()
            held.sent.clear()
            loss_sum = torch.zeros(())
            for number in range(1, min(micro_steps, 2) + 1):
                with model.accumulate(is_last=number == min(micro_steps, 2)):
                    held.phase = "forward"
                    loss = model(inputs)
                    held.phase = "backward"
                    (loss * model.mean_ranks).backward()
                loss_sum += loss.detach()
            gradients = sum(_local_bytes(p.grad) for p in model.parameters() if p.grad is not None)
            held.phase = "optimizer"
            apply_gradients(optimizer, model.parameters(), loss_sum, config.training.max_grad_norm)
            optimizer.zero_grad()
        states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
        return Simulation(
            weights=sum(_local_bytes(p) for p in model.parameters()),
            gradients=gradients,
            optimizer=sum(map(_local_bytes, states)),
            peaks=dict(held.peaks),
            sent=dict(held.sent),
        )


def _whole_batch(config: Config, shape: MeshShape) -> ThdBatch:
    """A full micro-batch whose every token carries a label: the most that a step can hold. Real tensors on the host."""
    size = config.packed_sequence["packed_sequence_size"]
    multiple = 2 * shape.cp if shape.cp > 1 else 1
    length = min(size, max(multiple, DOCUMENT_TOKENS // multiple * multiple))
    lengths = [length] * (size // length) + ([size % length] if size % length else [])
    positions = torch.cat([torch.arange(n) for n in lengths])
    row = {
        "input_ids": torch.zeros(size, dtype=torch.long),
        "labels": torch.zeros(size, dtype=torch.long),
        "position_ids": positions,
        "seq_lens": lengths,
        "seq_lens_padded": lengths,
    }
    return to_thd(packed_sequence_thd_collater([row] * config.training.micro_batch_size))


@contextlib.contextmanager
def _fake_world(shape: MeshShape) -> Iterator[Mesh]:
    """Rank 0 of a process group in which nothing is sent."""
    names = ("dp_replicate", "dp_shard", "cp")
    if shape.world_size == 1:
        yield Mesh(shape, torch.device("cpu"), None)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shape.world_size)
    try:
        root = init_device_mesh("cpu", (shape.dp_replicate, shape.dp_shard, shape.cp), mesh_dim_names=names)
        yield Mesh(shape, torch.device("cpu"), root)
    finally:
        dist.destroy_process_group()


def _axes(mesh: Mesh) -> dict[str, str]:
    if mesh.root is None:
        return {}
    names = mesh.root.mesh_dim_names or ()
    return {mesh.root.get_group(name).group_name: name for name in names}


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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, DTensor):
        yield from _tensors(value.to_local())
    elif isinstance(value, FakeTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _local_bytes(value: Tensor) -> int:
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.numel() * local.element_size()


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"
