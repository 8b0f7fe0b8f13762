"""Before the first step: the model tried without weights, and the block that a run prints.

`try_settings` runs first in every run: the model is described by its config on the meta device,
where it has shapes and no weights, and run on a few tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from torch import nn

from automodel_lite.config.components import locate, text_of
from automodel_lite.config.schema import Config, TrainingConfig
from automodel_lite.config.sizes import LEAST_STEPS
from automodel_lite.data.feeding.source import PackSource, TrainingPlan
from automodel_lite.data.packing.report import PackingReport
from automodel_lite.errors import ConfigError
from automodel_lite.models.settings import cannot_work
from automodel_lite.models.source import CausalLM, describe
from automodel_lite.parallel.mesh import (
    Mesh,
    init_mesh,
    threads_of,
)
from automodel_lite.run.checkpoint_folder import exported_folder
from automodel_lite.seed import use_deterministic
from automodel_lite.telemetry.console import Console
from automodel_lite.telemetry.metrics import STARTUP
from automodel_lite.training.build import BuiltModel
from automodel_lite.training.guards import Guards
from automodel_lite.training.plan import (
    AUTO,
    Decided,
    Parts,
    build_parts,
    check_parts,
)
from automodel_lite.training.schedules import num_warmup
from automodel_lite.version import __version__

AUTO_SETTINGS = "automodel_lite.parts.auto.resolve_auto"


def resolve_auto(config: Config, console: Console | None = None, has_data: bool = True) -> Config:
    """Returns the configuration with a number in place of each `auto` (parts/auto.py), which every
    program asks for first.

    has_data  False: rows come later, from memory
    """
    open_settings = (config.packed_sequence.get("packed_sequence_size"), config.optimizer.get("lr"))
    if AUTO not in open_settings and config.training.micro_batch_size:
        return config
    return locate(AUTO_SETTINGS)(config, console or Console(), has_data)


NUM_TOKENS = 4
_SHAPES = re.compile(
    r"reduction dim|must match the size|is invalid for input|cannot be multiplied|broadcast"
    r"|mismatch"
)
"""Errors of shapes. Others may be the meta device's own: it has no experts in fp32, no values to
look at.
"""


def checked_parts(config: Config) -> Parts:
    """Builds the parts of the configuration, and tries them; raises ConfigError."""
    parts = build_parts(config)
    try_settings(config, parts)
    return parts


def try_settings(config: Config, parts: Parts) -> None:
    """Raises one ConfigError with a line per part of the configuration that cannot work; nothing is
    loaded.
    """
    problems = []
    strategy = "fsdp" if parts.mesh.strategy == "auto" else parts.mesh.strategy
    if config.hub.push and not config.checkpoint.export_hf:
        problems.append(
            f"hub.push={config.hub.push} uploads what checkpoint.export_hf=false does not write."
        )
    for attempt in (
        lambda: build_on_meta(parts.model),
        # a missing argument is named before the weights are read
        lambda: parts.optimizer(nn.Linear(2, 2)),
        lambda: check_parts(parts, strategy, default_device()),
    ):
        try:
            attempt()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def build_on_meta(source: CausalLM) -> None:
    """Builds the model without weights and, where settings change it, runs it.

    Raises ConfigError when a model of this config cannot be built or run. What the meta device
    cannot do (kernels of other packages, sizes that depend on values) is left to the real model.
    """
    if source.pretrained and not source.overrides:
        return  # its makers have run it
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="meta")
    # one that is made from ids looks at values
    mask = torch.zeros(1, 1, NUM_TOKENS, NUM_TOKENS, device="meta")
    lm = None
    config = source.resolve_model_config({"vocab_size": 64})
    try:
        lm = describe(config).eval()
        with torch.no_grad():
            lm(input_ids=ids, attention_mask=mask, use_cache=False)
    except Exception as error:  # a model's code may raise anything
        if lm is None or not isinstance(error, RuntimeError) or _SHAPES.search(str(error)):
            raise cannot_work(error, source.overrides) from error


def from_run(config: Config) -> Config:
    """Replaces a run's folder in model.pretrained by what that run has exported: its model, or its
    adapter and base.

    Raises ConfigError for a run without an export, and for an adapter that nothing continues.
    """
    pretrained = config.model.get("pretrained")
    folder = exported_folder(pretrained) if pretrained else None
    if not pretrained or not folder or Path(folder) == Path(pretrained).expanduser():
        return config
    tokenizer = {
        key: folder if value == pretrained else value for key, value in config.tokenizer.items()
    }
    model = folder
    peft = config.peft
    settings = Path(folder) / "adapter_config.json"
    if settings.is_file():
        if not peft:
            raise ConfigError(
                f"model.pretrained={pretrained} holds an adapter: peft=lora continues it; to train "
                "the whole model, automodel-lite export merges it into its base first."
            )
        model = json.loads(settings.read_text())["base_model_name_or_path"]
        peft = peft | {"adapter": peft.get("adapter") or folder}
    return replace(
        config, model=config.model | {"pretrained": model}, tokenizer=tokenizer, peft=peft
    )


def open_world(config: Config) -> Mesh:
    """Opens the groups of ranks, and prepares this process; every rank calls it, once its data is
    there: ranks of a group wait only so long for each other.
    """
    mesh = init_mesh(config.mesh)
    STARTUP.lap("groups")
    prepare_process(config.training)
    return mesh


def prepare_process(config: TrainingConfig) -> None:
    """Threads and kernels of this process, before the first kernel runs, after its
    groups are open.
    """
    torch.set_num_threads(threads_of(config.num_threads)[0])
    use_deterministic(config.deterministic)
    if config.tf32:
        torch.set_float32_matmul_precision("high")


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
            f"{report.strategy}: {report.packs:,} packs of {report.packed_sequence_size:,}, "
            f"{report.documents_per_pack_mean:.1f} documents per pack, fill {report.fill_frac:.1%} "
            f"(padded batches: {report.padded_fill_frac:.1%})"
        )
        packing = "\n".join([head, *(f"{topic} {text}" for topic, text in report.remarks())])
    schedule = config.lr_scheduler  # one without a warm-up has neither
    num_warmup_steps = num_warmup(
        schedule.get("warmup_steps", 0), schedule.get("warmup_frac", 0.0), plan.max_steps
    )
    lines = steps_text(plan, report, num_warmup_steps)
    if config.training.max_steps is None and plan.max_steps < LEAST_STEPS:
        lines += (
            f"\nNOTE: {plan.max_steps} steps are few to learn from: {LEAST_STEPS} or more need a "
            "larger training.num_epochs, or more data"
        )
    every = config.training.val_every_steps
    if every and not data.val_packs and not config.samples.prompts:
        lines += (
            f"\nNOTE: training.val_every_steps={every} has nothing to validate on: hold out a "
            "part, dataset.val_frac=0.05, or name a file, dataset.val_path=..."
        )
    if config.training.global_batch_size == "auto":
        lines += (
            f"\ntraining.global_batch_size=auto: {plan.shape.global_batch_size}, and "
            f"{num_warmup_steps:,} of warm-up"
        )
    return [("packing", packing), ("steps", lines)]


def model_lines(config: Config, built: BuiltModel, mesh: Mesh) -> list[Line]:
    """What is trained, how, and what it takes."""
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
        lines.append(("peft", built.adapter.description))
    lines.append(("attention", built.attention))
    if training.deterministic:
        lines.append(("kernels", "deterministic: the same bits in each run"))
    if built.compiled != "off":
        lines.append(("compile", built.compiled))
    max_norm = training.max_grad_norm
    clipping = f"gradients clipped to {max_norm}" if max_norm else "no clipping"
    learning = f"{text_of(config.optimizer)}, {text_of(config.lr_scheduler)}, {clipping}"
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
    if any("Experts" in type(module).__name__ for module in lm.modules()):
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


def steps_text(plan: TrainingPlan, report: PackingReport | None, num_warmup: int) -> str:
    """How long the run is, and a hint where it is too short to learn."""
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
    packs = f"{shape.global_batch_size} pack{'s' if shape.global_batch_size > 1 else ''}"
    lines = [
        f"{plan.max_steps:,}{epochs}; a step is {packs}{documents} in micro-batches of "
        f"{shape.micro_batch_size} on {shape.dp_size} data-parallel "
        f"rank{'s' if shape.dp_size > 1 else ''}"
    ]
    if report and report.packs < shape.global_batch_size:
        lines.append(
            f"NOTE: the data are {report.packs:,} packs, fewer than a step takes: lower "
            "packed_sequence.packed_sequence_size or training.global_batch_size for more steps"
        )
    if plan.max_steps <= num_warmup:
        lines.append(
            f"NOTE: the run ends within its warm-up: lower lr_scheduler.warmup_steps={num_warmup}"
        )
    return "\n".join(lines)
