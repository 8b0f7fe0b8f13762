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

import torch

from automodel_lite.config.components import build
from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.feed import DeviceFeed, DeviceStep
from automodel_lite.data.feeding.source import PackSource, TrainingPlan
from automodel_lite.data.prepare import check_positions, check_sizes, prepare_data
from automodel_lite.interpreter import relaxed_gc
from automodel_lite.models.flops import cost_model
from automodel_lite.parallel.context_parallel import check_same_batch
from automodel_lite.parallel.mesh import Mesh, init_mesh, mesh_shape, world_size
from automodel_lite.parallel.peers import Peers
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.parts.images import check_images, images_line
from automodel_lite.parts.losses import label_values
from automodel_lite.progress import Progress, activity
from automodel_lite.run.nonfinite import StepOutcome
from automodel_lite.seed import seed_all
from automodel_lite.telemetry.callbacks import MetricsLog, value_of
from automodel_lite.telemetry.console import Console
from automodel_lite.telemetry.live_report import LiveReport
from automodel_lite.telemetry.metrics import Counts, Meter, StepResult, count_own
from automodel_lite.tools.finish import check_exportable, finish
from automodel_lite.training import resume, start
from automodel_lite.training.build import BuiltModel
from automodel_lite.training.decide import decide
from automodel_lite.training.ema import WeightAverage
from automodel_lite.training.engine import Engine
from automodel_lite.training.evaluation import (
    check_held_out,
    sample_answers,
    validation_losses,
)
from automodel_lite.training.guards import Guards, TrainState
from automodel_lite.training.memory import out_of_memory_text
from automodel_lite.training.plan import build_parts


def main(config: Config) -> int:
    """Trains until the planned step, or until it must stop; returns the exit code."""
    return TrainFinetuneRecipe.launch(config)


