"""What a run is built from, and how its model is laid out on the ranks. Nothing is built here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import transformers
from torch import nn
from torch.optim import Optimizer
from transformers import PretrainedConfig

from automodel_lite.attention.kernel import AttentionKernel, ReferenceAttention
from automodel_lite.attention.spec import FAMILIES
from automodel_lite.config.components import build, locate, missing_package
from automodel_lite.config.schema import AdvancedConfig, Config, MeshConfig, TrainingConfig
from automodel_lite.data.packing.packs import Packer
from automodel_lite.data.prepare import build_packer
from automodel_lite.errors import ConfigError, format_value
from automodel_lite.models.flops import ModelSize
from automodel_lite.models.loss import FusedLinearCrossEntropy, Loss, checked_loss
from automodel_lite.models.source import CausalLM
from automodel_lite.parallel.mesh import MeshShape
from automodel_lite.parallel.sharding import choose_precision

if TYPE_CHECKING:
    from automodel_lite.parts.adapters.lora import Lora  # which brings peft


AUTO = "auto"
OF_TRAINING = ("router_aux_loss", "mtp_loss", "freeze", "train_towers")
RATE = "automodel_lite.parts.auto.learning_rate"


@dataclass(frozen=True)
class Parts:
    """What the model is built from, and what its memory depends on.

    attention  None takes the best kernel for the model and the device
    peft       None trains the model itself
    optimizer  makes the optimizer of a module
    """

    model: CausalLM
    attention: AttentionKernel | None
    peft: Lora | None
    loss: Loss
    optimizer: Callable[[nn.Module], Optimizer]
    packer: Packer
    mesh: MeshConfig
    training: TrainingConfig
    advanced: AdvancedConfig
    teacher: CausalLM | None = None  # a frozen second model
    data: Any = None  # of whose packs the heaviest stand for a step that is counted

    @property
    def packed_sequence_size(self) -> int:
        return self.packer.packed_sequence_size

    @property
    def is_quantized(self) -> bool:
        """Are the frozen weights held in 4 bits?"""
        return self.peft is not None and self.peft.is_quantized


def build_parts(config: Config) -> Parts:
    """Raises ConfigError for what a part refuses, and for a package that is missing."""
    loss = checked_loss(build(config.loss))
    teacher = None
    if config.teacher:
        with naming_teacher():
            teacher = build(config.teacher)
            teacher.resolve_model_config({})
        for name in OF_TRAINING:
            if value := getattr(teacher, name):
                raise ConfigError(
                    f"teacher.{name}={format_value(value)} is of a model that is trained, and the "
                    "teacher is frozen: leave it out."
                )
    if loss.needs_teacher != (teacher is not None):
        name = type(loss).__name__
        cure = (
            "needs one: set teacher=pretrained teacher.pretrained=..."
            if loss.needs_teacher
            else "does not use it"
        )
        raise ConfigError(f"teacher={'pretrained' if teacher else 'none'}: loss={name} {cure}.")
    packer = build_packer(config)
    packer.can_cut = not loss.separates_rows
    cuts = packer.overlong in ("truncate", "split") or packer.cuts_documents
    if "answers" in loss.required and (cuts or packer.is_ragged):
        raise ConfigError(
            f"packed_sequence.strategy={packer.strategy} overlong={packer.overlong}: pairs of "
            "answers stay whole, in one pack: use exact_fill, best_fit or next_fit, and "
            "overlong=drop or error."
        )
    model = build(config.model)
    optimizer = config.optimizer
    if optimizer.get("lr") == AUTO:
        optimizer = optimizer | {"lr": locate(RATE)(model, loss, config.peft)[0]}
    return Parts(
        model=model,
        attention=build(config.attention) if config.attention else None,
        peft=build(config.peft) if config.peft else None,
        loss=loss,
        teacher=teacher,
        optimizer=partial(build, optimizer),
        packer=packer,
        mesh=config.mesh,
        training=config.training,
        advanced=config.advanced,
    )


@contextmanager
def naming_teacher() -> Iterator[None]:
    """Names the teacher in a ConfigError of a class that both models share, and that knows one
    name.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(re.sub(r"\bmodel\.(?=[a-z_.]+=)", "teacher.", str(error))) from error


def check_parts(parts: Parts, strategy: str, device: torch.device) -> None:
    """Raises ConfigError with a line for each of the combinations that do not work."""
    problems = [*_axes_rules(parts, strategy), *_compile_rules(parts), *_fp8_rules(parts)]
    if parts.peft:
        problems += parts.peft.problems(parts.model)
    if parts.model.mtp_loss:
        problems += locate(FAMILIES["mtp_problems"])(parts)
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
        yield missing_package("training.fp8", "torchao")
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


@dataclass(frozen=True, kw_only=True)
class Decided(Parts):
    """The settings of a run with nothing left open, before any of it is built: `auto` is gone from
    its mesh, its recomputation and its reduction. A run, its dry run and recipes/verify.py decide
    alike, and nobody changes it afterwards.

    kernel         in place of `attention`, which may be None
    of_teacher     the same of the frozen second model
    """

    config: PretrainedConfig
    size: ModelSize
    shape: MeshShape
    strategy: str  # fsdp, ddp or none
    dtype: torch.dtype  # of compute
    kernel: AttentionKernel = field(default_factory=ReferenceAttention)
    attention_text: str = ""  # which kernel and exchange, and why
    recomputation_text: str = ""  # empty: as configured
    reduction_text: str = ""  # empty: gradients are reduced after the last micro-batch
    of_teacher: Decided | None = None

    @classmethod
    def of(cls, parts: Parts, **decisions: Any) -> Decided:
        """Returns these parts with the decisions about them."""
        return cls(**{x.name: getattr(parts, x.name) for x in fields(Parts)}, **decisions)

    @property
    def tokens(self) -> int:
        """Of a micro-batch, over the ranks that share it."""
        return self.training.micro_batch_size * self.packed_sequence_size


AnyParts = TypeVar("AnyParts", bound=Parts)


def with_recomputation(parts: AnyParts, how: str, every: int) -> AnyParts:
    """Returns the parts with this activation checkpointing on each `every`-th layer."""
    training = replace(parts.training, activation_checkpointing=how)
    advanced = replace(parts.advanced, recompute_every_layers=every)
    return replace(parts, training=training, advanced=advanced)


def as_teacher(parts: Parts, teacher: CausalLM) -> Parts:
    """Returns the parts of a frozen second model: the same but for what is trained."""
    own = {x.name: getattr(parts, x.name) for x in fields(Parts)}
    changed = {"model": teacher, "teacher": None, "peft": None, "loss": FusedLinearCrossEntropy()}
    return Parts(**own | changed)
