"""A copy of a checkpoint's tensors on the host, which training does not change while it is written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class HostCopies:
    """One tensor a name, made at the first save and used again by every other: locking pages costs more than copying.

    torch's own stager closes itself after one use (2.11), and then locks the memory anew for every save.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the copies. Memory that the host does not have raises an error."""
        for name, tensor in tensors.items():
            copy = self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                # page-locked memory takes a GPU's copy at 25 GB/s and more, other memory at 3 to 6
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._copies[name] = copy
            copy.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            # the next step changes the weights, and the writer reads the copies: both wait for the last of them
            torch.cuda.current_stream().record_event().synchronize()
        return {name: self._copies[name] for name in tensors}
