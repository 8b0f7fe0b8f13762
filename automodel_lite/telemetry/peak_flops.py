"""What a device can do at most, from its data sheet: dense bf16 tensor FLOP/s, without sparsity.

A device that is not listed by its exact name has no known peak: no utilisation is better than a wrong one.
"""

from __future__ import annotations

import torch

BF16_TFLOPS = {
    "NVIDIA A10": 125.0,
    "NVIDIA A10G": 70.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-SXM-64GB": 312.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H200": 989.4,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA B200": 2250.0,
    "NVIDIA GeForce RTX 3090": 71.0,
    "NVIDIA GeForce RTX 4090": 165.2,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of one device in the compute dtype; None when it is not known (CPU, MIG slices, fp32)."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(device_name: str) -> float | None:
    """By the name that torch gives the device."""
    tflops = BF16_TFLOPS.get(device_name)
    return None if tflops is None else tflops * 1e12
