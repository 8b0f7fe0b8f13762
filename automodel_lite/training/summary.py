"""The block that a run prints before its first step: pairs of a topic and its text."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from automodel_lite.config.components import text_of
from automodel_lite.config.schema import Config
from automodel_lite.config.sizes import AUTO_BATCH_SIZE, LEAST_STEPS
from automodel_lite.data.feeding.planned import epochs_of
from automodel_lite.data.feeding.source import PackSource, TrainingPlan
from automodel_lite.data.packing.report import PackingReport
from automodel_lite.data.tokens.tokenizer import vocabulary_of
from automodel_lite.errors import counted
from automodel_lite.models.layers import has_experts
from automodel_lite.parallel.mesh import (
    Mesh,
    threads_of,
)
from automodel_lite.training.beyond_plan import notes_beyond_plan
from automodel_lite.training.build import BuiltModel
from automodel_lite.training.classes import untrained_note
from automodel_lite.training.guards import Guards
from automodel_lite.training.schedules import num_warmup
from automodel_lite.training.settings import (
    Decided,
)
from automodel_lite.version import __version__

Line = tuple[str, str]


def version_line() -> Line:
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return "version", f"automodel_lite {__version__} ({versions})"


def plan_lines(
    report: PackingReport | None, plan: TrainingPlan, config: Config, data: PackSource
) -> list[Line]:
    """How the documents are packed, and how long the run is."""
    packing = "while it is read: exact_fill over the next 256 documents"
    if report:
        head = (
            f"{report.strategy}: {counted(report.packs, 'pack')} of "
            f"{report.packed_sequence_size:,}, {report.documents_per_pack_mean:.1f} documents per "
            f"pack, fill {report.fill_frac:.1%} (padded batches: {report.padded_fill_frac:.1%})"
        )
        packing = "\n".join([head, *(f"{topic} {text}" for topic, text in report.remarks())])
    schedule = config.lr_scheduler  # one without a warm-up has neither
    num_warmup_steps = num_warmup(
        schedule.get("warmup_steps", 0), schedule.get("warmup_frac", 0.0), plan.max_steps
    )
    lines = steps_text(plan, report, num_warmup_steps, config.training.global_batch_documents)
    if config.training.max_steps is None and plan.max_steps < LEAST_STEPS:
        lines += (
            f"\nNOTE: {counted(plan.max_steps, 'step', 'is')} few to learn from: {LEAST_STEPS} or "
            "more need a larger training.num_epochs, or more data"
        )
    every = config.training.val_every_steps
    is_idle = not (data.val_packs or config.samples.prompts or config.tasks)
    if every and is_idle:
        lines += (
            f"\nNOTE: training.val_every_steps={every} has nothing to validate on: hold out a "
            "part, dataset.val_frac=0.05, or name a file, dataset.val_path=..."
        )
    is_open = config.training.global_batch_documents is None
    if config.training.global_batch_size == "auto" and is_open:
        size = plan.shape.global_batch_size
        most = f"at most {AUTO_BATCH_SIZE} packs, and as few as give {LEAST_STEPS} steps"
        warmup = f"{counted(num_warmup_steps, 'step')} of warm-up"
        lines += f"\ntraining.global_batch_size=auto: {size} ({most}), {warmup}"
    if report and config.training.max_steps is None and config.training.num_epochs is None:
        epochs, why = epochs_of(config.training, report.documents)
        lines += f"\ntraining.num_epochs: {epochs}{why.replace('training.num_epochs=null: ', '')}"
    lines += "".join(f"\nNOTE: {note}" for note in notes_beyond_plan(config, plan))
    note = untrained_note(data)
    of_classes = [("", note)] if note else []
    return [*of_classes, ("packing", packing), ("steps", lines)]


def model_lines(
    config: Config, built: BuiltModel, mesh: Mesh, tokenizer: PreTrainedTokenizerBase
) -> list[Line]:
    """What is trained, how, and what it takes; every rank calls it."""
    decided = built.decided
    training = decided.training
    if mesh.device.type == "cuda":
        device = f"{torch.cuda.get_device_name(mesh.device)}: {processes_text(decided)}"
    else:
        num_threads = torch.get_num_threads()
        plural = "s" if num_threads > 1 else ""
        each = " each" if mesh.shape.world_size > 1 else ""
        why = threads_of(training.num_threads)[1]
        device = f"cpu: {processes_text(decided)}, {num_threads} thread{plural}{each} ({why})"
    lines = [("device", device), ("model", model_text(built))]
    lines += [("", note) for note in decided.model.notes]
    if built.adapter:
        known = vocabulary_of(str(decided.model.pretrained), str(decided.model.source["revision"]))
        note = built.adapter.frozen_rows(built.model.loss_model.lm, tokenizer, known)
        lines.append(("peft", f"{built.adapter.description}\n{note}".strip()))
    lines.append(("attention", built.attention))
    if training.deterministic:
        lines.append(("kernels", "deterministic: the same bits in each run"))
    if built.compiled != "off":
        lines.append(("compile", built.compiled))
    max_norm = training.max_grad_norm
    clipping = f"gradients clipped to {max_norm}" if max_norm else "no clipping"
    schedule = dict(config.lr_scheduler)
    if schedule.get("warmup_steps") is not None:
        schedule.pop("warmup_frac", None)  # not read
    learning = f"{text_of(config.optimizer)}, {text_of(schedule)}, {clipping}"
    lines.append(("optimizer", learning))
    if decay := training.ema_decay:
        steps = f"about {1 / (1 - decay):,.0f} steps (decay {decay})"
        lines.append(("average", f"of the weights of {steps}: validated, sampled and exported"))
    lines.append(("memory", f"{built.memory}\n{decided.reduction_text}".strip()))
    return lines + recomputation_lines(decided)


def model_text(built: BuiltModel) -> str:
    decided = built.decided
    lm = built.model.loss_model.lm
    dtype = str(decided.dtype).removeprefix("torch.")
    held = f"{decided.training.master_weights} master weights"
    if built.adapter:
        held = f"frozen in {dtype}, adapter in fp32"
    text = (
        f"{lm.config.model_type} {decided.model.pretrained or 'from scratch'}: "
        f"{count(decided.size.parameters)} parameters, {dtype} compute, {held}, loss {built.loss}"
    )
    if has_experts(lm):
        text += f", experts {lm.config.get_text_config()._experts_implementation}"
    return text


def recomputation_lines(decided: Decided) -> list[Line]:
    """Why layers are recomputed, where that was left open."""
    return [("recompute", decided.recomputation_text)] if decided.recomputation_text else []


def data_lines(data: PackSource) -> list[Line]:
    """Where the documents are from, and what became of them."""
    return [("data", data.documents.description), *(("", note) for note in data.notes)]


def position_line(guards: Guards, max_steps: int) -> str:
    """`runs/x: fresh, steps 1 to 200, next checkpoint after step 100`, or from where it goes on."""
    folder = guards.folder.display_path
    checkpoint = guards.checkpointer.newest_name
    step = guards.state.num_steps
    save_every = guards.config.checkpoint.every_steps
    origin = f"continues from {checkpoint}" if checkpoint else "fresh"
    if step >= max_steps:
        return f"{folder}: {origin}"
    saved = min((step // save_every + 1) * save_every, max_steps) if save_every else max_steps
    return (
        f"{folder}: {origin}, steps {step + 1} to {max_steps}, next checkpoint after step {saved}"
    )


def processes_text(decided: Decided) -> str:
    shape = decided.shape
    plural = "es" if shape.world_size > 1 else ""
    more = f" x tp {shape.tp}, ep {shape.ep}" if shape.tp * shape.ep > 1 else ""
    if decided.mesh.ep_overlap:
        more += " with micro-batches in turns"
    axes = f"dp_replicate {shape.dp_replicate} x dp_shard {shape.dp_shard} x cp {shape.cp}{more}"
    return f"{shape.world_size} process{plural} ({axes}, {decided.strategy})"


def count(number: float) -> str:
    """8.03 B, 124 M, 37.2 k."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            scaled = number / size
            decimals = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
            return f"{scaled:,.{decimals}f} {unit}"
    return f"{number:.0f}"


