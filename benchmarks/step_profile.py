"""Where the time of a training step goes on one CPU thread, and how near its matrix products are to this machine's peak.

    python -m benchmarks.step_profile --data gsm8k_train.jsonl --shape small --precision fp32

The step is that of benchmarks.peers_cpu (GSM8K in packs of 2,048, our model, loss and optimizer in a bare loop), under
torch.profiler. The peak is measured in the same run, in the same dtype and on the same thread: a square product of
2,048, and each product of the step by itself, repeated on operands that stay.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.peers import bare
from benchmarks.peers.job import SHAPES, Job, use_one_thread

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")
GROUPS = {
    "attention": ("scaled_dot_product",),
    "optimizer": ("_fused_adam", "clip_grad", "_foreach_"),
    "loss": ("log_softmax", "gather", "scatter_add"),
    "copies and casts": ("aten::copy_", "aten::cat", "aten::clone"),
}
SQUARE = 2048


@dataclass(frozen=True)
class Product:
    """Matrix products of one shape in the profiled steps."""

    m: int
    k: int
    n: int
    count: int
    seconds: float  # of all of them
    median_s: float  # of one: the profiler's clock goes on while another process has the core

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.k * self.n * self.count


def profiled(job: Job) -> tuple[list[Product], Counter[str], float]:
    """Products by shape, self seconds by group of operations, CPU seconds of all timed steps."""
    model, optimizer, batches = bare.parts(job)
    for batch in batches[: job.warmup_steps]:
        bare.train(model, optimizer, batch)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for batch in batches[job.warmup_steps :]:
            bare.train(model, optimizer, batch)
    seconds_of: dict[tuple[int, int, int], list[float]] = {}
    groups: Counter[str] = Counter()
    for event in profiler.events() or []:
        seconds = event.self_cpu_time_total / 1e6
        if event.name in PRODUCTS:
            seconds_of.setdefault(_sizes(event), []).append(seconds)
            groups["matrix products"] += seconds
        else:
            groups[_group(event.name)] += seconds
    products = [
        Product(*sizes, len(s), sum(s), statistics.median(s)) for sizes, s in seconds_of.items()
    ]
    return sorted(products, key=lambda product: -product.seconds), groups, sum(groups.values())


def _sizes(event: Any) -> tuple[int, int, int]:
    left, right = [shape for shape in event.input_shapes if len(shape) >= 2][-2:]
    return left[-2] * (left[0] if len(left) == 3 else 1), left[-1], right[-1]


def _group(name: str) -> str:
    for group, parts in GROUPS.items():
        if any(part in name for part in parts):
            return group
    return "elementwise and the rest"


def product_flops_per_s(m: int, k: int, n: int, dtype: torch.dtype, least_s: float = 0.15) -> float:
    """Best of five, each long enough to be timed."""
    left, right = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    left @ right
    best = 0.0
    for _ in range(5):
        count, began = 0, time.process_time()
        while (spent := time.process_time() - began) < least_s / 5 or not count:
            left @ right
            count += 1
        best = max(best, 2.0 * m * k * n * count / spent)
    return best


def main() -> None:
    args = parser().parse_args()
    use_one_thread()
    dtype = torch.float32 if args.precision == "fp32" else torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        job = Job(args.work or folder, args.shape, args.precision, args.steps, 2, args.data, folder)
        products, groups, total = profiled(job)
    print(
        f"{args.shape}, {args.precision}, {args.steps} steps: {total / args.steps:.2f} CPU-s a step"
    )
    for name, seconds in groups.most_common():
        print(f"  {name:26s} {seconds / total:6.1%}")
    square = product_flops_per_s(SQUARE, SQUARE, SQUARE, dtype)
    seconds, flops = sum(p.median_s * p.count for p in products), sum(p.flops for p in products)
    alone_s = sum(p.flops / product_flops_per_s(p.m, p.k, p.n, dtype) for p in products)
    print(f"matrix products in the step {flops / seconds / 1e9:8.1f} GFLOP/s")
    print(
        f"the same, each by itself    {flops / alone_s / 1e9:8.1f} GFLOP/s: the step reaches {alone_s / seconds:.0%}"
    )
    print(
        f"a square one of {SQUARE}        {square / 1e9:8.1f} GFLOP/s: the step reaches {flops / seconds / square:.0%}"
    )
    print("\n| m x k x n | a step | share of the step | GFLOP/s |\n| --- | --- | --- | --- |")
    for p in products[:8]:
        rate = p.flops / p.count / p.median_s / 1e9
        print(
            f"| {p.m} x {p.k} x {p.n} | {p.count / args.steps:.0f} | {p.seconds / total:.1%} | {rate:,.0f} |"
        )


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--data", required=True, help="JSON lines with question and answer")
    found.add_argument("--shape", default="small", choices=list(SHAPES))
    found.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    found.add_argument("--steps", type=int, default=3)
    found.add_argument("--work", help="keep the tokenized rows in this folder")
    return found


if __name__ == "__main__":
    main()