class TrainFinetuneRecipe:
    """One run: built by `setup()`, trained by `run()`."""

    def __init__(self, config: Config, peers: Peers | None = None) -> None:
        self.config = config
        self.console = Console()
        self.guards = Guards(config, peers or Peers(None), self.console.print)
        self.page = LiveReport(
            self.guards.folder.path, config.report and not self.console.is_silent, self.console.say
        )
        # built by setup(), in the order the data meets them
        self.data: PackSource
        self.plan: TrainingPlan
        self.mesh: Mesh
        self.engine: Engine
        self.built: BuiltModel
        self.model: ParallelModel
        self.meter: Meter
        self.optimizer: torch.optim.Optimizer
        self.average: WeightAverage
        self.scheduler: torch.optim.lr_scheduler.LambdaLR
        self.state: TrainState  # where the run stands
        self.metrics: MetricsLog
        # used by run()
        self.feed: DeviceFeed
        self.counts: Counts  # of the next step, over all ranks
        self.bar: Progress

    @classmethod
    def launch(cls, config: Config, *more: object) -> int:
        """Trains, or continues, or counts a dry run; `more` are arguments of a subclass. Returns
        the exit code.
        """
        return resume.launch(cls, config, *more)

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
        show = self.console.show
        show([start.version_line()])
        self.guards.lock.check()
        batches = check_sizes(config, world_size())
        parts = build_parts(config)
        start.try_settings(config, parts)
        self.guards.memory_text = out_of_memory_text(parts)
        self.data = prepare_data(config, batches, parts.packer)
        show(start.data_lines(self.data))
        if line := images_line(self.data):
            show([("images", line)])
        check_held_out(config, self.data)
        label_values.check_loss(self.data, parts.loss)
        self.plan = self.data.plan(config.training)
        self.guards.peers.compare(
            "data", self.data.fingerprint() | {"training.max_steps": self.plan.max_steps}
        )
        resume.compare_sources(self.guards, parts, self.data)
        model_config = parts.model.config(self.data.tokenizer)
        check_positions(self.data, parts.model, parts.teacher)
        report = self.data.report(cost_model(model_config))
        shape = mesh_shape(config.mesh, world_size())
        decided = decide(parts, self.data.tokenizer, shape, start.default_device())
        self.guards.peers.compare("recomputation", {"why": decided.recomputation_text})
        self.mesh = init_mesh(config.mesh)
        start.prepare_process(config.training)
        show(start.plan_lines(report, self.plan, config))
        with activity("loading the model"):
            self.engine = Engine.build(decided, self.data.tokenizer, self.mesh, config.seed)
        self.built = self.engine.built
        self.optimizer = self.engine.optimizer
        check_images(self.data, self.built, self.mesh)
        self.data = label_values.with_values(
            self.data, self.built, self.mesh, config.cache_dir, config.seed
        )
        self.model = self.built.model
        show(start.model_lines(config, self.built, self.mesh))
        check_exportable(config, self.built, self.data)
        self.guards.memory_text = out_of_memory_text(decided, self.built.memory)
        self.meter = Meter(self.mesh, self.built.flops, self.model.compute_dtype)
        self.meter.profile(config.training.profile_steps, self.guards.folder.path, self.console.say)
        self.average = WeightAverage(self.optimizer, config.training.ema_decay)
        self.scheduler = build(config.lr_scheduler, self.optimizer, max_steps=self.plan.max_steps)
        self.guards.open()
        # from the newest checkpoint that loads, or fresh
        saved = self.guards.checkpointer.load_newest(self.model.loss_model, self.optimizer)
        self.state = self.guards.state = resume.state_of(
            saved, self.data, self.scheduler, self.guards
        )
        resume.open_folder(self.guards, self.data, report, self.console.lines)
        self.metrics = resume.open_log(self.guards, saved, self.data.counts)

    def run(self) -> int:
        """Trains; logs, validates and saves when due; exports and evaluates at the end. Returns the
        exit code.
        """
        config = self.config
        guards = self.guards
        state = self.state
        self.console.say("run", start.position_line(guards, self.plan.max_steps))
        guards.watch_steps(self.plan.max_steps, self.model, self.mesh.device)
        if state.pending_validation:
            self.validate()
        self.open_feed()
        before: StepResult | None = None
        while self.num_steps < self.plan.max_steps and not (
            guards.boundary.stop_reason or self.metrics.end_reason
        ):
            guards.watchdog.enter(f"in step {self.num_steps + 1}")
            self.meter.start(self.num_steps + 1)
            ready = next(self.feed)
            self.meter.lap("data")
            seed_all(config.seed, self.num_steps, self.mesh.token_rank)
            result = self.step(ready)
            state.advance(ready.batches.after)
            logs = self.num_steps == 1 or self.is_due(config.training.log_every_steps)
            validates = self.is_due(config.training.val_every_steps)
            saves = guards.checkpointer.is_due(
                self.num_steps, self.is_due(config.checkpoint.every_steps)
            )
            if logs or validates or saves:
                guards.nonfinite.settle()
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
        return self.end()

    def step(self, ready: DeviceStep) -> StepResult:
        """One optimizer step. A micro-batch's loss is a sum; it is divided by what the loss counts
        in the whole step.

        Nothing here waits for the device: a nonfinite step is skipped on the device and detected
        one step later.
        """
        counts = self.counts
        own_sums = self.forward_backward(ready, self.counts)
        self.send_counts(has_next=self.num_steps + 1 < self.plan.max_steps)
        self.meter.lap("data")
        sums = self.engine.total(own_sums)
        loss_sum = sums.pop("loss")
        lr = float(self.scheduler.get_last_lr()[0])
        grad_norm = self.engine.step(loss_sum, self.config.training.max_grad_norm)
        self.scheduler.step()
        self.meter.lap("optimizer")
        numbers = StepOutcome(loss_sum, grad_norm)
        self.counts = self.guards.after_step(ready, numbers)
        return StepResult(numbers, lr, counts, sums)

    def forward_backward(self, ready: DeviceStep, counts: Counts) -> dict[str, torch.Tensor]:
        """Accumulates the gradients of this rank's micro-batches; returns the sums of its losses
        and of their parts.
        """
        self.model.loss_model.items_per_label = counts.items_per_label
        return self.engine.forward_backward(ready.inputs, counts.divisor, self.meter.lap)

    def open_feed(self) -> None:
        """The steps from here on, each read and copied to the device while the one before it is
        computed.
        """
        steps = self.data.steps(self.state.cursor, self.mesh, self.built.flops.attention)
        self.feed = DeviceFeed(
            steps, self.engine.place, self.mesh.device, self.model.loss_model.needs_mixer_metadata
        )
        has_next = self.num_steps < self.plan.max_steps
        for axis in filter(None, (self.mesh.cp, self.mesh.tp)) if has_next else ():
            check_same_batch(self.feed.peek().micro_batches[0], axis)
        self.send_counts(has_next)
        self.counts = self.guards.receive_counts()
        self.bar = Progress(
            "training", self.plan.max_steps, "steps", in_log=False, num_done=self.num_steps
        )
        self.bar.note("first step")

    def send_counts(self, has_next: bool) -> None:
        """Reads the next step, and starts the message that sums over the ranks what is in it."""
        micro_batches = self.feed.peek().micro_batches if has_next else ()
        items = self.model.loss_model.loss.num_items
        self.guards.send_counts(
            count_own(micro_batches, self.mesh, self.built.flops.attention, items)
        )

    def is_due(self, every_steps: int) -> bool:
        """Every `every_steps` steps (0 = never), and after the last step."""
        return self.num_steps == self.plan.max_steps or (
            every_steps > 0 and self.num_steps % every_steps == 0
        )

    def log(self, result: StepResult, ready: DeviceStep) -> None:
        """Logs a row to the screen, metrics.jsonl and the callbacks."""
        row = self.meter.row(result, self.num_steps, ready.batches.epoch, self.plan.max_steps)
        self.console.step(row)
        self.bar.note(f"loss {row.loss:.4f}")
        self.metrics.log_step(
            row.as_row() | ready.batches.left_out | self.guards.stragglers.take_row()
        )
        self.page.update()

    def validate(self) -> None:
        """Mean loss over the label tokens of each validation set; every document is counted once. A
        stop signal interrupts it; the resumed run validates first.
        """
        self.state.pending_validation = True
        self.guards.watchdog.enter(f"validating after step {self.num_steps}")
        losses = dict[str, float]()
        must_stop = self.guards.boundary.must_stop
        with self.average.applied(self.model):
            for name, packs in self.data.val_packs.items():
                found = validation_losses(
                    self.model, packs, self.data, self.mesh, self.engine.place, must_stop
                )
                if found is None:
                    return
                losses |= {f"val_{kind}/{name}": loss for kind, loss in found.items()}
            answers = sample_answers(
                self.config.samples, self.model, self.mesh, self.data.tokenizer
            )
        self.console.validation(self.num_steps, losses, answers)
        if losses:
            self.metrics.log_step({"step": self.num_steps, **losses})
        for prompt, answer in answers:
            self.metrics.text(self.num_steps, prompt, answer)
        self.meter.lap("validation")
        self.state.pending_validation = False
        self.state.val_loss = value_of(losses, "val_loss")

    def save(self, wait: bool = False) -> None:
        """Saves everything that the next step depends on; never after a nonfinite step."""
        if reason := self.guards.nonfinite_text(self.model.parameters()):
            self.console.print(f"{self.num_steps:7d}  WARNING: the step is not saved: {reason}")
            return
        self.guards.watchdog.enter(f"saving step {self.num_steps}")
        self.average.settle()
        state = self.state.to_json(self.data, self.mesh, self.metrics.state())
        wait |= self.num_steps == self.plan.max_steps
        with activity(f"saving step {self.num_steps}"):
            self.guards.checkpointer.save(
                self.num_steps, self.model.loss_model, self.optimizer, state, wait=wait
            )
        self.meter.lap("checkpoint")

    def end(self) -> int:
        """Finishes the run after its last step; saves it where it stops before. Returns the exit
        code.
        """
        self.meter.close()
        self.guards.nonfinite.settle()
        self.bar.close()
        code = 0
        if self.guards.boundary.stop_reason:
            self.save(wait=True)
            code = self.guards.record_stop()
        else:
            if self.metrics.end_reason:
                self.console.print(f"{self.num_steps:7d}  ended early: {self.metrics.end_reason}")
                self.save(wait=True)
            with self.average.applied(self.model):  # the averaged weights are what is exported
                finish(self.guards, self.built, self.data, self.metrics, self.console, self.page)
        self.metrics.log({"step": self.num_steps, **self.meter.rest()})
        self.guards.close()
        del self.feed  # shuts down its workers
        self.metrics.close()
        self.mesh.close()
        return code
