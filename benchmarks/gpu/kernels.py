"""Every attention kernel on this GPU against the fp32 reference: outputs and gradients, context parallelism, speed.

Random packed documents; cases are grouped heads, head dims, sliding window, softcap, sinks and latent attention's head
dims. Context-parallel ranks are emulated in one process: each rank's queries against its prefixes, gradients of keys
and values summed. A kernel that refuses a case says so; that is no failure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from automodel_lite.attention.kernel import AttentionKernel, ReferenceAttention
from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.errors import ConfigError
from automodel_lite.graphs import compiled_graphs
from automodel_lite.parallel.context_parallel import (
    concatenated_ranges,
    owned_segments,
    shard_indices,
)
from automodel_lite.thd import AttentionOptions, Segments
from benchmarks.gpu.machine import clocks

KERNELS = {
    "varlen": "automodel_lite.parts.kernels.varlen.VarlenAttention",
    "flash": "automodel_lite.parts.kernels.flash.FlashAttention",
    "te": "automodel_lite.parts.kernels.te.TransformerEngineAttention",
    "flex": "automodel_lite.parts.kernels.flex.FlexAttention",
    "reference": "automodel_lite.attention.kernel.ReferenceAttention",
}
LENGTHS = [48, 16, 160, 16, 320, 80]  # multiples of 2 * 8
CP_SIZES = (2, 4, 8)
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""Norm of the difference over the norm of the reference; bf16 rounds at 4e-3."""


@dataclass(frozen=True)
class Case:
    """What is asked of a kernel."""

    name: str
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    value_head_dim: int = 64
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


CASES = [
    Case("grouped heads"),
    Case("equal heads", num_kv_heads=8),
    Case("head dim 128", head_dim=128, value_head_dim=128),
    Case("head dim 256", head_dim=256, value_head_dim=256),
    Case("window 50", window=50),
    Case("softcap 30", softcap=30.0),
    Case("sinks, window", sinks=True, window=50),
    Case("latent 192/128", num_kv_heads=8, head_dim=192, value_head_dim=128),
]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    kernel: str
    case: str
    largest: float | None  # relative error, over outputs and gradients, plain and context parallel
    verdict: str


def run(kernel_name: str, case_name: str, device: str) -> dict[str, Any]:
    """One case of one kernel."""
    try:
        kernel = load(KERNELS[kernel_name])
    except ConfigError as error:
        return {"verdict": "missing", "why": str(error)}
    graphs = compiled_graphs()
    row = check(
        kernel_name,
        kernel,
        next(case for case in CASES if case.name == case_name),
        torch.device(device),
    )
    found = {
        "verdict": "FAIL" if row.verdict.startswith("FAIL") else "pass",
        "largest_error": row.largest,
    }
    return found | {"why": row.verdict, "graphs": compiled_graphs() - graphs}


def speed(kernel_name: str, device: str, tokens: int = 32768) -> dict[str, Any]:
    """Milliseconds of a forward and backward on one long stream."""
    try:
        kernel = load(KERNELS[kernel_name])
    except ConfigError as error:
        return {"verdict": "missing", "why": str(error)}
    found = {
        "verdict": "pass",
        "forward_backward_ms": speed_ms(kernel, tokens, torch.device(device)),
    }
    return found | {"tokens": tokens, **clocks(device)}


def load(path: str) -> AttentionKernel:
    module, name = path.rsplit(".", 1)
    kernel: AttentionKernel = getattr(import_module(module), name)()
    return kernel


def check(name: str, kernel: AttentionKernel, case: Case, device: torch.device) -> Row:
    """One kernel on one case: plain packing, then every context-parallel size."""
    # the fp32 reference on CUDA shows its own error; everything else runs in bf16 there
    dtype = torch.float32 if device.type == "cpu" or name == "reference" else torch.bfloat16
    with_gradients = not (device.type == "cpu" and name == "flex")  # which has no backward on CPU
    dims = case.head_dim, case.value_head_dim
    spec = AttentionSpec(case.name, device, dtype, *dims, case.softcap, case.sinks)
    try:
        if device.type == "cuda":
            kernel.check(spec)
        plain, over_cp = largest_errors(kernel, case, device, dtype, with_gradients)
    except ConfigError as error:
        return Row(name, case.name, None, f"refuses: {error}"[:110])
    except Exception as error:
        return Row(
            name,
            case.name,
            None,
            f"FAIL: {type(error).__name__}: {str(error).splitlines()[0]}"[:110],
        )
    largest = max(plain, over_cp)
    failed = f"FAIL: plain packing {plain:.1e}, context parallel {over_cp:.1e}"
    return Row(name, case.name, largest, "ok" if largest < TOLERANCE[dtype] else failed)


