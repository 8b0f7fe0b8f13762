"""`attention: auto`: the kernel for this device and this model, and the reason."""

from __future__ import annotations

from automodel_lite.attention.kernel import AttentionKernel, AttentionSpec
from automodel_lite.attention.reference import ReferenceAttention
from automodel_lite.errors import ConfigError


def auto_attention(spec: AttentionSpec) -> tuple[AttentionKernel, str]:
    """The first kernel that can serve the model, and one sentence that says why: print it.

    Off CUDA the reference; on CUDA varlen, else flex (softcap, sinks), else the reference.
    Raises ConfigError for mesh.cp_exchange=te: whoever asks for it has Transformer Engine, and says attention=te.
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

    refused = []
    for kernel in (VarlenAttention(), FlexAttention()):
        try:
            kernel.check(spec)
        except ConfigError as error:
            refused.append(str(error))
        else:
            why = "inside torch, the fastest that needs no package" if not refused else " ".join(refused)
            return kernel, f"{kernel.name.removeprefix('thd_')}: {why}"
    return ReferenceAttention(), f"reference: slow, but {' '.join(refused)}"
