"""The block that a run prints before its first step."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

import automodel_lite
from automodel_lite.config.components import text_of
from automodel_lite.config.schema import Config
from automodel_lite.data.loader import PackSource, TrainingPlan
from automodel_lite.data.packing.report import PackingReport
from automodel_lite.parallel.mesh import Mesh, MeshShape
from automodel_lite.training.build import BuiltModel

Line = tuple[str, str]


def version_line() -> Line:
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return "", f"automodel_lite {automodel_lite.__version__} ({versions})"


def plan_lines(report: PackingReport | None, plan: TrainingPlan, config: Config) -> list[Line]:
    """How the documents are packed, and how long the run is."""
    return [("packing", packing_text(report)), ("steps", steps_text(plan, report, warmup_steps(config)))]


def model_lines(config: Config, built: BuiltModel, mesh: Mesh) -> list[Line]:
    """What is trained, how, and what it takes."""
    return [
        ("device", _device(mesh, built)),
        ("model", _model(built)),
        *([("peft", built.adapter.description)] if built.adapter else []),
        ("attention", built.attention),
        *([("kernels", "deterministic: the same bits in each run")] if config.training.deterministic else []),
        *([("compile", built.compiled)] if built.compiled != "off" else []),
        ("optimizer", optimizer_text(config)),
        *([("average", average_text(config))] if config.training.ema_decay else []),
        ("memory", f"{built.memory}\n{built.reduction}".strip()),
    ]


def optimizer_text(config: Config) -> str:
    """`adamw (lr 1e-05, weight_decay 0.01), cosine (warmup_steps 20), gradients clipped to 1.0`, with all options."""
    max_norm = config.training.max_grad_norm
    clipping = f"gradients clipped to {max_norm}" if max_norm else "no clipping"
    return f"{text_of(config.optimizer)}, {text_of(config.lr_scheduler)}, {clipping}"


def average_text(config: Config) -> str:
    decay = config.training.ema_decay
    return f"of the weights of about {1 / (1 - decay):,.0f} steps (decay {decay}): validated, sampled and exported"


def data_lines(data: PackSource) -> list[Line]:
    """Where the documents are from, and what became of them."""
    return [("data", data.documents.description), *(("", note) for note in data.notes)]


def position_line(folder: str, checkpoint: Path | None, step: int, max_steps: int, save_every: int) -> str:
    """`runs/x: fresh, steps 1 to 200, next checkpoint after step 100`, or from where it goes on."""
    origin = f"continues from {checkpoint.name}" if checkpoint else "fresh"
    if step >= max_steps:
        return f"{folder}: {origin}"
    saved = min((step // save_every + 1) * save_every, max_steps) if save_every else max_steps
    return f"{folder}: {origin}, steps {step + 1} to {max_steps}, next checkpoint after step {saved}"


def _device(mesh: Mesh, built: BuiltModel) -> str:
    shape = mesh.shape
    processes = f"{shape.world_size} process{'es' if shape.world_size > 1 else ''}"
    name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    num_threads = torch.get_num_threads()
    each = " each" if shape.world_size > 1 else ""
    threads = f", {num_threads} thread{'s' if num_threads > 1 else ''}{each}" if mesh.device.type == "cpu" else ""
    return f"{name}: {processes} ({axes_text(shape)}, {built.strategy}){threads}"


def axes_text(shape: MeshShape) -> str:
    more = f" x tp {shape.tp}, ep {shape.ep}" if shape.tp * shape.ep > 1 else ""
    return f"dp_replicate {shape.dp_replicate} x dp_shard {shape.dp_shard} x cp {shape.cp}{more}"


def _model(built: BuiltModel) -> str:
    lm = built.model.loss_model.lm
    source = built.pretrained or "from scratch"
    dtype = str(built.model.compute_dtype).removeprefix("torch.")
    masters = f"frozen in {dtype}, adapter in fp32" if built.adapter else f"{built.masters} master weights"
    return (
        f"{lm.config.model_type} {source}: {count(built.num_parameters)} parameters, {dtype} compute, "
        f"{masters}, loss {built.loss}{_experts(lm)}"
    )


def _experts(lm: transformers.PreTrainedModel) -> str:
    """How a mixture's experts are computed; nothing for a dense model."""
    has_experts = any("Experts" in type(module).__name__ for module in lm.modules())
    return f", experts {lm.config.get_text_config()._experts_implementation}" if has_experts else ""


def count(number: float) -> str:
    """8.03 B, 124 M, 37.2 k."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:,.{0 if number >= 100 * size else 1 if number >= 10 * size else 2}f} {unit}"
    return f"{number:.0f}"


def packing_text(report: PackingReport | None) -> str:
    if report is None:
        return "while it is read: exact_fill over the next 256 documents"
    lines = [
        f"{report.strategy}: {report.packs:,} packs of {report.packed_sequence_size:,}, "
        f"{report.documents_per_pack_mean:.1f} documents per pack, fill {report.fill_frac:.1%} "
        f"(padded batches: {report.padded_fill_frac:.1%})"
    ]
    if report.dropped_documents:
        lines.append(f"dropped {report.dropped_documents:,} over-long documents, {report.dropped_tokens:,} tokens")
    if report.truncated_documents:
        lines.append(f"truncated {report.truncated_documents:,} documents by {report.cut_tokens:,} tokens")
    if report.split_documents:
        lines.append(f"split {report.split_documents:,} documents")
    if report.left_out_documents:
        lines.append(f"max_packs left out {report.left_out_documents:,} documents, {report.left_out_tokens:,} tokens")
    if report.imbalance_before and report.imbalance_after:
        lines.append(
            f"slowest rank {report.imbalance_before:.3f} x the mean, {report.imbalance_after:.3f} x balanced by "
            f"{report.balance}"
        )
    return "\n".join([*lines, *([report.note] if report.note else [])])


def warmup_steps(config: Config) -> int:
    """0 for a schedule without a warm-up."""
    schedule = config.lr_scheduler
    return int(schedule["warmup_steps"]) if "warmup_steps" in schedule else 0


def steps_text(plan: TrainingPlan, report: PackingReport | None, num_warmup: int) -> str:
    """How long the run is, and a hint where it is too short to learn."""
    shape = plan.shape
    epochs = f" = {plan.num_epochs:.1f} epochs of {plan.steps_per_epoch:,}" if plan.num_epochs else " of a stream"
    num_packs = min(shape.global_batch_size, report.packs) if report else shape.global_batch_size
    documents = f" (about {report.documents_per_pack_mean * num_packs:,.0f} documents)" if report else ""
    packs = f"{shape.global_batch_size} pack{'s' if shape.global_batch_size > 1 else ''}"
    lines = [
        f"{plan.max_steps:,}{epochs}; a step is {packs}{documents} in micro-batches of "
        f"{shape.micro_batch_size} on {shape.dp_size} data-parallel rank{'s' if shape.dp_size > 1 else ''}"
    ]
    if report and report.packs < shape.global_batch_size:
        lines.append(
            f"NOTE: the data are {report.packs:,} packs, fewer than a step takes: lower "
            "packed_sequence.packed_sequence_size or training.global_batch_size for more steps"
        )
    if plan.max_steps <= num_warmup:
        lines.append(f"NOTE: the run ends within its warm-up: lower lr_scheduler.warmup_steps={num_warmup}")
    return "\n".join(lines)
