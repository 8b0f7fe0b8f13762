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

# where the shards of a gradient lie; None: every rank has all of it
Layout = tuple[DeviceMesh, tuple[Placement, ...]] | None


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Returns the 2-norm of all gradients over all ranks, on the device: one collective per layout
    of the shards, and dtype.
    """
    # 1. Group the gradients by layout. Experts may lie on another mesh than the rest of the model,
    # and torch's own norm takes gradients of one mesh only. By dtype, too, as weights whose copies
    # the optimizer writes have theirs in bf16: of mixed lists torch launches a norm per tensor.
    by_layout: dict[tuple[Layout, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        layout: Layout = None
        if isinstance(gradient, DTensor):
            layout = (gradient.device_mesh, gradient.placements)
        by_layout.setdefault((layout, gradient.dtype), []).append(local(gradient))

    # 2. Compute the norm of each group over all ranks.
    norms = []
    for (layout, _), gradients in by_layout.items():
        # In fp32: the norm of a bf16 gradient would have 3 digits in its own dtype.
        norms_here = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        norm = torch.linalg.vector_norm(torch.stack(norms_here))
        if layout is not None:
            # Ranks with different shards add their squares (Partial). Replicas hold the same
            # gradient, which must count once.
            mesh, placements = layout
            reduction = [p if p.is_replicate() else Partial() for p in placements]
            square = DTensor.from_local(norm.square(), mesh, reduction, run_check=False)
            norm = square.full_tensor().sqrt()
        norms.append(norm)

    # 3. Groups hold different parameters, so the norm of their norms is that of all gradients.
    return torch.linalg.vector_norm(torch.stack(norms))


@torch.no_grad()
def apply_gradients(
    optimizer: Optimizer, parameters: Iterable[nn.Parameter], loss_sum: Tensor, max_norm: float
) -> Tensor:
    """Takes one optimizer step, unless the loss or a gradient is not finite; returns the norm of
    the gradients before clipping.

    loss_sum  over all ranks, as the norm is: so all ranks skip the same steps
    max_norm  the gradients are scaled down to it; 0 = never
    An optimizer without torch's `found_inf` and `grad_scale` waits for the device, and its
    gradients are scaled here.
    """
    parameters = list(parameters)

    # 1. Decide on the device whether to skip the step, and by what to divide the gradients.
    norm = gradient_norm(parameters)
    is_nonfinite = ~(torch.isfinite(loss_sum) & torch.isfinite(norm))
    divisor = torch.ones_like(norm)
    if max_norm:
        divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0)
    # With mesh.cpu_offload the optimizer steps on the host, and waits for the device anyway.
    step_device = local(parameters[0]).device
    is_nonfinite = is_nonfinite.to(step_device)
    divisor = divisor.to(step_device)

    # 2. Step. Torch's GradScaler looks at the same attribute to tell the two kinds apart.
    if vars(optimizer).get("_step_supports_amp_scaling", False):
        # The kernel of the step reads both, skips and divides itself: the host does not wait.
        optimizer.found_inf = is_nonfinite.float()  # type: ignore[attr-defined]
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        optimizer.step()
    elif not is_nonfinite:
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [local(p.grad) for p in stepped if p.grad is not None]
        torch._foreach_div_(gradients, divisor)
        optimizer.step()

    # 3. Mark the weights as changed: fused kernels do not, and `Fp8Gathers` and `ComputeWeights`
    # look at the versions, and make what is frozen once.
    increment_version([local(p) for p in parameters if p.grad is not None])
    return norm
