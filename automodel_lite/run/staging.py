"""A copy of a checkpoint's tensors on the host, which training does not change while it is written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostCopies:
    """One tensor a name, made at the first save and used again by every other: locking pages costs more than copying.

    torch's own stager closes itself after one use (2.11), and then locks the memory anew for every save.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the copies, sharded as the tensors are. Memory that the host does not have raises an error."""
        taken: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            copy = self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (here.shape, here.dtype):
                # page-locked memory takes a GPU's copy at 25 GB/s and more, other memory at 3 to 6
                copy = torch.empty(here.shape, dtype=here.dtype, pin_memory=here.is_cuda)
                self._copies[name] = copy
            copy.copy_(here.detach(), non_blocking=True)
            taken[name] = _sharded_as(tensor, copy)
        if any(tensor.is_cuda for tensor in tensors.values()):
            # the next step changes the weights, and the writer reads the copies: both wait for the last of them
            torch.cuda.current_stream().record_event().synchronize()
        return taken


def _sharded_as(tensor: Tensor, copy: Tensor) -> Tensor:
    """The copy with the placements of the tensor; `DTensor.from_local` would move it back to the mesh's device."""
    if not isinstance(tensor, DTensor):
        return copy
    return DTensor(copy, tensor._spec, requires_grad=False)
