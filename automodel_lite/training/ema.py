"""An exponential moving average of the trained weights, in host memory:
torch.optim.swa_utils.AveragedModel on shards.

The average is part of the optimizer's state, `ema` of each parameter: so it is sharded as the
parameter is, saved, and loaded on any number of ranks, like a moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from automodel_lite.models.layers import local
from automodel_lite.parallel.sharding import ParallelModel

NAME = "ema"


class WeightAverage:
    """After each step of the optimizer: average = decay x average + (1 - decay) x weight, in fp32;
    the first is the weight itself. With a decay of 0 there is none.

    A GPU's weights are copied asynchronously and averaged when the next step has been launched, so
    nothing waits.
    """

    def __init__(self, optimizer: Optimizer, decay: float) -> None:
        self.optimizer = optimizer
        self.decay = decay
        self._copies: dict[Tensor, Tensor] = {}  # page-locked, of a GPU's weights
        # averages, and the copies that go into them
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._copied: Any = None  # the event after the last copy
        if decay:
            optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.settle()
        for parameter, state in optimizer.state.items():
            if NAME not in state:
                state[NAME] = parameter.detach().to("cpu", torch.float32, copy=True)
            elif parameter.is_cuda:
                here = local(parameter.detach())
                if parameter not in self._copies:
                    self._copies[parameter] = torch.empty(
                        here.shape, dtype=here.dtype, pin_memory=True
                    )
                self._pending.append(
                    (local(state[NAME]), self._copies[parameter].copy_(here, non_blocking=True))
                )
            else:
                local(state[NAME]).lerp_(local(parameter.detach()).float(), 1 - self.decay)
        if self._pending:
            self._copied = torch.cuda.Event()
            self._copied.record()

    @torch.no_grad()
    def settle(self) -> None:
        """Takes in the last step's weights: before the average is used or saved."""
        if self._copied is not None:
            self._copied.synchronize()
        for average, weight in self._pending:
            average.lerp_(weight.float(), 1 - self.decay)
        self._pending.clear()
        self._copied = None

    @contextmanager
    def applied(self, model: ParallelModel) -> Iterator[None]:
        """The model has the averaged weights inside, and its own again afterwards, as shards."""
        self.settle()
        averaged = [(p, state[NAME]) for p, state in self.optimizer.state.items() if NAME in state]
        own = [local(parameter.detach()).to("cpu", copy=True) for parameter, _ in averaged]
        try:
            self._set(model, [(parameter, local(average)) for parameter, average in averaged])
            yield
        finally:
            self._set(model, [(parameter, weight) for (parameter, _), weight in zip(averaged, own)])

    @torch.no_grad()
    def _set(self, model: ParallelModel, weights: list[tuple[Tensor, Tensor]]) -> None:
        for parameter, weight in weights:
            local(parameter).copy_(weight)
        model.free_gathered()  # what is whole still is of other weights, or rounded to fp8
