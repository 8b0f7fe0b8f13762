"""Fine-tune a Hugging Face causal LM on packed sequences.

    torchrun recipes/train_ft.py --config-name llama_packed packed_sequence.packed_sequence_size=512

    files ─▶ documents ─▶ token rows ─▶ pack plan ─▶ packs ─▶ batch ─▶ ThdBatch ─▶ shard ─▶ hidden ─▶ loss
                                                              [B,S]     [T]       [T/cp]   [T/cp,C]  sum

`setup()` builds the parts in the order the data meets them, `run()` says when things happen, `step()` says what.
"""

from __future__ import annotations

from automodel_lite.cli import run_recipe

if __name__ == "__main__":  # --help, --cfg and mistakes are answered before torch is imported; this does not return
    run_recipe("recipes.train_ft:main")

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from automodel_lite.cli.ending import leave_from_thread
from automodel_lite.config.components import build
from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.feed import DeviceFeed, ReadyStep
from automodel_lite.data.feeding.source import Cursor
from automodel_lite.data.prepare import check_positions, check_same_data, check_sizes, prepare_data
from automodel_lite.errors import MISTAKE_EXIT, PeerError, RunStoppedError, is_lost_peer, is_out_of_memory, one_line
from automodel_lite.interpreter import collecting_seldom
from automodel_lite.models.flops import cost_model
from automodel_lite.models.generate import load_generator
from automodel_lite.models.source import runs_remote_code
from automodel_lite.parallel.context_parallel import check_ranks_read_alike, cp_shard
from automodel_lite.parallel.mesh import init_mesh, rank, use_threads, world_size
from automodel_lite.parallel.peers import Peers, flat, open_control, open_peers, together, versions
from automodel_lite.progress import Progress, activity, duration
from automodel_lite.run.checkpoint import Checkpointer
from automodel_lite.run.export import check_exportable, export
from automodel_lite.run.failures import (
    BadSteps,
    Place,
    StepNumbers,
    Watchdog,
    are_finite,
    recorded,
)
from automodel_lite.run.folder import RunFolder, plain
from automodel_lite.run.lock import RunLock
from automodel_lite.run.stopping import SIGNALS, StepBoundary, deadline_of, ending_of
from automodel_lite.seed import seed_all, use_deterministic
from automodel_lite.telemetry.callbacks import open_metrics
from automodel_lite.telemetry.console import Console, quiet_libraries
from automodel_lite.telemetry.metrics import Meter, StepProfiler, StepResult, sum_counts
from automodel_lite.thd import ThdBatch
from automodel_lite.tools.report import LiveReport
from automodel_lite.tools.trained import publish
from automodel_lite.training.build import build_model
from automodel_lite.training.ema import WeightAverage
from automodel_lite.training.evaluation import questions_of, sample_answers, validation_loss
from automodel_lite.training.memory import out_of_memory_text
from automodel_lite.training.optimizers import apply_gradients
from automodel_lite.training.plan import build_parts
from automodel_lite.training.schedules import move_to
from automodel_lite.training.start import (
    Line,
    data_lines,
    dry_run,
    model_lines,
    plan_lines,
    position_line,
    try_settings,
    version_line,
)


def main(config: Config) -> int:
    """Trains until the planned step, or until it must stop; returns the exit code."""
    quiet_libraries()
    if config.dry_run:
        return dry_run(config)
    folder, peers = RunFolder(config.output_dir), open_peers(is_new_job=True)
    with together(peers):
        config = folder.with_saved_layout(config)
        message = folder.finished_message(config)
        state = {"output_dir (what it holds)": folder.read_status().get("state", "no run")}
        peers.compare("settings", versions() | flat(plain(config)) | state)
        if message:
            Console(is_silent=rank() != 0).print(message)
            return 0
        check_sizes(config, world_size())  # all at once, before any part asks for one of them
        return TrainFinetuneRecipe(config, peers).train()


