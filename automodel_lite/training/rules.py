"""What does not work together: one ConfigError with a line for each, before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec

import torch
import transformers
from torch import nn

from automodel_lite.config.components import missing_package
from automodel_lite.config.schema import Config
from automodel_lite.config.sizes import model_axes
from automodel_lite.data.feeding.order import batch_shape
from automodel_lite.errors import ConfigError, UserError, is_limit
from automodel_lite.models.loss import Loss
from automodel_lite.models.settings import cannot_work
from automodel_lite.models.source import CausalLM, describe
from automodel_lite.parallel.sharding import choose_precision
from automodel_lite.training.settings import RunParts, build_parts
from automodel_lite.training.world import default_device


def check_parts(parts: RunParts, strategy: str, device: torch.device) -> None:
    """Raises ConfigError with a line for each of the combinations that do not work."""
    problems: list[ConfigError] = [
        *_axes_rules(parts, strategy),
        *_overlap_rules(parts),
        *_compile_rules(parts),
        *_fp8_rules(parts),
    ]
    if parts.peft:
        problems += parts.peft.problems(parts.model)
    if parts.model.mtp_loss:
        problems += _mtp_rules(parts)
    if parts.training.neftune_noise_alpha:
        problems += _noise_rules(parts)
    if parts.training.global_batch_documents:
        problems += _batch_rules(parts)
    problems += _master_weights_rules(parts, device)
    if problems:
        raise ConfigError.of(problems)


def _axes_rules(parts: RunParts, strategy: str) -> Iterator[ConfigError]:
    """Yields what transformers' tensor and expert parallelism and offloading cannot do."""
    mesh = parts.mesh
    has_axes = mesh.tp * mesh.ep > 1
    axis = "mesh.tp" if mesh.tp > 1 else "mesh.ep"
    axes = " ".join(model_axes(mesh))
    if has_axes and strategy != "fsdp":
        yield ConfigError(
            f"{axes} does not work with mesh.strategy={strategy}",
            key=axis,
            cure="set mesh.strategy=fsdp",
        )
    if has_axes and not find_spec("transformers.distributed.expert_parallel"):
        yield ConfigError(
            f"{axes} needs transformers 5.22 or newer, and {transformers.__version__} is installed",
            key=axis,
            cure="pip install -U transformers, or use mesh.dp_shard",
        )
    if has_axes and parts.peft:
        yield ConfigError(
            f"{axes} with peft is not supported, as the sharding plans have no adapters",
            key=axis,
            cure="use mesh.dp_shard",
        )
    if has_axes and parts.training.fp8 != "none":
        yield ConfigError(
            f"{axes} with training.fp8={parts.training.fp8} is not supported",
            key=axis,
            cure="set training.fp8=none",
        )
    if mesh.cpu_offload and strategy != "fsdp":
        yield ConfigError(
            "mesh.cpu_offload=true needs FSDP",
            key="mesh.cpu_offload",
            cure=f"set mesh.strategy=fsdp, not {strategy}",
        )
    if mesh.cpu_offload and has_axes:
        yield ConfigError(
            f"mesh.cpu_offload=true with {axes} is not supported",
            key="mesh.cpu_offload",
            cure="use mesh.dp_shard, or set mesh.cpu_offload=false",
        )


def _overlap_rules(parts: RunParts) -> Iterator[ConfigError]:
    """Yields what two micro-batches that take turns do not go with."""
    mesh = parts.mesh
    advanced = parts.advanced
    if not mesh.ep_overlap:
        return
    key = "mesh.ep_overlap"
    overlap = f"{key}=true"
    off = f"set {key}=false"
    if mesh.ep == 1:
        yield ConfigError(
            f"{overlap} sends rows to experts of other ranks, and mesh.ep=1 has none",
            key=key,
            cure=f"set mesh.ep=2 or more, or {key}=false",
        )
    for name in ("tp", "cp"):
        size = getattr(mesh, name)
        if size > 1:
            yield ConfigError(
                f"{overlap} with mesh.{name}={size} is not supported",
                key=key,
                cure=f"use mesh.dp_shard, or {off}",
            )
    if advanced.reduce_every_micro_batch is True:
        yield ConfigError(
            f"{overlap} leaves gradients to the last micro-batch",
            key=key,
            cure=f"set advanced.reduce_every_micro_batch=false, or {key}=false",
        )
    if advanced.reshard_after_forward is True:
        yield ConfigError(
            f"{overlap} has two micro-batches in a layer, whose weights stay gathered",
            key=key,
            cure=f"set advanced.reshard_after_forward=false, or {key}=false",
        )
    if parts.model.router_aux_loss:
        yield ConfigError(
            f"{overlap} with model.router_aux_loss={parts.model.router_aux_loss}: each router "
            "remembers one micro-batch",
            key=key,
            cure=f"set model.router_aux_loss=0, or {key}=false",
        )
    if parts.training.compile is True:
        yield ConfigError(
            f"{overlap} is not tested with training.compile=true",
            key=key,
            cure=f"set training.compile=false, or {key}=false",
        )


