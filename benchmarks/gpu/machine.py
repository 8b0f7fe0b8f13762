"""What is installed, what this card does at most (a bf16 product and a copy), and what it does meanwhile."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable
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
