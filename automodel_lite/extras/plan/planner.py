"""From a model, data and GPUs to the mesh, micro-batch and recomputation that fit and are fast.

Layouts are tried in the order of an estimate: products at half of the peak rate, and the traffic
that they cannot hide. The least recomputation that fits is searched by simulating steps, and the
seconds of a step are those of its counted operations and messages at the rates of the GPU. Once
enough layouts fit, the others are not simulated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import yaml
from transformers import PretrainedConfig

from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.attention.spec import layer_shapes
from automodel_lite.config.sizes import AUTO_BATCH_SIZE
from automodel_lite.errors import ConfigError, one_line
from automodel_lite.extras.plan.by_layers import layer_pattern
from automodel_lite.extras.plan.capacity import usable
from automodel_lite.extras.plan.measured import COMPILED, MEASURED, MeasuredRates
from automodel_lite.extras.plan.recompute import OFFLOAD, least_recomputation
from automodel_lite.extras.plan.simulation import CountError, Simulation, simulate
from automodel_lite.extras.plan.tracker import Message, Work
from automodel_lite.models.flops import CostModel, ModelSize, StepFlops, model_size, step_flops
from automodel_lite.models.settings import experts_per_token
from automodel_lite.parallel.mesh import MeshShape
from automodel_lite.telemetry.metrics import peak_of
from automodel_lite.thd import ThdBatch
from automodel_lite.training.decide import decide_layout
from automodel_lite.training.memory import estimate_memory
from automodel_lite.training.rules import check_pairs
from automodel_lite.training.settings import Decided, RunParts, with_recomputation

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "ep")
SHOWN = 10
MOST_SIMULATED = 12  # layouts that fit


@dataclass(frozen=True)
class Gpu:
    """Rates of one GPU; links in one direction.

    measured  what it does in a step; None = nobody has measured it, and only a bound is known
    """

    gigabytes: float
    flops: float
    bytes_per_s: float
    node_bytes_per_s: float  # to the others of its node
    network_bytes_per_s: float = 50e9  # to other nodes: an NDR InfiniBand port
    latency_s: float = 20e-6  # of a collective that is waited for
    overlaps: bool = True  # sharded weights and gradients travel beside the computation
    source: str = "the data sheet, which no step reaches: a bound"
    measured: MeasuredRates | None = None


_SHEETS = yaml.safe_load(Path(__file__).with_name("gpus.yaml").read_text())
GPUS = {
    name: Gpu(flops=peak_of(sheet.pop("device")) or 0.0, measured=MEASURED.get(name), **sheet)
    for name, sheet in _SHEETS.items()
}


def plain_documents(parts: RunParts) -> None:
    """Leaves the micro-batch to the simulation."""


@dataclass(frozen=True)
class Job:
    """What is to be planned.

    parts     with the preset's own mesh and batch
    lengths   tokens of each document, cut as the packs cut them; of a tree, each token once
    paths     tokens of its longest row: the document's own, but for a tree
    batch     micro-batch of a layout's parts; None = plain documents
    """

    parts: RunParts
    config: PretrainedConfig
    gpu: Gpu
    gpus_per_node: int
    nodes: int
    lengths: np.ndarray
    paths: np.ndarray
    batch: Callable[[RunParts], ThdBatch | None] = plain_documents

    @property
    def world(self) -> int:
        return self.gpus_per_node * self.nodes

    @cached_property
    def size(self) -> ModelSize:
        return model_size(self.config)

    @cached_property
    def flops(self) -> StepFlops:
        # Frozen weights have no gradient of their own; an adapter's few are left out.
        return step_flops(self.config, self.size, 0 if self.parts.peft else None)

    def visible(self, window: int | None) -> float:
        """Returns the mean number of keys that a query sees."""
        # by a query of each document
        seen = CostModel(0.0, 0.0, window, 1.0).pairs(self.paths) / self.paths
        return float((seen * self.lengths).sum() / self.lengths.sum())

    def bandwidth(self, extent: int) -> float:
        """extent: ranks from the first to the last of a group; its slowest link decides."""
        return (
            self.gpu.node_bytes_per_s
            if extent <= self.gpus_per_node
            else self.gpu.network_bytes_per_s
        )


@dataclass(frozen=True)
class Layout:
    """A mesh and a batch that are possible, before anything is counted."""

    shape: MeshShape
    micro_batch: int
    global_batch: int
    # estimate of a step, for each of its packs: layouts are tried in this order
    likely_s: float = 0.0

    @property
    def micro_steps(self) -> int:
        return self.global_batch // (self.micro_batch * self.shape.dp)

    def __str__(self) -> str:
        sizes = {axis.removeprefix("dp_"): getattr(self.shape, axis) for axis in AXES}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 GPU"


@dataclass(frozen=True)
class Plan:
    """A layout that fits."""

    layout: Layout
    parts: RunParts
    step: Simulation
    # products, attention, memory, links, exchange, update -> of an optimizer step, at least
    seconds: dict[str, float]
    tokens: int  # of an optimizer step, over all GPUs
    mfu: float
    # the same by the rates that the card was measured to reach; None where it has none
    predicted: dict[str, float] | None = None

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.step_s / self.layout.shape.world_size

    @property
    def predicted_s(self) -> float | None:
        return None if self.predicted is None else sum(self.predicted.values())

    @property
    def predicted_tokens_per_s_per_gpu(self) -> float | None:
        seconds = self.predicted_s
        return self.tokens / seconds / self.layout.shape.world_size if seconds else None


@dataclass(frozen=True)
class Outcome:
    """plans: the best first; lost: a word -> how many layouts lost by it."""

    plans: list[Plan]
    lost: Counter[str]


def coarsely(job: Job) -> Iterator[tuple[float, Layout, RunParts]]:
    """Yields the layouts of the job's world with the settings that hold least, and the bytes that
    they hold by the coarse formulas.
    """
    for layout in possible(job):
        parts = with_recomputation(placed(job, layout), *OFFLOAD)
        if parts.advanced.reduce_every_micro_batch == "auto" and layout.micro_steps > 1:
            parts = replace(parts, advanced=replace(parts.advanced, reduce_every_micro_batch=True))
        plan = Decided.of(
            parts,
            config=job.config,
            size=job.size,
            shape=layout.shape,
            strategy="fsdp",
            dtype=torch.bfloat16,
        )
        yield estimate_memory(plan, 0 if parts.peft else None).total, layout, parts


def make_plans(
    job: Job, most: int = MOST_SIMULATED, say: Callable[[str], None] = lambda line: None
) -> Outcome:
    """Searches the layouts of the job's world; the best plan was simulated whole, checkpoint and
    export included.

    most  layouts that fit, at which the search ends
    say   gets a line per layout that is simulated
    """
    # Layouts in the order of their likely speed: each that fits is simulated by a few of its
    # layers, until enough are found.
    pattern = layer_pattern(job.config)
    capacity = usable(int(job.gpu.gigabytes * 1e9))
    plans: list[Plan] = []
    lost: Counter[str] = Counter()
    not_counted: CountError | None = None
    for layout in sorted(possible(job), key=lambda one: one.likely_s):
        if len(plans) >= most:
            lost["slower"] += 1
            continue
        what = f"{layout}, micro-batch {layout.micro_batch}"
        try:
            plan = decide_layout(
                placed(job, layout), job.config, layout.shape, torch.device("cuda")
            )
            check_pairs(plan, layout.shape.dp)
            adapter = 0 if job.parts.peft else None
            found = least_recomputation(plan, capacity, pattern, adapter, job.batch(plan))
        except CountError as error:
            lost["not counted"] += 1
            not_counted = error
            say(f"{what}: cannot be counted")
            continue
        except (ConfigError, NotImplementedError) as error:
            lost["unsupported"] += 1
            say(f"{what}: {one_line(error, 100)}")
            continue
        if found is None:
            lost["memory"] += 1
            say(f"{what}: too large")
            continue
        plans.append(priced(job, layout, *found))
        say(
            f"{what}: fits, {plans[-1].step.peak / 2**30:.1f} GiB, at most "
            f"{plans[-1].tokens_per_s_per_gpu:,.0f} tokens/s per GPU"
        )
        plans.sort(key=lambda plan: plan.step_s / plan.layout.global_batch)
    if not_counted and not plans:
        raise not_counted
    while plans:  # what only the whole step shows: its export
        best = plans[0].parts
        whole = simulate(best, job.config, plans[0].layout.shape, job.batch(best))
        if whole.peak <= capacity:
            return Outcome(
                [replace(plans[0], step=replace(whole, work=plans[0].step.work)), *plans[1:]], lost
            )
        lost["memory"] += 1
        plans.pop(0)
    return Outcome([], lost)


def placed(job: Job, layout: Layout) -> RunParts:
    """Returns the job's parts on the layout's mesh, with its batch."""
    mesh = replace(job.parts.mesh, **{axis: getattr(layout.shape, axis) for axis in AXES})
    training = replace(
        job.parts.training,
        micro_batch_size=layout.micro_batch,
        global_batch_size=layout.global_batch,
    )
    # a kernel that exists on any machine; what is simulated has the memory of a GPU's
    return replace(job.parts, mesh=mesh, training=training, attention=ReferenceAttention())


def possible(job: Job) -> Iterator[Layout]:
    """Yields meshes that the model, the pack and the engine take, with micro-batches that divide
    the global batch.
    """
    base = job.parts
    training = job.parts.training
    heads = [n for one in layer_shapes(job.config) for n in (one.num_heads, one.num_kv_heads) if n]
    # tp and ep, which transformers combines with neither
    is_split = not (base.peft or base.mesh.cpu_offload)
    powers = [2**n for n in range(11)]
    # heads are divided over tp, which stays inside a node; a pack is divided over cp, twice for the
    # zigzag
    of_tp = [
        n
        for n in powers
        if n == 1 or (is_split and n <= job.gpus_per_node and not any(h % n for h in heads))
    ]
    of_cp = [n for n in powers if n <= 16 and base.packed_sequence_size % (2 * n) == 0]
    wanted = training.global_batch_size
    if wanted == "auto" or training.global_batch_documents:
        wanted = AUTO_BATCH_SIZE
    for tp, cp in ((tp, cp) for tp in of_tp for cp in of_cp if job.world % (tp * cp) == 0):
        dp = job.world // (tp * cp)
        # the preset's batch where it is a multiple of the ranks; more ranks than that bring a pack
        # each
        asked = int(wanted or dp * training.micro_batch_size)
        for replicate in {1, *(n for n in (job.nodes, job.nodes // 4) if n > 1 and dp % n == 0)}:
            shards = dp // replicate * cp * tp
            of_ep = [n for n in powers if n > 1 and is_split and n % tp == 0 and shards % n == 0]
            for ep in [
                1,
                *(n for n in of_ep if job.size.num_experts and job.size.num_experts % n == 0),
            ]:
                shape = MeshShape(replicate, dp // replicate, cp, tp, ep)
                for micro in (1, 2, 4, 8):
                    batch = dp if micro == 1 and asked % dp and asked <= job.world else asked
                    if batch % (micro * dp) == 0:
                        layout = Layout(shape, micro, batch)
                        yield replace(layout, likely_s=_likely_s(job, layout) / batch)


def _likely_s(job: Job, layout: Layout) -> float:
    """Returns the seconds of a step whose products have half of the peak rate."""
    shape = layout.shape
    size = job.size
    # that a data-parallel rank has at a time
    tokens = layout.micro_batch * job.parts.packed_sequence_size
    pairs = tokens * job.visible(job.flops.attention.window)
    work_s = (
        job.flops.of(tokens, tokens, pairs * 0.5) / (shape.cp * shape.tp) / (0.5 * job.gpu.flops)
    )
    # Beside the products, bf16 weights are gathered twice, gradients reduced once in fp32, over
    # replicas too. Experts are sharded over what ep leaves, or over no more ranks than there are
    # experts.
    shards = shape.dp_shard * shape.cp
    replicas = shape.dp_replicate
    experts = size.all_experts * (shape.ep > 1 or shards > size.num_experts)
    copies = max(1, shards * shape.tp // shape.ep) if shape.ep > 1 else 1
    sharded = (size.parameters - experts) / shape.tp * (
        shards - 1
    ) / shards + experts / shape.ep * (copies - 1) / copies
    gather_s = 4.0 * sharded / job.bandwidth(shards * shape.tp)
    of_copies_s = (
        8.0
        * size.parameters
        / (shards * shape.tp)
        * (replicas - 1)
        / replicas
        / job.bandwidth(job.world)
    )
    reduce_s = 0.0 if job.parts.peft else gather_s + of_copies_s
    # what tp reduces, and tokens on their way to experts and back, are waited for
    text = job.config.get_text_config()
    hidden = 2.0 * tokens / shape.cp * text.hidden_size
    waited_s = (
        7 * size.num_layers * 2 * hidden * (shape.tp - 1) / shape.tp / job.bandwidth(shape.tp)
    )
    if experts:
        routed = hidden / shape.tp * (experts_per_token(text) or 1)
        waited_s += (
            4 * size.num_layers * routed * (shape.ep - 1) / shape.ep / job.bandwidth(shape.ep)
        )
    before_last = (layout.micro_steps - 1) * max(work_s, gather_s)
    return before_last + max(work_s, gather_s + reduce_s) + layout.micro_steps * waited_s


def priced(job: Job, layout: Layout, parts: RunParts, step: Simulation) -> Plan:
    """Returns the plan with the seconds that its counted step takes."""
    seconds = _step_seconds(job, layout, parts, step, None)
    predicted = None
    if job.gpu.measured:
        predicted = _step_seconds(job, layout, parts, step, job.gpu.measured)
    tokens = layout.global_batch * parts.packed_sequence_size
    flops = job.flops.of(tokens, tokens, tokens * job.visible(job.flops.attention.window))
    batch = job.batch(parts)
    if batch is not None and batch.images is not None:
        flops += batch.images.flops * layout.micro_steps * layout.shape.dp
    mfu = flops / sum(seconds.values()) / job.world / job.gpu.flops
    return Plan(layout, parts, step, seconds, tokens, mfu, predicted)


def _step_seconds(
    job: Job, layout: Layout, parts: RunParts, step: Simulation, measured: MeasuredRates | None
) -> dict[str, float]:
    """Returns the seconds of an optimizer step, by what they go into; at least these without
    measured rates.
    """
    windows = {
        one.window for work in step.work.values() for one in work if not isinstance(one, Message)
    }
    visible = {window: job.visible(window) for window in windows}
    is_compiled = parts.training.compile is not False
    seconds = dict.fromkeys(("products", "attention", "memory", "links", "exchange", "update"), 0.0)
    alone = layout.micro_steps - 1
    in_turns = 0
    if parts.mesh.ep_overlap:  # two by two
        in_turns = alone // 2 * 2
        alone -= in_turns
    counted = [("micro", alone, False), ("micro", in_turns, True)]
    counted += [("last", 1, False), ("update", 1, False)]
    for name, times, is_hidden in counted:
        found = computing_s(step.work[name], job.gpu, measured, visible, is_compiled)
        links = _links_s(job, step.work[name], sum(found.values()), is_hidden)
        for key, value in (found | links).items():
            seconds[key] += times * value
    return seconds


def computing_s(
    work: Work,
    gpu: Gpu,
    measured: MeasuredRates | None,
    visible: dict[int | None, float],
    is_compiled: bool,
) -> dict[str, float]:
    """Returns the seconds of the operations on the GPU, by kind.

    measured  None = the rates of the data sheet, of which an operation takes the longer of its
              FLOPs and its bytes: a bound
    visible   window -> keys that a query sees
    Kernels of attention read and write their helpers beside their products (the gradient of the
    queries in fp32, those of keys and values for each query head), so that both times add up.
    """
    flops_per_s = measured.product_flops if measured else gpu.flops
    bytes_per_s = measured.bytes_per_s if measured else gpu.bytes_per_s
    shares = COMPILED if is_compiled else {}
    found: defaultdict[str, float] = defaultdict(float)
    for one, times in work.items():
        if isinstance(one, Message):
            continue
        bytes_s = one.bytes / bytes_per_s * shares.get(one.kind, 1.0)
        if one.kind == "attention" and measured:
            keys = visible[one.window]
            took = one.flops * keys / measured.attention(keys) + bytes_s
        else:
            flops = one.flops * (visible[one.window] if one.kind == "attention" else 1.0)
            took = max(flops / flops_per_s, bytes_s)
        kind = {"product": "products", "attention": "attention", "update": "update"}
        found[kind.get(one.kind, "memory")] += times * took
    return found


def _links_s(job: Job, work: Work, computing: float, is_hidden: bool = False) -> dict[str, float]:
    """Returns the seconds of messages, beside so many of computation: of what travels beside it, a
    layer's share is waited for at the begin, and all that takes longer than the computation.

    is_hidden  all messages travel beside it: another micro-batch computes
    """
    parallel = 0.0
    exchange = 0.0
    for one, times in work.items():
        if not isinstance(one, Message):
            continue
        took = times * one.bytes / job.bandwidth(one.extent)
        if (one.is_parallel or is_hidden) and job.gpu.overlaps:
            parallel += took
        else:
            exchange += took + times * job.gpu.latency_s
    share = parallel / job.size.num_layers
    return {"exchange": exchange, "links": share + max(parallel - computing, 0.0)}