def check_pairs(parts: RunParts, dp_size: int) -> None:
    """Raises ConfigError for a step without two micro-batches that could take turns."""
    micro_steps = batch_shape(parts.training, dp_size).micro_steps
    if parts.mesh.ep_overlap and micro_steps < 3:
        least = 3 * dp_size * parts.training.micro_batch_size
        raise ConfigError(
            "mesh.ep_overlap=true needs 3 micro-batches in a step, as the last one runs alone, and "
            f"there are {micro_steps}",
            key="mesh.ep_overlap",
            cure=f"set training.global_batch_size={least} or more, or mesh.ep_overlap=false",
        )


def _compile_rules(parts: RunParts) -> Iterator[ConfigError]:
    """Yields what compiled layers do not support."""
    training = parts.training
    if training.compile is not True:
        return
    is_selective = training.activation_checkpointing == "selective"
    if is_selective and parts.advanced.recompute_every_layers > 1:
        yield ConfigError(
            "training.activation_checkpointing=selective with training.compile=true is every "
            "layer's",
            key="training.activation_checkpointing",
            cure="set advanced.recompute_every_layers=1",
        )


def _fp8_rules(parts: RunParts) -> Iterator[ConfigError]:
    """Yields what fp8 lacks: its products take multiples of 16 in every dim, tokens too."""
    if parts.training.fp8 == "none":
        return
    key = "training.fp8"
    fp8 = f"{key}={parts.training.fp8}"
    packer = parts.packer
    if not find_spec("torchao"):
        yield missing_package("training.fp8", "torchao")
    if parts.is_quantized:
        yield ConfigError(
            f"{fp8} cannot multiply peft=qlora's 4-bit weights",
            key=key,
            cure="use peft=lora, or fp8=none",
        )
    if packer.is_ragged:
        yield ConfigError(
            f"{fp8} needs multiples of 16 tokens, and padded rows are not",
            key=key,
            cure="use packing",
        )
    tokens = parts.training.micro_batch_size * packer.packed_sequence_size
    multiple = 16 * parts.mesh.cp
    if tokens % multiple:
        yield ConfigError(
            f"{fp8} needs multiples of 16 tokens",
            key=key,
            cure="packed_sequence.packed_sequence_size x training.micro_batch_size = "
            f"{tokens} must be a multiple of {multiple} (16 * mesh.cp)",
        )


def _noise_rules(parts: RunParts) -> Iterator[ConfigError]:
    """Yields what has embeddings of other tokens, or parts of them."""
    alpha = parts.training.neftune_noise_alpha
    key = "training.neftune_noise_alpha"
    noise = f"{key}={alpha}"
    tp = parts.mesh.tp
    if tp > 1:
        yield ConfigError(
            f"{noise} with mesh.tp={tp} is not supported",
            key=key,
            cure="use mesh.dp_shard or mesh.cp",
        )
    if parts.model.mtp_loss:
        yield ConfigError(
            f"{noise} with model.mtp_loss={parts.model.mtp_loss}, whose heads embed further tokens",
            key=key,
            cure="set one of them to 0",
        )


def _batch_rules(parts: RunParts) -> Iterator[ConfigError]:
    """Yields what a batch that is counted in documents contradicts."""
    key = "training.global_batch_documents"
    documents = f"{key}={parts.training.global_batch_documents}"
    packs = parts.training.global_batch_size
    if isinstance(packs, int):
        yield ConfigError(
            f"{documents} and training.global_batch_size={packs} both say what a step is",
            key=key,
            cure="set one of them to null",
        )
    if parts.packer.balance == "window":
        yield ConfigError(
            f"packed_sequence.balance=window moves packs between steps, whose {documents} decide "
            "what is in them",
            key="packed_sequence.balance",
            cure="set packed_sequence.balance=step",
        )


def _mtp_rules(parts: RunParts) -> Iterator[ConfigError]:
    """Yields what heads that predict further tokens cannot be trained with."""
    key = "model.mtp_loss"
    mtp = f"{key}={parts.model.mtp_loss}"
    loss = parts.loss
    if parts.peft:
        yield ConfigError(
            f"{mtp} with peft: an adapter holds no such heads",
            key=key,
            cure=f"set {key}=0",
        )
    if loss.needs_documents or loss.needs_reference or not loss.of_text:
        yield ConfigError(
            f"{mtp} predicts further tokens of what is imitated, and loss={type(loss).__name__} "
            "compares answers or rewards them",
            key=key,
            cure=f"set {key}=0",
        )
    if loss.needs_logits:
        yield ConfigError(
            f"{mtp} with loss={type(loss).__name__}, which takes the logits of the model's own "
            "head",
            key=key,
            cure="use loss=fused_linear_cross_entropy",
        )
    if parts.training.fp8 != "none":
        yield ConfigError(
            f"{mtp} with training.fp8={parts.training.fp8} is not supported",
            key=key,
            cure="set training.fp8=none",
        )


