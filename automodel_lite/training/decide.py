"""Every setting that depends on the model, the ranks and the device, decided once and before
anything is built: `decide` is called by a run and its dry run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_lite.attention.interface import choose_attention
from automodel_lite.attention.kernel import AttentionKernel
from automodel_lite.attention.positions import LENGTH_DEPENDENT
from automodel_lite.attention.spec import attention_specs, config_value, layer_shapes
from automodel_lite.data.feeding.order import batch_shape
from automodel_lite.data.feeding.source import PackSource
from automodel_lite.data.tokens.tokenizer import vocabulary_of
from automodel_lite.errors import ConfigError
from automodel_lite.models.flops import size_of
from automodel_lite.models.settings import describe_with
from automodel_lite.models.source import CausalLM, describe
from automodel_lite.parallel.exchange import choose_exchange
from automodel_lite.parallel.mesh import MeshShape, choose_strategy
from automodel_lite.parallel.sharding import choose_precision
from automodel_lite.telemetry.metrics import STARTUP
from automodel_lite.training.memory import estimate_memory, gib, gpu_bytes, num_shards
from automodel_lite.training.rules import check_pairs, check_parts
from automodel_lite.training.settings import (
    Decided,
    RunParts,
    as_teacher,
    with_recomputation,
)

_MOST_OF_A_GPU = 0.9  # that a coarse estimate may fill

ChooseRecomputation = Callable[[Decided, int, int | None], tuple[Decided, str]]
"""(settings, bytes of the GPU, weights of the adapter) -> settings, and why."""


def decide(
    parts: RunParts,
    tokenizer: PreTrainedTokenizerBase,
    shape: MeshShape,
    device: torch.device,
    gpu: int | None = None,
    trains: bool = True,
    recompute: ChooseRecomputation | None = None,
) -> Decided:
    """Returns all settings of a run. Before any process group exists: a step may be simulated.

    gpu     bytes; None = those of `device`
    trains     False: what only a step needs, recomputation and reduction, is left as it is
    recompute  settles `activation_checkpointing=auto` for a GPU of so many bytes; None = `full`
    Raises ConfigError as `decide_layout` does.
    """
    decided = decide_layout(parts, parts.model.config(tokenizer), shape, device)
    if parts.teacher:
        second = as_teacher(parts, parts.teacher)
        frozen = decide_layout(second, parts.teacher.config(tokenizer), shape, device)
        decided = replace(decided, of_teacher=frozen)
    if not trains:
        return decided
    check_pairs(parts, shape.dp)
    gpu = gpu or gpu_bytes(device)
    adapter = adapter_weights(decided, device)
    if gpu and parts.mesh.strategy == "auto":
        decided = with_fsdp_where_copies_do_not_fit(decided, adapter, gpu)
    # on a CPU nothing is recomputed
    if parts.training.activation_checkpointing == "auto" and gpu and recompute:
        decided, reason = recompute(decided, gpu, adapter)
        text = f"{reason} on GPUs of {gpu / 1e9:.0f} GB"
        decided = replace(decided, recomputation_text=text)
        STARTUP.lap("plan")
    available = gpu_bytes(device) and float(gpu or 0)
    if available and decided.of_teacher and not parts.mesh.cpu_offload:
        frozen = decided.of_teacher
        available -= frozen.dtype.itemsize * frozen.size.parameters / num_shards(frozen)
    return decide_reduction(decided, adapter, available)


def decide_layout(
    parts: RunParts, config: PretrainedConfig, shape: MeshShape, device: torch.device
) -> Decided:
    """Returns what follows from the mesh and the device: the strategy, the precision, the kernel
    and the exchange. What fits the memory is not looked at.

    Raises ConfigError when the settings, the model, the kernel and the device do not fit together.
    """
    # nobody has counted: a GPU may be too small for all of it
    if parts.training.activation_checkpointing == "auto":
        parts = with_recomputation(parts, "full" if device.type == "cuda" else "none", 1)
    strategy = choose_strategy(parts.mesh.strategy, shape, parts.mesh.cpu_offload)
    dtype = choose_precision(parts.training.precision, device)
    check_parts(parts, strategy, device)
    if parts.mesh.ep_overlap:  # what FSDP frees behind one micro-batch, the other still needs
        kept = replace(parts.advanced, reshard_after_forward=False, reduce_every_micro_batch=False)
        parts = replace(parts, advanced=kept)
    kernel, reason = choose_attention(parts.attention, attention_specs(config, device, dtype))
    parts, exchange = with_exchange(parts, config, kernel, dtype)
    described = describe_with(parts.model.settings, partial(describe, config))
    parts.model.add_heads(described)
    # with the models' code
    from automodel_lite.models.experts import choose_experts

    source = parts.model
    experts = choose_experts(source.experts, described, device, source.key)
    parts = replace(parts, model=source.with_experts(experts))
    parts.model.balance(described)  # a model without routers is refused
    return Decided.of(
        parts,
        config=config,
        size=size_of(described),
        shape=shape,
        strategy=strategy,
        dtype=dtype,
        kernel=kernel,
        attention_text=f"{reason}\n{exchange}".strip(),
    )


def with_exchange(
    parts: RunParts, config: PretrainedConfig, kernel: AttentionKernel, dtype: torch.dtype
) -> tuple[RunParts, str]:
    """Returns the parts with `mesh.cp_exchange=auto` decided, and a line that says how; none
    without context parallelism.

    Raises ConfigError where the model, the kernel or the pack size rule context parallelism out.
    """
    cp = parts.mesh.cp
    if cp == 1:
        return replace(parts, mesh=replace(parts.mesh, cp_exchange="all_gather")), ""
    num_tokens = parts.packed_sequence_size * parts.training.micro_batch_size
    tp = parts.mesh.tp
    # heads are divided over tp first
    layers = [
        replace(x, num_heads=x.num_heads // tp, num_kv_heads=x.num_kv_heads // tp)
        for x in layer_shapes(config)
    ]
    exchange, reason = choose_exchange(
        parts.mesh.cp_exchange, kernel, layers, num_tokens, cp, dtype.itemsize
    )
    line = f"cp_exchange=auto takes {exchange}: {reason}" if reason else ""
    return replace(parts, mesh=replace(parts.mesh, cp_exchange=exchange)), line


def with_fsdp_where_copies_do_not_fit(decided: Decided, adapter: int | None, gpu: int) -> Decided:
    """Returns the settings of one process, with FSDP where the copies of the weights in the compute
    dtype take the room that the step needs: FSDP has those of two layers at a time.

    gpu  bytes
    """
    if decided.strategy != "none" or decided.is_quantized:
        return decided
    least = with_recomputation(decided, "full", 1)
    sharded = replace(least, strategy="fsdp")
    alone, with_fsdp = (estimate_memory(each, adapter).total for each in (least, sharded))
    is_needed = alone > _MOST_OF_A_GPU * gpu and with_fsdp < alone
    if not is_needed:
        return decided
    # in the mesh, too: a step that is simulated is laid out by its settings
    return replace(decided, strategy="fsdp", mesh=replace(decided.mesh, strategy="fsdp"))


def decide_reduction(decided: Decided, adapter: int | None, available: float | None) -> Decided:
    """Returns the settings with `advanced.reduce_every_micro_batch=auto` decided.

    adapter    trained weights beside a frozen model, None without
    available  bytes of the GPU; None = not known, as on a CPU
    """
    advanced = decided.advanced
    wish = advanced.reduce_every_micro_batch
    at_end = replace(decided, advanced=replace(advanced, reduce_every_micro_batch=False))
    whole = estimate_memory(at_end, adapter).gradients
    micro_steps = batch_shape(decided.training, decided.shape.dp).micro_steps
    # A sum of a quarter of the GPU leaves too little for a micro-batch; reducing a smaller one
    # early gains little.
    is_large = available is not None and whole > available / 4
    is_asked = wish is True or (wish == "auto" and is_large)
    is_on = decided.strategy == "fsdp" and micro_steps > 1 and is_asked
    text = f"gradients are reduced after every micro-batch: their sum would take {gib(whole)}"
    advanced = replace(advanced, reduce_every_micro_batch=is_on)
    return replace(decided, advanced=advanced, reduction_text=text if is_on else "")


def adapter_weights(decided: Decided, device: torch.device) -> int | None:
    """Counts the trained weights of an adapter on the meta device; None when the model itself is
    trained.
    """
    peft = decided.peft
    pretrained = decided.model.pretrained
    if peft is None:
        return None
    peft.check(device, decided.strategy, pretrained)
    lm = describe(decided.config)
    with torch.device("meta"):
        peft.adapt(lm, str(pretrained))
    return sum(p.numel() for p in lm.parameters() if p.requires_grad)


def check_positions(data: PackSource, model: CausalLM, teacher: CausalLM | None = None) -> None:
    """Raises ConfigError when a document has more tokens than a model has positions (each document
    starts at 0), or when the rows of a tree may need different rotations for the tokens that they
    share.
    """
    models = {"model": model} if teacher is None else {"model": model, "teacher": teacher}
    for name, config in {name: of.config(data.tokenizer) for name, of in models.items()}.items():
        longest = data.longest
        text = config.get_text_config()
        limit = config_value(text, "max_position_embeddings")
        rope = config_value(text, "rope_parameters", {})
        # one kind, or one for each kind of layer
        for parameters in [x for x in (rope, *rope.values()) if isinstance(x, dict)]:
            kind = parameters.get("rope_type")
            at_top = config_value(text, "original_max_position_embeddings", limit)
            original = parameters.get("original_max_position_embeddings") or at_top
            if data.has_trees and kind in LENGTH_DEPENDENT and longest > original:
                raise ConfigError(
                    f"{name}.config.rope_parameters.rope_type={kind} rotates rows over {original} "
                    f"tokens differently, and rows of up to {longest} share their beginnings: set "
                    "packed_sequence.tree=off."
                )
        if limit is not None and longest > limit:
            raise ConfigError(
                f"the longest document has {longest} tokens, the {name} "
                f"max_position_embeddings={limit}: set "
                f"packed_sequence.packed_sequence_size={limit} (packed_sequence.overlong drops, "
                f"truncates or splits longer ones), or scale its positions by {name}.config."
            )


def check_same_vocabulary(teacher: RunParts, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError for a teacher with another tokenizer; one without tokenizer files is taken
    at its word.
    """
    name = str(teacher.model.pretrained)
    theirs = vocabulary_of(name, str(teacher.model.source["revision"]))
    tokens = {token for token, _ in tokenizer.get_vocab().items() ^ theirs.items()}
    if theirs and (differing := sorted(tokens)):
        raise ConfigError(
            f"teacher.pretrained={name} has another vocabulary than the student "
            f"({len(differing):,} tokens differ, as {differing[0]!r}), and probabilities are "
            "compared token by token: take a teacher of the same family."
        )
