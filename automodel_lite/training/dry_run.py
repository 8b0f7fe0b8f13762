"""`dry_run=true`: reports everything that is known of a run without training it.

The data is read and tokenized (the cache is kept for the run), packs are planned, the kernel is chosen and checked,
parameters are counted on the meta device, and a step of rank 0 is run under fake tensors. No weights are loaded,
nothing is written to the run's folder. One process answers for any mesh: set mesh.dp_shard to the processes meant.

`try_settings` runs first in every run: what could only fail later is tried on stand-ins that cost nothing. The
model is described by its config on the meta device, where it has shapes and no weights, and run on a few tokens; the
optimizer gets two parameters and makes one step; the schedule is evaluated along its course.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PretrainedConfig

from automodel_lite.config.components import build
from automodel_lite.config.schema import Config
from automodel_lite.data.loader import batch_shape
from automodel_lite.data.prepare import prepare_data
from automodel_lite.errors import ConfigError, one_line
from automodel_lite.models.flops import cost_model, model_size
from automodel_lite.models.source import CausalLM, cannot_work, describe
from automodel_lite.parallel.mesh import MeshShape, mesh_shape, rank, world_size
from automodel_lite.parallel.sharding import choose_precision, choose_strategy
from automodel_lite.progress import activity
from automodel_lite.telemetry.console import Console
from automodel_lite.training.build import Parts, build_parts, check_axes, choose_attention, with_exchange
from automodel_lite.training.memory import gpu_bytes, out_of_memory_text, plan_memory
from automodel_lite.training.optimizers import SmallAdamW
from automodel_lite.training.start_lines import axes_text, count, data_lines, packing_text, steps_text, warmup_steps


def dry_run(config: Config) -> int:
    """Prints the findings on rank 0 and returns 0; raises ConfigError or DataError as the run would."""
    console = Console(is_silent=rank() != 0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = planned_shape(config)
    parts = build_parts(config)
    try_settings(config, parts)
    data = prepare_data(config, batch_shape(config.training, shape.dp))
    plan = data.plan(config.training)
    model_config = parts.model.config(data.tokenizer)
    strategy = choose_strategy(config.mesh.strategy, shape, device.type == "cuda", parts.is_quantized)
    check_axes(parts, strategy)
    dtype = choose_precision(config.training.precision, device)
    kernel, attention = choose_attention(parts, model_config, device, dtype)
    report = data.report(cost_model(model_config))
    parts, exchange = with_exchange(parts, model_config, kernel, device, dtype, report.mean_tokens if report else None)
    adapter = _adapter_weights(parts, model_config, device, strategy)
    size = model_size(model_config)
    memory, reduction = plan_memory(parts, shape, strategy, model_config, size, adapter, dtype, gpu_bytes(device))
    name = str(dtype).removeprefix("torch.")
    trained = "all trained" if adapter is None else f"frozen, {count(adapter)} of the adapter trained"
    console.say(
        "device", f"{device.type}, {shape.world_size} process(es) ({axes_text(shape)}, {strategy}), {name} compute"
    )
    console.say("model", f"{model_config.model_type}: {count(size.parameters)} parameters, {trained}")
    console.say("attention", f"{attention}\n{exchange}" if exchange else attention)
    for topic, text in data_lines(data):
        console.say(topic, text)
    console.say("packing", packing_text(report))
    console.say("steps", steps_text(plan, report, warmup_steps(config)))
    by_arithmetic = f"{memory}\n{reduction}".strip()
    console.say("memory", _memory(parts, model_config, shape, by_arithmetic, bool(reduction)))
    console.print("dry run: the settings, the data and the model fit together; nothing was trained or written")
    return 0


def _memory(
    parts: Parts, model_config: PretrainedConfig, shape: MeshShape, by_arithmetic: str, reduces_every: bool
) -> str:
    """What rank 0 of the requested world would hold and send on GPUs, counted by running it under fake tensors, which
    GPU it fits, and what to change when it fits none.
    """
    if rank() != 0:
        return ""
    strategy = choose_strategy(parts.mesh.strategy, shape, is_gpu=True, is_quantized=parts.is_quantized)
    if parts.peft and strategy != "fsdp":
        return by_arithmetic
    from automodel_lite.training.simulation import GPUS_GB, SLACK, simulate  # a run that trains has no use for it

    try:
        with activity(f"simulating a step of {shape.world_size} ranks"):
            found = simulate(parts, model_config, shape, reduces_every, strategy)
    except (RuntimeError, NotImplementedError) as error:
        return f"{by_arithmetic}\nnot simulated: this model needs values ({type(error).__name__})"
    available = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else GPUS_GB[-1] * 10**9
    cure = "" if found.peak + SLACK <= available else f"\n{out_of_memory_text(parts, None)}"
    return f"rank 0 of {shape.world_size}, simulated: {found}{cure}"


def planned_shape(config: Config) -> MeshShape:
    """The mesh of the processes that run; in a single one, the requested mesh."""
    mesh = config.mesh
    requested = mesh.dp_replicate * max(mesh.dp_shard, 1) * mesh.cp * mesh.tp
    return mesh_shape(mesh, world_size() if world_size() > 1 else requested)


def _adapter_weights(parts: Parts, model_config: PretrainedConfig, device: torch.device, strategy: str) -> int | None:
    """Counted on the meta device; None when the model itself is trained."""
    if parts.peft is None:
        return None
    parts.peft.check(device, strategy, parts.model.pretrained)
    lm = describe(model_config)
    with torch.device("meta"):
        parts.peft.adapt(lm, str(parts.model.pretrained))
    return sum(p.numel() for p in lm.parameters() if p.requires_grad)


NUM_TOKENS = 4
_SHAPES = re.compile(r"reduction dim|must match the size|is invalid for input|cannot be multiplied|broadcast|mismatch")
"""Errors of shapes. Others may be the meta device's own: it has no experts in fp32, no values to look at."""
FALLBACK_STEPS = 1000  # of a run whose length is not known yet


