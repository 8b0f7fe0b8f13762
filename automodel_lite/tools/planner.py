"""From a model, data and GPUs to the mesh, micro-batch and recomputation that fit and are fast.

Layouts are ordered by a bound that no step can beat (products at the peak rate, and the traffic that they cannot hide).
From the best bound on, the least recomputation that fits is searched by simulating steps, and the seconds of a step are
those of its counted operations and messages at the rates of the GPU. A layout whose bound is above the third best plan
is not simulated: it cannot become one of the first three.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from automodel_lite.attention.spec import layer_shapes
from automodel_lite.config.sizes import AUTO_BATCH_SIZE
from automodel_lite.errors import ConfigError
from automodel_lite.models.flops import ModelSize, StepFlops, model_size, step_flops
from automodel_lite.parallel.mesh import MeshShape
from automodel_lite.telemetry.metrics import peak_of
from automodel_lite.training.build import plan_model
from automodel_lite.training.plan import ModelPlan, Parts
from automodel_lite.training.recompute import least_recomputation, recomputation_text, usable
from automodel_lite.training.simulation import Simulation, layer_pattern, simulate
from automodel_lite.training.tracker import Message, Operation, Work

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "ep")
MOST_SIMULATED = 8  # layouts
SHOWN = 10
_FUSED = 1 / 3  # of the bytes outside products and attention: assumed of compiled layers, not measured


@dataclass(frozen=True)
class Gpu:
    """Rates of one GPU; links in one direction."""

    gigabytes: float
    flops: float
    bytes_per_s: float
    node_bytes_per_s: float  # to the others of its node
    network_bytes_per_s: float = 50e9  # to other nodes: an NDR InfiniBand port
    latency_s: float = 20e-6  # of a collective that is waited for
    overlaps: bool = True  # sharded weights and gradients travel beside the computation
    source: str = "the data sheet, which no step reaches: a bound"


def _sheet(name: str, gigabytes: float, terabytes_per_s: float, link_gigabytes_per_s: float) -> Gpu:
    return Gpu(gigabytes, peak_of(name) or 0.0, terabytes_per_s * 1e12, link_gigabytes_per_s * 1e9)


GPUS = {
    "a100-40": _sheet("NVIDIA A100-SXM4-40GB", 40, 1.555, 200),
    "a100-80": _sheet("NVIDIA A100-SXM4-80GB", 80, 2.039, 200),
    "h100-80": _sheet("NVIDIA H100 80GB HBM3", 80, 3.35, 300),
    "h200-141": _sheet("NVIDIA H200", 141, 4.8, 300),
    "b200-192": _sheet("NVIDIA B200", 192, 8.0, 600),
    "l40s-48": _sheet("NVIDIA L40S", 48, 0.864, 25),
    "rtx4090-24": _sheet("NVIDIA GeForce RTX 4090", 24, 1.008, 20),
}
"""Links: NVLink's rate less its overhead, or PCIe's."""


def calibrated(gpu: Gpu, path: Path) -> Gpu:
    """Returns the GPU with the rates of a file: `ceilings` as gpu_check writes them, or fields of `Gpu`."""
    found = json.loads(path.read_text())
    ceilings = found.get("ceilings", {})
    values = {key: value for key, value in found.items() if key in Gpu.__dataclass_fields__}
    for key, name, unit in (("flops", "product_tflops", 1e12), ("bytes_per_s", "copy_tb_per_s", 1e12)):
        if ceilings.get(name):
            values[key] = ceilings[name] * unit
    if not values:
        raise ConfigError(f"{path}: neither `ceilings` of gpu_check nor rates such as flops and bytes_per_s.")
    return replace(gpu, **{"source": f"measured, {path}", **values})


@dataclass(frozen=True)
class Job:
    """What is to be planned.

    parts_of  more overrides -> the parts
    lengths   tokens of each document, cut as the packs cut them
    """

    parts_of: Callable[[Sequence[str]], Parts]
    config: PretrainedConfig
    gpu: Gpu
    gpus_per_node: int
    nodes: int
    lengths: np.ndarray
    seen: dict[int | None, float] = field(default_factory=dict)  # window -> mean number of visible keys

    @property
    def world(self) -> int:
        return self.gpus_per_node * self.nodes

    def visible(self, window: int | None) -> float:
        """Returns the mean number of keys that a query sees."""
        if window in self.seen:
            return self.seen[window]
        s = self.lengths.astype(np.float64)
        beyond = np.maximum(s - window, 0) if window else np.zeros_like(s)
        self.seen[window] = float((s * (s + 1) - beyond * (beyond + 1)).sum() / 2 / s.sum())
        return self.seen[window]

    @cached_property
    def size(self) -> ModelSize:
        return model_size(self.config)

    @cached_property
    def flops(self) -> StepFlops:
        return step_flops(self.config, self.size, None)

    def bandwidth(self, extent: int) -> float:
        """extent: ranks from the first to the last of a group; its slowest link decides."""
        return self.gpu.node_bytes_per_s if extent <= self.gpus_per_node else self.gpu.network_bytes_per_s


@dataclass(frozen=True)
class Layout:
    """A mesh and a batch that are possible, before anything is counted."""

    shape: MeshShape
    micro_batch: int
    global_batch: int
    bound_s: float = 0.0  # of a step, for each of its packs

    @property
    def micro_steps(self) -> int:
        return self.global_batch // (self.micro_batch * self.shape.dp)

    @property
    def overrides(self) -> list[str]:
        axes = [f"mesh.{axis}={getattr(self.shape, axis)}" for axis in AXES]
        training = {"micro_batch_size": self.micro_batch, "global_batch_size": self.global_batch}
        return [*axes, *(f"training.{key}={value}" for key, value in training.items())]

    def __str__(self) -> str:
        axes = zip(("replicate", "shard", "cp", "tp", "ep"), (getattr(self.shape, a) for a in AXES))
        return " x ".join(f"{name} {size}" for name, size in axes if size > 1) or "1 GPU"


@dataclass(frozen=True)
class Plan:
    """A layout that fits."""

    layout: Layout
    parts: Parts
    step: Simulation
    seconds: dict[str, float]  # products, attention, memory, links, exchange, update -> of an optimizer step
    tokens: int  # of an optimizer step, over all GPUs
    useful_flops: float
    more: tuple[str, ...] = field(default=())  # overrides

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.step_s / self.layout.shape.world_size

    @property
    def bound(self) -> str:
        return max(self.seconds, key=self.seconds.__getitem__)

    @property
    def overrides(self) -> list[str]:
        training = self.parts.training
        return [
            *self.more,
            *self.layout.overrides,
            f"training.activation_checkpointing={training.activation_checkpointing}",
            f"training.recompute_every_layers={training.recompute_every_layers}",
        ]

    def mfu(self, gpu: Gpu) -> float:
        return self.useful_flops / self.step_s / self.layout.shape.world_size / gpu.flops

    def loses_by(self, best: Plan) -> str:
        """Returns, in a word, where a token takes longer than in the best plan."""
        excess = {key: s / self.tokens - best.seconds[key] / best.tokens for key, s in self.seconds.items()}
        worst = max(excess, key=excess.__getitem__)
        is_recomputed = recomputation_text(self.parts) != recomputation_text(best.parts)
        return "recomputation" if worst in ("products", "memory") and is_recomputed else worst

    def as_json(self, gpu: Gpu) -> dict[str, Any]:
        return {
            "overrides": self.overrides,
            "peak_bytes": self.step.peak,
            "step_s": self.step_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu(gpu),
            "seconds": self.seconds,
            "weights_bytes": self.step.weights,
            "gradients_bytes": self.step.gradients,
            "optimizer_bytes": self.step.optimizer,
        }


@dataclass(frozen=True)
class Outcome:
    """plans: the best first; lost: a word -> how many layouts lost by it."""

    plans: list[Plan]
    lost: Counter[str]


def make_plans(job: Job, more: Sequence[str] = (), most: int = MOST_SIMULATED) -> Outcome:
    """Searches the layouts of the job's world; the best plan was simulated whole, checkpoint and export included."""
    base = job.parts_of(more)
    pattern, capacity = layer_pattern(job.config), usable(int(job.gpu.gigabytes * 1e9))
    layouts = sorted(possible(job, base), key=lambda one: one.bound_s)
    plans: list[Plan] = []
    lost: Counter[str] = Counter()
    num_simulated = 0
    for layout in layouts:
        third = sorted(plan.step_s / plan.layout.global_batch for plan in plans)[2:3]
        if num_simulated >= most or (third and layout.bound_s > third[0]):
            lost["slower"] += 1
            continue
        try:
            plan = planned(base, job.config, layout)
            if (found := least_recomputation(plan, capacity, pattern)) is None and layout.micro_steps > 1:
                mesh = replace(plan.parts.mesh, reduce_every_micro_batch=True)  # their unsharded sum is what is spared
                plan = replace(plan, parts=replace(plan.parts, mesh=mesh))
                found = least_recomputation(plan, capacity, pattern)
        except (ConfigError, NotImplementedError):
            lost["unsupported"] += 1
            continue
        num_simulated += found is not None
        if found is None:
            lost["memory"] += 1
            continue
        reduces = ("mesh.reduce_every_micro_batch=true",) if plan.parts.mesh.reduce_every_micro_batch is True else ()
        plans.append(priced(job, layout, *found, (*more, *reduces)))
    plans.sort(key=lambda plan: plan.step_s / plan.layout.global_batch)
    while plans:  # what only the whole step shows: its export
        whole = simulate(plans[0].parts, job.config, plans[0].layout.shape)
        if whole.peak <= capacity:
            return Outcome([replace(plans[0], step=replace(whole, work=plans[0].step.work)), *plans[1:]], lost)
        lost["memory"] += 1
        plans.pop(0)
    return Outcome([], lost)


