"""Where the time of a run goes, on the device's own clock."""

from __future__ import annotations

import time

import torch

PHASES = ("data", "forward", "backward", "optimizer", "validation", "checkpoint", "other")


class PhaseClock:
    """Laps: `lap("forward")` says that the time since the last lap went into the forward pass.

    On a GPU the laps are events in its stream, which are read by `seconds()`: no lap waits for the device, and the
    time that the device stood idle for data counts as data.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self._start = self._now()

    def lap(self, phase: str) -> None:
        """`phase` is one of PHASES."""
        self._marks.append((phase, self._now()))

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds since the last call; waits for the device."""
        spent = dict.fromkeys(PHASES, 0.0)
        before = self._start
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for phase, mark in self._marks:
            spent[phase] += _between(before, mark)
            before = mark
        self._start, self._marks = before, []
        return {phase: value for phase, value in spent.items() if value}

    def _now(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def _between(first: float | torch.cuda.Event, second: float | torch.cuda.Event) -> float:
    if isinstance(first, torch.cuda.Event) and isinstance(second, torch.cuda.Event):
        return first.elapsed_time(second) / 1e3
    assert isinstance(first, float)
    assert isinstance(second, float)
    return second - first
