"""The end of a run that has trained its last step: export, held-out questions, model
card, upload.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from automodel_lite.config.components import build
from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.source import PackSource
from automodel_lite.errors import (
    ConfigError,
    RunStoppedError,
    is_lost_peer,
    is_out_of_memory,
    one_line,
)
from automodel_lite.evaluation.questions import questions_of
from automodel_lite.extras import hub as hub_card
from automodel_lite.extras.report.live import LiveReport
from automodel_lite.models.score_head import is_scorer
from automodel_lite.models.source import is_remote_code, model_class
from automodel_lite.run.checkpoint_folder import best_checkpoint, name_of, step_of
from automodel_lite.run.export import export_adapter, export_hf, write_small_files
from automodel_lite.run.sharded_files import BrokenCheckpointError
from automodel_lite.telemetry.callbacks import MetricsLog
from automodel_lite.telemetry.console import Console
from automodel_lite.tools.decisions import write_decisions
from automodel_lite.tools.ending_notes import ending_notes
from automodel_lite.training.build import BuiltModel
from automodel_lite.training.guards import Guards


def check_exportable(config: Config, built: BuiltModel, data: PackSource) -> None:
    """Raises ConfigError at the start for what would fail after the training: the small files are
    written once.
    """
    if not config.checkpoint.export_hf:
        return
    lm = built.model.loss_model.lm
    with tempfile.TemporaryDirectory() as folder:
        try:
            lm.config.save_pretrained(folder)
            write_small_files(Path(folder), lm, data.tokenizer)
        except (ValueError, TypeError) as error:
            reason = one_line(error, 400)
            raise ConfigError(
                f"checkpoint.export_hf=true: the export at the end would fail, {reason} Fix "
                "generation_config.json or config.json of the model, or set "
                "checkpoint.export_hf=false."
            ) from None


def finish(
    run: Guards,
    built: BuiltModel,
    data: PackSource,
    metrics: MetricsLog,
    console: Console,
    page: LiveReport,
) -> None:
    """Exports the trained model, with `checkpoint.keep_best` that of the best checkpoint, and
    answers the held-out questions with it; every rank calls it. Raises RunStoppedError when what
    was trained is not finite, or is not on the disk at the end.
    """
    if metrics.end_reason:
        console.print(f"{run.state.num_steps:7d}  ended early: {metrics.end_reason}")
    run.watchdog.enter("exporting")
    run.check_finite(built.model.parameters())
    if run.config.checkpoint.export_hf:
        step = _use_best(run, built) if run.config.checkpoint.keep_best else run.state.num_steps
        exported = _export(run, built, data, step)
        hub = run.config.hub
        lm_config = built.model.loss_model.lm.config
        loader = f"{model_class(lm_config).__name__}.from_pretrained"
        if built.adapter and is_scorer(lm_config):  # the config beside its base has another head
            padding = lm_config.get_text_config().pad_token_id
            more = f"num_labels={lm_config.num_labels}, pad_token_id={padding}"
            loader += f"(folder, {more})"
        elif built.adapter:
            loader = "peft.PeftModel.from_pretrained"
        console.say(
            "exported",
            f"{run.folder.display_path}/{exported.name}: {_weights_text(run, step)}loads with "
            f"{loader}",
        )
        if metrics.end_reason and run.ranks.is_first and (hint := _best_hint(run)):
            console.say("best", hint)
        if run.ranks.is_first and run.config.evaluation:
            with without_undoing("evaluated", console):
                ask_exported(run, built, data, metrics, console, exported)
        if run.ranks.is_first:
            with without_undoing("decisions", console):
                for line in write_decisions(run.folder.path, exported):
                    console.say("decisions", line)
            with without_undoing("card", console):
                hub_card.write_card(run.folder.path, exported, hub.push)
        if run.ranks.is_first and hub.push:
            with without_undoing("uploaded", console):
                address = hub_card.push(run.folder.path, exported, hub.push, hub.private)
                console.say("uploaded", address)
        metrics.exported(exported)
    elif run.config.evaluation:
        console.say("answers", "not asked for: checkpoint.export_hf=false wrote no model to ask")
    run.check_saved()
    if run.ranks.is_first:
        step = run.state.num_steps
        newest = run.checkpointer.newest_name
        is_saved = run.checkpointer.holds(step)
        run.folder.write_status("finished", step, metrics.end_reason or "", newest, is_saved)
    console.print(
        f"finished at step {run.state.num_steps} of {run.max_steps}: {run.folder.display_path}"
    )
    if run.ranks.is_first:
        epochs = data.plan(run.config.training).num_epochs
        settles = not metrics.end_reason and not build(run.config.loss).required
        for note in ending_notes(run.folder.rows(), run.config.training, epochs, settles):
            console.say("NOTE", note)
    if page.is_drawn:
        console.say("report", f"{run.folder.display_path}/report.html")
    console.commands("next", run.folder.next_commands("finished"))


@contextmanager
def without_undoing(stage: str, console: Console) -> Iterator[None]:
    """Says what a stage behind the export meets, on the one rank that runs it: what was trained and
    exported is finished.
    """
    try:
        yield
    except Exception as error:
        text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        console.say(stage, f"WARNING: {one_line(text, 600)}")


def _use_best(run: Guards, built: BuiltModel) -> int:
    """Gives the model the weights of the best checkpoint, unless the last step is as good; returns
    the step that the model is of. Every rank calls it.

    Raises RunStoppedError when that checkpoint is damaged.
    """
    last = run.state.num_steps
    best = run.ranks.on_first(lambda: best_checkpoint(run.folder.checkpoints))
    own = run.state.rating
    if best is None:
        return last
    path, rating = best
    if own is not None and own.metric == rating.metric and own.cost <= rating.cost:
        return last
    try:
        run.checkpointer.load_weights(path, built.model.loss_model)
    except BrokenCheckpointError as error:
        export = f"automodel-lite export {shlex.quote(str(run.folder.path))}"
        raise RunStoppedError(
            f"{path.name}, the best checkpoint, does not load ({error}): {export} exports the "
            "newest one."
        ) from error
    built.model.free_gathered()  # what is whole still is of the last step
    return step_of(path) or last


def _weights_text(run: Guards, step: int) -> str:
    """Says which step is exported where that is a choice."""
    if step < run.state.num_steps:
        best = best_checkpoint(run.folder.checkpoints)
        return f"step {step}, which has {best[1].text if best else 'the best rating'}; "
    return f"step {step}, the last; " if run.config.checkpoint.keep_best else ""


def _best_hint(run: Guards) -> str | None:
    """Returns how to get the best weights of a run that ended early and exports its last step;
    None where they are exported, or nothing is validated.
    """
    best = best_checkpoint(run.folder.checkpoints)
    if run.config.checkpoint.keep_best or best is None:
        return None
    path, rating = best
    if path.name == name_of(run.state.num_steps):
        return (
            "the last step is exported, not the best one; with checkpoint.keep_best=1 a run keeps "
            "and exports that"
        )
    folder = shlex.quote(run.folder.display_path)
    return (
        f"the last step is exported; {path.name} has {rating.text}: automodel-lite "
        f"export {folder} --checkpoint best"
    )


def _export(run: Guards, built: BuiltModel, data: PackSource, step: int) -> Path:
    """hf/ or adapter/; raises RunStoppedError with the way to export the checkpoint later."""
    model = built.model
    dataset = run.config.dataset
    tokenizer = data.tokenizer
    try:
        if built.adapter:
            folder = run.folder.path / "adapter"
            export_adapter(folder, model.loss_model, built.adapter, tokenizer, step, dataset)
            return folder
        dtype = built.decided.model.dtype
        mesh = model.sharded_over
        folder = run.folder.hf
        export_hf(folder, model.loss_model, tokenizer, dtype, model.logits, step, mesh, dataset)
        return folder
    except (OSError, ValueError, RuntimeError) as error:
        if is_lost_peer(error) or is_out_of_memory(error):
            raise
        folder = run.folder.path
        cure = f"make room in {folder}, and run the same command again to continue from there."
        if run.checkpointer.holds(step):
            export = f"automodel-lite export {shlex.quote(str(folder))}"
            cure = f"{export} exports it, and so does the same command again."
        reason = one_line(error)
        raise RunStoppedError(
            f"the export failed ({reason}): {run.newest_text()[:-1]}; {cure}"
        ) from error


def ask_exported(
    run: Guards,
    built: BuiltModel,
    data: PackSource,
    metrics: MetricsLog,
    console: Console,
    exported: Path,
) -> None:
    """Asks the held-out questions with the exported folder, as a user would load it; on the CPU:
    the GPU is full.
    """
    # with transformers' generation
    from automodel_lite.tools.load_generator import load_generator

    is_remote = is_remote_code(type(built.model.loss_model.lm))
    variables = run.config.tokenize.template_kwargs
    generator = load_generator(str(exported), is_remote, True, variables)
    questions = questions_of(data.documents)
    answers, scores = build(run.config.evaluation).ask(generator, questions)
    console.print(answers)
    metrics.log({"step": run.state.num_steps, **scores})
