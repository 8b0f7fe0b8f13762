"""What is installed, what this card does at most (a bf16 product and a copy), and what it does meanwhile."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.gpu.plan import read_table

COPY_BYTES = 2**31


class NothingComputedError(Exception):
    """A part has run to where it compares numbers, on a card whose kernels compute none."""


def check_computes(device: str) -> None:
    """Called by a part where it is about to compare; raises NothingComputedError on a fake card."""
    if not computes(device):
        raise NothingComputedError("this card computes nothing: three ones add up to 0")


def computes(device: str) -> bool:
    import torch

    return float(torch.ones(3, device=device).sum()) != 0


def header(device: str) -> dict[str, Any]:
    """Versions, driver, commit and the documents, by which a table is judged; imports every module of a GPU run."""
    import torch

    import recipes.train_ft  # noqa: F401
    from benchmarks.gpu.documents import SEED, described

    found = {
        "verdict": "pass",
        "computes": computes(device),
        "versions": {name: _version(name) for name in read_table()["packages"]},
        "seed": SEED,
        "fp32_products": torch.get_float32_matmul_precision(),
        "commit": _output("git", "describe", "--always", "--dirty") or "unknown",
        "documents": described("chat"),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"capability": f"{properties.major}.{properties.minor}"}
        found |= {"memory_gib": properties.total_memory / 2**30, "cuda": torch.version.cuda}
        found |= {"driver": _smi("driver_version"), "power_limit": _smi("power.limit")}
    return found


def _output(*command: str) -> str:
    """Of a command, on one line; empty where it is missing or fails."""
    where = os.path.dirname(__file__)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, cwd=where)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join(done.stdout.split()) if done.returncode == 0 else ""


def _smi(query: str) -> str:
    return _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0")


def clocks(device: str) -> dict[str, float | None]:
    """MHz of the cores, watts and degrees at this moment: called while the device works."""
    names = ("clock_mhz", "power_w", "temperature_c")
    values = _smi("clocks.sm,power.draw,temperature.gpu").split(",") if device == "cuda" else []
    try:
        return dict(zip(names, map(float, values), strict=True))
    except ValueError:  # no tool, or "[N/A]"
        return dict.fromkeys(names)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def expandable_segments(device: str) -> dict[str, Any]:
    """Does the allocator get memory in expandable segments? Sandboxed kernels may refuse them."""
    setting = "expandable_segments:True"
    os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = setting
    import torch

    total = sum(float(torch.ones(2**20 * size, device=device).sum()) for size in (1, 17, 3))
    check_computes(device)
    wanted = 21 * 2**20
    verdict = "pass" if total == wanted else "FAIL"
    return {"verdict": verdict, "why": f"ones in its memory add up to {total:.0f} of {wanted}"}


def ceilings(device: str, size: int = 8192) -> dict[str, Any]:
    """TFLOP/s of a product of three square matrices (bf16; fp32 and small on a CPU), TB/s of a copy (read and written):
    the median of three, with clocks and power meanwhile. One card has no links to measure.
    """
    import torch

    from automodel_lite.telemetry.metrics import peak_of

    is_cuda = device == "cuda"
    dtype, copy_bytes, repeats = torch.bfloat16, COPY_BYTES, (20, 10)
    if not is_cuda:
        size, dtype, copy_bytes, repeats = 1024, torch.float32, 2**28, (3, 3)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in "ab")
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source).fill_(0)
    products = [median_ms(lambda: a @ b, device, repeats[0]) for _ in range(3)]
    if is_cuda:
        # two seconds of work, as the clocks are read by a program that takes one
        for _ in range(min(2000, int(2000 / statistics.median(products)))):
            a @ b
    meanwhile = clocks(device)
    copies = [median_ms(lambda: target.copy_(source), device, repeats[1]) for _ in range(3)]
    peak = peak_of(torch.cuda.get_device_name()) if is_cuda else None
    return meanwhile | {
        "verdict": "pass",
        "bf16_tflops": 2 * size**3 / statistics.median(products) / 1e9,
        "memory_tb_per_s": 2 * copy_bytes / statistics.median(copies) / 1e9,
        "link_gb_per_s": None,
        "data_sheet_tflops": None if peak is None else peak / 1e12,
    }


# channels that go in and come out of the products of a layer: Llama-3.2-1B, Llama-3.1-8B
PRODUCTS = (
    *((2048, 2048), (2048, 512), (2048, 512), (2048, 2048)),
    *((2048, 8192), (2048, 8192), (8192, 2048)),
    *((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)),
    *((4096, 14336), (4096, 14336), (14336, 4096)),
)
# tokens of a document, whose queries see half as many keys on average
DOCUMENTS = (480, 1240, 8192)


def rates(device: str, tokens: int = 8192) -> dict[str, Any]:
    """What the planner predicts by, some 2 s: TFLOP/s of the products of layers, forward and backward; TB/s of a sum of
    two tensors; and TFLOP/s of attention by the keys that a query sees, beside the bytes that it moves.
    """
    import torch

    is_cuda = device == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    tokens = tokens if is_cuda else 64
    flops = took_s = 0.0
    for channels_in, channels_out in PRODUCTS if is_cuda else PRODUCTS[:2]:
        x = torch.randn(tokens, channels_in, device=device, dtype=dtype)
        weight = torch.randn(channels_out, channels_in, device=device, dtype=dtype)
        grad = torch.randn(tokens, channels_out, device=device, dtype=dtype)
        for left, right in ((x, weight.t()), (grad, weight), (grad.t(), x)):
            took_s += median_ms(partial(torch.mm, left, right), device) / 1e3
            flops += 2.0 * tokens * channels_in * channels_out
    a = torch.ones(2**30 if is_cuda else 2**20, device=device, dtype=dtype)
    b = torch.ones_like(a)
    bytes_per_s = 3 * a.nbytes / median_ms(partial(torch.add, a, b, out=b), device) * 1e3
    del a, b
    found = {
        f"{length / 2:.0f}": attention_flops(device, length, 4 * tokens, bytes_per_s) / 1e12
        for length in (DOCUMENTS if is_cuda else (64,))
    }
    check_computes(device)
    return {
        "verdict": "pass",
        "product_tflops": flops / took_s / 1e12,
        "step_tb_per_s": bytes_per_s / 1e12,
        "attention_tflops": found,
    }


def attention_flops(device: str, length: int, tokens: int, bytes_per_s: float) -> float:
    """FLOP/s of the default kernel's forward and backward on documents of one length, 32 heads on 8 of 128 channels,
    less the seconds of the bytes that the planner counts for them.
    """
    import torch

    from automodel_lite.attention.kernel import ReferenceAttention
    from automodel_lite.parts.kernels.varlen import VarlenAttention
    from automodel_lite.thd import AttentionOptions, Segments

    kernel = VarlenAttention() if device == "cuda" else ReferenceAttention()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokens = tokens // length * length
    heads, kv_heads, channels = 32, 8, 128
    q, k, v, grad = (
        torch.randn(tokens, number, channels, device=device, dtype=dtype, requires_grad=True)
        for number in (heads, kv_heads, kv_heads, heads)
    )
    cu = torch.arange(0, tokens + 1, length, device=device, dtype=torch.int32)
    segments = Segments(cu, cu, length, length)
    options = AttentionOptions(channels**-0.5)

    def run() -> None:
        out = kernel(q, k, v, segments, options)
        torch.autograd.grad(out, (q, k, v), grad)

    took_s = median_ms(run, device) / 1e3
    # 2 products forward and 5 backward, 2 FLOPs each, of a pair and channel
    flops = 14.0 * tokens * (length + 1) / 2 * heads * channels
    # tensors of queries: q and out; of the backward pass q, out and their gradients, and helpers of
    # 16 + 8 bytes a value; of keys: k and v, and their gradients with a sum of each
    of_q, of_k = q.numel(), k.numel()
    moved = 2 * (6 * of_q + 6 * of_k) + 24 * of_q + 4 * of_k
    least_s = 0.2 * took_s  # where a kernel moves less than that, its products are all
    return flops / max(took_s - moved / bytes_per_s, least_s)


def median_ms(run: Callable[[], object], device: str, repeats: int = 5) -> float:
    """The median of `repeats`, by the device's own clock."""
    import torch

    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            run()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)
