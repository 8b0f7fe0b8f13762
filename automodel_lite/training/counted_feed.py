"""The data feed of a run: steps on the device before they are needed, and what is in each of them
over all ranks, which a step's loss is divided by.

    read and copy 2 ─┐           ┌─ sum over the ranks ─▶ counts of 2
    step 1 ──────────┴───────────┘                        step 2 ───▶
"""

from __future__ import annotations

from collections.abc import Iterator

from automodel_lite.data.feeding.feed import DeviceStep
from automodel_lite.data.feeding.source import HostStep
from automodel_lite.models.flops import CostModel
from automodel_lite.parallel.context_parallel import check_same_batch
from automodel_lite.telemetry.metrics import Counts, count_own
from automodel_lite.training.engine import Engine
from automodel_lite.training.guards import Guards


class CountedFeed(Iterator[DeviceStep]):
    """The next `num_steps` steps of a source; every rank makes one and calls the same methods.

    counts    of the step that comes next, over all ranks
    num_left  steps that are not taken yet
    Raises ConfigError when ranks that share a pack have read different ones.
    """

    counts: Counts

    def __init__(
        self,
        steps: Iterator[HostStep],
        engine: Engine,
        guards: Guards,
        costs: CostModel,
        num_steps: int,
    ) -> None:
        self._feed = engine.feed(steps)
        self._mesh = engine.mesh
        self._items = engine.model.loss_model.loss.num_items
        self._guards = guards
        self._costs = costs
        self.num_left = num_steps
        for axis in filter(None, (self._mesh.cp, self._mesh.tp)) if num_steps else ():
            check_same_batch(self._feed.peek().micro_batches[0], axis)
        self.read_ahead()
        self.counts = guards.receive_counts()

    def __next__(self) -> DeviceStep:
        ready = next(self._feed)
        self.num_left -= 1
        return ready

    def read_ahead(self) -> None:
        """Reads the step that comes next, and starts the message that sums over the ranks what is
        in it; `Guards.after_step` receives it.
        """
        micro_batches = self._feed.peek().micro_batches if self.num_left else ()
        own = count_own(micro_batches, self._mesh, self._costs, self._items)
        times = self._guards.stragglers.own_times(self._guards.state.num_steps + 1)
        self._guards.boundary.send([*own, *times])