def largest_errors(
    kernel: AttentionKernel,
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    with_gradients: bool,
) -> tuple[float, float]:
    """Relative, over outputs and gradients: of plain packing, and of all context-parallel sizes."""
    torch.manual_seed(0)
    cu = boundaries(torch.tensor(LENGTHS))
    whole, total = segments_of(cu, cu, device), sum(LENGTHS)
    shapes = [(total, case.num_heads, case.head_dim), (total, case.num_kv_heads, case.head_dim)]
    shapes += [
        (total, case.num_kv_heads, case.value_head_dim),
        (total, case.num_heads, case.value_head_dim),
    ]
    q, k, v, grad = (torch.randn(shape, device=device) for shape in shapes)
    sinks = torch.randn(case.num_heads, device=device) if case.sinks else None
    # bf16 inputs are rounded for both, so that only the arithmetic differs
    q, k, v, grad = (x.to(dtype).float() for x in (q, k, v, grad))
    want = attend(
        ReferenceAttention(), q, k, v, sinks, whole, grad, case, torch.float32, with_gradients
    )
    errors = []
    for cp in (1, *CP_SIZES):
        if cp == 1:
            got = attend(kernel, q, k, v, sinks, whole, grad, case, dtype, with_gradients)
        else:
            got = over_ranks(kernel, cp, q, k, v, sinks, cu, grad, case, dtype, with_gradients)
        errors.append(max(float((a - b).norm() / b.norm()) for a, b in zip(got, want)))
    return errors[0], max(errors[1:])


def attend(
    kernel: AttentionKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    segments: Segments,
    grad: Tensor,
    case: Case,
    dtype: torch.dtype,
    with_gradients: bool,
) -> list[Tensor]:
    """fp32 output and gradients of q, k, v (and sinks)."""
    leaves = [x.to(dtype).detach().requires_grad_(with_gradients) for x in (q, k, v)]
    sink_leaf = None if sinks is None else sinks.to(dtype).detach().requires_grad_(with_gradients)
    options = AttentionOptions(q.shape[-1] ** -0.5, case.window, case.softcap, sink_leaf)
    out = kernel(*leaves, segments, options)
    if not with_gradients:
        return [out.float()]
    out.backward(grad.to(dtype))
    of_sinks = [] if sink_leaf is None else [sink_leaf.grad.float()]
    return [out.detach().float(), *(x.grad.float() for x in leaves), *of_sinks]


def over_ranks(
    kernel: AttentionKernel,
    cp: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu: Tensor,
    grad: Tensor,
    case: Case,
    dtype: torch.dtype,
    with_gradients: bool,
) -> list[Tensor]:
    """What the ranks compute after the all-gather of keys and values, put together again."""
    out = grad.new_zeros(len(q), case.num_heads, case.value_head_dim)
    grads = [torch.zeros_like(x) for x in (q, k, v)] + (
        [] if sinks is None else [torch.zeros_like(sinks)]
    )
    for rank in range(cp):
        owned = owned_segments(cu, cp, rank)
        mine = shard_indices(cu, cp, rank).to(q.device)
        keys = concatenated_ranges(owned.document_start, owned.end).to(q.device)
        cu_q = boundaries(owned.end - owned.start)
        cu_k = boundaries(owned.end - owned.document_start)
        got = attend(
            kernel,
            q[mine],
            k[keys],
            v[keys],
            sinks,
            segments_of(cu_q, cu_k, q.device),
            grad[mine],
            case,
            dtype,
            with_gradients,
        )
        out[mine] = got[0]
        if with_gradients:
            grads[0][mine] = got[1]
            grads[1].index_add_(0, keys, got[2])
            grads[2].index_add_(0, keys, got[3])
            for total, part in zip(grads[3:], got[4:]):
                total += part
    return [out, *grads] if with_gradients else [out]


def segments_of(cu_q: Tensor, cu_k: Tensor, device: torch.device) -> Segments:
    """Of boundaries on the host: one object on the device where they are one."""
    there = cu_q.to(device)
    keys = there if cu_k is cu_q else cu_k.to(device)
    return Segments(there, keys, int(cu_q.diff().max()), int(cu_k.diff().max()))


def boundaries(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def speed_ms(kernel: AttentionKernel, tokens: int, device: torch.device) -> float:
    """Forward and backward of one stream of 80 documents, 32 heads on 8, head dim 128, bf16."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    weights = torch.rand(80) + 0.2
    lengths = (weights / weights.sum() * tokens).long() // 16 * 16
    lengths[-1] += tokens - int(lengths.sum())
    cu = boundaries(lengths)
    segments = segments_of(cu, cu, device)
    q, k, v, grad = (
        torch.randn(tokens, heads, 128, device=device, dtype=torch.bfloat16)
        for heads in (32, 8, 8, 32)
    )
    case = Case("speed", 32, 8, 128, 128)
    return device_ms(
        lambda: attend(kernel, q, k, v, None, segments, grad, case, torch.bfloat16, True)
    )


def device_ms(run: Callable[[], object], repeats: int = 5) -> float:
    """Median of `repeats`, by the device's own clock."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
