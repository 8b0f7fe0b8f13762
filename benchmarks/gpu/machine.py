"""What is installed, and what this card does at most: a bf16 product and a copy."""

from __future__ import annotations

import os
import statistics
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("torch", "transformers", "triton", "peft", "torchao", "liger-kernel", "bitsandbytes", "trl", "flash-attn")
PACKAGES += ("transformer-engine", "flash-linear-attention")
COPY_BYTES = 2**31


def imports(device: str) -> dict[str, Any]:
    """Versions, and every module of the program that a GPU run imports."""
    import torch

    import recipes.train_ft  # noqa: F401

    found = {"verdict": "pass", "versions": {name: _version(name) for name in PACKAGES}}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"memory_gib": properties.total_memory / 2**30, "capability": f"{properties.major}.{properties.minor}"}
        found |= {"cuda": torch.version.cuda}
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def expandable_segments(device: str) -> dict[str, Any]:
    """Does the allocator get memory in expandable segments? Sandboxed kernels may refuse them."""
    os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    import torch

    total = sum(float(torch.ones(2**20 * size, device=device).sum()) for size in (1, 17, 3))
    return {"verdict": "pass" if total == 21 * 2**20 else "FAIL"}


def ceilings(device: str, size: int = 8192) -> dict[str, Any]:
    """TFLOP/s of a bf16 product of three square matrices, TB/s of a copy (read and written), with the median's spread."""
    import torch

    from automodel_lite.telemetry.metrics import peak_of
    from benchmarks.gpu.kernels import device_ms

    if device != "cuda":
        return {"verdict": "pass", "product_tflops": None, "copy_tb_per_s": None, "data_sheet_tflops": None}
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    products = [device_ms(lambda: a @ b, repeats=20) for _ in range(3)]
    copies = [device_ms(lambda: target.copy_(source), repeats=10) for _ in range(3)]
    peak = peak_of(torch.cuda.get_device_name())
    return {
        "verdict": "pass",
        "product_tflops": 2 * size**3 / statistics.median(products) / 1e9,
        "copy_tb_per_s": 2 * COPY_BYTES / statistics.median(copies) / 1e9,
        "data_sheet_tflops": None if peak is None else peak / 1e12,
    }