def steps_text(
    plan: TrainingPlan,
    report: PackingReport | None,
    num_warmup: int,
    step_documents: int | None = None,
) -> str:
    """Returns how long the run is, and a hint where it is too short to learn.

    step_documents   documents of a step, where they are set: its packs follow from them
    """
    shape = plan.shape
    epochs = (
        f" = {plan.num_epochs:.1f} epochs of {plan.steps_per_epoch:,}"
        if plan.num_epochs
        else " of a stream"
    )
    num_packs = min(shape.global_batch_size, report.packs) if report else shape.global_batch_size
    documents = (
        f" (about {report.documents_per_pack_mean * num_packs:,.0f} documents)" if report else ""
    )
    packs = counted(shape.global_batch_size, "pack")
    width = shape.micro_batch_size * shape.dp_size
    if step_documents and report:
        documents = ""
        mean = report.packs / (plan.steps_per_epoch or 1)
        about = f"about {mean:.3g} pack{'s' if mean > 1 else ''}"
        packs = f"{counted(step_documents, 'document')} ({about})"
    lines = [
        f"{plan.max_steps:,}{epochs}; a step is {packs}{documents} in micro-batches of "
        f"{shape.micro_batch_size} on {counted(shape.dp_size, 'data-parallel rank')}"
    ]
    if step_documents and report and mean < width:
        lines.append(
            f"NOTE: a step has about {mean:.3g} packs for {width} places (micro-batches x ranks), "
            "and the others are padding: a smaller packed_sequence.packed_sequence_size fills them"
        )
    elif report and report.packs < shape.global_batch_size:
        lines.append(
            f"NOTE: the data are {counted(report.packs, 'pack')}, fewer than a step takes: lower "
            "packed_sequence.packed_sequence_size or training.global_batch_size for more steps"
        )
    if plan.max_steps <= num_warmup:
        lines.append(
            f"NOTE: the run ends within its warm-up: lower lr_scheduler.warmup_steps={num_warmup}"
        )
    return "\n".join(lines)
