"""The sizes of GPUs, and what a step may hold of them."""

from __future__ import annotations

GPUS_GB = (16, 24, 40, 48, 80, 96, 141, 192)  # that are sold
SLACK = 3 << 30  # bytes of a GPU that the driver, the allocator and the kernels' workspaces take
PLANNED_GPU = 80 * 10**9  # bytes of a GPU that is only planned


def usable(num_bytes: int) -> int:
    """Returns what a step may hold on a GPU of this size: less what the driver, the allocator and
    workspaces take. By the size that it is sold with, so that GPUs of one kind agree.
    """
    nominal = max(
        (size * 10**9 for size in GPUS_GB if size * 10**9 <= num_bytes), default=num_bytes
    )
    return nominal - SLACK
