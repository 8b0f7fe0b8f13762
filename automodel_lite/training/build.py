"""The model of a run: loaded or made, given its attention kernel and its loss, checked, spread over the mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_lite.attention.adapter import install
from automodel_lite.attention.auto import auto_attention
from automodel_lite.attention.kernel import AttentionKernel
from automodel_lite.attention.probe import check_packing_isolation, stream_of
from automodel_lite.attention.spec import attention_spec
from automodel_lite.config.components import build, locate
from automodel_lite.config.schema import Config, TrainingConfig
from automodel_lite.models.adapter import Adapter, Peft, cast_frozen
from automodel_lite.models.flops import StepFlops, model_size, step_flops
from automodel_lite.models.layers import check_layers, compile_layers, recompute_layers
from automodel_lite.models.loss import CrossEntropy, Loss, LossModel, head_is_plain
from automodel_lite.models.source import CausalLM, embedding_rows
from automodel_lite.parallel.checks import check_context_parallel, check_cp_settings, checkpointing_hint
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parallel.sharding import (
    ParallelModel,
    choose_precision,
    choose_strategy,
    decoder_layers,
    parallelize,
)
from automodel_lite.training.memory import MemoryEstimate, estimate_memory


@dataclass(frozen=True)
class BuiltModel:
    """A parallel model and what is said of it at the start."""

    model: ParallelModel
    num_parameters: int
    flops: StepFlops
    memory: MemoryEstimate  # of one rank
    attention: str  # which kernel, and why
    loss: str
    strategy: str
    source_dtype: torch.dtype  # of the loaded weights, which the export keeps; fp32 from scratch
    adapter: Adapter | None = None  # LoRA and the like: only this is trained and saved


def build_model(config: Config, source: CausalLM, tokenizer: PreTrainedTokenizerBase, mesh: Mesh) -> BuiltModel:
    """Every rank builds the same weights; then they are checked and sharded.

    Raises ConfigError when the model, the kernel and the device do not fit together.
    """
    check_layers(config.training.compile, config.training.activation_checkpointing)
    strategy = choose_strategy(config.mesh.strategy, mesh.shape, mesh.device)
    dtype = choose_precision(config.training.precision, mesh.device)
    lm, adapter = load_and_adapt(config, source, tokenizer, mesh.device, strategy)
    size = model_size(source.config(tokenizer))
    trained = sum(p.numel() for p in lm.parameters() if p.requires_grad)
    flops = step_flops(lm.config, size, trained if adapter else None)
    memory = estimate_memory(config, mesh.shape, strategy, lm.config, size, trained if adapter else None, dtype)
    kernel, reason = choose_attention(config, lm.config, mesh.device, dtype)
    hint = check_cp(config, lm.config, mesh, dtype)
    install(lm, kernel)
    cast_frozen(lm, dtype)
    torch.nn.Module.to(lm, mesh.device)
    with torch.autocast(mesh.device.type, dtype, enabled=dtype != torch.float32):
        check_packing_isolation(lm, mesh.device)
        check_context_parallel(lm, mesh.cp, config.mesh.cp_exchange, mesh.device)
        loss, loss_reason = choose_loss(config, lm, mesh.device)
    speed_up_layers(config.training, lm)
    model = parallelize(LossModel(lm, loss), mesh, strategy, dtype)
    attention = f"{reason}\n{hint}" if hint else reason
    return BuiltModel(model, size.parameters, flops, memory, attention, loss_reason, strategy, source.dtype, adapter)


def load_and_adapt(
    config: Config, source: CausalLM, tokenizer: PreTrainedTokenizerBase, device: torch.device, strategy: str
) -> tuple[transformers.PreTrainedModel, Adapter | None]:
    """The model on the CPU (quantized: on its device), with adapters inside when `peft` asks for them."""
    if not config.peft:
        return source.build(tokenizer), None
    peft: Peft = build(config.peft)
    peft.check(device, strategy, source.pretrained)
    lm = source.build(tokenizer, peft.load_arguments(device))
    return lm, peft.adapt(lm, str(source.pretrained))


def speed_up_layers(training: TrainingConfig, lm: transformers.PreTrainedModel) -> None:
    """fp8, compilation and recomputation, in this order: checkpoint(compile(layer)). Changes the model in place."""
    layers = decoder_layers(lm)
    if training.fp8 != "none":
        locate("automodel_lite.models.fp8.use_fp8")(layers, training.fp8)
    if training.compile:
        compile_layers(layers)
    recompute_layers(layers, training.activation_checkpointing, training.recompute_every_layers)


def choose_attention(
    config: Config, model_config: PretrainedConfig, device: torch.device, dtype: torch.dtype
) -> tuple[AttentionKernel, str]:
    """The configured kernel, checked against what the model asks of it; an empty node (`attention=auto`) takes the
    best.
    """
    spec = attention_spec(model_config, device, dtype, exchanges_by_itself(config))
    if not config.attention:
        return auto_attention(spec)
    kernel: AttentionKernel = build(config.attention)
    kernel.check(spec)
    return kernel, f"{kernel.name.removeprefix('thd_')}: as configured"


def exchanges_by_itself(config: Config) -> bool:
    """Must the kernel exchange between context-parallel ranks on its own?"""
    return config.mesh.cp > 1 and config.mesh.cp_exchange == "te"


def check_cp(config: Config, model_config: PretrainedConfig, mesh: Mesh, dtype: torch.dtype) -> str | None:
    """Raises ConfigError where the model or the pack size rule context parallelism out; may have a hint to print."""
    spec = attention_spec(model_config, mesh.device, dtype, exchanges_by_itself(config))
    size: int = config.packed_sequence["packed_sequence_size"]
    check_cp_settings(model_config, spec, mesh.shape.cp, config.mesh.cp_exchange, size)
    if config.training.activation_checkpointing != "none":
        return None
    num_layers: int = model_config.get_text_config().num_hidden_layers
    num_tokens = size * config.training.micro_batch_size
    return checkpointing_hint(spec, num_layers, num_tokens, mesh.shape.cp, config.mesh.cp_exchange)


def choose_loss(config: Config, lm: transformers.PreTrainedModel, device: torch.device) -> tuple[Loss, str]:
    """The configured loss; heads that are not `hidden @ weight.T` take the model's own head, and it is said."""
    loss: Loss = build(config.loss)
    name = type(loss).__name__
    if loss.includes_head and not head_is_plain(lm, probe_inputs(lm, device)):
        return CrossEntropy(), f"CrossEntropy: the output head of {type(lm).__name__} is more than hidden @ weight.T"
    return loss, name


def probe_inputs(lm: transformers.PreTrainedModel, device: torch.device) -> dict[str, object]:
    """Model inputs of one short document."""
    num_tokens = 8
    ids = torch.arange(num_tokens)[None] % embedding_rows(lm)
    return stream_of(ids, device).model_inputs()
