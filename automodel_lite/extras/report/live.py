"""The page of a run that goes on, where the package has its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

REFRESH_S = 10
_OVERHEAD_FRAC = 0.01  # of the run's time that drawing may take


@dataclass
class LiveReport:
    """Draws the page of a run: takes at most 1 % of its time, and costs a warning when it cannot
    be drawn.
    """

    run: Path
    is_drawn: bool
    warn: Callable[[str, str], None]
    _not_before: float = field(default=0.0, init=False)

    def update(self, is_last: bool = False) -> None:
        """Draws the page if it is due; `is_last` always does, without the page's
        refresh of itself.
        """
        began = time.perf_counter()
        if not self.is_drawn or not self.run.is_dir() or (began < self._not_before and not is_last):
            return
        try:
            from automodel_lite.extras.report import draw_run

            draw_run(self.run, refresh_s=None if is_last else REFRESH_S)
        except Exception as error:
            self.is_drawn = False
            self.warn("report", f"WARNING: not drawn: {type(error).__name__}: {error}")
        now = time.perf_counter()
        self._not_before = now + max(REFRESH_S, (now - began) / _OVERHEAD_FRAC)
