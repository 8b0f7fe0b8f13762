"""Which rank makes the others wait: compared every 50 steps, in the message that the ranks exchange
in every step.

The seconds of a whole step say nothing, as all ranks wait for the slowest one. What a rank does
alone is measured: the forward pass of one decoder layer, between the gather of its weights and that
of the next layer's; and how long the rank waits for its data. Nothing waits for the device: a GPU's
times are events, read when they have passed. Under context or tensor parallelism ranks meet inside
the layer, too: whole groups are compared there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median, median_low
from typing import Any

import torch
from torch import nn

from automodel_lite.telemetry.metrics import mark, seconds_between

EVERY_STEPS = 50
SLOW_FRAC = 0.1  # of the median layer, or of a step, beyond which a rank is named


class Stragglers:
    """Times this rank, and compares all of them after every 50th step. A rank alone is
    not timed.
    """

    def __init__(self, layer: nn.Module, device: torch.device, hosts: list[str], rank: int) -> None:
        self.device = device
        self.hosts = hosts
        self.rank = rank
        self._row: dict[str, Any] = {}  # of the last comparison
        self._marks: list[tuple[Any, Any]] = []  # before and after the layer
        self.wait_s = 0.0  # for data since the last comparison
        self._began = time.monotonic()
        if len(hosts) > 1:
            # inside FSDP's own hooks: after the layer's weights are there, before they are freed
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_hook(self._leave, prepend=True)

    @classmethod
    def off(cls) -> Stragglers:
        """Times nobody: before the first step."""
        return cls(nn.Identity(), torch.device("cpu"), [], 0)

    def _enter(self, layer: nn.Module, args: Any) -> None:
        self._entered = mark(self.device)

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():  # validation has batches of its own
            self._marks.append((self._entered, mark(self.device)))

    def own_times(self, step: int) -> list[float]:
        """Returns this rank's share of the message of `step`: in every 50th, a place for each
        rank's seconds in the layer, and one for each rank's seconds without data, of which this
        rank fills its own two.
        """
        if step % EVERY_STEPS or len(self.hosts) < 2:
            return []
        # the device may be a step behind: what it has not passed belongs to the next comparison
        passed = [marks for marks in self._marks if isinstance(marks[1], float) or marks[1].query()]
        self._marks = self._marks[len(passed) :]
        times = [0.0] * (2 * len(self.hosts))
        times[self.rank] = median([seconds_between(*marks) for marks in passed] or [0.0])
        times[len(self.hosts) + self.rank] = self.wait_s / EVERY_STEPS
        return times

    def compare(self, times: Sequence[float], step: int, say: Callable[[str], None]) -> None:
        """Takes in the times of all ranks after step `step`; `say` is told of a slow one."""
        now = time.monotonic()
        step_s = (now - self._began) / EVERY_STEPS
        self.wait_s = 0.0
        self._began = now
        self._row = {}
        warnings = list[str]()
        layers = times[: len(self.hosts)]
        waits = times[len(self.hosts) :]
        for kind, what, found in (
            ("layer_s", "a layer", layers),
            ("data_wait_s", "its data", waits),
        ):
            usual = median_low(found)
            most = max(found)
            slowest = f"rank {found.index(most)} on {self.hosts[found.index(most)]}"
            self._row |= {
                f"ranks/{kind}_min": min(found),
                f"ranks/{kind}_median": usual,
                f"ranks/{kind}_max": most,
                f"ranks/{kind}_slowest": slowest,
            }
            # a layer is compared with the layers of other ranks, a wait with the step that it holds
            # up
            if most > usual + SLOW_FRAC * (usual if found is layers else step_s):
                warnings.append(
                    f"{slowest} takes {most:.2g} s for {what}, most ranks {usual:.2g} s"
                )
        if warnings:
            self._row["warning"] = f"step {step}: {' and '.join(warnings)}: all ranks wait for it"
            say(f"WARNING: {self._row['warning']}")

    def take_row(self) -> dict[str, Any]:
        """Returns what the last comparison found, once."""
        row = self._row
        self._row = {}
        return row
