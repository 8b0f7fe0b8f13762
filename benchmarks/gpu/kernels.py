"""Every attention kernel on this GPU against the fp32 reference: outputs and gradients, context parallelism, speed.

Random packed documents; cases (plan.yaml) are grouped heads, head dims, sliding window, softcap, sinks and latent attention's head
dims. Context-parallel ranks are emulated in one process: each rank's queries against its prefixes, gradients of keys
and values summed. A kernel that refuses a case says so; that is no failure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from automodel_lite.attention.kernel import AttentionKernel, ReferenceAttention
from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.config.components import locate
from automodel_lite.errors import ConfigError
from automodel_lite.graphs import compiled_graphs
from automodel_lite.parallel.context_parallel import (
    concatenated_ranges,
    owned_segments,
    shard_indices,
)
from automodel_lite.thd import AttentionOptions, Segments
from benchmarks.gpu.machine import check_computes, median_ms
from benchmarks.gpu.plan import read_table

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


def run(kernel_name: str, case_name: str, device: str) -> dict[str, Any]:
    """One case of one kernel: plain packing, then every context-parallel size."""
    case = Case(case_name, **read_table()["cases"][case_name])
    on_cpu = device == "cpu"
    # the fp32 reference on CUDA shows its own error; everything else runs in bf16 there
    dtype = torch.float32 if on_cpu or kernel_name == "reference" else torch.bfloat16
    dims = case.head_dim, case.value_head_dim
    spec = AttentionSpec(case.name, torch.device(device), dtype, *dims, case.softcap, case.sinks)
    graphs = compiled_graphs()
    try:
        kernel: AttentionKernel = locate(KERNELS[kernel_name])()
    except ConfigError as error:
        return {"verdict": "missing", "why": str(error)}
    try:
        if not on_cpu:
            kernel.check(spec)
        # flex has no backward on a CPU
        problem = Problem.random(case, device, dtype, not (on_cpu and kernel_name == "flex"))
        plain, over_cp = problem.largest_errors(kernel)
    except ConfigError as error:
        return {"verdict": "pass", "largest_error": None, "why": f"refuses: {error}"[:110]}
    check_computes(device)
    largest, why = max(plain, over_cp), "ok"
    if largest >= TOLERANCE[dtype]:
        why = f"FAIL: plain packing {plain:.1e}, context parallel {over_cp:.1e}"
    found = {"verdict": "pass" if why == "ok" else "FAIL", "largest_error": largest, "why": why}
    return found | {"graphs": compiled_graphs() - graphs}


def speed(kernel_name: str, device: str, tokens: int = 32768) -> dict[str, Any]:
    """Milliseconds of a forward and backward on one stream of 80 documents, 32 heads on 8, head dim 128, bf16."""
    try:
        kernel: AttentionKernel = locate(KERNELS[kernel_name])()
    except ConfigError as error:
        return {"verdict": "missing", "why": str(error)}
    torch.manual_seed(0)
    torch._dynamo.reset()
    weights = torch.rand(80) + 0.2
    lengths = (weights / weights.sum() * tokens).long() // 16 * 16
    lengths[-1] += tokens - int(lengths.sum())
    case = Case("speed", 32, 8, 128, 128)
    problem = Problem.random(case, device, torch.bfloat16, True, lengths)
    # cast before the clock starts: the inputs, in fp32, are no part of the kernel's work
    leaves = problem.leaves()
    grad = problem.grad.to(problem.dtype)

    def run() -> None:
        torch.autograd.grad(problem.output(kernel, leaves), leaves, grad)

    milliseconds = median_ms(run, device)
    return {"verdict": "pass", "forward_backward_ms": milliseconds, "tokens": tokens}


@dataclass(frozen=True)
class Problem:
    """Random inputs of a stream [T, H, D], in fp32, and the gradient of its output."""

    case: Case
    dtype: (
        torch.dtype
    )  # of the kernel; the inputs are rounded to it, so that only the arithmetic differs
    with_gradients: bool
    cu: Tensor  # boundaries, on the host
    segments: Segments
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    sinks: Tensor | None

    @classmethod
    def random(
        cls,
        case: Case,
        device: str,
        dtype: torch.dtype,
        with_gradients: bool,
        lengths: Tensor | None = None,
    ) -> Problem:
        torch.manual_seed(0)
        cu = boundaries(torch.tensor(LENGTHS) if lengths is None else lengths)
        heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads)
        dims = (case.head_dim, case.head_dim, case.value_head_dim, case.value_head_dim)
        inputs = (
            torch.randn(int(cu[-1]), *shape, device=device).to(dtype).float()
            for shape in zip(heads, dims)
        )
        segments = segments_of(cu, cu, device)
        sinks = torch.randn(case.num_heads, device=device) if case.sinks else None
        return cls(case, dtype, with_gradients, cu, segments, *inputs, sinks)

    def largest_errors(self, kernel: AttentionKernel) -> tuple[float, float]:
        """Relative, over outputs and gradients: of plain packing, and of all context-parallel sizes."""
        want = replace(self, dtype=torch.float32).attend(ReferenceAttention())
        errors = []
        for cp in (1, *CP_SIZES):
            got = self.attend(kernel) if cp == 1 else self.attend_over_ranks(kernel, cp)
            errors.append(max(float((a - b).norm() / b.norm()) for a, b in zip(got, want)))
        return errors[0], max(errors[1:])

    def leaves(self) -> list[Tensor]:
        """q, k, v (and sinks) in the kernel's dtype."""
        given = [x for x in (self.q, self.k, self.v, self.sinks) if x is not None]
        rounded = [x.to(self.dtype).detach() for x in given]
        return [x.requires_grad_(self.with_gradients) for x in rounded]

    def output(self, kernel: AttentionKernel, leaves: list[Tensor]) -> Tensor:
        case = self.case
        q, k, v, *sinks = leaves
        learned = sinks[0] if sinks else None
        options = AttentionOptions(case.head_dim**-0.5, case.window, case.softcap, learned)
        return kernel(q, k, v, self.segments, options)

    def attend(self, kernel: AttentionKernel) -> list[Tensor]:
        """fp32 output and gradients of q, k, v (and sinks)."""
        leaves = self.leaves()
        out = self.output(kernel, leaves)
        if not self.with_gradients:
            return [out.float()]
        out.backward(self.grad.to(self.dtype))
        return [out.detach().float(), *(leaf.grad.float() for leaf in leaves)]

    def attend_over_ranks(self, kernel: AttentionKernel, cp: int) -> list[Tensor]:
        """What the ranks compute after the all-gather of keys and values, put together again."""
        device = self.q.device
        total = [torch.zeros_like(self.grad)]
        if self.with_gradients:
            inputs = (self.q, self.k, self.v, self.sinks)
            total += [torch.zeros_like(x) for x in inputs if x is not None]
        for rank in range(cp):
            owned = owned_segments(self.cu, cp, rank)
            mine = shard_indices(self.cu, cp, rank).to(device)
            keys = concatenated_ranges(owned.document_start, owned.end).to(device)
            cu_q = boundaries(owned.end - owned.start)
            cu_k = boundaries(owned.end - owned.document_start)
            part = replace(
                self,
                segments=segments_of(cu_q, cu_k, device),
                q=self.q[mine],
                k=self.k[keys],
                v=self.v[keys],
                grad=self.grad[mine],
            )
            places = (mine, mine, keys, keys, slice(None))  # of the output, q, k, v and sinks
            for whole, place, found in zip(total, places, part.attend(kernel)):
                if isinstance(place, Tensor):
                    whole.index_add_(0, place, found)
                else:
                    whole += found
        return total


def segments_of(cu_q: Tensor, cu_k: Tensor, device: torch.device | str) -> Segments:
    """Of boundaries on the host: one object on the device where they are one."""
    there = cu_q.to(device)
    keys = there if cu_k is cu_q else cu_k.to(device)
    return Segments(there, keys, int(cu_q.diff().max()), int(cu_k.diff().max()))


def boundaries(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
