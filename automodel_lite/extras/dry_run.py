"""`dry_run=true` reports everything that is known of a run without training it.

The data is read and tokenized (the cache is kept for the run), packs are planned, the kernel is
chosen and checked, parameters are counted on the meta device, and a step of rank 0 is run under
fake tensors. No weights are loaded, nothing stays in the run's folder. One process answers for
any mesh: set mesh.dp_shard to the processes meant.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from automodel_lite.config.schema import Config
from automodel_lite.data.prepare import check_sizes, prepare_data
from automodel_lite.errors import explained, one_line
from automodel_lite.extras.asking import open_tasks
from automodel_lite.extras.plan import choose_recomputation
from automodel_lite.extras.plan.capacity import GPUS_GB, PLANNED_GPU, usable
from automodel_lite.extras.plan.heaviest import heaviest_batch
from automodel_lite.models.flops import cost_model
from automodel_lite.models.freezing import freeze_named
from automodel_lite.models.layers import freeze_towers
from automodel_lite.models.source import describe
from automodel_lite.parallel.mesh import rank
from automodel_lite.parts.images import images_lines
from automodel_lite.parts.losses import label_values
from automodel_lite.progress import activity
from automodel_lite.results import RESULTS
from automodel_lite.telemetry.console import Console
from automodel_lite.thd import ThdBatch
from automodel_lite.training.beyond_plan import check_keep_best
from automodel_lite.training.classes import with_classes
from automodel_lite.training.decide import (
    adapter_weights,
    check_positions,
    check_same_vocabulary,
    decide,
)
from automodel_lite.training.evaluation import check_held_out
from automodel_lite.training.memory import (
    estimate_memory,
    gpu_bytes,
    out_of_memory_text,
)
from automodel_lite.training.resolve import shape_of_dry_run
from automodel_lite.training.rules import checked_parts
from automodel_lite.training.settings import Decided
from automodel_lite.training.summary import (
    count,
    data_lines,
    plan_lines,
    processes_text,
    recomputation_lines,
)
from automodel_lite.training.world import default_device


def dry_run(config: Config) -> int:
    """Prints the findings on rank 0 and returns 0; raises ConfigError or DataError as the run
    would.
    """
    console = Console(is_silent=rank() != 0)
    check_writable(Path(config.output_dir))
    device = default_device()
    shape = shape_of_dry_run(config.mesh)
    parts = checked_parts(config)
    data = prepare_data(config, check_sizes(config, shape.world_size), parts.packer)
    check_held_out(config, data)
    parts = with_classes(parts, data)
    label_values.check_loss(data, parts.loss)
    plan = data.plan(config.training)
    check_keep_best(config, plan.max_steps)
    model_config = parts.model.config(data.tokenizer)
    open_tasks(config, data.tokenizer, model_config)
    check_positions(data, parts.model, parts.teacher)
    report = data.report(cost_model(model_config))
    parts = replace(parts, data=data)
    made = decide(
        parts,
        data.tokenizer,
        shape,
        device,
        gpu_bytes(device) or PLANNED_GPU,
        recompute=choose_recomputation,
    )
    if made.of_teacher:
        check_same_vocabulary(made.of_teacher, data.tokenizer)
    adapter = adapter_weights(made, device)
    name = str(made.dtype).removeprefix("torch.")
    num_trained, trained = what_is_trained(made, adapter)
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
        *plan_lines(report, plan, config, data),
    ]
    for topic, text in lines:
        console.say(topic, text)
    estimate = estimate_memory(made, adapter, num_trained if made.model.freeze else None)
    RESULTS.update(
        data.counts,
        parameters=made.size.parameters,
        trained_parameters=num_trained,
        processes=asdict(shape),
        packing=report and asdict(report),
        max_steps=plan.max_steps,
        steps_per_epoch=plan.steps_per_epoch,
        batch=asdict(plan.shape),
        estimated_bytes=asdict(estimate) | {"total": estimate.total},
    )
    by_arithmetic = f"{estimate}\n{made.reduction_text}".strip()
    console.say("memory", _memory(made, by_arithmetic, heaviest_batch(made)))
    console.print(
        "dry run: the settings, the data and the model fit together; nothing was trained or written"
    )
    return 0


def check_writable(folder: Path) -> None:
    """Raises ConfigError unless the run could write its folder: an empty one is made and removed
    beside it, or in the closest folder that exists.
    """
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    sentence = f"output_dir={folder} cannot be written in {there}"
    with (
        explained(sentence, cure="choose another with output_dir=... "),
        TemporaryDirectory(prefix=".dry_run_", dir=there),
    ):
        pass


def what_is_trained(decided: Decided, adapter: int | None) -> tuple[int, str]:
    """Returns how many parameters are trained, and says so."""
    if adapter is not None:
        return adapter, f"frozen, {count(adapter)} of the adapter trained"
    size = decided.size
    source = decided.model
    left_out = [*source.freeze]
    if size.towers and not source.train_towers:
        left_out.append("the towers")
    if not left_out:
        return size.parameters, "all trained"
    lm = describe(decided.config)
    source.add_heads(lm)
    if not source.train_towers:
        freeze_towers(lm, lm.dtype)
    freeze_named(lm, source.freeze)
    trained = sum(p.numel() for p in lm.parameters() if p.requires_grad)
    return trained, f"{count(trained)} trained, not {', '.join(left_out)}"


def _memory(decided: Decided, by_arithmetic: str, batch: ThdBatch | None) -> str:
    """What rank 0 of the requested world would hold and send on GPUs, counted by running it under
    fake tensors, which GPU it fits, and what to change when it fits none.
    """
    # with fake tensors, 800 modules
    from automodel_lite.extras.plan.simulation import simulate

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