def planned(base: Parts, config: PretrainedConfig, layout: Layout) -> ModelPlan:
    shape = layout.shape
    mesh = replace(base.mesh, **{axis: getattr(shape, axis) for axis in AXES})
    training = replace(base.training, micro_batch_size=layout.micro_batch, global_batch_size=layout.global_batch)
    parts = replace(base, mesh=mesh, training=training, attention=None)
    # on a CPU attention=auto takes the reference, which exists here; the simulation counts the kernel of a GPU
    plan = plan_model(parts, config, shape, torch.device("cpu"))
    dtype = torch.float32 if base.training.precision == "fp32" else torch.bfloat16
    return replace(plan, dtype=dtype, strategy="fsdp" if base.mesh.strategy == "auto" else plan.strategy)


def possible(job: Job, base: Parts) -> Iterator[Layout]:
    """Yields meshes that the model, the pack and the engine take, with micro-batches that divide the global batch."""
    shapes, size = layer_shapes(job.config), job.size
    heads = [n for one in shapes for n in (one.num_heads, one.num_kv_heads) if n]
    is_split = not (base.peft or base.mesh.cpu_offload)  # tp and ep, which transformers combines with neither
    powers = [2**n for n in range(11)]
    for tp in [n for n in powers if n == 1 or (is_split and n <= job.gpus_per_node and not any(h % n for h in heads))]:
        for cp in [n for n in powers if job.world % (n * tp) == 0 and base.packed_sequence_size % (2 * n) == 0]:
            dp = job.world // (tp * cp)
            if cp > 16:
                continue
            for replicate in {1, *(n for n in (job.nodes, job.nodes // 4) if n > 1 and dp % n == 0)}:
                shards = dp // replicate * cp * tp
                experts = [n for n in powers if n > 1 and is_split and size.num_experts % n == 0 and shards % n == 0]
                for ep in [1, *(n for n in experts if size.num_experts and n % tp == 0)]:
                    shape = MeshShape(replicate, dp // replicate, cp, tp, ep)
                    wanted = base.training.global_batch_size
                    wanted = AUTO_BATCH_SIZE if wanted == "auto" else int(wanted or 0)
                    asked = wanted or dp * base.training.micro_batch_size
                    for micro in (1, 2, 4, 8):
                        batch = asked if asked % (micro * dp) == 0 else dp
                        if (batch != asked and (micro > 1 or asked > job.world)) or batch % (micro * dp):
                            continue
                        layout = Layout(shape, micro, batch)
                        yield replace(layout, bound_s=_bound_s(job, base, layout) / batch)


def _bound_s(job: Job, base: Parts, layout: Layout) -> float:
    """Returns seconds that no step of this layout can beat."""
    shape, size = layout.shape, job.size
    tokens = layout.micro_batch * base.packed_sequence_size  # that a data-parallel rank has at a time
    pairs = tokens * job.visible(job.flops.attention.window if job.flops.attention.window_frac == 1 else None)
    frac = 2 / 3 if base.peft else 1.0  # frozen weights have no gradient of their own
    work_s = frac * job.flops.of(tokens, tokens, pairs * 0.5) / (shape.cp * shape.tp) / job.gpu.flops
    shards = shape.dp_shard * shape.cp
    gathered = 4.0 * (size.parameters - size.all_experts * (shape.ep > 1)) / shape.tp * (shards - 1) / shards
    gather_s = gathered / job.bandwidth(shards * shape.tp)
    hidden = 2.0 * tokens / shape.cp * job.config.get_text_config().hidden_size
    reduced = 7 * size.num_layers * 2 * hidden * (shape.tp - 1) / shape.tp / job.bandwidth(shape.tp)
    return layout.micro_steps * (max(work_s, gather_s if job.gpu.overlaps else 0.0) + reduced)


def priced(job: Job, layout: Layout, parts: Parts, step: Simulation, more: tuple[str, ...] = ()) -> Plan:
    """Returns the plan with the seconds that its counted step takes."""
    is_fused = parts.training.compile is not False
    total: defaultdict[str, float] = defaultdict(float)
    for name, times in (("micro", layout.micro_steps - 1), ("last", 1), ("update", 1)):
        for key, value in _seconds(job, step.work[name], is_fused, len(layer_shapes(job.config))).items():
            total[key] += times * value
    keys = ("products", "attention", "memory", "links", "exchange")
    seconds = {key: total[key] for key in keys} | {"update": total["update"]}
    tokens = layout.global_batch * parts.packed_sequence_size
    flops = job.flops.of(tokens, tokens, tokens * job.visible(job.flops.attention.window))
    return Plan(layout, parts, step, seconds, tokens, flops, more)


def _seconds(job: Job, work: Work, is_fused: bool, num_layers: int) -> dict[str, float]:
    """Each operation takes the longer of its FLOPs and its bytes; of what travels beside the computation, a layer's
    share is waited for at the begin, and all that takes longer than the computation.
    """
    gpu = job.gpu
    found: defaultdict[str, float] = defaultdict(float)
    parallel = 0.0
    for one, times in work.items():
        if isinstance(one, Message):
            took = times * one.bytes / job.bandwidth(one.extent)
            if one.is_parallel:
                parallel += took
            else:
                found["exchange"] += took + times * gpu.latency_s
        elif isinstance(one, Operation):
            flops = one.flops * (job.visible(one.window) if one.kind == "attention" else 1.0)
            bytes_s = times * one.bytes / gpu.bytes_per_s
            kind = {"product": "products", "other": "memory"}.get(one.kind, one.kind)
            share = _FUSED if kind == "memory" and is_fused else 1.0
            found[kind] += max(times * flops / gpu.flops, share * bytes_s)
    compute = found["products"] + found["attention"] + found["memory"]
    found["links"] += parallel / num_layers + max(parallel - compute, 0.0) if gpu.overlaps else parallel
    return found
