"""Small messages between the ranks on the host, apart from gradients and checkpoints: a gloo group
of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from automodel_lite.config.schema import MeshConfig

T = TypeVar("T")
SLOW_TIMEOUT_S = 3600  # a slow disk is not a dead rank


@dataclass(frozen=True)
class Control:
    """`group` is None for a run of one process."""

    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.group else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if self.group else 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def max(self, values: Sequence[int]) -> list[int]:
        """The largest value over all ranks, for each place."""
        if self.group is None:
            return list(values)
        agreed = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self.group)
        return agreed.tolist()

    def start_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Starts the sum over all ranks, for each place; the function that it returns
        waits for it.
        """
        if self.group is None:
            return partial(list, values)
        total = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(total, group=self.group, async_op=True)

        def wait() -> list[float]:
            work.wait()
            return total.tolist()

        return wait

    def on_first(self, fn: Callable[[], T]) -> T:
        """Calls fn on rank 0 alone; every rank returns its value, or raises its error."""
        if self.group is None:
            return fn()
        outcomes: list[Any] = [_outcome(fn)] if self.is_first else [None]
        dist.broadcast_object_list(outcomes, 0, group=self.group)
        return _values(outcomes)[0]

    def on_all(self, fn: Callable[[], T]) -> list[T]:
        """Calls fn on every rank; each returns the values of all, in rank order, or raises the
        error of the first rank that has one.
        """
        if self.group is None:
            return [fn()]
        outcomes: list[Any] = [None] * self.world_size
        dist.all_gather_object(outcomes, _outcome(fn), group=self.group)
        return _values(outcomes)

    def barrier(self) -> None:
        if self.group is not None:
            dist.all_reduce(torch.zeros(1), group=self.group)


def _outcome(fn: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return fn(), None
    except Exception as error:
        # an error of a library may not survive pickling: those of Python, and ours, are made of
        # their arguments
        is_ours = type(error).__module__.split(".")[0] in ("builtins", "automodel_lite")
        is_plain = is_ours and isinstance(error, OSError | ValueError | RuntimeError)
        return None, error if is_plain else RuntimeError(f"{type(error).__name__}: {error}")


def _values(outcomes: Sequence[tuple[Any, Exception | None]]) -> list[Any]:
    for _, error in outcomes:
        if error is not None:
            raise error
    return [value for value, _ in outcomes]


def open_control(config: MeshConfig, is_slow: bool = False) -> Control:
    """A new control group over all ranks (every rank calls it), or none without a launcher.

    A slow group waits an hour for a rank that is writing a checkpoint or finishing the run.
    """
    if not dist.is_initialized():
        return Control(None)
    timeout_s = max(config.timeout_s, SLOW_TIMEOUT_S) if is_slow else config.timeout_s
    return Control(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))


def all_ranks() -> Control:
    """Returns the ranks of the default process group; this process alone without one."""
    return Control(dist.group.WORLD if dist.is_initialized() else None)
