"""`dry_run=true` reports everything that is known of a run without training it.

The data is read and tokenized (the cache is kept for the run), packs are planned, the kernel is
chosen and checked, parameters are counted on the meta device, and a step of rank 0 is run under
fake tensors. No weights are loaded, nothing is written to the run's folder. One process answers for
any mesh: set mesh.dp_shard to the processes meant.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import torch

from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.planned import PlannedPacks
from automodel_lite.data.feeding.source import PackSource
from automodel_lite.data.packing.packs import join_packs
from automodel_lite.data.prepare import check_positions, check_sizes, prepare_data
from automodel_lite.errors import one_line
from automodel_lite.extras.plan.simulation import simulate
from automodel_lite.models.flops import cost_model
from automodel_lite.parallel.mesh import mesh_shape, rank, world_size
from automodel_lite.parts.images import images_lines
from automodel_lite.progress import activity
from automodel_lite.results import RESULTS
from automodel_lite.telemetry.console import Console
from automodel_lite.thd import ThdBatch, to_thd
from automodel_lite.training.decide import adapter_weights, decide
from automodel_lite.training.evaluation import check_held_out
from automodel_lite.training.memory import (
    GPUS_GB,
    PLANNED_GPU,
    estimate_memory,
    gpu_bytes,
    out_of_memory_text,
    usable,
)
from automodel_lite.training.plan import Decided, Parts
from automodel_lite.training.start import (
    checked_parts,
    count,
    data_lines,
    default_device,
    plan_lines,
    processes_text,
    recomputation_lines,
)


def dry_run(config: Config) -> int:
    """Prints the findings on rank 0 and returns 0; raises ConfigError or DataError as the run
    would.
    """
    console = Console(is_silent=rank() != 0)
    device = default_device()
    mesh = config.mesh
    requested = mesh.dp_replicate * max(mesh.dp_shard, 1) * mesh.cp * mesh.tp
    # one process answers for any mesh
    shape = mesh_shape(mesh, world_size() if world_size() > 1 else requested)
    parts = checked_parts(config)
    data = prepare_data(config, check_sizes(config, shape.world_size), parts.packer)
    check_held_out(config, data)
    plan = data.plan(config.training)
    model_config = parts.model.config(data.tokenizer)
    check_positions(data, parts.model, parts.teacher)
    report = data.report(cost_model(model_config))
    made = decide(parts, data.tokenizer, shape, device, gpu_bytes(device) or PLANNED_GPU)
    adapter = adapter_weights(made, device)
    name = str(made.dtype).removeprefix("torch.")
    trained = (
        "all trained" if adapter is None else f"frozen, {count(adapter)} of the adapter trained"
    )
    lines = [("device", f"{device.type}: {processes_text(made)}, {name} compute")]
    if device.type == "cpu":
        lines.append(("", "this machine has no GPU: recomputation and memory are those of GPUs"))
    lines += [
        (
            "model",
            f"{model_config.model_type}: {count(made.size.parameters)} parameters, {trained}",
        ),
        ("attention", made.attention_text),
        *recomputation_lines(made),
        *data_lines(data),
        *images_lines(data),
        *plan_lines(report, plan, config),
    ]
    for topic, text in lines:
        console.say(topic, text)
    estimate = estimate_memory(made, adapter)
    RESULTS.update(
        data.counts,
        parameters=made.size.parameters,
        trained_parameters=made.size.parameters if adapter is None else adapter,
        processes=asdict(shape),
        packing=report and asdict(report),
        max_steps=plan.max_steps,
        steps_per_epoch=plan.steps_per_epoch,
        batch=asdict(plan.shape),
        estimated_bytes=asdict(estimate) | {"total": estimate.total},
    )
    by_arithmetic = f"{estimate}\n{made.reduction_text}".strip()
    batch = most_work_of_towers(data, parts) or most_branched(data, parts)
    console.say("memory", _memory(made, by_arithmetic, batch))
    console.print(
        "dry run: the settings, the data and the model fit together; nothing was trained or written"
    )
    return 0


MOST_PACKS = 64
"""Of the first epoch, among which the one with the longest paths is looked for."""


def most_branched(data: PackSource, parts: Parts) -> ThdBatch | None:
    """Returns the micro-batch whose trees have the most keys, every token labeled, with ids of 0;
    None where nothing branches, and of a stream, whose packs are not known.
    """
    if not isinstance(data, PlannedPacks) or not data.has_trees:
        return None
    packs = data.packs_of(0)
    size = parts.training.micro_batch_size
    batches = (to_thd(join_packs([packs[i]] * size)) for i in range(min(len(packs), MOST_PACKS)))
    batch = max(batches, key=lambda batch: int(batch.attention.segments.cu_k[-1]))
    ids = torch.zeros_like(batch.input_ids)
    return all_labeled(replace(batch, input_ids=ids, columns={}), parts)


def most_work_of_towers(data: PackSource, parts: Parts) -> ThdBatch | None:
    """Returns the micro-batch of the first epoch's packs whose images are the most work, every
    token labeled; None where no document has one.
    """
    if not isinstance(data, PlannedPacks):
        return None
    packs = data.packs_of(0)
    work = np.zeros(len(packs)) + packs.tower_flops()
    if not work.any():
        return None
    most = np.argsort(work, kind="stable")[-parts.training.micro_batch_size :]
    batch = to_thd(packs.__getitems__(most.tolist()).row)
    return all_labeled(batch, parts)


def all_labeled(batch: ThdBatch, parts: Parts) -> ThdBatch:
    """Returns the batch with a label at each token, and what the loss asks for."""
    ids = torch.zeros_like(batch.input_ids)
    batch = replace(batch, labels=ids, label_rows=torch.arange(len(ids)))
    return replace(batch, columns=batch.columns | parts.loss.example_columns(batch))


def _memory(decided: Decided, by_arithmetic: str, batch: ThdBatch | None) -> str:
    """What rank 0 of the requested world would hold and send on GPUs, counted by running it under
    fake tensors, which GPU it fits, and what to change when it fits none.
    """
    if rank() != 0:
        return ""
    num_ranks = decided.shape.world_size
    try:
        with activity(f"simulating a step of {num_ranks} ranks"):
            found = simulate(decided, decided.config, decided.shape, batch)
    except NotImplementedError as error:
        return f"{by_arithmetic}\nnot simulated: {one_line(error, 100)}"
    RESULTS.update(
        peak_bytes=found.peak,
        peaks_bytes=found.peaks,
        weights_bytes=found.weights,
        gradients_bytes=found.gradients,
        optimizer_bytes=found.optimizer,
        sent_bytes=found.sent,
    )
    available = gpu_bytes(default_device()) or GPUS_GB[-1] * 10**9
    cure = "" if found.peak <= usable(available) else f"\n{out_of_memory_text(decided)}"
    of = ""
    if batch is not None:
        of = ", with its most images" if batch.images else ", with the keys of its trees"
    return f"rank 0 of {num_ranks}, simulated{of}: {found}{cure}"
