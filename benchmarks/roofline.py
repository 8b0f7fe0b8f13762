"""Tokens a second and MFU of published jobs, on paper: counted operations against two ceilings of the card.

    python -m benchmarks.roofline                                 the table of docs/roofline.md
    python -m benchmarks.roofline --calibration gpu_calibration.json   rates that `gpu_check.py` measured
    python -m benchmarks.roofline --write                         writes docs/roofline.md

Every operation of a forward and backward is dispatched once with FakeTensors (shapes, no numbers) on models of one and
two layers; their difference is a layer. An operation takes as long as the larger of its FLOPs at the product's ceiling
and its bytes, read and written, at memory's. Nothing is a share of a peak that somebody guessed.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import LlamaConfig, LlamaForCausalLM

from automodel_lite.attention.interface import install
from automodel_lite.models.layers import cast_weights, decoder_layers, recompute_layers
from automodel_lite.models.loss import FusedLinearCrossEntropy, LossModel
from automodel_lite.parts.adapters.lora import Lora
from automodel_lite.parts.kernels.varlen import VarlenAttention
from automodel_lite.thd import stream_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "roofline.md"
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
VIEWS = frozenset(
    {
        "detach",
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "unsqueeze",
        "expand",
        "slice",
        "select",
        "alias",
    }
)
VIEWS |= frozenset(
    {"permute", "split", "empty", "empty_like", "empty_strided", "as_strided", "squeeze", "reshape"}
)
DOCUMENT = 1024  # tokens of a document


@dataclass(frozen=True)
class Job:
    """A published figure, and what it ran."""

    name: str
    shape: tuple[int, int, int, int, int, int]  # hidden, layers, heads, kv heads, inner, vocabulary
    tokens: int  # of a GPU's micro-batch
    gpus: int
    published: str
    lora: bool = False
    recompute_every: int = 0  # layers: 1 = all are recomputed, 2 = every second, 0 = none
    gathers: int = 2  # of a layer per micro-batch; 1 = advanced.reshard_after_forward=false
    weights: str = "fp32"  # masters; bf16: weights, gradients and moments without masters

    @property
    def assumes(self) -> str:
        """What this row stands on, beside what all do."""
        layers = {0: "no layer", 1: "every layer", 2: "every second layer"}[self.recompute_every]
        trained = "a frozen base in bf16" if self.lora else f"weights in {self.weights}"
        gradients = "" if self.gpus == 1 or self.lora else ", gradients reduced in fp32"
        held = ", layers gathered once" if self.gathers == 1 else ""
        return f"{layers} recomputed, {trained}{gradients}, FSDP over {self.gpus} rank{'s' if self.gpus > 1 else ''}{held}"


LLAMA_8B = (4096, 32, 32, 8, 14336, 128256)
LLAMA_70B = (8192, 80, 64, 8, 28672, 128256)
LLAMA2_7B = (4096, 32, 32, 32, 11008, 32000)
TITAN = "14,451 in fp8 (Megatron-Bridge); bf16 5,762 eager, 6,667 compiled (torchtitan, selective recomputation)"
NEMO = "12,473 (NeMo)"
JOBS = [
    Job("Llama-3.1-8B, 8k, 8 GPUs", LLAMA_8B, 8192, 8, TITAN, recompute_every=1),
    Job("Llama-3.1-8B, 8k, 8 GPUs", LLAMA_8B, 8192, 8, TITAN, recompute_every=2),
    Job("Llama-3.1-8B, 8k, 8 GPUs", LLAMA_8B, 8192, 8, TITAN),
    Job("Llama-3.1-8B, 8k, 8 GPUs", LLAMA_8B, 8192, 8, TITAN, gathers=1),
    Job("Llama-3.1-8B, 8k, 1 GPU", LLAMA_8B, 8192, 1, "", recompute_every=1),
    Job("Llama-3.1-8B, 8k, 1 GPU", LLAMA_8B, 8192, 1, "", recompute_every=1, gathers=1),
    Job("Llama-3.1-8B, 8k, 1 GPU", LLAMA_8B, 8192, 1, "", weights="bf16"),
    Job("Llama-3-8B LoRA, 4k, 1 GPU", LLAMA_8B, 4096, 1, NEMO, lora=True),
    Job("Llama-3-8B LoRA, 4k, 1 GPU", LLAMA_8B, 4096, 1, NEMO, lora=True, recompute_every=1),
    Job("Llama-2-7B, 4k, 8 GPUs", LLAMA2_7B, 4096, 8, "16,891 in fp8 (NeMo)"),
    Job(
        "Llama-3-70B LoRA, 4k, 8 GPUs",
        LLAMA_70B,
        4096,
        8,
        "1,092 (NeMo)",
        lora=True,
        recompute_every=1,
    ),
    Job("Llama-3-70B, 8k, 64 GPUs", LLAMA_70B, 8192, 64, "867 with cp 2 (NeMo)", recompute_every=1),
]


NOTES = """\
## Counted before and after

