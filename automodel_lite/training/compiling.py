"""Layers and loss compiled, by a batch like that of the first step."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from automodel_lite import compat
from automodel_lite.attention.documents import runs_by_rows
from automodel_lite.config.schema import TrainingConfig
from automodel_lite.config.sizes import ceil_div
from automodel_lite.errors import ConfigError, counted, one_line
from automodel_lite.graphs import compiled_graphs, graph_breaks
from automodel_lite.models.layers import (
    KEPT_FRAC,
    compile_layers,
    decoder_layers,
    recompute_layers,
)
from automodel_lite.models.source import embedding_rows
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parallel.sharding import (
    ParallelModel,
)
from automodel_lite.thd import ThdBatch, stream_of
from automodel_lite.training.settings import RunParts

if TYPE_CHECKING:
    pass  # which brings peft

DOCUMENT_TOKENS = 1024  # the most of each document that stands for the data


def compiles(training: TrainingConfig, is_gpu: bool) -> bool:
    """auto: on a GPU, unless selective checkpointing watches single operations, which compilation
    fuses away.
    """
    if training.compile == "auto":
        return is_gpu and training.activation_checkpointing != "selective"
    return training.compile is True


def compile_model(
    parts: RunParts, model: ParallelModel, mesh: Mesh, backend: str = "inductor"
) -> str:
    """checkpoint(compile(layer)) for every decoder layer, in place; returns what was compiled, and
    how long it took.

    All graphs of training are made here, by a forward and backward of a batch like the first
    step's. With training.compile=auto a model that cannot be compiled trains uncompiled, and the
    reason is returned.
    """
    training = parts.training
    layers = decoder_layers(model.loss_model.lm)
    how = (training.activation_checkpointing, parts.advanced.recompute_every_layers)
    routers = model.loss_model.routers
    if not compiles(training, mesh.device.type == "cuda"):
        recompute_layers(layers, *how)
        return "off"
    if reason := why_uncompiled(parts, model):
        recompute_layers(layers, *how)
        return f"off: {reason}"
    # which compiled graphs do themselves
    is_selective = training.activation_checkpointing == "selective"
    kept_frac = KEPT_FRAC if is_selective else 1.0
    undo = compile_layers(layers, backend, kept_frac, routers.drop if routers else lambda: None)
    if not is_selective:
        recompute_layers(layers, *how)
    model.loss_model.loss_backend = backend
    began = time.monotonic()
    graphs = compiled_graphs()
    breaks = graph_breaks()
    try:
        batch = worst_case_batch(parts, embedding_rows(model.loss_model.lm))
        batch = model.loss_model.look_ahead(batch)
        with model.accumulate(is_last=True):
            own = cp_shard(batch, mesh.cp, parts.mesh.cp_exchange).to(mesh.device)
            model(own).sum.backward()
    except (
        compat.dynamo.exc.TorchDynamoException,
        compat.dynamo.exc.FailOnRecompileLimitHit,
    ) as error:
        if training.compile is True:
            raise
        undo()
        model.loss_model.loss_backend = None
        recompute_layers(layers, *how)
        return f"off: {one_line(error, 200)}"
    finally:
        for parameter in model.parameters():
            parameter.grad = None
    line = f"{counted(compiled_graphs() - graphs, 'graph')} in {time.monotonic() - began:.0f} s"
    if broken := graph_breaks() - breaks:
        places = ", ".join(
            f"{reason} ({counted(times, 'time')})" for reason, times in broken.items()
        )
        line += f"; parts of the layers run uncompiled: {places}"
    return line


def why_uncompiled(parts: RunParts, model: ParallelModel) -> str:
    """Returns why layers run without graphs though one may compile; raises ConfigError where
    training.compile=true asks for graphs.
    """
    if parts.mesh.ep_overlap:  # likewise
        return "mesh.ep_overlap=true is not tested with graphs"
    if runs_by_rows(model.loss_model.lm):  # which a check has refused with training.compile=true
        return "documents run as rows of many shapes"
    routers = model.loss_model.routers
    if routers is None or routers.is_found:
        return ""
    if parts.training.compile is True:
        name = type(model.loss_model.lm).__name__
        raise ConfigError(
            f"model.router_aux_loss={parts.model.router_aux_loss} with training.compile=true: "
            f"transformers does not tell which modules the routers of {name} are: set "
            "training.compile=false."
        )
    return "model.router_aux_loss, of routers that transformers records by itself"


def worst_case_batch(parts: RunParts, num_ids: int) -> ThdBatch:
    """A micro-batch of packs, not sharded, on the host: documents of one length, whose every token
    carries a label.
    """
    tokens = parts.training.micro_batch_size * parts.packed_sequence_size
    cp = parts.mesh.cp
    multiple = 2 * cp if cp > 1 else 1
    least = ceil_div(tokens, DOCUMENT_TOKENS)
    number = next(
        n for n in range(least, tokens + 1) if tokens % n == 0 and (tokens // n) % multiple == 0
    )
    batch = stream_of(torch.arange(tokens).view(number, -1) % num_ids, "cpu")
    if parts.loss.head == "score":  # whose labels are no tokens
        batch = replace(batch, labels=batch.labels.clamp(max=0))
    return replace(batch, columns=parts.loss.example_columns(batch))