class Twin(nn.Module):
    """Stands for a model: a matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.bias = nn.Parameter(torch.ones(2))


def try_settings(config: Config, parts: Parts) -> None:
    """Raises one ConfigError with a line per part of the configuration that cannot work; nothing is loaded."""
    problems = []
    if config.hub.push and not config.checkpoint.export_hf:
        problems.append(f"hub.push={config.hub.push} uploads what checkpoint.export_hf=false does not write.")
    for attempt in (
        lambda: try_model(parts.model),
        lambda: try_optimizer(config),
        lambda: check_master_weights(parts),
    ):
        try:
            attempt()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def try_model(source: CausalLM) -> None:
    """Builds the model without weights and, where settings change it, runs it.

    Raises ConfigError when a model of this config cannot be built or run. What the meta device cannot do (kernels of
    other packages, sizes that depend on values) is left to the real model.
    """
    if source.pretrained and not source.overrides:
        return  # its makers have run it
    config = source.described({"vocab_size": 64})
    lm = _or_config_error(source, lambda: _on_meta(config, source))
    if lm is not None:
        _or_config_error(source, lambda: _run_on_meta(lm))


def _on_meta(config: PretrainedConfig, source: CausalLM) -> transformers.PreTrainedModel | None:
    with torch.device("meta"):
        lm: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
            config, trust_remote_code=source.source["trust_remote_code"]
        )
    return lm


def _run_on_meta(lm: transformers.PreTrainedModel) -> None:
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="meta")
    mask = torch.zeros(1, 1, NUM_TOKENS, NUM_TOKENS, device="meta")  # one that is made from ids looks at values
    try:
        with torch.no_grad():
            lm.eval()(input_ids=ids, attention_mask=mask, use_cache=False)
    except (RuntimeError, NotImplementedError) as error:
        if _SHAPES.search(str(error)):
            raise


def _or_config_error(source: CausalLM, attempt: Callable[[], Any]) -> Any:
    try:
        return attempt()
    except Exception as error:  # a model's code may raise anything
        raise cannot_work(error, source.overrides) from error


def check_master_weights(parts: Parts) -> None:
    """Raises ConfigError for weights in bf16 where they would not learn, or nothing is saved."""
    training, what = parts.training, f"training.master_weights={parts.training.master_weights}"
    if training.master_weights == "fp32":
        return
    optimizer = parts.optimizer(Twin())
    if type(optimizer) is not SmallAdamW:
        raise ConfigError(
            f"{what} with {type(optimizer).__name__} loses every update smaller than 1/256 of the weight: set "
            "optimizer=adamw_bf16 or optimizer=adamw_8bit, which use stochastic rounding."
        )
    if parts.peft:
        raise ConfigError(f"{what} with peft: the few weights of an adapter stay in fp32; set it to fp32.")
    if parts.mesh.strategy == "ddp":
        raise ConfigError(f"{what} with mesh.strategy=ddp would accumulate gradients in bf16: use mesh.strategy=fsdp.")
    if choose_precision(training.precision, default_device()) != torch.bfloat16:
        raise ConfigError(f"{what} computes in bf16: set training.precision=bf16, not {training.precision}.")


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def try_optimizer(config: Config) -> None:
    """One step of the optimizer on a twin, and the whole course of its schedule.

    Raises ConfigError for an argument that either refuses, and for a rate that is not a number or below 0.
    """
    twin = Twin()
    steps = config.training.max_steps or FALLBACK_STEPS
    try:
        optimizer: torch.optim.Optimizer = build(config.optimizer, twin)
        scheduler = build(config.lr_scheduler, optimizer, max_steps=steps)
    except ConfigError:
        raise
    except Exception as error:  # the user's own class may raise anything
        raise ConfigError(f"optimizer or lr_scheduler: {one_line(error)}") from error
    if not isinstance(scheduler, LambdaLR):
        raise ConfigError(
            f"lr_scheduler gives a {type(scheduler).__name__}: a torch.optim.lr_scheduler.LambdaLR is needed, with "
            "no state but its step."
        )
    for step in sorted({0, 1, steps // 2, steps - 1, steps}):
        rates = [base * frac(step) for base, frac in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise ConfigError(f"lr_scheduler gives a learning rate of {rates[0]} at step {step} of {steps}.")
