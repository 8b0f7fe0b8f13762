"""Builds the model of a run: weights, attention kernel and loss, spread over the mesh, then
checked.

Compiled layers and the compiled loss run once before the first step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from automodel_lite import compat
from automodel_lite.attention.documents import runs_by_rows
from automodel_lite.attention.interface import install
from automodel_lite.attention.isolation import check_packing_isolation
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.attention.positions import short_lengths
from automodel_lite.attention.spec import FAMILIES
from automodel_lite.config.components import locate
from automodel_lite.config.schema import TrainingConfig
from automodel_lite.config.sizes import ceil_div
from automodel_lite.errors import (
    ConfigError,
    is_lost_peer,
    is_out_of_memory,
    is_out_of_threads,
    one_line,
)
from automodel_lite.graphs import compiled_graphs, graph_breaks
from automodel_lite.interpreter import trim_malloc
from automodel_lite.models.flops import StepFlops, step_flops, visited_weights
from automodel_lite.models.layers import (
    KEPT_FRAC,
    cast_weights,
    compile_layers,
    decoder_layers,
    has_fp8,
    recompute_layers,
)
from automodel_lite.models.loss_model import LossModel
from automodel_lite.models.source import embedding_rows
from automodel_lite.parallel.context_parallel import check_context_parallel, cp_shard
from automodel_lite.parallel.mesh import Mesh, reading_turn
from automodel_lite.parallel.sharding import (
    ParallelModel,
    parallelize,
)
from automodel_lite.seed import seed_all
from automodel_lite.telemetry.metrics import STARTUP
from automodel_lite.thd import ThdBatch, stream_of
from automodel_lite.training.memory import (
    MemoryEstimate,
    check_weights_fit,
    estimate_memory,
)
from automodel_lite.training.plan import Decided, Parts

if TYPE_CHECKING:
    from automodel_lite.parts.adapters.lora import LoraAdapter  # which brings peft

CHECK_VOCABULARY = "automodel_lite.parts.losses.distillation.check_same_vocabulary"


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
            attention = rows_reason(decided, lm)
        loss = check_model(decided.mesh.cp_exchange, model, mesh)
        model.gather_towers_once()
        STARTUP.lap("probe")
    heads = model.loss_model.heads
    beside = visited_weights(lm, only_trained=True) if adapter else None
    flops = step_flops(decided.config, decided.size, beside, heads.depth if heads else 0)
    flops = flops.without_frozen(lm) if decided.model.freeze else flops
    if decided.of_teacher:
        locate(CHECK_VOCABULARY)(decided.of_teacher, tokenizer)
        teacher = build_model(decided.of_teacher, tokenizer, mesh, trains=False)
        model.loss_model.set_teacher(teacher.model.loss_model)
        flops = flops.with_teacher(teacher.flops)
    compiled = compile_model(decided, model, mesh) if trains else "off"
    STARTUP.lap("compile")
    num_trained = sum(p.numel() for p in lm.parameters() if p.requires_grad)
    model = replace(model, reduces_every=decided.advanced.reduce_every_micro_batch is True)
    of_adapter = num_trained if adapter else None
    memory = estimate_memory(decided, of_adapter, num_trained if decided.model.freeze else None)
    return BuiltModel(model, decided, flops, memory, loss, compiled, attention, adapter)


def rows_reason(parts: Parts, lm: transformers.PreTrainedModel) -> str:
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


def assemble(
    parts: Parts,
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
        adapter = peft.adapt(lm, str(source.pretrained)) if peft else None
        # frozen towers of a model that is trained keep the dtype in which they are written back
        if adapter:
            cast_weights(lm, dtype, are_trained=False)
        if not trains:
            cast_weights(lm.requires_grad_(False), dtype, are_trained=False)
        elif parts.training.fp8 != "none":
            locate(FAMILIES["use_fp8"])(decoder_layers(lm), parts.training.fp8)
        heads = locate(FAMILIES["mtp"])(lm, source.mtp_loss) if source.mtp_loss else None
        loss_model = LossModel(lm, parts.loss, source.balance(lm), heads)
        # DDP has no gradients to reduce
        of_frozen = "none" if strategy == "ddp" and not trains else strategy
        how = (parts.mesh.cpu_offload, parts.advanced.reshard_after_forward is not False)
        made.append((parallelize(loss_model, mesh, of_frozen, dtype, *how), adapter))
        if adapter and is_described:
            loading.enter_context(adapter.hidden())

    if strategy == "fsdp" and mesh.root is not None:
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
        gathers = locate(FAMILIES["fp8_gathers"])(lm, dtype)
        model = replace(model, refresh=gathers.refresh)
    return model, adapter


def _place(model: torch.nn.Module, device: torch.device, offloads: bool) -> None:
    """Moves a model to its device; offloaded weights stay on the host, buffers do not."""
    if not offloads:
        torch.nn.Module.to(model, device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


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
        problem = f"mesh.tp={shape.tp} mesh.ep={shape.ep}: {name} does not run in parts"
        cure = "mesh.tp=1 mesh.ep=1"
        if shape.tp == shape.ep == 1:
            problem = f"training.precision=bf16: {name} does not run with weights in bf16"
            cure = "mesh.strategy=ddp or training.precision=fp32"
            if "BFloat16" not in str(error):
                raise
        if is_out_of_memory(error) or is_lost_peer(error) or is_out_of_threads(error):
            raise
        raise ConfigError(f"{problem} ({one_line(error)}): set {cure}.") from error


DOCUMENT_TOKENS = 1024  # the most of each document that stands for the data


def compiles(training: TrainingConfig, is_gpu: bool) -> bool:
    """auto: on a GPU, unless selective checkpointing watches single operations, which compilation
    fuses away.
    """
    if training.compile == "auto":
        return is_gpu and training.activation_checkpointing != "selective"
    return training.compile is True


def compile_model(parts: Parts, model: ParallelModel, mesh: Mesh, backend: str = "inductor") -> str:
    """checkpoint(compile(layer)) for every decoder layer, in place; returns what was compiled, and
    how long it took.

    All graphs of training are made here, by a forward and backward of a batch like the first
    step's. With training.compile=auto a model that cannot be compiled trains uncompiled, and the
    reason is returned.
    """
    training = parts.training
    layers = decoder_layers(model.loss_model.lm)
    how = (training.activation_checkpointing, parts.advanced.recompute_every_layers)
    cannot_compile = model.loss_model.balance is not None or runs_by_rows(model.loss_model.lm)
    if cannot_compile or not compiles(training, mesh.device.type == "cuda"):
        recompute_layers(layers, *how)
        return "off"
    # which compiled graphs do themselves
    is_selective = training.activation_checkpointing == "selective"
    undo = compile_layers(layers, backend, KEPT_FRAC if is_selective else 1.0)
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
    line = f"{compiled_graphs() - graphs} graphs in {time.monotonic() - began:.0f} s"
    if broken := graph_breaks() - breaks:
        places = ", ".join(f"{reason} ({times} times)" for reason, times in broken.items())
        line += f"; parts of the layers run uncompiled: {places}"
    return line


def worst_case_batch(parts: Parts, num_ids: int) -> ThdBatch:
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
    return replace(batch, columns=parts.loss.example_columns(batch))
