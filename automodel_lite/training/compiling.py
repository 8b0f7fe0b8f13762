"""Recomputation and compilation of the decoder layers and of the fused loss, tried out before the first step."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from automodel_lite.attention.probe import stream_of
from automodel_lite.config.schema import Config, TrainingConfig
from automodel_lite.data.prepare import build_packer
from automodel_lite.graphs import compiled_graphs
from automodel_lite.models.layers import compile_layers, decoder_layers, recompute_layers
from automodel_lite.models.loss import FusedLinearCrossEntropy
from automodel_lite.models.source import embedding_rows
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parallel.shard import cp_shard
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.thd import ThdBatch

DOCUMENT_TOKENS = 1024


def compiles(training: TrainingConfig, is_gpu: bool) -> bool:
    """auto: on a GPU, unless selective checkpointing watches single operations, which compilation fuses away."""
    if training.compile == "auto":
        return is_gpu and training.activation_checkpointing != "selective"
    return training.compile is True


def speed_up(config: Config, model: ParallelModel, mesh: Mesh, backend: str = "inductor") -> str:
    """checkpoint(compile(layer)) for every decoder layer, in place; returns what was compiled, and how long it took.

    All graphs of training are made here, by a forward and backward of a batch like the first step's. With
    training.compile=auto a model that cannot be compiled trains uncompiled, and the reason is returned.
    """
    training = config.training
    layers = decoder_layers(model.loss_model.lm)
    how = (training.activation_checkpointing, training.recompute_every_layers)
    if not compiles(training, mesh.device.type == "cuda"):
        recompute_layers(layers, *how)
        return "off"
    undo, plain_loss = compile_layers(layers, backend), model.loss_model.loss
    recompute_layers(layers, *how)
    if isinstance(plain_loss, FusedLinearCrossEntropy):
        model.loss_model.loss = replace(plain_loss, backend=backend)
    began, graphs = time.monotonic(), compiled_graphs()
    try:
        _try(model, like_the_first(config, model, mesh))
    except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
        if training.compile is True:
            raise
        undo()
        model.loss_model.loss = plain_loss
        recompute_layers(layers, *how)
        return f"off: {' '.join(str(error).split())[:200]}"
    return f"{compiled_graphs() - graphs} graphs in {time.monotonic() - began:.0f} s"


def _try(model: ParallelModel, batch: ThdBatch) -> None:
    """One forward and backward, whose gradients are thrown away."""
    try:
        with model.accumulate(is_last=True):
            model(batch).backward()
    finally:
        for parameter in model.parameters():
            parameter.grad = None


def like_the_first(config: Config, model: ParallelModel, mesh: Mesh) -> ThdBatch:
    """As many tokens as a micro-batch of packs, in documents of one length."""
    tokens = config.training.micro_batch_size * build_packer(config).packed_sequence_size
    least = -(-tokens // DOCUMENT_TOKENS)
    number = next(n for n in range(least, tokens + 1) if tokens % n == 0 and (tokens // n) % (2 * mesh.shape.cp) == 0)
    ids = torch.arange(tokens).view(number, -1) % embedding_rows(model.loss_model.lm)
    return cp_shard(stream_of(ids, "cpu"), mesh.cp, config.mesh.cp_exchange).to(mesh.device)
