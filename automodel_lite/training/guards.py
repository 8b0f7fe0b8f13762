"""What watches over a run while it trains: one object, so that the recipe is about training.

lock         one job at a time works in the run's folder
watchdog     writes the stacks of a rank that makes no progress
peers        the failure of one rank ends all of them
boundary     the ranks stop together: after a signal, or when the job's time is nearly over
stragglers   the rank for which the others wait is named
state        where the run stands: what a checkpoint holds beside tensors
ledger       a chained line per step: what was computed can be checked, and computed again
nonfinite    steps whose loss or gradient is not finite are skipped, and too many of them end the
             run
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.feed import DeviceStep
from automodel_lite.data.feeding.source import Cursor, PackSource
from automodel_lite.errors import ConfigError, PeerError, RunStoppedError, counted
from automodel_lite.launched import rank, world_size
from automodel_lite.models.layers import decoder_layers
from automodel_lite.parallel.control import Control, open_control
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parallel.peers import Peers
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.progress import activity
from automodel_lite.run.checkpoint import Checkpointer
from automodel_lite.run.checkpoint_folder import Rating
from automodel_lite.run.ending import exit_as
from automodel_lite.run.failures import Place, record_failures
from automodel_lite.run.folder import RunFolder
from automodel_lite.run.lock import RunLock
from automodel_lite.run.nonfinite import NonfiniteSteps, are_finite
from automodel_lite.run.stopping import (
    INTERRUPTED_EXIT,
    PREEMPTED_EXIT,
    SIGNALS,
    StepBoundary,
    deadline_of,
    outcome_of,
)
from automodel_lite.run.watchdog import Watchdog
from automodel_lite.telemetry.ledger import NAME, Ledger, step_row
from automodel_lite.telemetry.metrics import NUM_COUNTS, Counts, StepResult, counts_of
from automodel_lite.telemetry.stragglers import Stragglers
from automodel_lite.thd import ThdBatch
from automodel_lite.training.engine import TrainingEngine

_VISIBLE_WITHIN_S = 10.0


@dataclass
class TrainState:
    """Kept in each checkpoint: small, and JSON."""

    num_steps: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    pending_validation: bool = False  # of this step: it is due, or was interrupted
    val_loss: float | None = None  # of this step
    rating: Rating | None = None  # of this step, by which the best checkpoint is chosen
    # digests of the files that shape the numbers, and of validation sets
    sources: dict[str, str] = field(default_factory=dict)

    def advance(self, cursor: Cursor) -> None:
        """Counts a finished step; `cursor` is where the data go on after it."""
        self.num_steps += 1
        self.cursor = cursor
        self.val_loss = None
        self.rating = None

    def to_json(self, data: PackSource, mesh: Mesh, extra: dict[str, Any]) -> dict[str, Any]:
        """The content of state.json; every rank calls it. `extra` is what the callbacks keep."""
        return {
            "data": data.fingerprint(),
            "world_size": world_size(),
            "step": self.num_steps,
            "cursor": asdict(self.cursor.gather(mesh)),
            "extra": extra,
            "owes_validation": self.pending_validation,
            "val_loss": self.val_loss,
            "rating": self.rating and self.rating.to_json(),
            "sources": self.sources,
        }


class Guards:
    """The guards of one run, entered in this order:

    with guards.recording():     an error is recorded, and the lock given back
        guards.lock.check()      before anything is built: nobody else works in the folder
        guards.open()            once the process groups exist: takes the folder
        guards.watch_steps()     before the first step: from now on a stop signal is a request
        guards.watchdog.enter("in step 1")
        guards.after_step(...)
        guards.close()
    """

    def __init__(self, config: Config, peers: Peers, say: Callable[[str], None]) -> None:
        self.config = config
        self.peers = peers
        self.say = say
        self.folder = RunFolder(config.output_dir)
        self.lock = RunLock(self.folder.lock)
        self.watchdog = Watchdog(self.folder.path, rank(), config.training.hang_timeout_s)
        # what a full memory held, and what to change: see memory.out_of_memory_text
        self.memory_text = (
            "No model is loaded yet, so no setting of it helps: give the process more memory "
            "(ulimit -v, or the memory of its job or container)."
        )
        self.state = TrainState()
        self.max_steps = 0
        self.ranks = self.slow_ranks = Control(None)
        self.checkpointer: Checkpointer
        self.boundary: StepBoundary
        self.nonfinite: NonfiniteSteps
        self.ledger: Ledger
        self.stragglers = Stragglers.off()
        self._watched: tuple[int, Sequence[int], Sequence[ThdBatch], StepResult] | None = None

    @contextmanager
    def recording(self, at_end: Callable[[], None]) -> Iterator[None]:
        """Records how the run ends; a rank that only noticed the end of another one reports that
        rank's error. `at_end` is called in any case, unless the folder is another job's by then.
        """
        self.peers.on_failure = self._end_with_peer
        try:
            watched = (self.folder, self.watchdog, self.lock, self.peers)
            with record_failures(*watched, lambda: self.memory_text, self.place):
                yield
        finally:
            self.watchdog.stop()
            if self.lock.token is None or self.lock.is_held():
                at_end()
            self.lock.release()

    def open(self) -> None:
        """Opens the control groups and takes the folder; every rank calls it. Raises ConfigError
        when another job has taken it meanwhile, or the ranks do not share it.
        """
        config = self.config
        self.ranks = open_control(config.mesh)
        self.slow_ranks = open_control(config.mesh, is_slow=True)
        self.ledger = Ledger(self.folder.path / NAME, not self.ranks.is_first, self.say)
        self.checkpointer = Checkpointer(
            self.folder,
            config,
            self.ranks,
            self.slow_ranks,
            self.say,
            self.lock.check_held,
            self.ledger.add_checkpoint,
        )
        deadline = deadline_of(config.training.max_time, config.advanced.stop_margin_s)
        self.boundary = StepBoundary(self.ranks, deadline, self.checkpointer, self.lock)
        self.nonfinite = NonfiniteSteps(
            self.folder.bad_steps, config.training.max_nonfinite_steps, rank(), self.say
        )
        self.lock.token = self.ranks.on_first(self.lock.acquire)
        # Every rank must see the lock that rank 0 has just written: on a disk of its own a node
        # would save checkpoints that are never whole. Network file systems may show it a few
        # seconds later.
        end = time.monotonic() + _VISIBLE_WITHIN_S
        while not (is_seen := self.lock.is_held()) and time.monotonic() < end:
            time.sleep(0.2)
        blind = self.ranks.max([0 if is_seen else rank() + 1])[0]
        if blind:
            raise ConfigError(
                f"output_dir={self.folder.path} is not the same folder on all nodes: rank "
                f"{blind - 1} does not see what rank 0 has written there: use a file system that "
                "all nodes share."
            )

    def watch_steps(self, model: ParallelModel, device: torch.device) -> None:
        """Before the first step, a signal ends the process; from now on it is a request to save and
        exit. Every rank calls it.
        """
        layers = decoder_layers(model.loss_model.lm)
        self.stragglers = Stragglers(
            layers[len(layers) // 2], device, self.ranks.on_all(socket.gethostname), rank()
        )
        SIGNALS.defer(self._record_end)

    def after_step(self, ready: DeviceStep, result: StepResult) -> Counts:
        """Settles the step before, which the device has finished; returns the counts of the next
        one, which the ranks have sent in the middle of this one.
        """
        self.settle()
        step = self.state.num_steps + 1
        self._watched = (step, ready.batches.pack_ids, ready.micro_batches, result)
        self.stragglers.wait_s += ready.batches.wait_s
        return self.receive_counts()

    def settle(self) -> None:
        """Waits for the step under watch and reads its numbers, once for all who want them: the
        ledger records it, and a nonfinite one is dumped. Raises RunStoppedError for one too many of
        those in a row.
        """
        if self._watched is None:
            return
        step, pack_ids, batches, result = self._watched
        self._watched = None
        numbers = result.numbers.read()
        self.ledger.add_step(step_row(step, pack_ids, result, numbers))
        self.nonfinite.check(step, pack_ids, batches, numbers)

    def receive_counts(self) -> Counts:
        """Returns what is in the next step, over all ranks; agrees on a stop, and compares the
        ranks when it is due.
        """
        sums = self.boundary.receive()
        if times := sums[NUM_COUNTS:]:
            self.stragglers.compare(times, self.state.num_steps + 1, self.say)
        return counts_of(sums[:NUM_COUNTS])

    def nonfinite_text(self, parameters: Iterable[Tensor]) -> str:
        """Says why a checkpoint of now could not be continued from; empty where it could. Every
        rank calls it.
        """
        if bad := self.nonfinite.in_a_row:
            return f"the loss or the gradient of the last {counted(bad, 'step')} is not finite"
        return "" if are_finite(parameters, self.ranks) else "the trained weights are not finite"

    def check_finite(self, parameters: Iterable[Tensor]) -> None:
        """Raises RunStoppedError when the last steps were skipped, or the trained weights are not
        finite.
        """
        if reason := self.nonfinite_text(parameters):
            raise RunStoppedError(
                f"step {self.state.num_steps} is the last one, and {reason}: {self.newest_text()} "
                "Lower optimizer.lr, raise the warm-up, or look at the data, and start a new run "
                "with name=... ."
            )

    def check_saved(self) -> None:
        """Raises RunStoppedError unless the last step is on disk, as a checkpoint or an export."""
        self.ranks.on_first(self.lock.check_held)
        if self.checkpointer.holds(self.state.num_steps):
            return
        if not self.config.checkpoint.export_hf:
            raise RunStoppedError(
                f"the last step, {self.state.num_steps}, could not be saved: {self.newest_text()} "
                f"Make room in {self.folder.path} and run the same command again to continue from "
                "there."
            )
        self.say(
            "WARNING: the last step is exported, but not saved as a checkpoint: "
            f"{self.newest_text()}"
        )

    def save(self, engine: TrainingEngine, state: dict[str, Any], wait: bool) -> None:
        """Saves everything that the next step depends on; never after a nonfinite step. Every rank
        calls it.
        """
        step = self.state.num_steps
        if reason := self.nonfinite_text(engine.model.parameters()):
            self.say(f"{step:7d}  WARNING: the step is not saved: {reason}")
            return
        self.watchdog.enter(f"saving step {step}")
        with activity(f"saving step {step}"):
            model = engine.model.loss_model
            wait |= step == self.max_steps
            self.ledger.secure()
            state = {**state, "ledger": self.ledger.head}
            self.checkpointer.save(step, model, engine.optimizer, state, wait=wait)

    def newest_text(self) -> str:
        newest = self.checkpointer.newest_name
        return f"the newest checkpoint is {newest}." if newest else "there is no checkpoint."

    def record_stop(self) -> int:
        """Records that the run stopped early, says how to go on, and returns the exit code."""
        newest = self.checkpointer.newest_name
        reason = self.boundary.stop_reason or ""
        state, code = outcome_of(reason)
        if self.ranks.is_first:
            self.folder.write_status(state, self.state.num_steps, reason, newest)
        self.say(
            f"stopped after step {self.state.num_steps} of {self.max_steps} ({reason}); run the "
            f"same command again to continue from {newest or 'the start'}"
        )
        return code

    def place(self) -> Place:
        """The last finished step, and the newest checkpoint."""
        if self.lock.token is None:  # nothing is built yet
            return None, None
        return self.state.num_steps, self.checkpointer.newest_name

    def close(self) -> None:
        """Waits for all ranks: launchers end a job soon after its first process."""
        self.peers.stop()
        self.ledger.close()
        self.slow_ranks.barrier()
        self.watchdog.stop()

    def _end_with_peer(self, error: PeerError) -> None:
        """Ends this rank, wherever it is, with the error of another."""
        ended_by_signal = {PREEMPTED_EXIT: "preempted", INTERRUPTED_EXIT: "interrupted"}
        self._record_end(ended_by_signal.get(error.exit_code, "failed"), str(error))
        self.lock.release()
        exit_as(error)

    def _record_end(self, state: str, reason: str) -> None:
        """Called before a thread ends the process."""
        if self.lock.is_held():
            self.folder.end(state, reason, *self.place())
        self.watchdog.stop()
