"""What does not work together: one ConfigError with a line for each, before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import transformers
from torch import nn

from automodel_lite.config.components import missing_package
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError
from automodel_lite.models.settings import cannot_work
from automodel_lite.models.source import CausalLM, describe
from automodel_lite.parallel.sharding import choose_precision
from automodel_lite.training.settings import Parts, build_parts
from automodel_lite.training.world import default_device

if TYPE_CHECKING:
    pass  # which brings peft


def check_parts(parts: Parts, strategy: str, device: torch.device) -> None:
    """Raises ConfigError with a line for each of the combinations that do not work."""
    problems = [*_axes_rules(parts, strategy), *_compile_rules(parts), *_fp8_rules(parts)]
    if parts.peft:
        problems += parts.peft.problems(parts.model)
    if parts.model.mtp_loss:
        problems += _mtp_rules(parts)
    if parts.training.neftune_noise_alpha:
        problems += _noise_rules(parts)
    problems += _master_weights_rules(parts, device)
    if problems:
        raise ConfigError("\n".join(problems))


def _axes_rules(parts: Parts, strategy: str) -> Iterator[str]:
    """Yields what transformers' tensor and expert parallelism and offloading cannot do."""
    mesh = parts.mesh
    has_axes = mesh.tp * mesh.ep > 1
    axes = f"mesh.tp={mesh.tp} mesh.ep={mesh.ep}"
    if has_axes and strategy != "fsdp":
        yield f"{axes} works only with mesh.strategy=fsdp, not with {strategy}."
    if has_axes and not find_spec("transformers.distributed.expert_parallel"):
        yield (
            f"{axes} needs transformers 5.21 or newer, and {transformers.__version__} is "
            "installed: pip install -U transformers, or use mesh.dp_shard."
        )
    if has_axes and parts.peft:
        yield (
            f"{axes} with peft is not supported, as the sharding plans have no adapters: use "
            "mesh.dp_shard."
        )
    if has_axes and parts.training.fp8 != "none":
        yield (
            f"{axes} with training.fp8={parts.training.fp8} is not supported: set "
            "training.fp8=none."
        )
    if mesh.cpu_offload and strategy != "fsdp":
        yield f"mesh.cpu_offload=true needs FSDP: set mesh.strategy=fsdp, not {strategy}."
    if mesh.cpu_offload and has_axes:
        yield (
            f"mesh.cpu_offload=true with {axes} is not supported: use mesh.dp_shard, or set "
            "mesh.cpu_offload=false."
        )


def _compile_rules(parts: Parts) -> Iterator[str]:
    """Yields what compiled layers do not support."""
    training = parts.training
    aux_loss = parts.model.router_aux_loss
    if training.compile is not True:
        return
    if aux_loss:
        yield (
            f"model.router_aux_loss={aux_loss} with training.compile=true: the "
            "outputs of the routers are recorded, which compiled layers do not support: set "
            "training.compile=false."
        )
    is_selective = training.activation_checkpointing == "selective"
    if is_selective and parts.advanced.recompute_every_layers > 1:
        yield (
            "training.activation_checkpointing=selective with training.compile=true is every "
            "layer's: set advanced.recompute_every_layers=1."
        )


def _fp8_rules(parts: Parts) -> Iterator[str]:
    """Yields what fp8 lacks: its products take multiples of 16 in every dim, tokens too."""
    if parts.training.fp8 == "none":
        return
    fp8 = f"training.fp8={parts.training.fp8}"
    packer = parts.packer
    if not find_spec("torchao"):
        yield str(missing_package("training.fp8", "torchao"))
    if parts.is_quantized:
        yield f"{fp8} cannot multiply peft=qlora's 4-bit weights: use peft=lora, or fp8=none."
    if packer.is_ragged:
        yield f"{fp8} needs multiples of 16 tokens, and padded rows are not: use packing."
    tokens = parts.training.micro_batch_size * packer.packed_sequence_size
    multiple = 16 * parts.mesh.cp
    if tokens % multiple:
        yield (
            f"{fp8} needs multiples of 16 tokens: packed_sequence.packed_sequence_size x "
            f"training.micro_batch_size = {tokens} must be a multiple of {multiple} (16 * mesh.cp)."
        )


def _noise_rules(parts: Parts) -> Iterator[str]:
    """Yields what has embeddings of other tokens, or parts of them."""
    alpha = parts.training.neftune_noise_alpha
    noise = f"training.neftune_noise_alpha={alpha}"
    tp = parts.mesh.tp
    if tp > 1:
        yield f"{noise} with mesh.tp={tp} is not supported: use mesh.dp_shard or mesh.cp."
    if parts.model.mtp_loss:
        yield (
            f"{noise} with model.mtp_loss={parts.model.mtp_loss}, whose heads embed further "
            "tokens: set one of them to 0."
        )


def _mtp_rules(parts: Parts) -> Iterator[str]:
    """Yields what heads that predict further tokens cannot be trained with."""
    mtp = f"model.mtp_loss={parts.model.mtp_loss}"
    loss = parts.loss
    if parts.peft:
        yield f"{mtp} with peft: an adapter holds no such heads: set model.mtp_loss=0."
    if loss.needs_documents or loss.needs_reference:
        yield (
            f"{mtp} predicts further tokens of what is imitated, and loss={type(loss).__name__} "
            "compares answers or rewards them: set model.mtp_loss=0."
        )
    if loss.needs_logits:
        yield (
            f"{mtp} with loss={type(loss).__name__}, which takes the logits of the model's own "
            "head: use loss=fused_linear_cross_entropy."
        )
    if parts.training.fp8 != "none":
        yield f"{mtp} with training.fp8={parts.training.fp8} is not supported: set fp8=none."


def _master_weights_rules(parts: Parts, device: torch.device) -> Iterator[str]:
    """Yields what weights in bf16, which learn by stochastic rounding alone, do not support."""
    training = parts.training
    if training.master_weights != "bf16":
        return
    masters = f"training.master_weights={training.master_weights}"
    optimizer = type(parts.optimizer(nn.Linear(1, 1)))
    if not getattr(optimizer, "rounds_by_chance", False):
        yield (
            f"{masters} with {optimizer.__name__} loses every update smaller than 1/256 of the "
            "weight: set optimizer=adamw_bf16 or optimizer=adamw_8bit, which use stochastic "
            "rounding."
        )
    if parts.peft:
        yield f"{masters} with peft: the few weights of an adapter stay in fp32; set it to fp32."
    if parts.mesh.strategy == "ddp":
        yield (
            f"{masters} with mesh.strategy=ddp would accumulate gradients in bf16: use "
            "mesh.strategy=fsdp."
        )
    if choose_precision(training.precision, device) != torch.bfloat16:
        yield (
            f"{masters} computes in bf16: set training.precision=bf16, not {training.precision}."
        )


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
    takers = [
        f"logger.{name}.artifact" for name, part in config.logger.items() if part.get("artifact")
    ]
    if config.hub.push:
        takers.append("hub.push")
    if not config.checkpoint.export_hf:
        problems += [
            f"{key} takes the exported model, which checkpoint.export_hf=false does not write: "
            f"leave that out, or remove this, ~{key}."
            for key in takers
        ]
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
            raise cannot_work(error, source.settings) from error