| change | before | after | numbers |
|---|---|---|---|
| fp8 all-gathers, scales computed once a step (`training.fp8=tensorwise`) | 8 bytes a weight are sent: two gathers in bf16, gradients in fp32; every gathered weight is rounded to fp8 on every rank, forward and backward | 6 bytes (5 where layers are gathered once), and each rank rounds its shard once a step; one more all-reduce of 4 bytes per matrix; 1 byte per weight of a rank's part is held | the same bits: losses and gradient norms of two emulated gloo ranks, six kinds of run |
| `varlen` attention inside the graph of its layer | 4 graphs for the layers of a Llama, in training; queries and keys leave one and enter the next | 1 graph, and 1 for validation: rotation, casts and copies can fuse up to the kernel, 1 to 2 % by the bytes. The boundaries and the longest document are sizes of the graph, so that nothing is filled up with empty documents, and 12 packs of 1 to 48 documents need no new graph | the same bits on a CPU (torch's operation with a CPU kernel); as many values are kept for the backward pass |

## Considered

What was counted, for Llama-3.1-8B and 8,192 tokens unless a row says otherwise, at the rates above; a GPU may show otherwise.

| change | counted | why not |
|---|---|---|
| weights resident in bf16, fp32 masters in the optimizer, on one GPU | 2 bytes a weight are moved for casts where 18 are (12 with `advanced.reshard_after_forward=false`): 38 ms of a step of 0.6 s or more, and the same 16 bytes a weight in memory | exact with one micro-batch alone: several are summed in fp32, which takes 2 bytes more. It would need optimizers and checkpoints of its own, while the setting spares a third of it with all of them |
| gathering two layers ahead where layers are resharded | no byte and no launch less; 0.4 GiB more is held (70B: 1.6 GiB) | the host is ahead of the device, so one layer hides the traffic already. Where layers stay gathered two are gathered ahead, at no cost |
| gathers of weights in fp8 (`training.fp8=tensorwise`), Llama-3.1-8B on 8 GPUs | 6 bytes a weight instead of 8: 0.18 s of traffic become 0.13 s, of which one layer in 32 is not hidden | below 1 % of a step by itself; built, with the same bits under emulation, for the products that it goes with |
| experts by token dispatch, Qwen3-30B-A3B, 8,192 tokens on 8 GPUs | sharding gathers 29 G expert weights in bf16 twice and reduces them in fp32: 203 GB per GPU, 0.68 s at 300 GB/s, beside 0.17 s of products at the peak rate. Dispatch sends 8 copies of each token there and back, forward and backward: 45 GB, 0.15 s | **more than 3 %: about 2 times at these rates**, where the links bind. `mesh.ep` takes transformers' engine for it; its rate is to be measured before anything of our own is written |
| gathers of a frozen 70B base for LoRA, 4,096 tokens on 8 GPUs | 0.81 s of traffic beside 1.9 s of operations: hidden but for one layer in 80. `mesh.tp=8` sends activations instead, 6 all-reduces of 67 MB per layer: 56 GB, 0.19 s, none of it hidden | sharding is the faster one while its traffic is hidden; a base in fp8 or 4 bits halves the rest (`peft=qlora`) |""".splitlines()


@dataclass(frozen=True)
class Ceilings:
    """Of one card; links in one direction, per GPU."""

    flops: float
    bytes_per_s: float
    link_bytes_per_s: float


class Count(TorchDispatchMode):
    """FLOPs and bytes of each operation, in the order of dispatch."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, float, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        name = name.rstrip("_")
        if name in VIEWS or namespace == "prim":
            return out
        touched = {
            "gather": (args[1:], out),
            "index_select": (out, out),
            "embedding": (out, out),
        }.get(name)
        touched = (out,) if name.startswith("new_") else touched or (args, kwargs, out)
        tensors = [x for x in tree_leaves(touched) if isinstance(x, Tensor)]
        moved = float(sum(x.numel() * x.element_size() for x in tensors))
        packet = func._overloadpacket
        flops = (
            float(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
            if packet in flop_registry
            else 0.0
        )
        if "varlen_attn" in name:
            flops = attention_flops(args, is_backward="backward" in name)
        self.operations.append((name, flops, moved))
        return out


def attention_flops(args: Any, is_backward: bool) -> float:
    """Two products of the visible pairs forward, five backward (FlashAttention makes the scores again)."""
    q = next(x for x in args if isinstance(x, Tensor) and x.ndim == 3)
    pairs = q.shape[0] * (min(DOCUMENT, q.shape[0]) + 1) / 2
    return (10 if is_backward else 4) * pairs * q.shape[1] * q.shape[2]


@functools.cache
def counted(job: Job, num_layers: int, recomputes: bool) -> list[tuple[str, float, float]]:
    """One forward and backward of `num_layers` layers in bf16, embedding, head and loss included."""
    hidden, _, heads, kv_heads, inner, vocabulary = job.shape
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
        attn_implementation="sdpa",
    )
    batch = stream_of(
        torch.zeros(max(1, job.tokens // DOCUMENT), min(DOCUMENT, job.tokens), dtype=torch.int64),
        "cpu",
    )
    count = Count()
    with torch.device("meta"):
        lm = LlamaForCausalLM(config).train().to(torch.bfloat16)
    if job.lora:
        Lora(r=16).adapt(lm, "shapes alone")
        cast_weights(lm, torch.bfloat16, are_trained=False)
    install(lm, VarlenAttention())
    recompute_layers(decoder_layers(lm), "full" if recomputes else "none", 1)
    model = LossModel(lm, FusedLinearCrossEntropy())
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_fake_cpu(model)
        batch = batch.map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        with torch.autocast("cpu", torch.bfloat16, enabled=job.lora, cache_enabled=False), count:
            model(batch).sum.backward()
    return count.operations


def on_fake_cpu(model: torch.nn.Module) -> None:
    """Parameters and buffers of a model on the meta device become FakeTensors, in place."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = torch.nn.Parameter(fake, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def seconds(
    operations: list[tuple[str, float, float]], ceilings: Ceilings, is_fused: bool
) -> float:
    """Fused: what is no product and no attention moves nothing of its own beside them; a bound that no compiler passes."""
    total = 0.0
    for _, flops, moved in operations:
        if flops or not is_fused:
            total += max(flops / ceilings.flops, moved / ceilings.bytes_per_s)
    return total


def step(job: Job, ceilings: Ceilings) -> dict[str, float]:
    """Seconds of a step of one micro-batch, eager and fused, and useful FLOPs as `models/flops.py` counts them."""
    hidden, layers, heads, kv_heads, inner, vocabulary = job.shape
    head_dim = hidden // heads
    layer_weights = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    weights = layers * layer_weights + 2 * hidden * vocabulary
    pairs = job.tokens * (min(DOCUMENT, job.tokens) + 1) / 2
    useful = (4 if job.lora else 6) * (layers * layer_weights + hidden * vocabulary) * job.tokens
    useful += 12 * layers * heads * head_dim * pairs
    trained = layers * 16 * (2 * hidden * 4 + (hidden + inner) * 3) if job.lora else weights
    # the backward pass begins with the head, and the gradient of the embedding needs no weight: both are gathered once
    gathered = job.gathers * layers * layer_weights + 2 * hidden * vocabulary
    # AdamW reads the gradient, and reads and writes a weight and two moments: in fp32 28 bytes, in bf16 14. Masters are
    # cast for each gather, 6 bytes of a rank's shard, and whole gradients to fp32, another 6.
    bytes_per_weight = 14 if job.weights == "bf16" and not job.lora else 28
    casts = 0.0 if job.lora or job.weights == "bf16" else 6 * gathered / job.gpus + 6 * weights
    optimizer_s = (bytes_per_weight * trained / job.gpus + casts) / ceilings.bytes_per_s
    part = (job.gpus - 1) / job.gpus
    traffic_s = part * (2 * gathered + (0 if job.lora else 4 * weights)) / ceilings.link_bytes_per_s
    found = {"useful_flops": useful, "traffic_s": traffic_s, "optimizer_s": optimizer_s}

    def whole(measure: Callable[[list[tuple[str, float, float]]], float]) -> float:
        """Of all layers: the difference of two and one, of layers that are recomputed and that are not."""
        first, second = (measure(counted(job, n, False)) for n in (1, 2))
        total = first + (layers - 1) * (second - first)
        if job.recompute_every:
            again, both = (measure(counted(job, n, True)) for n in (1, 2))
            total += layers / job.recompute_every * ((both - again) - (second - first))
        return total

    for name, is_fused in (("eager", False), ("fused", True)):
        compute_s = whole(
            lambda operations, is_fused=is_fused: seconds(operations, ceilings, is_fused)
        )  # type: ignore[misc]
        found[name] = max(compute_s, traffic_s) + traffic_s / layers + optimizer_s
    found["other_gb"] = whole(lambda operations: sum(b for _, f, b in operations if not f)) / 1e9
    found["tflop"] = whole(lambda operations: sum(f for _, f, _ in operations)) / 1e12
    return found


def page(ceilings: Ceilings) -> str:
    lines = [
        "# Roofline estimates",
        "",
        "`python -m benchmarks.roofline --write` wrote this page. **Nothing on it was measured.** It shows the time that the counted operations",
        "take at the peak rates of a GPU, for comparison with the first measured table (`python benchmarks/gpu_check.py`).",
        "",
        f"Rates: matrix products at {ceilings.flops / 1e12:.0f} TFLOP/s, memory at {ceilings.bytes_per_s / 1e12:.2f} TB/s, links at "
        f"{ceilings.link_bytes_per_s / 1e9:.0f} GB/s per GPU. The defaults are from the H100's data sheet and are never",
        "reached in practice: `--calibration gpu_calibration.json` takes the rates that `gpu_check.py` measured on a card.",
        "",
        "**The two bounds are never reached.** The best published compiled row for this 8B, 6,667, is 45 % MFU where the fused bound is 92 %; the highest",
        "bf16 MFU on record for a model of this size is 57.8 % (7B, one H200). Figures to beat, per H100: **14,451** tokens/s for Llama-3 8B at",
        "8k (fp8, 8 GPUs, Megatron-Bridge 25.11), and **13,011** for Qwen3-30B-A3B at 4k on mock data (bf16, 16 GPUs, its model card of July 2026).",
        "",
        "| job | assumes | published tokens/s/GPU | bound, eager: never reached | bound, fused: never reached | MFU of the eager bound | MFU of the fused bound | TFLOP per step | GB outside products | traffic s | optimizer and casts s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for job in JOBS:
        found = step(job, ceilings)
        rates = [job.tokens / found[name] for name in ("eager", "fused")]
        mfu = [found["useful_flops"] / found[name] / ceilings.flops for name in ("eager", "fused")]
        lines.append(
            f"| {job.name} | {job.assumes} | {job.published} | {rates[0]:,.0f} | {rates[1]:,.0f} | {mfu[0]:.0%} | "
            f"{mfu[1]:.0%} | {found['tflop']:,.0f} | {found['other_gb']:,.0f} | {found['traffic_s']:.2f} | "
            f"{found['optimizer_s']:.3f} |"
        )
    lines += [
        "",
        "What all rows assume:",
        "",
        f"- One micro-batch per step, documents of {DOCUMENT} tokens, all tokens labeled, products in bf16; layers are gathered in bf16 twice",
        "  unless a row says once, the embedding and the head once.",
        "- Whether a row fits is not asked here: `dry_run=true` and the planner count memory.",
        "- Operations are counted on models of one and two layers with FakeTensors (`varlen` attention, the fused loss); each operation takes the",
        "  larger of FLOPs / ceiling and bytes / ceiling, one after another. Kernel launches, the host and NCCL latency are free.",
        "- *eager*: every operation reads and writes memory. *fused*: only products and attention do, an upper bound for compilers.",
        "- Traffic overlaps with compute except for one layer's share. The rate inside a node is also used for 64 GPUs, which is optimistic.",
        "- AdamW with fp32 masters moves 28 bytes a weight, in bf16 14; casting masters for a gather moves 6 of a rank's shard, and",
        "  gradients back 6 of all weights. Weights in bf16 do neither, and learn like fp32 only by stochastic rounding (`optimizer=adamw_bf16`).",
        "- Useful FLOPs are 6 per weight and token (4 under a frozen weight), 12 per visible pair and channel; recomputation does not count.",
        "- Published jobs used other documents and other frameworks; mixtures of experts and fp8 are not included.",
        "",
        *NOTES,
        "",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tflops", type=float, default=989.0)
    parser.add_argument("--tb-per-s", type=float, default=3.35)
    parser.add_argument("--link-gb-per-s", type=float, default=300.0)
    parser.add_argument(
        "--calibration", type=Path, help="gpu_calibration.json: measured rates in place of these"
    )
    parser.add_argument(
        "--operations",
        action="store_true",
        help="bytes by operation, of two layers of the first job",
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args(argv)
    if arguments.calibration:
        measured = json.loads(arguments.calibration.read_text())
        arguments.tflops, arguments.tb_per_s = measured["bf16_tflops"], measured["memory_tb_per_s"]
        arguments.link_gb_per_s = measured["link_gb_per_s"] or arguments.link_gb_per_s
    ceilings = Ceilings(
        arguments.tflops * 1e12, arguments.tb_per_s * 1e12, arguments.link_gb_per_s * 1e9
    )
    if arguments.operations:
        total: Counter[str] = Counter()
        for name, _, moved in counted(JOBS[0], 2, True):
            total[name] += moved  # type: ignore[assignment]
        for name, moved in total.most_common(20):
            print(f"{name:40s} {moved / 1e9:8.2f} GB")
        return 0
    text = page(ceilings)
    if arguments.write:
        PAGE.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
