"""Small messages between the ranks on the host, apart from gradients and checkpoints: a gloo group of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from automodel_lite.config.schema import MeshConfig
from automodel_lite.errors import ConfigError, DataError, RunStoppedError

_ERRORS: dict[str, type[Exception]] = {
    "ConfigError": ConfigError,
    "DataError": DataError,
    "RunStoppedError": RunStoppedError,
    "OSError": OSError,
}


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

    def sum(self, value: int) -> int:
        if self.group is None:
            return value
        total = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(total, group=self.group)
        return int(total)

    def on_first(self, fn: Callable[[], Any]) -> Any:
        """Calls fn on rank 0 alone: every rank gets its value (JSON), or its error: the same one of `_ERRORS`, or
        RuntimeError.
        """
        if self.group is None:
            return fn()
        failure: Exception | None = None
        answer: dict[str, Any] = {}
        if self.is_first:
            try:
                answer = {"value": fn()}
            except Exception as error:
                failure = error
                kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), "RuntimeError")
                number = error.errno if isinstance(error, OSError) else None
                answer = {"error": kind, "number": number, "text": _decoded(error)}
        answer = self._from_first(answer)
        if failure is not None:
            raise failure
        if "error" in answer:
            arguments = (answer["text"],) if answer["number"] is None else (answer["number"], answer["text"])
            raise _ERRORS.get(answer["error"], RuntimeError)(*arguments)
        return answer["value"]

    def barrier(self) -> None:
        if self.group is not None:
            dist.all_reduce(torch.zeros(1), group=self.group)

    def _from_first(self, answer: dict[str, Any]) -> Any:
        text = json.dumps(answer).encode()
        size = torch.tensor(len(text))
        dist.broadcast(size, 0, group=self.group)
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if self.is_first else torch.empty(int(size)).byte()
        dist.broadcast(data, 0, group=self.group)
        return json.loads(data.numpy().tobytes())


SLOW_TIMEOUT_S = 3600  # a slow disk is not a dead rank


def open_control(config: MeshConfig, is_slow: bool = False) -> Control:
    """A new control group over all ranks (every rank calls it), or none without a launcher.

    A slow group waits an hour for a rank that is writing a checkpoint or finishing the run.
    """
    if not dist.is_initialized():
        return Control(None)
    timeout_s = max(config.timeout_s, SLOW_TIMEOUT_S) if is_slow else config.timeout_s
    return Control(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))


def _decoded(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
