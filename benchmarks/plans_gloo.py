"""Are predicted seconds right? Six layouts on gloo ranks of this CPU, beside rates that were measured in the same run.

    python -m benchmarks.plans_gloo                 some five minutes of two cores

Every round times the kernels of a layer, a gather with a reduction, and a step of each layout, in turns and on all ranks
at once, so that whatever else the machine does slows all of them. The medians of the rates are the planner's
calibration; it prices the simulated step of each layout, and the medians of the steps stand beside that. CPU seconds of
a rank, which other programs hardly change, and seconds on the clock, which mean something where the ranks have a core each.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.extras.plan.planner import Gpu, Job, Layout, priced
from automodel_lite.extras.plan.simulation import simulate
from automodel_lite.extras.plan.tracker import operation
from automodel_lite.models.layers import decoder_layers, recompute_layers
from automodel_lite.models.loss import LossModel
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import AXES, MeshShape, open_mesh
from automodel_lite.parallel.sharding import parallelize
from automodel_lite.training.build import worst_case_batch
from automodel_lite.training.decide import with_exchange
from automodel_lite.training.optimizers import apply_gradients
from automodel_lite.training.plan import Parts, build_parts, with_recomputation

CONFIG = AutoConfig.for_model(
    "llama",
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=2048,
    tie_word_embeddings=False,
    attn_implementation="sdpa",
)
TOKENS = 512
LAYOUTS = {  # mesh, packs of a step, recomputation
    "shard 2": ((1, 2, 1), 2, "none"),
    "shard 2, two micro-batches": ((1, 2, 1), 4, "none"),
    "shard 2, recomputed": ((1, 2, 1), 2, "full"),
    "cp 2": ((1, 1, 2), 1, "none"),
    "shard 4": ((1, 4, 1), 4, "none"),
    "replicate 2 x shard 2": ((2, 2, 1), 4, "none"),
}
CLOCKS = {"CPU": time.process_time, "clock": time.perf_counter}


def parts_of(name: str) -> tuple[Parts, MeshShape]:
    axes, packs, how = LAYOUTS[name]
    shape = MeshShape(*axes)
    texts = [
        f"packed_sequence.packed_sequence_size={TOKENS}",
        f"training.global_batch_size={packs}",
    ]
    texts += [f"mesh.{axis}={size}" for axis, size in zip(AXES, axes)]
    parts = build_parts(
        check_config(
            compose_config("smoke", [*texts, "training.precision=fp32", "training.compile=false"])
        )
    )
    parts = with_recomputation(parts, how, 1)
    return with_exchange(parts, CONFIG, ReferenceAttention(), torch.float32)[0], shape


def took(function: Callable[[], Any]) -> list[float]:
    """Seconds by each of CLOCKS."""
    began = [clock() for clock in CLOCKS.values()]
    function()
    return [clock() - start for clock, start in zip(CLOCKS.values(), began)]


class Kernels(TorchDispatchMode):
    """Adds up what each kind of kernel does, and its seconds: kind -> FLOPs, bytes, seconds by each clock."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.found: defaultdict[str, Any] = defaultdict(lambda: np.zeros(2 + len(CLOCKS)))
        self._keys = (tokens + 1) / 2

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: list[Any] = []
        seconds = took(lambda: result.append(func(*args, **(kwargs or {}))))
        name = func.overloadpacket.__name__
        if "attention" in name:  # two products forward and five backward, of each visible key
            query = next(x for x in tree_leaves(args) if isinstance(x, Tensor))
            flops = (10.0 if "backward" in name else 4.0) * query.numel() * self._keys
            self.found["product"] += [flops, 0.0, *seconds]
        elif one := operation(func, args, kwargs or {}, result[0], _tensors):
            self.found[one.kind] += [one.flops, one.bytes, *seconds]
        return result[0]


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def step_of(name: str) -> Callable[[], None]:
    """Returns what runs an optimizer step of this layout."""
    parts, shape = parts_of(name)
    mesh = open_mesh(shape, torch.device("cpu"))
    lm = AutoModelForCausalLM.from_config(CONFIG).train()
    model = parallelize(LossModel(lm, parts.loss), mesh, "fsdp", torch.float32)
    install(lm, ReferenceAttention())
    recompute_layers(decoder_layers(lm), parts.training.activation_checkpointing, 1)
    optimizer = parts.optimizer(model.loss_model)
    batch = cp_shard(worst_case_batch(parts, CONFIG.vocab_size), mesh.cp, parts.mesh.cp_exchange)
    micro_steps = LAYOUTS[name][1] // shape.dp

    def step() -> None:
        total = torch.zeros(())
        for number in range(micro_steps):
            with model.accumulate(number == micro_steps - 1):
                loss = model(batch).sum
                (loss * model.mean_ranks).backward()
            total += loss.detach()
        apply_gradients(optimizer, model.parameters(), total, 1.0)
        optimizer.zero_grad()

    return step


