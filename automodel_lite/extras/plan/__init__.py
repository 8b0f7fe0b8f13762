"""What a step takes, counted under fake tensors: memory, traffic, time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from automodel_lite.training.settings import Decided


def choose_recomputation(decided: Decided, gpu: int, adapter: int | None) -> tuple[Decided, str]:
    """See plan/recompute.py, which is imported when it is called: a run on a CPU has no use for
    fake tensors, and they bring 800 modules.
    """
    from automodel_lite.extras.plan import recompute

    return recompute.choose_recomputation(decided, gpu, adapter)