class TrainFinetuneRecipe:
    """One run: built by `setup()`, trained by `run()`."""

    def __init__(self, config: Config, peers: Peers | None = None) -> None:
        self.config, self.peers = config, peers or Peers(None)
        self.folder = folder = RunFolder(config.output_dir)
        self.lock = RunLock(folder.lock)
        self.memory_text = ""
        self.watchdog = Watchdog(folder, rank(), config.training.stuck_after_s)
        self.num_steps = 0
        self.console = Console(is_silent=rank() != 0)
        self.lines: list[Line] = []
        self.page = LiveReport(folder.path, config.report and rank() == 0, self.console.say)

    def train(self) -> int:
        """The whole run; its outcome is recorded."""
        self.peers.watch(self.leave_with)
        with self.lock:
            try:
                with self.watchdog, recorded(self.watchdog, self.lock, lambda: self.memory_text, self.place):
                    with collecting_seldom():
                        self.setup()
                    return self.run()
            finally:
                if not self.lock.is_taken():
                    self.page.update(is_last=True)

    def setup(self) -> None:
        """Builds every part; raises ConfigError or DataError before anything is trained."""
        config = self.config
        self.show([version_line()])
        self.lock.check()
        batches = check_sizes(config, world_size())
        self.parts = build_parts(config)
        try_settings(config, self.parts)
        self.memory_text = out_of_memory_text(self.parts, None)
        self.data = prepare_data(config, batches)
        self.show(data_lines(self.data))
        self.plan = self.data.plan(config.training)
        self.peers.compare("data", flat(self.data.fingerprint()) | {"training.max_steps": self.plan.max_steps})
        self.mesh = init_mesh(config.mesh)
        use_threads(config.training.num_threads)
        use_deterministic(config.training.deterministic)
        model_config = self.parts.model.config(self.data.tokenizer)
        check_positions(self.data.longest, model_config)
        self.costs = cost_model(model_config)
        self.report = self.data.report(self.costs)
        self.show(plan_lines(self.report, self.plan, config))
        seed_all(config.seed, "model")
        with activity("loading the model"):
            mean_tokens = self.report.mean_tokens if self.report else None
            self.built = build_model(self.parts, self.data.tokenizer, self.mesh, mean_tokens)
        self.show(model_lines(config, self.built, self.mesh))
        self.model = self.built.model
        self.memory_text = out_of_memory_text(self.parts, self.built.memory)
        if config.checkpoint.export_hf:
            check_exportable(self.model.loss_model.lm, self.data.tokenizer)
        self.meter = Meter(self.mesh, self.built.flops, self.model.compute_dtype)
        self.optimizer = self.parts.optimizer(self.model.loss_model)
        self.average = WeightAverage(self.optimizer, config.training.ema_decay)
        self.scheduler = build(config.lr_scheduler, self.optimizer, max_steps=self.plan.max_steps)
        self.control, self.slow_control = open_control(config.mesh), open_control(config.mesh, is_slow=True)
        self.checkpointer = Checkpointer(
            self.folder, config, self.control, self.slow_control, self.console.print, self.lock.check_held
        )
        deadline = deadline_of(config.training.max_time, config.training.stop_margin_s)
        self.boundary = StepBoundary(self.control, deadline, self.checkpointer, self.lock)
        self.bad_steps = BadSteps(self.folder.bad_steps, config.training.max_bad_steps, rank(), self.console.print)
        self.resume()

    def show(self, lines: Sequence[Line]) -> None:
        """Lines of the start block, printed as soon as they are known and kept in run.json."""
        self.lines += lines
        for topic, text in lines:
            self.console.say(topic, text)

    def resume(self) -> None:
        """Continues from the newest checkpoint that loads, or starts fresh."""
        self.num_steps, self.cursor = 0, Cursor()
        self.pending_validation, self.val_loss = False, None  # of this step
        self.extra: dict[str, Any] = {}  # state of callbacks across restarts, small and JSON
        self.end_reason: str | None = None  # of a callback that ends the run before its last step
        self.lock.token = self.control.on_first(self.lock.acquire)
        state = self.checkpointer.load_newest(self.model.loss_model, self.optimizer)
        fingerprint = self.data.fingerprint()
        if state:
            check_same_data(state["data"], fingerprint, self.config.checkpoint.accept_changes)
            self.num_steps, self.cursor, self.extra = state["step"], Cursor(**state["cursor"]), state["extra"]
            self.pending_validation, self.val_loss = state["owes_validation"], state["val_loss"]
            move_to(self.scheduler, self.num_steps)
        self.state = {"data": fingerprint, "world_size": world_size()}
        if self.mesh.rank == 0:
            self.folder.open(self.config, self.data.shape.global_batch_size, self.data.packer.slot_multiple)
            with self.folder.being_written():
                self.folder.write_status("running", self.num_steps, checkpoint=self.checkpointer.newest_name)
                self.folder.write_facts(self.lines)
                if self.report:
                    self.report.to_json(self.folder.packing)
                    self.folder.lengths.write_text(json.dumps(self.data.lengths()))
                self.folder.rewind_metrics(self.num_steps)
        self.control.barrier()
        self.watchdog.start(self.lock.token)
        self.metrics = open_metrics(
            self.config, self.folder, self.mesh.rank == 0, self.num_steps, self.extra, self.console.print
        )
        self.tell({"step": 0, **self.data.counts} if not self.num_steps else None)

    def run(self) -> int:
        """Trains; logs, validates and saves when due; exports and evaluates at the end."""
        training = self.config.training
        every, origin = self.config.checkpoint.every_steps, self.checkpointer.newest_name
        position = position_line(self.folder.shown, origin, self.num_steps, self.plan.max_steps, every)
        self.console.say("run", position)
        SIGNALS.defer()
        SIGNALS.watch(self.watchdog, self.boundary, self.last_words)
        if self.pending_validation:
            self.validate()
        steps = self.data.steps(self.cursor, self.mesh, self.costs)
        self.feed = DeviceFeed(steps, self.shard, self.mesh.device, self.model.loss_model.takes_mixers)
        if self.num_steps < self.plan.max_steps:
            for axis in (self.mesh.cp, self.mesh.tp):
                check_ranks_read_alike(self.feed.peek().micro_batches[0], axis)
        self.bar = Progress("training", self.plan.max_steps, "steps", in_log=False, num_done=self.num_steps)
        self.bar.note("first step")
        mesh, say = self.mesh, self.console.say
        profiler = StepProfiler(training.profile_steps, self.folder.path, mesh.rank, mesh.device, say)
        while self.num_steps < self.plan.max_steps and not (self.boundary.stop_reason or self.end_reason):
            self.watchdog.beat(f"in step {self.num_steps + 1}")
            profiler.begin(self.num_steps + 1)
            self.meter.start()
            ready = next(self.feed)
            batches = ready.batches
            self.meter.lap("data")
            seed_all(self.config.seed, self.num_steps, self.mesh.token_rank)
            result = self.step(ready)
            self.num_steps, self.cursor, self.val_loss = self.num_steps + 1, batches.after, None
            logs = self.num_steps == 1 or self.is_due(training.log_every_steps)
            validates = self.is_due(training.val_every_steps)
            saves = self.checkpointer.is_due(self.num_steps, self.is_due(self.config.checkpoint.every_steps))
            if logs or validates or saves:
                self.bad_steps.settle()
            self.meter.stop(result.counts, batches.wait_s)
            self.bar.add(1)
            profiler.end(self.num_steps)
            self.meter.lap("other")
            if logs:
                self.log(result, batches.epoch)
            if validates:
                self.validate()
            if saves:
                self.save()
        profiler.end(self.num_steps, is_over=True)
        self.bad_steps.settle()
        self.bar.close()
        if self.boundary.stop_reason:
            return self.leave_early()
        if self.end_reason:
            self.console.print(f"{self.num_steps:7d}  ended early: {self.end_reason}")
            self.save(wait=True)
        return self.finish()

    def step(self, ready: ReadyStep) -> StepResult:
        """One optimizer step. A micro-batch's loss is a sum; it is divided by the label tokens of the whole step.

        Nothing here waits for the device: a nonfinite step is skipped on the device and detected one step later.
        """
        counts = sum_counts(ready.micro_batches, self.mesh, self.costs)
        loss_sum = torch.zeros((), device=self.mesh.device)
        for number, batch in enumerate(ready.inputs, start=1):
            with self.model.accumulate(is_last=number == len(ready.inputs)):
                loss = self.model(batch)
                self.meter.lap("forward")
                (loss * (self.model.mean_ranks / (counts.num_label_tokens or 1))).backward()
                self.meter.lap("backward")
            loss_sum += loss.detach()
        if self.num_steps + 1 < self.plan.max_steps:
            self.feed.stage()
            self.meter.lap("data")
        loss_sum, lr = self.mesh.sum(loss_sum), float(self.scheduler.get_last_lr()[0])
        max_norm = self.config.training.max_grad_norm
        grad_norm = apply_gradients(self.optimizer, self.model.parameters(), loss_sum, max_norm)
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.meter.lap("optimizer")
        numbers = StepNumbers(loss_sum, grad_norm)
        self.bad_steps.watch(self.num_steps + 1, ready.batches.pack_ids, ready.micro_batches, numbers)
        self.boundary.agree()
        return StepResult(numbers, lr, counts)

    def shard(self, batch: ThdBatch) -> ThdBatch:
        """The tokens of this context-parallel rank."""
        return cp_shard(batch, self.mesh.cp, self.built.plan.parts.mesh.cp_exchange)

    def is_due(self, every_steps: int) -> bool:
        """Every `every_steps` steps (0 = never), and after the last step."""
        return self.num_steps == self.plan.max_steps or (every_steps > 0 and self.num_steps % every_steps == 0)

    def log(self, result: StepResult, epoch: int) -> None:
        """Logs a row to the screen, metrics.jsonl and the callbacks."""
        row = self.meter.row(result, self.num_steps, epoch, self.plan.max_steps)
        self.console.step(row)
        self.bar.note(f"loss {row.loss:.4f}, ETA {duration(row.eta_s)}")
        self.tell(row.as_row() | self.data.left_out(self.cursor, self.mesh))
        self.page.update()

    def tell(self, row: dict[str, Any] | None) -> None:
        """Logs a row to metrics.jsonl and the callbacks, any of which may end the run."""
        if row:
            self.metrics.log(row)
        self.extra |= self.metrics.state()
        if self.config.callbacks:
            self.end_reason = self.control.on_first(lambda: self.metrics.end_reason)

    def validate(self) -> None:
        """Mean loss over the label tokens of each validation set; every document is counted once. A stop signal
        interrupts it; the resumed run validates first.
        """
        self.pending_validation = True
        self.watchdog.beat(f"validating after step {self.num_steps}")
        losses = {}
        with self.average.applied(self.model):
            for name, packs in self.data.val_packs.items():
                loss = validation_loss(self.model, packs, self.data, self.mesh, self.shard, self.boundary.must_stop)
                if loss is None:
                    return
                losses[name] = loss
            answers = sample_answers(self.config.samples, self.model, self.mesh, self.data.tokenizer)
        for name, loss in losses.items():
            self.console.print(f"{self.num_steps:7d}  {loss:8.4f}  validation ({name})")
        if losses:
            self.tell({"step": self.num_steps, **{f"val_loss/{name}": loss for name, loss in losses.items()}})
        for prompt, answer in answers:
            self.console.print(f"{'':9}{prompt}\n{'':9}-> {answer}")
            self.metrics.text(self.num_steps, prompt, answer)
        self.meter.lap("validation")
        self.pending_validation, self.val_loss = False, sum(losses.values()) / len(losses) if losses else None

    def save(self, wait: bool = False) -> None:
        """Saves everything that the next step depends on; never after a nonfinite step."""
        if self.bad_steps.in_a_row:
            return
        self.watchdog.beat(f"saving step {self.num_steps}")
        if not are_finite(self.model.parameters(), self.control):
            self.console.print(f"{self.num_steps:7d}  WARNING: the step is not saved: its weights are not finite")
            return
        cursor = asdict(self.cursor.gathered(self.mesh))
        self.average.settle()
        self.state |= {"step": self.num_steps, "cursor": cursor, "extra": self.extra}
        self.state |= {"owes_validation": self.pending_validation, "val_loss": self.val_loss}
        is_last = self.num_steps == self.plan.max_steps
        with activity(f"saving step {self.num_steps}"):
            self.checkpointer.save(
                self.num_steps, self.model.loss_model, self.optimizer, self.state, wait=wait or is_last
            )
        self.meter.lap("checkpoint")

    def leave_early(self) -> int:
        """Saves the last step and reports that the same command continues the run."""
        self.save(wait=True)
        newest, reason = self.checkpointer.newest_name, self.boundary.stop_reason or ""
        state, code = ending_of(reason)
        if self.mesh.rank == 0:
            self.folder.write_status(state, self.num_steps, reason, newest)
        self.console.print(
            f"stopped after step {self.num_steps} of {self.plan.max_steps} ({reason}); run the same command again to "
            f"continue from {newest or 'the start'}"
        )
        self.close()
        return code

    def finish(self) -> int:
        """Exports the model, answers the held-out questions, and marks the run as finished.

        Raises RunStoppedError when what was trained is not on the disk, or is not finite.
        """
        self.watchdog.beat("exporting")
        self.check_numbers()
        if self.config.checkpoint.export_hf:
            with activity("exporting"):
                exported = self.export()
            loader = "peft.PeftModel" if self.built.adapter else "AutoModelForCausalLM"
            self.console.say("exported", f"{self.folder.shown}/{exported.name}: loads with {loader}.from_pretrained")
            if self.config.evaluation and self.mesh.rank == 0:
                is_foreign = runs_remote_code(self.built.model.loss_model.lm)
                generator = load_generator(str(exported), is_foreign, on_cpu=True)  # the GPU is full
                answers = build(self.config.evaluation).ask(generator, questions_of(self.data.documents))
                self.console.print(answers.text())
                self.metrics.log({"step": self.num_steps, **answers.as_row()})
            if self.mesh.rank == 0:
                publish(self.folder.path, exported, self.config.hub, self.console.say)
            self.metrics.exported(exported)
        self.check_saved()
        if self.mesh.rank == 0:
            self.folder.write_status("finished", self.num_steps, self.end_reason or "")
        self.console.print(f"finished at step {self.num_steps} of {self.plan.max_steps}: {self.folder.shown}")
        if self.page.is_drawn:
            self.console.say("report", f"{self.folder.shown}/{self.page.path.name}")
        self.console.commands("next", self.folder.next_commands("finished"))
        self.close()
        return 0

    def check_numbers(self) -> None:
        """Raises RunStoppedError when the last steps were skipped, or the weights are not finite."""
        is_good = are_finite(self.model.parameters(), self.control)
        if bad := self.bad_steps.in_a_row or not is_good:
            what = f"the loss or the gradient of the last {bad} steps was" if is_good else "the trained weights are"
            raise RunStoppedError(
                f"step {self.num_steps} is the last one, and {what} not finite: {self.newest_text()} Lower "
                "optimizer.lr, raise the warm-up, or look at the data, and start a new run with name=... ."
            )

    def check_saved(self) -> None:
        """Raises RunStoppedError unless the last step is on disk, as a checkpoint or an export."""
        self.control.on_first(self.lock.check_held)
        if self.checkpointer.holds(self.num_steps):
            return
        if not self.config.checkpoint.export_hf:
            raise RunStoppedError(
                f"the last step, {self.num_steps}, could not be saved: {self.newest_text()} Make room in "
                f"{self.folder.path} and run the same command again to continue from there."
            )
        self.console.print(f"WARNING: the last step is exported, but not saved as a checkpoint: {self.newest_text()}")

    def newest_text(self) -> str:
        newest = self.checkpointer.newest_name
        return f"the newest checkpoint is {newest}." if newest else "there is no checkpoint."

    def place(self) -> Place:
        """The last finished step, and the newest checkpoint."""
        if self.lock.token is None:  # nothing is built yet
            return None, None
        return self.num_steps, self.checkpointer.newest_name

    def leave_with(self, error: PeerError) -> None:
        """Ends this rank, wherever it is, with the error of another."""
        self.last_words("failed", str(error))
        self.lock.release()
        leave_from_thread(str(error), MISTAKE_EXIT)

    def last_words(self, state: str, reason: str) -> None:
        """Called before a thread ends the process."""
        if self.lock.is_held():
            self.folder.end(state, reason, *self.place())
        self.watchdog.stop()

    def export(self) -> Path:
        """hf/ or adapter/; raises RunStoppedError with the way to export the checkpoint later."""
        try:
            with self.average.applied(self.model):
                return export(
                    self.folder.path,
                    self.model,
                    self.data.tokenizer,
                    self.parts.model.dtype,
                    self.num_steps,
                    self.built.adapter,
                )
        except (OSError, ValueError, RuntimeError) as error:
            if is_lost_peer(error) or is_out_of_memory(error):
                raise
            cure = f"make room in {self.folder.path}, and run the same command again to continue from there."
            if self.checkpointer.holds(self.num_steps):
                cure = f"python recipes/export_hf.py {self.folder.path} exports it, and so does the same command again."
            reason = one_line(error)
            raise RunStoppedError(f"the export failed ({reason}): {self.newest_text()[:-1]}; {cure}") from error

    def close(self) -> None:
        self.metrics.log({"step": self.num_steps, **self.meter.rest()})
        self.peers.stop()
        self.slow_control.barrier()  # launchers end the job soon after its first process
        self.watchdog.stop()
        del self.feed  # its workers leave
        self.metrics.close()
        self.mesh.close()
