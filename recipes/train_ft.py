"""Fine-tune a Hugging Face causal LM on packed sequences.

    torchrun recipes/train_ft.py --config-name llama_packed packed_sequence.packed_sequence_size=512

    files ─▶ documents ─▶ token rows ─▶ plan ─▶ packs ─▶ batch ─▶ ThdBatch ─▶ shard ─▶ hidden ─▶ sum
                                                         [B,S]      [T]       [T/cp]   [T/cp,C]

`setup()` builds the parts in the order the data meets them, `run()` says when things happen,
`step()` says what. What watches over the run (locks, signals, other ranks, nonfinite numbers) is in
`guards`. A subclass may replace any method; `forward_backward` is the seam for another objective.
"""

from __future__ import annotations

from automodel_lite.cli import run_recipe

# --help, --cfg and mistakes are answered before torch is imported; this does not return
if __name__ == "__main__":
    run_recipe("recipes.train_ft:main")

import numpy as np
import torch

from automodel_lite.config.components import build
from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.feed import DeviceStep
from automodel_lite.data.prepare import check_sizes, prepare_data
from automodel_lite.evaluation.task_files import Asked
from automodel_lite.extras.asking import ask_tasks, open_tasks
from automodel_lite.extras.dry_run import dry_run
from automodel_lite.extras.plan import choose_recomputation
from automodel_lite.extras.report.live import LiveReport
from automodel_lite.interpreter import relaxed_gc
from automodel_lite.models.flops import cost_model
from automodel_lite.parallel.mesh import world_size
from automodel_lite.parallel.peers import Peers
from automodel_lite.parts.images import check_images, images_lines
from automodel_lite.parts.losses import label_values
from automodel_lite.progress import Progress, activity
from automodel_lite.run.nonfinite import StepOutcome
from automodel_lite.seed import derive_seed, seed_all
from automodel_lite.telemetry.callbacks import value_of
from automodel_lite.telemetry.console import Console
from automodel_lite.telemetry.metrics import Counts, Meter, StepResult
from automodel_lite.tools.finish import check_exportable, finish
from automodel_lite.training import launch, resume, rules, summary, world
from automodel_lite.training.beyond_plan import check_keep_best
from automodel_lite.training.build import build_model
from automodel_lite.training.classes import with_classes
from automodel_lite.training.counted_feed import CountedFeed
from automodel_lite.training.ema import WeightAverage
from automodel_lite.training.engine import TrainingEngine
from automodel_lite.training.evaluation import check_held_out, rating_of, validate
from automodel_lite.training.guards import Guards
from automodel_lite.training.memory import out_of_memory_text


def main(config: Config) -> int:
    """Trains until the planned step, or until it must stop; returns the exit code."""
    return TrainFinetuneRecipe.launch(config)