def on_rank(rank: int, world: int, rounds: int, folder: str) -> None:
    """Writes rates and steps of a rank: medians over the rounds."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world
    )
    names = [name for name in LAYOUTS if parts_of(name)[1].world_size == world]
    steps = {name: step_of(name) for name in names}
    alone = AutoModelForCausalLM.from_config(CONFIG).train()
    install(alone, ReferenceAttention())
    parts = parts_of(names[0])[0]
    plain, batch = LossModel(alone, parts.loss), worst_case_batch(parts, CONFIG.vocab_size)
    # a layer is gathered twice for each time that its gradient is reduced; and a message of no size
    layer = torch.zeros(sum(p.numel() for p in decoder_layers(alone)[0].parameters()) // world)
    whole, word = layer.new_zeros(layer.numel() * world), torch.zeros(world)

    def exchange() -> None:
        for _ in range(2):
            dist.all_gather_into_tensor(whole, layer)
        dist.reduce_scatter_tensor(layer, whole)

    found: defaultdict[str, list[Any]] = defaultdict(list)
    for number in range(rounds + 2):
        kernels = Kernels(TOKENS)
        dist.barrier()
        with kernels:
            plain(batch).sum.backward()
        plain.zero_grad()
        dist.barrier()
        sizes = {"exchange": took(exchange), "latency": took(partial(dist.all_reduce, word))}
        for name, step in steps.items():
            dist.barrier()
            sizes[name] = took(step)
        if number < 2:  # states are made, memory is warm
            continue
        for name, seconds in sizes.items():
            found[name].append(seconds)
        for kind, place in (("product", 0), ("other", 1)):
            found[kind].append([s / kernels.found[kind][place] for s in kernels.found[kind][2:]])
    bytes_sent = 3 * whole.nbytes * (world - 1) / world
    found["exchange"] = [[s / bytes_sent for s in seconds] for seconds in found["exchange"]]
    torch.save(
        {key: np.median(values, axis=0) for key, values in found.items()},
        f"{folder}/{world}.{rank}",
    )
    dist.barrier()
    dist.destroy_process_group()


def predicted_s(name: str, rates: dict[str, Any], clock: int) -> tuple[float, float]:
    """Returns the seconds of a step by the planner, and those of its messages among them."""
    gpu = Gpu(
        gigabytes=16,
        flops=1 / rates["product"][clock],
        bytes_per_s=1 / rates["other"][clock],
        node_bytes_per_s=1 / rates["exchange"][clock],
        latency_s=rates["latency"][clock],
        overlaps=False,
    )
    parts, shape = parts_of(name)
    lengths = np.array([TOKENS])
    job = Job(parts, CONFIG, gpu, shape.world_size, 1, lengths, lengths)
    step = simulate(replace(parts, attention=None), CONFIG, shape)
    plan = priced(job, Layout(shape, 1, LAYOUTS[name][1]), parts, step)
    return plan.step_s, plan.seconds["exchange"] + plan.seconds["links"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(
        "| layout | ranks | CPU-s predicted (messages) | measured | off % | s predicted | measured | off % |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for world in (2, 4):
            torch.multiprocessing.spawn(on_rank, (world, args.rounds, folder), world)
            ranks = [
                torch.load(Path(folder, f"{world}.{rank}"), weights_only=False)
                for rank in range(world)
            ]
            mean = {key: np.mean([rank[key] for rank in ranks], axis=0) for key in ranks[0]}
            for name in (name for name in LAYOUTS if name in mean):
                cells = [name, str(world)]
                for clock in range(len(CLOCKS)):
                    ours, sent = predicted_s(name, mean, clock)
                    theirs = mean[name][clock]
                    cells += [
                        f"{ours:.3f}" + f" ({sent:.3f})" * (clock == 0),
                        f"{theirs:.3f}",
                        f"{100 * (ours / theirs - 1):+.0f}",
                    ]
                print(f"| {' | '.join(cells)} |", flush=True)
            rates = [f"{key} {1e-9 / mean[key][0]:.3g}" for key in ("product", "other", "exchange")]
            print(
                f"(giga a CPU-second on {world} ranks: {', '.join(rates)}; a message {mean['latency'][0] * 1e6:.0f} us)"
            )


if __name__ == "__main__":
    main()
