"""The one step of any optimizer, which never waits for the device.

Non-finite numbers are found on the device, and an optimizer that takes torch's `found_inf` skips
the step there; clipping is its `grad_scale`, which saves a pass over the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from automodel_lite.models.layers import local


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients over all ranks, on the device: one collective for each way of
    sharding.
    """
    shards: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, list[Tensor]] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None):
        layout = (
            (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        )
        shards.setdefault(layout, []).append(local(gradient))
    norms = []
    for layout, tensors in shards.items():
        # in fp32, of gradients in bf16 too, whose own norm has 3 digits
        norm = torch.linalg.vector_norm(
            torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
        )
        if layout is not None:
            # the squares of ranks that hold other shards are summed; replicas hold the same
            mesh, placements = layout
            summed = [
                placement if placement.is_replicate() else Partial() for placement in placements
            ]
            norm = (
                DTensor.from_local(norm.square(), mesh, summed, run_check=False)
                .full_tensor()
                .sqrt()
            )
        norms.append(norm)
    return torch.linalg.vector_norm(torch.stack(norms))


@torch.no_grad()
def apply_gradients(
    optimizer: Optimizer, parameters: Iterable[nn.Parameter], loss_sum: Tensor, max_norm: float
) -> Tensor:
    """One optimizer step, unless the loss or a gradient is not finite; returns the gradient's norm
    before clipping.

    loss_sum  over all ranks, as the norm is: so all ranks skip the same steps
    max_norm  the gradients are scaled down to it; 0 = never
    An optimizer without torch's `found_inf` and `grad_scale` waits for the device, and its
    gradients are scaled here.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters)
    is_bad = ~(torch.isfinite(loss_sum) & torch.isfinite(norm))
    divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm else torch.ones_like(norm)
    where = local(parameters[0]).device  # the host's with mesh.cpu_offload, which waits anyway
    is_bad = is_bad.to(where)
    divisor = divisor.to(where)
    # where torch's GradScaler looks, too
    if vars(optimizer).get("_step_supports_amp_scaling", False):
        optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        optimizer.step()
    elif not is_bad:
        gradients = [
            local(p.grad)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        torch._foreach_div_(gradients, divisor)
        optimizer.step()
    # which fused kernels forget, and `Fp8Gathers` looks at
    increment_version(map(local, parameters))
    return norm
