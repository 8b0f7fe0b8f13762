"""Tokens a second and MFU of published jobs, on paper: counted operations against two ceilings of the card.

    python -m benchmarks.roofline                                 the table of docs/roofline.md
    python -m benchmarks.roofline --tflops 700 --tb-per-s 3.0     ceilings that `gpu_check.py` measured
    python -m benchmarks.roofline --write                         writes docs/roofline.md

Every operation of a forward and backward is dispatched once with FakeTensors (shapes, no numbers) on models of one and
two layers; their difference is a layer. An operation takes as long as the larger of its FLOPs at the product's ceiling
and its bytes, read and written, at memory's. Nothing is a share of a peak that somebody guessed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
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
from automodel_lite.attention.varlen import VarlenAttention
from automodel_lite.models.layers import cast_frozen, decoder_layers, recompute_layers
from automodel_lite.models.lora import Lora
from automodel_lite.models.loss import FusedLinearCrossEntropy, LossModel
from automodel_lite.thd import stream_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "roofline.md"
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
VIEWS = frozenset(
    {"detach", "view", "_unsafe_view", "t", "transpose", "unsqueeze", "expand", "slice", "select", "alias"}
)
VIEWS |= frozenset({"permute", "split", "empty", "empty_like", "empty_strided", "as_strided", "squeeze", "reshape"})
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
    recomputes: bool = False
    cp: int = 1


LLAMA_8B = (4096, 32, 32, 8, 14336, 128256)
LLAMA_70B = (8192, 80, 64, 8, 28672, 128256)
LLAMA2_7B = (4096, 32, 32, 32, 11008, 32000)
JOBS = [
    Job("Llama-3.1-8B, 8k, 8 GPUs", LLAMA_8B, 8192, 8, "5,762 eager, 6,667 compiled (torchtitan)", recomputes=True),
    Job("Llama-3-8B LoRA, 4k, 1 GPU", LLAMA_8B, 4096, 1, "12,473 (NeMo)", lora=True),
    Job("Llama-2-7B, 4k, 8 GPUs, bf16", LLAMA2_7B, 4096, 8, "16,891 in fp8 (NeMo)"),
    Job("Llama-3-70B LoRA, 4k, 8 GPUs", LLAMA_70B, 4096, 8, "1,092 (NeMo)", lora=True, recomputes=True),
    Job("Llama-3-70B, 8k, 64 GPUs", LLAMA_70B, 8192, 64, "867 with cp 2 (NeMo)", recomputes=True),
]


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
        touched = {"gather": (args[1:], out), "index_select": (out, out), "embedding": (out, out)}.get(name)
        touched = (out,) if name.startswith("new_") else touched or (args, kwargs, out)
        tensors = [x for x in tree_leaves(touched) if isinstance(x, Tensor)]
        moved = float(sum(x.numel() * x.element_size() for x in tensors))
        packet = func._overloadpacket
        flops = float(flop_registry[packet](*args, **(kwargs or {}), out_val=out)) if packet in flop_registry else 0.0
        if "varlen_attn" in name:
            flops = attention_flops(args, is_backward="backward" in name)
        self.operations.append((name, flops, moved))
        return out


def attention_flops(args: Any, is_backward: bool) -> float:
    """Two products of the visible pairs forward, five backward (FlashAttention makes the scores again)."""
    q = next(x for x in args if isinstance(x, Tensor) and x.ndim == 3)
    pairs = q.shape[0] * (min(DOCUMENT, q.shape[0]) + 1) / 2
    return (10 if is_backward else 4) * pairs * q.shape[1] * q.shape[2]


def counted(job: Job, num_layers: int) -> list[tuple[str, float, float]]:
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
    batch = stream_of(torch.zeros(max(1, job.tokens // DOCUMENT), min(DOCUMENT, job.tokens), dtype=torch.int64), "cpu")
    count = Count()
    with torch.device("meta"):
        lm = LlamaForCausalLM(config).train().to(torch.bfloat16)
    if job.lora:
        Lora(r=16).adapt(lm, "shapes alone")
        cast_frozen(lm, torch.bfloat16)
    install(lm, VarlenAttention())
    recompute_layers(decoder_layers(lm), "full" if job.recomputes else "none", 1)
    model = LossModel(lm, FusedLinearCrossEntropy())
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_fake_cpu(model)
        batch = batch.map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        with torch.autocast("cpu", torch.bfloat16, enabled=job.lora, cache_enabled=False), count:
            model(batch).backward()
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


def seconds(operations: list[tuple[str, float, float]], ceilings: Ceilings, is_fused: bool) -> float:
    """Fused: what is no product and no attention moves nothing of its own beside them; a bound that no compiler passes."""
    total = 0.0
    for _, flops, moved in operations:
        if flops or not is_fused:
            total += max(flops / ceilings.flops, moved / ceilings.bytes_per_s)
    return total


def step(job: Job, ceilings: Ceilings) -> dict[str, float]:
    """Seconds of a step of one micro-batch, eager and fused, and useful FLOPs as `models/flops.py` counts them."""
    one, two = counted(job, 1), counted(job, 2)
    hidden, layers, heads, kv_heads, inner, vocabulary = job.shape
    head_dim = hidden // heads
    layer_weights = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    weights = layers * layer_weights + 2 * hidden * vocabulary
    pairs = job.tokens * (min(DOCUMENT, job.tokens) + 1) / 2
    useful = (4 if job.lora else 6) * (layers * layer_weights + hidden * vocabulary) * job.tokens
    useful += 12 * layers * heads * head_dim * pairs
    trained = layers * 16 * (2 * hidden * 4 + (hidden + inner) * 3) if job.lora else weights
    optimizer_s = 28 * trained / job.gpus / ceilings.bytes_per_s  # weight, gradient and two moments in fp32
    part = (job.gpus - 1) / job.gpus
    traffic_s = part * (2 * 2 * weights + (0 if job.lora else 4 * weights)) / ceilings.link_bytes_per_s
    found = {"useful_flops": useful, "traffic_s": traffic_s}
    for name, is_fused in (("eager", False), ("fused", True)):
        of_one, of_two = (seconds(operations, ceilings, is_fused) for operations in (one, two))
        compute_s = of_one + (layers - 1) * (of_two - of_one)
        found[name] = max(compute_s, traffic_s) + traffic_s / layers + optimizer_s
    moved = [sum(b for _, f, b in operations if not f) for operations in (one, two)]
    found["other_gb"] = (moved[0] + (layers - 1) * (moved[1] - moved[0])) / 1e9
    flops = [sum(f for _, f, _ in operations) for operations in (one, two)]
    found["tflop"] = (flops[0] + (layers - 1) * (flops[1] - flops[0])) / 1e12
    return found


def page(ceilings: Ceilings) -> str:
    lines = [
        "# Roofline estimates",
        "",
        "`python -m benchmarks.roofline --write` wrote this page. **Nothing on it was measured.** It shows the time that the counted operations",
        "take at the peak rates of a GPU, for comparison with the first measured table (`python benchmarks/gpu_check.py`).",
        "",
        f"Peak rates: matrix products at {ceilings.flops / 1e12:.0f} TFLOP/s, memory at {ceilings.bytes_per_s / 1e12:.2f} TB/s, links at "
        f"{ceilings.link_bytes_per_s / 1e9:.0f} GB/s per GPU. The defaults are from the H100's data sheet and are never",
        "reached in practice: pass the rates that `gpu_check.py` measures as `--tflops` and `--tb-per-s`.",
        "",
        "| job | published tokens/s/GPU | eager | fused | MFU eager | MFU fused | TFLOP per step | GB outside products | traffic s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for job in JOBS:
        found = step(job, ceilings)
        rates = [job.tokens / found[name] for name in ("eager", "fused")]
        mfu = [found["useful_flops"] / found[name] / ceilings.flops for name in ("eager", "fused")]
        lines.append(
            f"| {job.name} | {job.published} | {rates[0]:,.0f} | {rates[1]:,.0f} | {mfu[0]:.0%} | {mfu[1]:.0%} | "
            f"{found['tflop']:,.0f} | {found['other_gb']:,.0f} | {found['traffic_s']:.2f} |"
        )
    lines += [
        "",
        "Assumptions:",
        "",
        f"- One micro-batch per step, documents of {DOCUMENT} tokens, all tokens labeled, and every layer recomputed in the full 8B and the",
        "  70B jobs; FSDP over all GPUs, gradients in fp32, weights gathered in bf16 twice; LoRA reduces no base gradients.",
        "- Operations are counted on models of one and two layers with FakeTensors (`varlen` attention, the fused loss); each operation takes the",
        "  larger of FLOPs / ceiling and bytes / ceiling, one after another. Kernel launches, the host and NCCL latency are free.",
        "- *eager*: every operation reads and writes memory. *fused*: only products and attention do, an upper bound for compilers.",
        "- Traffic overlaps with compute except for one layer's share. The rate inside a node is also used for 64 GPUs, which is optimistic.",
        "- Useful FLOPs are 6 per weight and token (4 under a frozen weight), 12 per visible pair and channel; recomputation does not count.",
        "- Published jobs used other documents and other frameworks; mixtures of experts and fp8 are not included.",
        "",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tflops", type=float, default=989.0)
    parser.add_argument("--tb-per-s", type=float, default=3.35)
    parser.add_argument("--link-gb-per-s", type=float, default=300.0)
    parser.add_argument("--operations", action="store_true", help="bytes by operation, of two layers of the first job")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args(argv)
    ceilings = Ceilings(arguments.tflops * 1e12, arguments.tb_per_s * 1e12, arguments.link_gb_per_s * 1e9)
    if arguments.operations:
        total: Counter[str] = Counter()
        for name, _, moved in counted(JOBS[0], 2):
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
