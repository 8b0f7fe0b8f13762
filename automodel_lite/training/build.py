"""Builds the model of a run: weights, attention kernel and loss, spread over the mesh, then
checked.

Compiled layers and the compiled loss run once before the first step.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from automodel_lite.attention.documents import runs_by_rows
from automodel_lite.attention.interface import install
from automodel_lite.attention.isolation import check_packing_isolation
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.attention.positions import short_lengths
from automodel_lite.data.tokens.stop_tokens import use_stop_ids
from automodel_lite.errors import ConfigError
from automodel_lite.interpreter import trim_malloc
from automodel_lite.models.flops import StepFlops, step_flops, visited_weights
from automodel_lite.models.layers import (
    cast_weights,
    decoder_layers,
    has_fp8,
)
from automodel_lite.models.loss_model import LossModel
from automodel_lite.models.mtp import HeadsAhead
from automodel_lite.models.neftune import EmbeddingNoise
from automodel_lite.parallel.mesh import Mesh, reading_turn
from automodel_lite.parallel.sharding import (
    ParallelModel,
    parallelize,
)
from automodel_lite.seed import seed_all
from automodel_lite.telemetry.metrics import STARTUP
from automodel_lite.training.checks import check_model, explaining_family_errors, rows_reason
from automodel_lite.training.compiling import compile_model
from automodel_lite.training.decide import check_same_vocabulary
from automodel_lite.training.memory import (
    MemoryEstimate,
    check_weights_fit,
    estimate_memory,
)
from automodel_lite.training.settings import Decided, RunParts

if TYPE_CHECKING:
    from automodel_lite.parts.adapters.adapter import LoraAdapter  # which brings peft


@dataclass(frozen=True)
class BuiltModel:
    """A parallel model and what the start block reports of it."""

    model: ParallelModel
    decided: Decided
    flops: StepFlops
    memory: MemoryEstimate  # of one rank
    loss: str
    compiled: str  # how many graphs, and in what time
    attention: str  # how tokens are mixed, and why
    adapter: LoraAdapter | None  # LoRA and the like: only this is trained and saved


def build_model(
    decided: Decided,
    tokenizer: PreTrainedTokenizerBase,
    mesh: Mesh,
    trains: bool = True,
    seed: int | None = None,
) -> BuiltModel:
    """The model on the mesh: described, sharded, then read or drawn by each rank for its own
    shards; then checked.

    trains  False for a frozen second model: in evaluation mode, its weights in the compute dtype
    seed    of weights that no file has; None = drawn from torch's generator as it stands
    Raises ConfigError for weights that no memory holds.
    """
    if seed is not None:
        seed_all(seed, "model")
    check_weights_fit(decided, mesh.device)
    STARTUP.lap("model")
    with trim_malloc():
        model, adapter = assemble(decided, tokenizer, mesh, decided.strategy, decided.dtype, trains)
        STARTUP.lap("load")
        lm = model.loss_model.lm
        decided.model.notes += use_stop_ids(lm, tokenizer, decided.template_kwargs)
        with explaining_family_errors(lm, mesh), short_lengths(lm) as has_lengths:
            if has_lengths:
                install(lm, ReferenceAttention())
                check_packing_isolation(
                    lm,
                    mesh.device,
                    lambda batch: model.probe(batch)[0].to(model.compute_dtype),
                    mesh.gather,
                )
        install(lm, decided.kernel)
        attention = decided.attention_text
        if runs_by_rows(lm):
            if decided.training.neftune_noise_alpha:
                raise ConfigError(
                    f"training.neftune_noise_alpha={decided.training.neftune_noise_alpha}: "
                    f"{type(lm).__name__} runs on rows of documents, whose tokens are not those of "
                    "the stream: set it to 0."
                )
            attention = rows_reason(decided, lm)
        loss = check_model(decided.mesh.cp_exchange, model, mesh)
        model.gather_towers_once()
        STARTUP.lap("probe")
    heads = model.loss_model.heads
    beside = visited_weights(lm, only_trained=True) if adapter else None
    flops = step_flops(decided.config, decided.size, beside, heads.depth if heads else 0)
    flops = flops.without_frozen(lm) if decided.model.freeze else flops
    if decided.of_teacher:
        check_same_vocabulary(decided.of_teacher, tokenizer)
        teacher = build_model(decided.of_teacher, tokenizer, mesh, trains=False)
        model.loss_model.set_teacher(teacher.model.loss_model)
        flops = flops.with_teacher(teacher.flops)
    compiled = compile_model(decided, model, mesh) if trains else "off"
    STARTUP.lap("compile")
    num_trained = sum(p.numel() for p in lm.parameters() if p.requires_grad)
    model = replace(
        model,
        reduces_every=decided.advanced.reduce_every_micro_batch is True,
        takes_turns=decided.mesh.ep_overlap,
    )
    of_adapter = num_trained if adapter else None
    memory = estimate_memory(decided, of_adapter, num_trained if decided.model.freeze else None)
    return BuiltModel(model, decided, flops, memory, loss, compiled, attention, adapter)


def assemble(
    parts: RunParts,
    tokenizer: PreTrainedTokenizerBase,
    mesh: Mesh,
    strategy: str,
    dtype: torch.dtype,
    trains: bool = True,
) -> tuple[ParallelModel, LoraAdapter | None]:
    """The parallel model with its weights, and the adapter inside it, if there is one.

    What changes the modules happens before FSDP, which remembers each parameter's module.
    """
    source = parts.model
    peft = parts.peft
    source.notes = []
    if peft:
        peft.check(mesh.device, strategy, source.pretrained)
    made: list[tuple[ParallelModel, LoraAdapter | None]] = []
    loading = ExitStack()

    def spread(lm: transformers.PreTrainedModel) -> None:
        is_described = lm.device.type == "meta"
        if parts.training.master_weights == "bf16":
            cast_weights(lm, torch.bfloat16, are_trained=True)
        adapter = peft.adapt(lm, str(source.pretrained), tokenizer) if peft else None
        # frozen towers of a model that is trained keep the dtype in which they are written back
        if adapter:
            cast_weights(lm, dtype, are_trained=False)
            if not is_described:
                adapter.follow_base()
        if not trains:
            cast_weights(lm.requires_grad_(False), dtype, are_trained=False)
        elif parts.training.fp8 != "none":
            from automodel_lite.models.fp8 import use_fp8  # with torchao

            use_fp8(decoder_layers(lm), parts.training.fp8)
        heads = HeadsAhead.of(lm, source.mtp_loss) if source.mtp_loss else None
        loss_model = LossModel(lm, parts.loss, source.balance(lm), heads)
        if trains and (alpha := parts.training.neftune_noise_alpha):
            loss_model.noise = EmbeddingNoise(alpha, lm)
        # DDP has no gradients to reduce
        of_frozen = "none" if strategy == "ddp" and not trains else strategy
        how = (parts.mesh.cpu_offload, parts.advanced.reshard_after_forward is not False)
        made.append((parallelize(loss_model, mesh, of_frozen, dtype, *how), adapter))
        if adapter and is_described:
            loading.enter_context(adapter.hidden())

    # DDP broadcasts what its first rank has; 4 bits have blocks that are no rows
    if mesh.root is not None and strategy != "ddp" and not parts.is_quantized:
        with loading:
            device = torch.device("cpu") if parts.mesh.cpu_offload else mesh.device
            source.build_sharded(tokenizer, spread, device, reading_turn)
    else:
        loaded_by = peft.load_arguments(mesh.device, dtype) if peft else None
        spread(source.build(tokenizer, loaded_by, mesh.device))
    model, adapter = made[-1]
    _place(model.loss_model, mesh.device, parts.mesh.cpu_offload)
    model.loss_model.train(trains)
    # by one scale for a whole weight; an offloaded shard is another tensor when it is gathered
    if (
        has_fp8(lm := model.loss_model.lm)
        and parts.training.fp8 == "tensorwise"
        and not parts.mesh.cpu_offload
    ):
        from automodel_lite.models.fp8 import Fp8Gathers  # with torchao

        gathers = Fp8Gathers(lm, dtype)
        model = replace(model, refresh=gathers.refresh)
    return model, adapter


def _place(model: torch.nn.Module, device: torch.device, offloads: bool) -> None:
    """Moves a model to its device; offloaded weights stay on the host, buffers do not."""
    if not offloads and any(tensor.device != device for tensor in model.parameters()):
        torch.nn.Module.to(model, device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