class TrainFinetuneRecipe:
    """One run: built by `setup()`, trained by `run()`."""

    def __init__(self, config: Config, peers: Peers | None = None) -> None:
        self.config = config
        self.console = Console()
        self.guards = Guards(config, peers or Peers(None), self.console.print)
        shows = config.report and not self.console.is_silent
        self.page = LiveReport(self.guards.folder.path, shows, self.console.say)

    @classmethod
    def launch(cls, config: Config, *more: object) -> int:
        """Trains, continues, or counts a dry run; `more` are arguments of a subclass."""
        return launch.launch(cls, config, *more, dry_run=dry_run)

    @property
    def num_steps(self) -> int:
        """The number of finished steps."""
        return self.state.num_steps

    def train(self) -> int:
        """Sets up and runs; the outcome is recorded in the run's folder."""
        with self.guards.recording(at_end=lambda: self.page.update(is_last=True)):
            with relaxed_gc():
                self.setup()
            return self.run()

    def setup(self) -> None:
        """Builds every part; raises ConfigError or DataError before anything is trained."""
        config = self.config
        guards = self.guards
        # what was asked
        self.console.show([summary.version_line()])
        guards.lock.check()
        batches = check_sizes(config, world_size())
        parts = rules.checked_parts(config)
        # the data, before a model is loaded: their mistakes cost seconds
        self.data = prepare_data(config, batches, parts.packer)
        self.console.show([*summary.data_lines(self.data), *images_lines(self.data)])
        check_held_out(config, self.data)
        parts = with_classes(parts, self.data)
        self.tasks = open_tasks(
            config, self.data.tokenizer, parts.model.config(self.data.tokenizer)
        )
        if self.tasks:
            self.console.say("tasks", self.tasks.text())
        label_values.check_loss(self.data, parts.loss)
        self.plan = self.data.plan(config.training)
        check_keep_best(config, self.plan.max_steps)
        resume.compare_data(guards, self.data, self.plan, parts)
        # the model, decided before any of it is built
        costs = cost_model(parts.model.config(self.data.tokenizer))
        report = None if self.console.is_silent else self.data.report(costs)
        decided = resume.agree_on_settings(
            guards, parts, self.data.tokenizer, choose_recomputation, self.data
        )
        self.mesh = world.open_world(config)
        self.console.show(summary.plan_lines(report, self.plan, config, self.data))
        guards.memory_text = out_of_memory_text(decided)
        with activity("loading the model"):
            self.built = build_model(decided, self.data.tokenizer, self.mesh, seed=config.seed)
        self.model = self.built.model
        self.engine = TrainingEngine.of(self.built, self.mesh)
        check_images(self.data, self.built, self.mesh)
        self.data = label_values.with_values(self.data, self.engine, self.built, config)
        lines = summary.model_lines(config, self.built, self.mesh, self.data.tokenizer)
        self.console.show(lines)
        check_exportable(config, self.built, self.data)
        guards.memory_text = out_of_memory_text(decided, self.built.memory)
        # where the run stands
        self.meter = Meter(self.mesh, self.built.flops, self.model.compute_dtype)
        self.meter.profile(config.training.profile_steps, guards.folder.path, self.console.say)
        optimizer = self.engine.optimizer
        self.average = WeightAverage(optimizer, config.training.ema_decay)
        self.scheduler = build(config.lr_scheduler, optimizer, max_steps=self.plan.max_steps)
        self.state, self.metrics = resume.open_run(
            guards, self.data, self.engine, self.scheduler, report, self.console.lines
        )

    def run(self) -> int:
        """Trains; logs, validates and saves when due; returns the exit code."""
        config = self.config
        guards = self.guards
        self.console.say("run", summary.position_line(guards, self.plan.max_steps))
        guards.watch_steps(self.model, self.mesh.device)
        if self.state.pending_validation:
            self.validate()
            guards.checkpointer.rate(self.state.val_loss, self.state.rating)
        self.open_feed()
        before: StepResult | None = None
        logs = True
        while self.feed.num_left and not (guards.boundary.stop_reason or self.metrics.end_reason):
            guards.watchdog.enter(f"in step {self.num_steps + 1}")
            self.meter.start(self.num_steps + 1)
            ready = next(self.feed)
            self.meter.lap("data")
            seed_all(config.seed, self.num_steps, self.mesh.token_rank)
            result = self.step(ready)
            self.state.advance(ready.batches.after)
            logs = self.num_steps == 1 or self.is_due(config.training.log_every_steps)
            validates = self.is_due(config.training.val_every_steps)
            planned = self.is_due(config.checkpoint.every_steps)
            saves = guards.checkpointer.is_due(self.num_steps, planned)
            if logs or validates or saves:
                guards.settle()
            self.meter.stop(self.num_steps, result.counts, ready.batches.wait_s)
            # the device has finished the step before
            self.bar.add(1, f"loss {before.loss:.4f}" if before else "")
            before = result
            if logs:
                self.log(result, ready)
            if validates:
                self.bar.note("validating")
                self.validate()
            if saves:
                self.save()
        if not logs:  # stopped or ended early: rates cover the steps since the row before
            self.log(result, ready)
        return self.end()

    def step(self, ready: DeviceStep) -> StepResult:
        """One optimizer step: sums of losses, divided by what the loss counts in the whole step.

        Nothing waits for the device: a nonfinite step is skipped there, and detected one later.
        """
        # accumulate gradients, divided by the counts of all ranks, which are known beforehand
        counts = self.feed.counts
        own_sums = self.forward_backward(ready, counts)
        # read the next step on the host, while the device is still at work on this one
        self.feed.read_ahead()
        self.meter.lap("data")
        # clip and apply; the learning rate of this step is read before the scheduler goes on
        sums = self.engine.total(own_sums)
        loss_sum = sums.pop("loss")
        lr = float(self.scheduler.get_last_lr()[0])
        grad_norm = self.engine.step(loss_sum, self.config.training.max_grad_norm)
        self.scheduler.step()
        self.meter.lap("optimizer")
        # hand the numbers to the guards, which read them once the device has them
        result = StepResult(StepOutcome(loss_sum, grad_norm), lr, counts, sums)
        self.feed.counts = self.guards.after_step(ready, result)
        return result

    def forward_backward(self, ready: DeviceStep, counts: Counts) -> dict[str, torch.Tensor]:
        """Accumulates this rank's gradients; returns the sums of its losses and their parts."""
        loss_model = self.model.loss_model
        loss_model.items_per_label = counts.items_per_label
        if loss_model.noise:
            loss_model.noise.seed = derive_seed(self.config.seed, self.num_steps, "noise")
        return self.engine.forward_backward(ready.inputs, counts.divisor, self.meter.lap)

    def open_feed(self) -> None:
        """The steps from here on, each read while the one before it is computed."""
        costs = self.built.flops.attention
        max_steps = self.plan.max_steps
        steps = self.data.steps(self.state.cursor, self.mesh, costs)
        self.feed = CountedFeed(steps, self.engine, self.guards, costs, max_steps - self.num_steps)
        self.bar = Progress("training", max_steps, "steps", in_log=False, num_done=self.num_steps)
        self.bar.note("first step")

    def is_due(self, every_steps: int) -> bool:
        """Every `every_steps` steps (0 = never), and after the last step."""
        is_last = self.num_steps == self.plan.max_steps
        return is_last or (every_steps > 0 and self.num_steps % every_steps == 0)

    def log(self, result: StepResult, ready: DeviceStep) -> None:
        """Logs a row to the screen, metrics.jsonl and the callbacks."""
        row = self.meter.row(result, self.num_steps, ready.batches.epoch, self.plan.max_steps)
        self.console.step(row)
        self.bar.note(f"loss {row.loss:.4f}")
        more = ready.batches.left_out | self.guards.stragglers.take_row()
        self.metrics.log_step(row.as_row() | more)
        self.page.update()

    def validate(self) -> None:
        """Mean loss over the labels of each validation set; a run stopped in it resumes with it."""
        self.state.pending_validation = True
        self.guards.watchdog.enter(f"validating after step {self.num_steps}")
        must_stop = self.guards.boundary.must_stop
        asked: Asked | None = Asked()
        with self.average.applied(self.model):
            judged: dict[str, list[np.ndarray]] = {}
            found = validate(self.engine, self.data, self.config.samples, must_stop, judged)
            if found and self.tasks and self.tasks.is_due(self.num_steps, self.is_due(0)):
                enter = self.guards.watchdog.enter
                asked = ask_tasks(self.tasks, self.engine, self.config, must_stop, enter)
        if found is None or asked is None:
            return
        losses, answers = found
        self.console.validation(self.num_steps, losses, answers)
        self.console.tasks(self.num_steps, asked.lines)
        numbers = losses | asked.numbers
        self.metrics.log_validation(self.num_steps, numbers, [*answers, *asked.texts])
        if judged and self.guards.ranks.is_first:
            details = self.model.loss_model.loss.details(judged, self.data.documents.val)
            self.guards.folder.note_decisions(self.num_steps, details)
        self.meter.lap("validation")
        self.state.pending_validation = False
        self.state.val_loss = value_of(losses, "val_loss")
        self.state.rating = rating_of(self.config.checkpoint, numbers)

    def save(self, wait: bool = False) -> None:
        """Saves everything that the next step depends on; never after a nonfinite step."""
        self.average.settle()
        state = self.state.to_json(self.data, self.mesh, self.metrics.state())
        self.guards.save(self.engine, state, wait)
        self.meter.lap("checkpoint")

    def end(self) -> int:
        """Finishes the run, or saves it where it stops before; returns the exit code."""
        self.meter.close()
        self.guards.settle()
        self.bar.close()
        code = 0
        if self.guards.boundary.stop_reason or self.metrics.end_reason:
            self.save(wait=True)
        if self.guards.boundary.stop_reason:
            code = self.guards.record_stop()
        else:
            with self.average.applied(self.model):  # the averaged weights are what is exported
                finish(self.guards, self.built, self.data, self.metrics, self.console, self.page)
        self.metrics.log({"step": self.num_steps, **self.meter.rest()})
        self.guards.close()
        del self.feed  # shuts down its workers
        self.metrics.close()
        self.mesh.close()
        return code
