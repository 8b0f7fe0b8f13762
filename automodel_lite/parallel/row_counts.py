"""Exchanges the numbers of rows that ranks are about to send, and brings them to the host.

Legend: W ranks, E experts of a rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Read = Callable[[], list[list[int]]]

# one for all layers, whose counts come one after the other
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def exchange_counts(counts_WE: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Read]:
    """Sends each rank the rows that each of its experts gets from here; returns those that come
    [W, E], and what waits for the sums of both, [2][W], on the host.
    """
    if counts_WE.is_cuda:
        return _exchange_beside(counts_WE, group)
    return exchange_at_once(counts_WE, group)


def exchange_at_once(counts_WE: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Read]:
    """As exchange_counts, in the order of the device's other work."""
    come_WE = torch.empty_like(counts_WE)
    dist.all_to_all_single(come_WE, counts_WE, group=group)
    return come_WE, torch.stack([counts_WE.sum(1), come_WE.sum(1)]).tolist


def _exchange_beside(counts_WE: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Read]:
    """As exchange_counts, on a stream of its own: what is launched from now on runs meanwhile."""
    device = counts_WE.device
    compute = torch.cuda.current_stream(device)
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    beside = _STREAMS[device]
    come_WE = torch.empty_like(counts_WE)
    # All exchanges of a group have one order on all ranks: this one comes after those that have
    # been launched, and whoever reads makes those to come wait for it.
    beside.wait_stream(compute)
    with torch.cuda.stream(beside):
        dist.all_to_all_single(come_WE, counts_WE, group=group)
        sizes_2W = torch.stack([counts_WE.sum(1), come_WE.sum(1)])
        host_2W = torch.empty_like(sizes_2W, device="cpu", pin_memory=True)
        host_2W.copy_(sizes_2W, non_blocking=True)
        copied = beside.record_event()
    # Freed by the caller before this stream has read them, they would be given to what sorts.
    counts_WE.record_stream(beside)

    def read() -> list[list[int]]:
        copied.synchronize()
        compute.wait_event(copied)
        return host_2W.tolist()

    return come_WE, read
