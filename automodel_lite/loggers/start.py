"""The block that a run prints before its first step."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

import automodel_lite
from automodel_lite.config import Config
from automodel_lite.distributed.mesh import Mesh
from automodel_lite.models.build import BuiltModel
from automodel_lite.training.pack_order import BatchShape
from automodel_lite.training.plan import TrainingPlan
from automodel_lite.training.prepare import PreparedData

Line = tuple[str, str]


def start_lines(
    config: Config, data: PreparedData, built: BuiltModel, mesh: Mesh, plan: TrainingPlan, shape: BatchShape
) -> list[Line]:
    """(topic, text) of each line: what was built, and why so."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return [
        ("", f"automodel_lite {automodel_lite.__version__} ({versions})"),
        ("device", _device(mesh, built)),
        ("model", _model(config, built)),
        ("attention", built.attention),
        ("data", data.documents.description),
        *(("", note) for note in data.tokens.notes),
        ("steps", _steps(plan, shape, data)),
    ]


def position_line(folder: Path, checkpoint: Path | None, step: int, max_steps: int) -> str:
    """`runs/x: fresh`, or from where it goes on."""
    origin = f"continues from {checkpoint.name}" if checkpoint else "fresh"
    return f"{folder}: {origin}, steps {step + 1} to {max_steps}" if step < max_steps else f"{folder}: {origin}"


def _device(mesh: Mesh, built: BuiltModel) -> str:
    shape = mesh.shape
    processes = f"{shape.world_size} process{'es' if shape.world_size > 1 else ''}"
    name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    axes = f"dp_replicate {shape.dp_replicate} x dp_shard {shape.dp_shard} x cp {shape.cp}, {built.strategy}"
    threads = f", {torch.get_num_threads()} threads each" if mesh.device.type == "cpu" else ""
    return f"{name}: {processes} ({axes}){threads}"


def _model(config: Config, built: BuiltModel) -> str:
    lm = built.model.loss_model.lm
    source = config.model["pretrained"] or "from scratch"
    dtype = str(built.model.compute_dtype).removeprefix("torch.")
    return (
        f"{lm.config.model_type} {source}: {built.num_parameters / 1e6:,.1f} M parameters, {dtype} compute, "
        f"fp32 master weights, loss {built.loss}"
    )


def _steps(plan: TrainingPlan, shape: BatchShape, data: PreparedData) -> str:
    packs = data.packs_of(0)
    num_documents = len(packs.plan.doc_ids) / max(len(packs), 1) * shape.global_batch_size
    return (
        f"{plan.max_steps:,} = {plan.num_epochs:.1f} epochs of {plan.steps_per_epoch:,}; a step is "
        f"{shape.global_batch_size} packs (about {num_documents:,.0f} documents) in micro-batches of "
        f"{shape.micro_batch_size} on {shape.dp_size} data-parallel rank{'s' if shape.dp_size > 1 else ''}"
    )
