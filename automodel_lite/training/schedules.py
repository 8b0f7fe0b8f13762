"""Learning-rate schedules: the fraction of the peak rate at each optimizer step, warm-up included.

Step 0 is the first optimizer step. During warm-up the fraction is (step + 1) / warmup_steps, so
that no step is wasted at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from automodel_lite.config.rules import Count, Fraction, Only

WarmupFrac = Annotated[Fraction, Only("warmup_steps", None)]


def num_warmup(warmup_steps: int | None, warmup_frac: float, max_steps: int) -> int:
    """Returns the steps of warm-up: those that are set, else a fraction of all."""
    # A number that is set does not depend on the length of the run: a run may be continued for more
    # steps.
    return round(warmup_frac * max_steps) if warmup_steps is None else warmup_steps


def _warmed_up(optimizer: Optimizer, warmup_steps: int, after: Callable[[int], float]) -> LambdaLR:
    """A linear rise to the peak, which is reached at step warmup_steps - 1; then `after(step)` of
    the peak.
    """
    return LambdaLR(
        optimizer, lambda step: (step + 1) / warmup_steps if step < warmup_steps else after(step)
    )


def progress_frac(step: int, first_step: int, max_steps: int) -> float:
    """0 at first_step, 1 at max_steps, which is one after the last step: no step is wasted at a
    rate of 0.
    """
    return min(1.0, max(0.0, (step - first_step) / max(1, max_steps - first_step)))


def cosine(
    optimizer: Optimizer,
    max_steps: int,
    warmup_steps: Count | None = None,  # steps of warm-up; null = warmup_frac of all
    warmup_frac: WarmupFrac = 0.03,  # fraction of the steps
    min_lr_frac: Fraction = 0.0,  # final learning rate / peak
) -> LambdaLR:
    """Half a cosine from the peak to min_lr_frac of it."""
    warmup = num_warmup(warmup_steps, warmup_frac, max_steps)

    def factor(step: int) -> float:
        half = 0.5 * (1 + math.cos(math.pi * progress_frac(step, warmup, max_steps)))
        return min_lr_frac + (1 - min_lr_frac) * half

    return _warmed_up(optimizer, warmup, factor)


def wsd(
    optimizer: Optimizer,
    max_steps: int,
    warmup_steps: Count | None = None,  # steps of warm-up; null = warmup_frac of all
    warmup_frac: WarmupFrac = 0.03,  # fraction of the steps
    decay_frac: Fraction = 0.1,  # fraction of the steps spent in the final decay
    min_lr_frac: Annotated[Fraction, Only("decay_frac")] = 0.0,  # final learning rate / peak
) -> LambdaLR:
    """Warm-up, stable, decay: the peak until the last `decay_frac` of the steps, then a straight
    line down.

    1.0 decays from the warm-up on, 0.0 never.
    """
    warmup = num_warmup(warmup_steps, warmup_frac, max_steps)
    start = max(warmup, max_steps - round(decay_frac * max_steps))
    return _warmed_up(
        optimizer,
        warmup,
        lambda step: 1 - (1 - min_lr_frac) * progress_frac(step, start, max_steps),
    )


def linear(
    optimizer: Optimizer,
    max_steps: int,
    warmup_steps: Count | None = None,  # steps of warm-up; null = warmup_frac of all
    warmup_frac: WarmupFrac = 0.03,  # fraction of the steps
    min_lr_frac: Fraction = 0.0,  # final learning rate / peak
) -> LambdaLR:
    """A straight line from the peak down to min_lr_frac of it."""
    return wsd(optimizer, max_steps, warmup_steps, warmup_frac, 1.0, min_lr_frac)
