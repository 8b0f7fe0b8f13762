"""`attention: auto`: the kernel for this device and this model, or one for each kind of layer, and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from automodel_lite.attention.kernel import AttentionKernel, AttentionSpec
from automodel_lite.attention.reference import ReferenceAttention
from automodel_lite.errors import ConfigError


def auto_attention(spec: AttentionSpec) -> tuple[AttentionKernel, str]:
    """The first kernel that can serve the model, and one sentence that says why: print it.

    Off CUDA the reference; on CUDA varlen, else flex (softcap, sinks, wide heads), else the reference. Layers of
    several kinds get the first kernel that can serve each. Raises ConfigError for mesh.cp_exchange=te: whoever asks for
    it has Transformer Engine, and says attention=te.
    """
    if not spec.num_heads:
        return ReferenceAttention(), "none: the model has no attention layers"
    if spec.own_exchange:
        raise ConfigError("mesh.cp_exchange=te needs attention=te: set it, or take mesh.cp_exchange=all_gather.")
    if spec.device.type != "cuda":
        return ReferenceAttention(), f"reference: the only packed kernel that trains on {spec.device.type}"
    # imported here: flex_attention brings torch._dynamo, 1 CPU-s that a CPU has no use for
    from automodel_lite.attention.flex import FlexAttention
    from automodel_lite.attention.varlen import VarlenAttention

    kernels = (VarlenAttention(), FlexAttention(), ReferenceAttention())
    found = [first_able(kernels, kind) for kind in spec.kinds]
    if len({kernel for kernel, _ in found}) == 1:
        return found[0]
    reasons = [
        f"{kind.num_layers} layers with head dim {kind.head_dim} on {reason}"
        for kind, (_, reason) in zip(spec.kinds, found)
    ]
    return KernelByKind(spec, kernels), "by kind of layer: " + " / ".join(reasons)


def first_able(kernels: Sequence[AttentionKernel], spec: AttentionSpec) -> tuple[AttentionKernel, str]:
    """The first of `kernels` that can serve `spec`, and why not the ones before; the last one can serve everything."""
    refused: list[str] = []
    for kernel in kernels[:-1]:
        try:
            kernel.check(spec)
        except ConfigError as error:
            refused.append(str(error))
        else:
            why = "inside torch, the fastest that needs no package" if not refused else " ".join(refused)
            return kernel, f"{kernel.name.removeprefix('thd_')}: {why}"
    return kernels[-1], f"reference: slow, but {' '.join(refused)}"


class KernelByKind:
    """One kernel for each kind of layer, told apart by what arrives: head dims, window, softcap, sinks."""

    name = "thd_by_kind"

    def __init__(self, spec: AttentionSpec, kernels: Sequence[AttentionKernel]) -> None:
        self.spec = replace(spec, others=())
        self.kernels = kernels
        self._chosen: dict[AttentionSpec, AttentionKernel] = {}

    def check(self, spec: AttentionSpec) -> None:
        """Does not raise: the last of the kernels can serve everything."""

    def __call__(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `AttentionKernel`."""
        kind = replace(
            self.spec,
            dtype=q_THD.dtype,
            head_dim=q_THD.shape[2],
            value_head_dim=v_THD.shape[2],
            window=window,
            softcap=softcap,
            sinks=sinks is not None,
        )
        if kind not in self._chosen:
            self._chosen[kind], _ = first_able(self.kernels, kind)
        attend = self._chosen[kind]
        return attend(
            q_THD, k_THD, v_THD, cu_q, cu_k, max_q, max_k, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
