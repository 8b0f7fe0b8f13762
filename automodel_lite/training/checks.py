"""The checks of a built model, before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor

from automodel_lite.attention.isolation import check_packing_isolation
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.config.sizes import model_axes, without
from automodel_lite.errors import (
    ConfigError,
    is_lost_peer,
    is_out_of_memory,
    is_out_of_threads,
    one_line,
)
from automodel_lite.parallel.context_parallel import check_context_parallel
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parallel.sharding import (
    ParallelModel,
)
from automodel_lite.thd import ThdBatch
from automodel_lite.training.settings import RunParts

if TYPE_CHECKING:
    pass  # which brings peft


def rows_reason(parts: RunParts, lm: transformers.PreTrainedModel) -> str:
    """Why the model runs by rows; raises ConfigError where a kernel, or compiled layers, were
    configured.
    """
    if parts.attention is not None and not isinstance(parts.attention, ReferenceAttention):
        raise ConfigError(
            f"attention: {type(lm).__name__} mixes tokens in its own code: set attention=auto."
        )
    if parts.training.compile is True:
        raise ConfigError(
            f"training.compile=true: documents go through {type(lm).__name__} as rows of many "
            "shapes, each of which would need a graph: set training.compile=false."
        )
    return (
        f"rows: {type(lm).__name__} mixes tokens in its own code: documents go through it as "
        "right-padded rows"
    )


def check_model(cp_exchange: str, model: ParallelModel, mesh: Mesh) -> str:
    """Documents kept apart, and context parallelism exact, on the model as it will train; every
    rank calls it.

    Returns which loss, and why: with a head that is not `hidden @ weight.T`, the model's own head
    and no fused one.
    """
    loss_model = model.loss_model
    heads = []

    def logits(batch: ThdBatch) -> Tensor:
        with explaining_family_errors(loss_model.lm, mesh):
            logits_TV, is_plain = model.probe(batch)
            if mesh.shape.tp > 1 and model.module.training:
                # autograd refuses what some families do in place
                with torch.enable_grad():
                    model.logits(batch)
        heads.append(is_plain)
        # how exact they are; some families cast theirs to fp32
        return logits_TV.to(model.compute_dtype)

    check_packing_isolation(loss_model.lm, mesh.device, logits, mesh.gather)
    check_context_parallel(
        loss_model.lm,
        mesh.cp,
        cp_exchange,
        mesh.device,
        lambda batch: model.logits(batch).to(model.compute_dtype),
    )
    model.free_gathered()
    if loss_model.heads and not all(heads):
        raise ConfigError(
            f"model.mtp_loss: the output head of {type(loss_model.lm).__name__} is more than "
            "hidden @ weight.T, and heads for further tokens share it: set model.mtp_loss=0."
        )
    loss_model.has_plain_head = all(heads)
    name = type(loss_model.loss).__name__
    if loss_model.has_plain_head or loss_model.loss.needs_logits:
        return name
    return (
        f"{name} of the model's own logits: the output head of {type(loss_model.lm).__name__} is "
        "more than hidden @ weight.T"
    )


@contextmanager
def explaining_family_errors(lm: transformers.PreTrainedModel, mesh: Mesh) -> Iterator[None]:
    """Makes a ConfigError of what stops a family's code whose layers are cut (transformers has a
    plan for it that does not run), or whose weights are in bf16 beside what it keeps in fp32.
    """
    shape = mesh.shape
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        name = type(lm).__name__
        axes = model_axes(shape)
        problem = f"{' '.join(axes)}: {name} does not run in parts"
        cure = without(axes)
        if not axes:
            problem = f"training.precision=bf16: {name} does not run with weights in bf16"
            cure = "mesh.strategy=ddp or training.precision=fp32"
            if "BFloat16" not in str(error):
                raise
        if is_out_of_memory(error) or is_lost_peer(error) or is_out_of_threads(error):
            raise
        raise ConfigError(f"{problem} ({one_line(error)}): set {cure}.") from error