def _master_weights_rules(parts: RunParts, device: torch.device) -> Iterator[ConfigError]:
    """Yields what weights in bf16, which learn by stochastic rounding alone, do not support."""
    training = parts.training
    if training.master_weights != "bf16":
        return
    key = "training.master_weights"
    masters = f"{key}={training.master_weights}"
    optimizer = type(parts.optimizer(nn.Linear(1, 1)))
    if not getattr(optimizer, "rounds_by_chance", False):
        yield ConfigError(
            f"{masters} with {optimizer.__name__} loses every update smaller than 1/256 of the "
            "weight",
            key=key,
            cure="set optimizer=adamw_bf16 or optimizer=adamw_8bit, which use stochastic rounding",
        )
    if parts.peft:
        yield ConfigError(
            f"{masters} with peft: the few weights of an adapter stay in fp32",
            key=key,
            cure=f"set {key}=fp32",
        )
    if parts.mesh.strategy == "ddp":
        yield ConfigError(
            f"{masters} with mesh.strategy=ddp would accumulate gradients in bf16",
            key=key,
            cure="use mesh.strategy=fsdp",
        )
    if choose_precision(training.precision, device) != torch.bfloat16:
        yield ConfigError(
            f"{masters} computes in bf16",
            key=key,
            cure=f"set training.precision=bf16, not {training.precision}",
        )


NUM_TOKENS = 4

_SHAPES = re.compile(
    r"reduction dim|must match the size|is invalid for input|cannot be multiplied|broadcast"
    r"|mismatch"
)
"""Errors of shapes. Others may be the meta device's own: it has no experts in fp32, no values to
look at.
"""


def checked_parts(config: Config) -> RunParts:
    """Builds the parts of the configuration, and tries them; raises ConfigError."""
    parts = build_parts(config)
    try_settings(config, parts)
    return parts


def try_settings(config: Config, parts: RunParts) -> None:
    """Raises one ConfigError with a line per part of the configuration that cannot work; nothing is
    loaded.
    """
    problems: list[UserError] = []
    strategy = "fsdp" if parts.mesh.strategy == "auto" else parts.mesh.strategy
    takers = [
        f"logger.{name}.artifact" for name, part in config.logger.items() if part.get("artifact")
    ]
    if config.hub.push:
        takers.append("hub.push")
    if not config.checkpoint.export_hf:
        for key in takers:
            text = (
                f"{key} takes the exported model, which checkpoint.export_hf=false does not write"
            )
            cure = f"leave that out, or remove this, ~{key}"
            problems.append(ConfigError(text, key=key, cure=cure))
    if parts.model.head == "score":
        problems += _score_rules(config)
    if not parts.loss.of_text:
        problems += _metric_rules(config, parts.loss)
    for attempt in (
        lambda: build_on_meta(parts.model),
        # a missing argument is named before the weights are read
        lambda: parts.optimizer(nn.Linear(2, 2)),
        lambda: check_parts(parts, strategy, default_device()),
    ):
        try:
            attempt()
        except ConfigError as error:
            problems += error.problems or [error]
    if problems:
        raise ConfigError.of(problems)


def _score_rules(config: Config) -> Iterator[ConfigError]:
    """Yields what asks a model to write that gives documents scores."""
    asking = {
        "samples.prompts": config.samples.prompts,
        "tasks": config.tasks,
        "evaluation": config.evaluation,
        "model.mtp_loss": config.model.get("mtp_loss"),
    }
    for key, value in asking.items():
        if value:
            yield ConfigError(
                f"{key} with model.head=score: it gives documents scores and writes no text; "
                "validation reports accuracy and the like",
                key=key,
                cure=f"leave {key} out",
            )


_OF_TEXT = re.compile("val_(token_accuracy|cross_entropy|perplexity)(/.*)?")


def _metric_rules(config: Config, loss: Loss) -> Iterator[ConfigError]:
    """Yields what waits for a number of tokens that are written, under a loss of other labels."""
    metrics = {
        f"callbacks.{name}.metric": part.get("metric") for name, part in config.callbacks.items()
    }
    if config.checkpoint.keep_best:
        metrics["checkpoint.best_metric"] = config.checkpoint.best_metric
    for key, metric in metrics.items():
        if _OF_TEXT.fullmatch(str(metric)):
            yield ConfigError(
                f"{key}={metric} counts tokens that are written, and loss={type(loss).__name__} "
                "learns no text: its validations have val_loss, val_accuracy and the like",
                key=key,
                cure=f"set {key}=val_loss",
            )


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
        if is_limit(error):
            raise
        if lm is None or not isinstance(error, RuntimeError) or _SHAPES.search(str(error)):
            raise cannot_work(error, source.settings) from error
