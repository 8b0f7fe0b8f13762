"""What a run is built from, and how its model is laid out on the ranks. Nothing is built here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PretrainedConfig

from automodel_lite.attention.kernel import AttentionKernel, ReferenceAttention
from automodel_lite.config.components import build
from automodel_lite.config.schema import AdvancedConfig, Config, MeshConfig, TrainingConfig
from automodel_lite.data.packing.packs import Packer
from automodel_lite.data.prepare import build_packer
from automodel_lite.errors import ConfigError, format_value
from automodel_lite.models.flops import ModelSize
from automodel_lite.models.loss import FusedLinearCrossEntropy, Loss, checked_loss
from automodel_lite.models.source import CausalLM
from automodel_lite.parallel.mesh import MeshShape

if TYPE_CHECKING:
    from automodel_lite.parts.adapters.lora import Lora  # which brings peft


AUTO = "auto"
OF_TRAINING = ("router_aux_loss", "mtp_loss", "freeze", "train_towers")


@dataclass(frozen=True)
class RunParts:
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
    # variables of the chat template, by which it may end a turn
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    data: Any = None  # of whose packs the heaviest stand for a step that is counted

    @property
    def packed_sequence_size(self) -> int:
        return self.packer.packed_sequence_size

    @property
    def is_quantized(self) -> bool:
        """Are the frozen weights held in 4 bits?"""
        return self.peft is not None and self.peft.is_quantized


def build_parts(config: Config) -> RunParts:
    """Raises ConfigError for what a part refuses, and for a package that is missing."""
    loss = checked_loss(build(config.loss))
    teacher = None
    if config.teacher:
        teacher = build(config.teacher, key="teacher")
        if teacher.head != "lm":
            raise ConfigError(
                f"teacher.head={teacher.head}: a teacher is asked for likelihoods of tokens",
                key="teacher.head",
                cure="leave it out",
            )
        teacher.resolve_model_config({})
        for name in OF_TRAINING:
            if value := getattr(teacher, name):
                raise ConfigError(
                    f"teacher.{name}={format_value(value)} is of a model that is trained, and the "
                    "teacher is frozen",
                    key=f"teacher.{name}",
                    cure="leave it out",
                )
    if loss.needs_teacher != (teacher is not None):
        name = type(loss).__name__
        if teacher:
            text = f"teacher=pretrained: loss={name} does not use it"
            raise ConfigError(text, key="teacher", cure="leave it out")
        text = f"teacher=none: loss={name} needs one"
        cure = "set teacher=pretrained teacher.pretrained=<folder or hub name>"
        raise ConfigError(text, key="teacher", cure=cure)
    model = build(config.model)
    check_head(model, loss)
    packer = build_packer(config)
    if loss.head == "score":
        whole = "a document is scored at its end, and stays whole"
        packer.keep_whole(whole, ("truncate", "split"), together=True)
    # a document that is cut would be several, each with a loss of its own
    takes_whole = loss.separates_rows or loss.needs_documents
    packer.can_cut = not takes_whole
    if "answers" in loss.required:
        whole = "pairs of answers stay whole, in one pack"
        packer.keep_whole(whole, ("truncate", "split"), together=True)
    if "choice_ids" in loss.required:
        whole = "questions stay whole, as an answer stands at the end of its row"
        packer.keep_whole(whole, ("truncate", "split"))
    if takes_whole:
        packer.keep_whole(
            f"rows of loss={type(loss).__name__} stay whole, as what a label counts follows from "
            "all of its row",
            ("split",),
        )
    return RunParts(
        model=model,
        attention=build(config.attention) if config.attention else None,
        peft=build(config.peft) if config.peft else None,
        loss=loss,
        teacher=teacher,
        template_kwargs=config.tokenize.template_kwargs,
        optimizer=partial(build_optimizer, config.optimizer),
        packer=packer,
        mesh=config.mesh,
        training=config.training,
        advanced=config.advanced,
    )


def check_head(model: CausalLM, loss: Loss) -> None:
    """Raises ConfigError for a loss that reads another head than the model has."""
    name = type(loss).__name__
    if model.head == loss.head:
        return
    if loss.head == "score":
        raise ConfigError(
            f"model.head={model.head}: loss={name} reads the scores of documents",
            key="model.head",
            cure="set model.head=score",
        )
    raise ConfigError(
        f"model.head=score: loss={name} is of tokens",
        key="model.head",
        cure="set loss=classify or loss=reward, or model.head=lm",
    )


def build_optimizer(part: Mapping[str, Any], module: nn.Module) -> Optimizer:
    """Returns the optimizer of a module; raises ConfigError for a rate that is not resolved."""
    if part.get("lr") == AUTO:
        raise ConfigError(
            "optimizer.lr=auto is not resolved",
            key="optimizer.lr",
            cure="call automodel_lite.training.resolve.resolve_auto(config) first, or set a number",
        )
    optimizer: Optimizer = build(part, module)
    return optimizer


@dataclass(frozen=True, kw_only=True)
class Decided(RunParts):
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
    def of(cls, parts: RunParts, **decisions: Any) -> Decided:
        """Returns these parts with the decisions about them."""
        return cls(**{x.name: getattr(parts, x.name) for x in fields(RunParts)}, **decisions)

    @property
    def tokens(self) -> int:
        """Of a micro-batch, over the ranks that share it."""
        return self.training.micro_batch_size * self.packed_sequence_size


AnyParts = TypeVar("AnyParts", bound=RunParts)


def with_recomputation(parts: AnyParts, how: str, every: int) -> AnyParts:
    """Returns the parts with this activation checkpointing on each `every`-th layer."""
    training = replace(parts.training, activation_checkpointing=how)
    advanced = replace(parts.advanced, recompute_every_layers=every)
    return replace(parts, training=training, advanced=advanced)


def as_teacher(parts: RunParts, teacher: CausalLM) -> RunParts:
    """Returns the parts of a frozen second model: the same but for what is trained."""
    return replace(as_start(parts), model=teacher, peft=None)


def as_start(parts: RunParts) -> RunParts:
    """Returns the parts of the start model, frozen: with the adapter that is continued, as
    `peft.adapter` has it; a new adapter changes nothing yet.
    """
    own = {x.name: getattr(parts, x.name) for x in fields(RunParts)}
    is_continued = parts.peft is not None and parts.peft.adapter is not None
    changed = {
        "teacher": None,
        "peft": parts.peft if is_continued else None,
        "loss": FusedLinearCrossEntropy(),
    }
    return RunParts(**own | changed)
