"""`training.profile_steps=[10,12]` writes where the time and the memory of a few steps go.

In torch's own formats:

profile/rank_00000.trace.json.gz     for https://ui.perfetto.dev or chrome://tracing
profile/rank_00000.txt               the operations that took longest
profile/rank_00000.memory.pickle     on a GPU: every allocation, for https://pytorch.org/memory_viz
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.profiler import profile

_NUM_ROWS = 30
_MAX_ALLOCATIONS = 1_000_000  # the newest; some 100 MB of a snapshot


class StepProfiler:
    """Profiles the steps from `steps[0]` to `steps[1]` on every rank; `begin` and `end` are called
    around each step.
    """

    def __init__(
        self,
        steps: Sequence[int],
        path: Path,
        device: torch.device,
        say: Callable[[str, str], None],
    ) -> None:
        self._first, self._last = steps
        self._path = path
        self._say = say
        self._is_gpu = device.type == "cuda"
        self._profile: profile | None = None
        self._has_begun = False

    def begin(self, step: int) -> None:
        """Starts at the first of the steps, or where a continued run comes into them."""
        if self._profile is not None or not self._first <= step <= self._last:
            return
        self._has_begun = True
        self._path.parent.mkdir(exist_ok=True)
        if self._is_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)
        self._profile = profile(record_shapes=True, profile_memory=True)
        self._profile.start()

    def end(self, step: int | None = None) -> None:
        """Writes the files when `step` was the last of them, or the training is over (None)."""
        if step is None and not self._has_begun:
            steps = f"training.profile_steps=[{self._first},{self._last}]"
            self._say("profiled", f"nothing: this run trained none of {steps}")
        if self._profile is None or (step is not None and step < self._last):
            return
        if self._is_gpu:
            torch.cuda.synchronize()
            torch.cuda.memory._dump_snapshot(f"{self._path}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profile.stop()
        self._profile.export_chrome_trace(f"{self._path}.trace.json.gz")
        by = "self_cuda_time_total" if self._is_gpu else "self_cpu_time_total"
        table = self._profile.key_averages().table(
            sort_by=by, row_limit=_NUM_ROWS, max_name_column_width=60
        )
        Path(f"{self._path}.txt").write_text(table)
        self._profile = None
        self._say("profiled", f"{self._path}.trace.json.gz, for https://ui.perfetto.dev")
