"""Learning-rate fractions by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from automodel_lite.training import schedules


def rates(
    make: Callable[..., torch.optim.lr_scheduler.LambdaLR], num_steps: int, **options: object
) -> list[float]:
    """The learning rate of each optimizer step at a peak of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer, max_steps=num_steps, **options)
    seen = []
    for _ in range(num_steps):
        seen.append(round(scheduler.get_last_lr()[0], 4))
        optimizer.step()
        scheduler.step()
    return seen


Make = Callable[..., torch.optim.lr_scheduler.LambdaLR]


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        pytest.param(
            schedules.wsd,
            {"warmup_steps": 2, "decay_frac": 1.0},
            [0.5, 1.0, 1.0, 0.75, 0.5, 0.25],
            id="linear",
        ),
        pytest.param(
            schedules.cosine,
            {"warmup_steps": 1},
            [1.0, 1.0, 0.9045, 0.6545, 0.3455, 0.0955],
            id="cosine",
        ),
        pytest.param(
            schedules.cosine,
            {"min_lr_frac": 0.5},
            [1.0, 0.9665, 0.875, 0.75, 0.625, 0.5335],
            id="floor",
        ),
        pytest.param(
            schedules.wsd,
            {"warmup_steps": 4, "decay_frac": 0.0},
            [0.25, 0.5, 0.75, 1.0, 1.0, 1.0],
            id="constant",
        ),
        pytest.param(
            schedules.wsd,
            {"warmup_steps": 2, "decay_frac": 0.5},
            [0.5, 1.0, 1, 1, 0.6667, 0.3333],
            id="wsd",
        ),
    ],
)
def test_rate_of_each_step(make: Make, options: dict, expected: list) -> None:
    assert rates(make, 6, **options) == expected


@pytest.mark.parametrize(
    "make",
    [
        schedules.cosine,
        schedules.linear,
        *(partial(schedules.wsd, decay_frac=frac) for frac in (0.0, 0.1, 1.0)),
    ],
)
def test_a_single_step_learns(make: Callable[..., torch.optim.lr_scheduler.LambdaLR]) -> None:
    assert rates(make, 1) == [1.0]


@pytest.mark.parametrize(
    ("steps", "frac", "max_steps", "found"),
    [
        (None, 0.03, 6, 0),
        (None, 0.03, 100, 3),
        (20, 0.03, 100, 20),
        (20, 0.0, 5, 20),
        (0, 0.5, 10, 0),
    ],
)
def test_steps_of_warm_up(steps: int | None, frac: float, max_steps: int, found: int) -> None:
    assert schedules.num_warmup(steps, frac, max_steps) == found
