"""Settings that a configuration leaves to the data and the model: `auto` becomes a number.

Every program resolves them first, so that all of them see the same packs and rates; a run saves the
numbers, and resumes with them.

    packed_sequence.packed_sequence_size   from the lengths of the documents
    optimizer.lr                           from the kind of training and the width of the model
    training.micro_batch_size (0)          from the size of a pack and a rank's packs in a step
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from automodel_lite.attention.spec import config_value
from automodel_lite.config.schema import Config, MeshConfig, TrainingConfig
from automodel_lite.config.sizes import (
    AUTO_BATCH_SIZE,
    LEAST_STEPS,
    MeshShape,
    ceil_div,
    fitted_batch_size,
    global_batch_size_of,
    mesh_shape,
    round_up,
)
from automodel_lite.data.feeding.planned import document_kind, epochs_of
from automodel_lite.data.feeding.source import AdaptingDataset, PackingDataset
from automodel_lite.data.prepare import build_documents
from automodel_lite.data.tokens.tokenize import job_of, tokenize_documents
from automodel_lite.errors import ConfigError
from automodel_lite.launched import world_size
from automodel_lite.run.checkpoint_folder import exported_folder
from automodel_lite.telemetry.console import Console
from automodel_lite.training.rates import FAR, learning_rate
from automodel_lite.training.rules import try_settings
from automodel_lite.training.settings import AUTO, Parts, build_parts

SIZE = "packed_sequence.packed_sequence_size"
COVERED_FRAC = 0.995  # of the documents, which fit a pack whole
LEAST_PACK = 128  # tokens
FEW_DOCUMENTS = 4  # of a typical length: as many leave little of a pack empty
LEAST_SPLIT_PACK = 512  # of text, which is split: a shorter context teaches little
MOST_PACK = 4096  # tokens; longer packs are for documents that need them
# of AUTO_BATCH_SIZE packs: where a run has more, longer packs waste less time per step
MANY_STEPS = 500


def resolve_auto(config: Config, console: Console | None = None, has_data: bool = True) -> Config:
    """Returns the configuration with numbers instead of `auto`; prints each with its reason.

    has_data  False: rows come later, from memory; packs are as long as the model's positions, and
              no longer than `MOST_PACK`
    Raises ConfigError or DataError as the run would: for settings that cannot work, before
    anything is tokenized; for a stream, whose lengths are not known.
    """
    open_settings = (config.packed_sequence.get("packed_sequence_size"), config.optimizer.get("lr"))
    if AUTO not in open_settings and config.training.micro_batch_size:
        return config
    console = console or Console()
    is_auto = config.packed_sequence.get("packed_sequence_size") == AUTO
    least = 2 * config.mesh.cp if config.mesh.cp > 1 else 1
    multiple = config.packed_sequence.get("slot_multiple") or least
    # packs this long are passed one by one, whatever the data are
    is_long = not is_auto and config.packed_sequence["packed_sequence_size"] > MOST_PACK // 2
    is_micro_open = not config.training.micro_batch_size and not is_long
    config = with_micro_batch(config, config.training.micro_batch_size or 1)
    # a size that any slots divide, to try the other settings with
    trial = with_pack_size(config, round_up(MOST_PACK, multiple)) if is_auto else config
    parts = build_parts(trial)
    if "lr" in config.optimizer:
        rate = _rate_of(config, parts, console)
        config = replace(config, optimizer=config.optimizer | {"lr": rate})
    data = None
    if is_auto or is_micro_open:
        try_settings(trial, parts)
        data = data_of(config, parts, console) if has_data else None
    if is_auto:
        if has_data:
            size, reason = pack_size_of(data, config, parts, multiple)
        else:
            model_config = parts.model.resolve_model_config({"vocab_size": LEAST_PACK})
            size, reason = _within_positions(model_config, MOST_PACK, "of rows in memory")
            size = size // multiple * multiple
        config = with_pack_size(config, size)
        console.say("auto", f"{SIZE}: {size:,} ({reason})")
    if is_micro_open:
        parts = build_parts(config)
        micro = micro_batch_of(config, parts, data)
        config = with_micro_batch(config, micro)
        if micro > 1:
            tokens = micro * parts.packed_sequence_size
            reason = f"packs of a step share forward passes of {tokens:,} tokens"
            console.say("auto", f"training.micro_batch_size: {micro} ({reason})")
    return config


def _rate_of(config: Config, parts: Parts, console: Console) -> Any:
    """Returns the learning rate, and prints one that is chosen, or given and far from it."""
    usual, reason = learning_rate(parts.model, parts.loss, config.peft)
    given = config.optimizer["lr"]
    if given == AUTO:
        console.say("auto", f"optimizer.lr: {usual:g} ({reason})")
        return usual
    if given and not usual / FAR <= given <= usual * FAR:
        console.say("NOTE", f"optimizer.lr={given:g} is far from the usual {usual:g} ({reason})")
    return given


def with_pack_size(config: Config, size: int) -> Config:
    """Returns the configuration with packs of this many tokens."""
    return replace(config, packed_sequence=config.packed_sequence | {"packed_sequence_size": size})


def with_micro_batch(config: Config, size: int) -> Config:
    """Returns the configuration with this many packs in a forward pass."""
    return replace(config, training=replace(config.training, micro_batch_size=size))


@dataclass(frozen=True)
class Known:
    """What the data of a run say before they are packed."""

    lengths: np.ndarray  # tokens of each document, int [documents]
    is_split: bool  # documents may be cut, so that no pack has to hold one whole
    tokenizer: PreTrainedTokenizerFast


def data_of(config: Config, parts: Parts, console: Console) -> Known | None:
    """Tokenizes the documents, or finds them in the cache; None for a stream, whose lengths are
    not known. Prints what was not in the cache: the run finds it there.
    """
    documents = build_documents(config)
    if isinstance(documents, PackingDataset):
        return None
    # trees that documents share would be as long as the pack: of `tree=all`, each document's own
    tree = "auto" if parts.packer.tree == "all" else parts.packer.tree
    job = job_of(config, documents, tree)
    packer = parts.packer
    if isinstance(documents, AdaptingDataset):
        documents, job, packer = documents.adapt(config, job, packer)
    tokens = tokenize_documents(documents, job, config.cache_dir)
    for note in tokens.notes:
        name = note.partition(": ")[0]
        _, is_entry, found = note.partition(" · cache: ")
        if is_entry and found != "hit":
            console.say("cache", f"{name}: {found}")
    packer = packer.for_document_kind(document_kind(documents))
    return Known(
        tokens.train.lengths, packer.overlong == "split" or packer.cuts_documents, job.tokenizer
    )


def pack_size_of(
    data: Known | None, config: Config, parts: Parts, multiple: int
) -> tuple[int, str]:
    """Returns the tokens of a pack, and why: see `fitted_pack_size`; a multiple of `multiple`, and
    at most the positions of the model and its teacher.
    """
    if data is None:
        raise ConfigError(
            f"{SIZE}=auto needs the lengths of all documents, which a stream does not know: set "
            f"{SIZE}={MOST_PACK}."
        )
    size, reason = fitted_pack_size(data.lengths, config.training, data.is_split)
    for model in (parts.model, parts.teacher):
        if model:
            size, reason = _within_positions(model.config(data.tokenizer), size, reason)
    return max(multiple, size // multiple * multiple), reason


def shape_of_dry_run(mesh: MeshConfig) -> MeshShape:
    """Returns `mesh_shape` of this job's processes; one alone answers for any mesh. Raises its
    ConfigError.
    """
    num_processes = world_size()
    if num_processes == 1:
        num_processes = mesh.dp_replicate * max(mesh.dp_shard, 1) * mesh.cp * mesh.tp
    return mesh_shape(mesh, num_processes)


def micro_batch_of(config: Config, parts: Parts, data: Known | None) -> int:
    """Returns the packs of a forward pass: as many of a rank's packs in a step as together have at
    most `MOST_PACK` tokens. Passes of a few hundred tokens leave a device idle.

    One, where documents are padded, where a stream packs them, and where the processes do not fit
    the mesh, which the run explains.
    """
    packer = parts.packer
    most = MOST_PACK // packer.packed_sequence_size
    if most < 2 or packer.is_ragged or data is None:
        return 1
    try:
        mesh = config.mesh
        shape = shape_of_dry_run(mesh) if config.dry_run else mesh_shape(mesh, world_size())
        dp = shape.dp
        batch = global_batch_size_of(parts.training, dp)
    except ConfigError:
        return 1
    training = config.training
    if training.global_batch_size == "auto" and training.max_steps is None:
        tokens = int(data.lengths.sum(dtype=np.int64))
        num_packs = ceil_div(tokens, packer.packed_sequence_size)
        epochs, _ = epochs_of(training, len(data.lengths))
        batch = fitted_batch_size(dp, batch, min(packer.max_packs or num_packs, num_packs), epochs)
    share = batch // dp
    return max(size for size in range(1, most + 1) if share % size == 0)


def _within_positions(model_config: PretrainedConfig, size: int, reason: str) -> tuple[int, str]:
    limit = config_value(model_config.get_text_config(), "max_position_embeddings")
    if limit and size > limit:
        return limit, f"{reason}; the model has {limit:,} positions"
    return size, reason


def fitted_pack_size(
    lengths: np.ndarray, training: TrainingConfig, is_split: bool = False
) -> tuple[int, str]:
    """Returns the tokens of a pack, and why: the power of two that holds 99.5 % of the documents
    whole, or more: several documents fill a pack that one leaves half empty, and long packs waste
    less time per step, where the run has steps enough.

    lengths    tokens of each document, int [documents]
    is_split   documents may be cut, so that no pack has to hold one whole

    >>> fitted_pack_size(np.array([40, 60, 213]), TrainingConfig())
    (256, '99.5 % of 3 documents have at most 213 tokens')
    """
    covered = int(np.quantile(lengths, COVERED_FRAC, method="inverted_cdf"))
    size = max(LEAST_PACK, 1 << (covered - 1).bit_length())
    reason = f"{COVERED_FRAC:.1%} of {len(lengths):,} documents have at most {covered:,} tokens"
    reason = reason.replace("%", " %")
    if is_split:
        size = min(size, LEAST_SPLIT_PACK)
        reason = f"{len(lengths):,} documents, which may be cut"
    tokens = int(lengths.sum(dtype=np.int64)) * epochs_of(training, len(lengths))[0]
    typical = int(np.median(lengths))
    wanted = 0 if is_split else min(FEW_DOCUMENTS * typical, MOST_PACK)
    least = size
    # steps of two packs are enough of them
    while size < wanted and tokens >= 4 * size * LEAST_STEPS:
        size *= 2
    if size > least:
        reason += f"; several of about {typical:,} fill a pack better than one"
    least = size
    while size < MOST_PACK and tokens >= 2 * size * AUTO_BATCH_SIZE * MANY_STEPS:
        size *= 2
    if size > least:
        reason += f", and {tokens:,} tokens are over {MANY_STEPS} steps of longer packs too"
    return size, reason


def from_run(config: Config) -> Config:
    """Replaces a run's folder in model.pretrained by what that run has exported: its model, or its
    adapter and base.

    Raises ConfigError for a run without an export, and for an adapter that nothing continues.
    """
    pretrained = config.model.get("pretrained")
    folder = exported_folder(pretrained) if pretrained else None
    if not pretrained or not folder or Path(folder) == Path(pretrained).expanduser():
        return config
    tokenizer = {
        key: folder if value == pretrained else value for key, value in config.tokenizer.items()
    }
    model = folder
    peft = config.peft
    settings = Path(folder) / "adapter_config.json"
    if settings.is_file():
        if not peft:
            raise ConfigError(
                f"model.pretrained={pretrained} holds an adapter: peft=lora continues it; to train "
                "the whole model, automodel-lite export merges it into its base first."
            )
        model = json.loads(settings.read_text())["base_model_name_or_path"]
        peft = peft | {"adapter": peft.get("adapter") or folder}
    return replace(
        config, model=config.model | {"pretrained": model}, tokenizer=tokenizer, peft=peft
    )
