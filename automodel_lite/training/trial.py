"""What could only fail later is tried at the start, on twins that cost nothing.

The model is described by its config on the meta device, where it has shapes and no weights, and run on a few tokens;
the optimizer gets two parameters and makes one step; the schedule is asked for every part of its course.
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
from automodel_lite.errors import ConfigError
from automodel_lite.models.source import CausalLM, cannot_work
from automodel_lite.parallel.sharding import choose_precision
from automodel_lite.training.optimizers import SmallAdamW

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


def try_settings(config: Config, source: CausalLM) -> None:
    """Raises one ConfigError with a line per part of the configuration that cannot work; nothing is loaded."""
    problems = []
    if config.hub.push and not config.checkpoint.export_hf:
        problems.append(f"hub.push={config.hub.push} uploads what checkpoint.export_hf=false does not write.")
    for attempt in (lambda: try_model(source), lambda: try_optimizer(config), lambda: check_master_weights(config)):
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


def check_master_weights(config: Config) -> None:
    """Raises ConfigError for weights in bf16 where they would not learn, or nothing is saved."""
    training, what = config.training, f"training.master_weights={config.training.master_weights}"
    if training.master_weights == "fp32":
        return
    optimizer = build(config.optimizer, Twin())
    if type(optimizer) is not SmallAdamW:
        raise ConfigError(
            f"{what} with {type(optimizer).__name__} loses every change of less than 1/256 of a weight: set "
            "optimizer=adamw_bf16 or optimizer=adamw_8bit, which round by chance."
        )
    if config.peft:
        raise ConfigError(f"{what} with peft: the few weights of an adapter stay in fp32; set it to fp32.")
    if config.mesh.strategy == "ddp":
        raise ConfigError(f"{what} with mesh.strategy=ddp would add gradients up in bf16: use mesh.strategy=fsdp.")
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
        raise ConfigError(f"optimizer or lr_scheduler: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(scheduler, LambdaLR):
        raise ConfigError(
            f"lr_scheduler gives a {type(scheduler).__name__}: a torch.optim.lr_scheduler.LambdaLR is needed, with "
            "no state but its step."
        )
    for step in sorted({0, 1, steps // 2, steps - 1, steps}):
        rates = [base * frac(step) for base, frac in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise ConfigError(f"lr_scheduler gives a learning rate of {rates[0]} at step {step} of {steps}.")
