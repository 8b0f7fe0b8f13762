"""Check what a run has recorded, and compute a step of it again, on any machine and layout.

automodel-lite verify runs/mine                           (the ledger, the checkpoints, the data)
automodel-lite verify runs/mine --replay 130              (and step 130, from the checkpoint before)
automodel-lite verify runs/mine --replay 130 --nproc 2 mesh.cp=2

A replayed step has the same bits, or is within rounding of its dtype, or is different: then the
first tensor that differs is named, by the next checkpoint. Exit code 1 where something differs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from automodel_lite.config.check import check_config
from automodel_lite.config.schema import Config, MeshConfig
from automodel_lite.errors import ConfigError
from automodel_lite.extras.load_run import load_run_config
from automodel_lite.extras.replay import (
    Comparison,
    Recorded,
    TensorDifference,
    compare_tensors,
    local_copies,
    step_number,
)
from automodel_lite.launched import world_size
from automodel_lite.parallel.mesh import mesh_shape
from automodel_lite.parallel.peers import Peers
from automodel_lite.results import RESULTS
from automodel_lite.run.folder import existing_run
from automodel_lite.seed import seed_all
from automodel_lite.telemetry.console import Console, quiet_libraries
from automodel_lite.telemetry.ledger import step_row
from automodel_lite.training import resume
from automodel_lite.training.launch import join_ranks
from automodel_lite.training.resolve import resolve_auto
from recipes.train_ft import TrainFinetuneRecipe


def main(run: Path, overrides: Sequence[str] = (), step: int | None = None) -> int:
    """Prints what was checked; returns the exit code. Raises ConfigError for what is not a run, and
    for a step that was not recorded.
    """
    quiet_libraries()
    folder = existing_run(run)
    console = Console()
    recorded = Recorded.of(folder)
    if step is not None and not recorded.problems:
        recorded.check_step(step)
    config = replay_config(load_run_config(folder), overrides)
    scratch = folder.path / f".replay-{os.environ.get('MASTER_PORT', os.getpid())}"
    try:
        with join_ranks(replace(config, output_dir=str(scratch))) as (joined, peers, _):
            recorded = recorded.hash_files(peers)
            for topic, text in recorded.lines:
                console.say(topic, text)
            outcome = list(recorded.problems)
            if not outcome:
                outcome = Replay(resolve_auto(joined), peers, recorded, step).check()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for text in outcome:
        console.print(f"FAIL: {text}")
    if not outcome:
        console.print("PASS")
    RESULTS.update(problems=outcome, head=recorded.head)
    return int(bool(outcome))


def replay_config(config: Config, overrides: Sequence[str]) -> Config:
    """Returns a run's settings without what only a training has: trackers, callbacks, an export,
    questions. A mesh that does not fit the processes of now becomes the plain one, unless
    `overrides` name it.
    """
    plain = replace(
        config,
        logger={},
        callbacks={},
        evaluation={},
        report=False,
        samples=replace(config.samples, prompts=[]),
        hub=replace(config.hub, push=None),
        checkpoint=replace(config.checkpoint, export_hf=False),
    )
    raw: Any = OmegaConf.create(asdict(plain))
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(f"{' '.join(overrides)}: {str(error).splitlines()[0]}") from None
    for value in parsed:
        OmegaConf.update(raw, value.key_or_group, value.value())
    found = check_config(raw)
    if any(text.startswith("mesh") for text in overrides):
        return found
    try:
        mesh_shape(found.mesh, world_size())
    except ConfigError:
        return replace(found, mesh=MeshConfig())
    return found


class Replay(TrainFinetuneRecipe):
    """The training of a run, moved to a checkpoint of it; in a folder of its own, which goes."""

    def __init__(
        self, config: Config, peers: Peers, recorded: Recorded, target: int | None
    ) -> None:
        super().__init__(config, peers)
        self.recorded = recorded
        self.target = target

    def check(self) -> list[str]:
        """Compares the data with the recorded ones, and replays; returns what is different."""
        with self.guards.recording(at_end=lambda: None):
            self.setup()
            self.console.print("")
            return self.compare()

    def compare(self) -> list[str]:
        """The rest of `check`, once everything is built."""
        sources = self.guards.state.sources
        problems = self.recorded.changed_inputs(self.data.fingerprint(), sources)
        if problems:
            return problems
        self.console.say("data", "packs and files are those that the ledger names")
        if self.target is None:
            return []
        start = self.recorded.checkpoint_before(self.target)
        where = "the beginning"
        if start is not None:
            self.move_to(start)
            where = start.name
        self.num_replayed = 0
        self.open_feed()
        comparison = self.replay_until(self.target, self.recorded.checkpoint_of(self.target))
        self.console.say("replay", f"step {self.target} from {where}: {comparison.text}")
        if not comparison.is_different:
            return []
        problems = [f"step {self.target}: {comparison.text}"]
        later = self.recorded.checkpoint_after(self.target)
        if not comparison.has_tensors and later is not None:
            named = self.replay_until(step_number(later), later)
            problems.append(f"{later.name}: {named.text}")
        return problems

    def move_to(self, checkpoint: Path) -> None:
        """Loads a checkpoint of the run: weights, optimizer, schedule, place in the data."""
        loss_model = self.model.loss_model
        saved = self.guards.checkpointer.load_from(checkpoint, loss_model, self.engine.optimizer)
        has_frozen = not all(p.requires_grad for p in self.engine.model.module.parameters())
        state = resume.state_of(saved, self.data, self.scheduler, self.guards, has_frozen)
        self.state = self.guards.state = state

    def replay_until(self, step: int, checkpoint: Path | None) -> Comparison:
        """Trains until this step and compares it with its line, and its tensors with those of its
        checkpoint where there is one.
        """
        engine = self.engine
        before = local_copies(engine) if checkpoint is not None else {}
        while self.num_steps < step:
            ready = next(self.feed)
            seed_all(self.config.seed, self.num_steps, self.mesh.token_rank)
            result = self.step(ready)
            self.state.advance(ready.batches.after)
            self.num_replayed += 1
        numbers = result.numbers.read()
        row = step_row(self.num_steps, ready.batches.pack_ids, result, numbers)
        line = self.recorded.row_of(step)
        dtype = str(self.engine.decided.dtype).removeprefix("torch.")
        limits = self.recorded.limits(step, dtype, self.num_replayed)
        tensors: list[TensorDifference] = []
        if checkpoint is not None:
            own = local_copies(engine)
            self.guards.checkpointer.load_from(checkpoint, self.model.loss_model, engine.optimizer)
            tensors = compare_tensors(before, own, local_copies(engine), self.guards.ranks)
        return Comparison(row, line, limits, tensors, checkpoint is not None)
