"""Settings that a configuration leaves to the data and the model: `auto` becomes a number.

Every program resolves them first, so that all of them see the same packs and rates; a run saves the
numbers, and resumes with them.

    from_run          model.pretrained          the folder of a run becomes what it has exported
    as_the_run_began  what a run is continued with: its batch, packs and rate
    classes           dataset.classes           those of a model that has a score head already
    rates             optimizer.lr              from the kind of training and the width of the model
    sizes             packed_sequence_size      from the lengths of the documents
                      micro_batch_size (0)      from the size of a pack and a rank's packs in a step

Each step is a function from settings to settings. `auto` is left where its answer follows from more
than the settings and the data: training.global_batch_size from the packs (feeding/planned.py), and
what depends on the ranks and the device (training/decide.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from automodel_lite.attention.spec import config_value
from automodel_lite.config.components import build
from automodel_lite.config.model_files import base_of
from automodel_lite.config.schema import Config, MeshConfig
from automodel_lite.config.sizes import (
    MeshShape,
    ceil_div,
    fitted_batch_size,
    global_batch_size_of,
    mesh_shape,
    round_up,
)
from automodel_lite.data.feeding.planned import document_kind, epochs_of
from automodel_lite.data.feeding.source import Reading, adapted, packing_dataset
from automodel_lite.data.packing.packs import Packer
from automodel_lite.data.prepare import build_documents, build_packer
from automodel_lite.data.tokens.tokenize import job_of, tokenize_documents
from automodel_lite.errors import ConfigError
from automodel_lite.launched import world_size
from automodel_lite.models.loss import checked_loss
from automodel_lite.models.score_head import is_scorer
from automodel_lite.run.checkpoint_folder import exported_folder
from automodel_lite.run.folder import RunFolder
from automodel_lite.telemetry.console import Console
from automodel_lite.training.pack_sizes import LEAST_PACK, MOST_PACK, fitted_pack_size
from automodel_lite.training.rates import FAR, learning_rate
from automodel_lite.training.rules import try_settings
from automodel_lite.training.settings import AUTO, RunParts, build_parts

SIZE = "packed_sequence.packed_sequence_size"


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
        model = base_of(Path(folder))
        peft = peft | {"adapter": peft.get("adapter") or folder}
    return replace(
        config, model=config.model | {"pretrained": model}, tokenizer=tokenizer, peft=peft
    )


def as_the_run_began(config: Config, folder: RunFolder) -> Config:
    """Returns the settings with what the layout of ranks, or `auto`, would decide anew taken from
    the run that has begun in this folder: the global batch, the size of packs and the slots of
    documents, the learning rate.

    Raises ConfigError when those slots cannot be shared by this many context-parallel ranks.
    """
    saved = folder.saved_config()
    if not saved:
        return config
    training = config.training
    optimizer = config.optimizer
    if training.global_batch_size in (None, AUTO) and not training.global_batch_documents:
        training = replace(training, global_batch_size=saved.get("training.global_batch_size"))
    if optimizer.get("lr") == AUTO:
        optimizer = optimizer | {"lr": saved.get("optimizer.lr")}
    packed = _packs_as_the_run_began(config, saved, folder)
    return replace(config, training=training, packed_sequence=packed, optimizer=optimizer)


def _packs_as_the_run_began(
    config: Config, saved: dict[str, Any], folder: RunFolder
) -> dict[str, Any]:
    packed = config.packed_sequence
    cp = config.mesh.cp
    slots = saved.get("packed_sequence.slot_multiple") or 1
    # slots that were typed and are others are a changed setting, which the folder names
    if packed.get("slot_multiple", 0) in (None, slots):
        packed = packed | {"slot_multiple": slots}
        if cp > 1 and slots % (2 * cp):
            raise ConfigError(
                f"mesh.cp={cp} needs documents padded to multiples of {2 * cp}, and "
                f"{folder.path} was started with packed_sequence.slot_multiple={slots}: use "
                "another mesh.cp, or start a new run with name=... "
                f"(packed_sequence.slot_multiple={2 * cp} from the start fits mesh.cp=1 and "
                f"{cp})."
            )
    if packed.get("packed_sequence_size") == AUTO:
        packed = packed | {"packed_sequence_size": saved.get(SIZE)}
    return packed


def resolve_auto(config: Config, console: Console | None = None, has_data: bool = True) -> Config:
    """Returns the configuration with numbers instead of `auto`; prints each with its reason.

    has_data  False: rows come later, from memory; packs are as long as the model's positions, and
              no longer than `MOST_PACK`
    Raises ConfigError or DataError as the run would: for settings that cannot work, before
    anything is tokenized; for a stream, whose lengths are not known.
    """
    console = console or Console()
    return sizes(rates(classes(from_run(config)), console), console, has_data)


def classes(config: Config) -> Config:
    """Returns the configuration with the classes of a model that tells them apart already: what it
    calls number 2 is number 2 of the data.
    """
    dataset = config.dataset
    pretrained = config.model.get("pretrained")
    is_open = dataset.get("format") == "labeled" and dataset.get("classes") is None
    if config.model.get("head") != "score" or not pretrained or not is_open:
        return config
    known = build(config.model).resolve_model_config({})
    if not is_scorer(known) or known.num_labels < 2:
        return config
    names = [known.id2label[number] for number in range(known.num_labels)]
    return replace(config, dataset=dataset | {"classes": names})


def rates(config: Config, console: Console) -> Config:
    """Returns the configuration with a learning rate: by what is trained, and the width of the
    model. Prints one that is chosen, or given and far from the usual one.
    """
    given = config.optimizer.get("lr")
    if given is None:
        return config
    usual, reason = learning_rate(
        build(config.model), checked_loss(build(config.loss)), config.peft
    )
    if given == AUTO:
        console.say("auto", f"optimizer.lr: {usual:g} ({reason})")
        return replace(config, optimizer=config.optimizer | {"lr": usual})
    if given and not usual / FAR <= given <= usual * FAR:
        console.say("NOTE", f"optimizer.lr={given:g} is far from the usual {usual:g} ({reason})")
    return config


def sizes(config: Config, console: Console, has_data: bool = True) -> Config:
    """Returns the configuration with the tokens of a pack, and the packs of a forward pass."""
    given: Any = config.packed_sequence.get("packed_sequence_size")
    is_micro_open = not config.training.micro_batch_size
    if is_micro_open:
        config = with_micro_batch(config, 1)
        # packs this long are passed one by one, whatever the data are
        is_micro_open = given == AUTO or given <= MOST_PACK // 2
    if given != AUTO and not is_micro_open:
        return config
    # The other settings are tried before anything is tokenized, with a pack that any slots divide.
    trial = config
    if given == AUTO:
        trial = with_pack_size(config, round_up(MOST_PACK, slots_of(config)))
    parts = build_parts(trial)
    try_settings(trial, parts)
    data = data_of(config, parts, console) if has_data else None
    if given == AUTO:
        size, reason = pack_size_of(data, config, parts, has_data)
        config = with_pack_size(config, size)
        console.say("auto", f"{SIZE}: {size:,} ({reason})")
    if is_micro_open:
        micro = micro_batch_of(config, build_packer(config), data)
        config = with_micro_batch(config, micro)
        if micro > 1:
            tokens = micro * config.packed_sequence["packed_sequence_size"]
            reason = f"packs of a step share forward passes of {tokens:,} tokens"
            console.say("auto", f"training.micro_batch_size: {micro} ({reason})")
    return config


def slots_of(config: Config) -> int:
    """Returns what the slot of each document is a multiple of, in tokens."""
    least = 2 * config.mesh.cp if config.mesh.cp > 1 else 1
    return int(config.packed_sequence.get("slot_multiple") or least)


def with_layout(config: Config, global_batch_size: int, slot_multiple: int) -> Config:
    """Returns the configuration with what followed from the layout of ranks: `as_the_run_began`
    takes it from there.
    """
    training = config.training
    if not training.global_batch_documents:  # which any layout takes as they are
        training = replace(training, global_batch_size=global_batch_size)
    packed = config.packed_sequence | {"slot_multiple": slot_multiple}
    return replace(config, training=training, packed_sequence=packed)


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
    is_wrapped: bool  # they are laid end to end, which fills packs of any size
    tokenizer: PreTrainedTokenizerFast


def data_of(config: Config, parts: RunParts, console: Console) -> Known | None:
    """Tokenizes the documents, or finds them in the cache; None for a stream, whose lengths are
    not known. Prints what was not in the cache: the run finds it there.
    """
    documents = build_documents(config)
    if packing_dataset(documents) is not None:
        return None
    # trees that documents share would be as long as the pack: of `tree=all`, each document's own
    tree = "auto" if parts.packer.tree == "all" else parts.packer.tree
    job = job_of(config, documents, tree)
    reading = adapted(config, Reading(documents, job, parts.packer))
    tokens = tokenize_documents(reading.documents, reading.job, config.cache_dir)
    for note in tokens.notes:
        name = note.partition(": ")[0]
        _, is_entry, found = note.partition(" · cache: ")
        if is_entry and found != "hit":
            console.say("cache", f"{name}: {found}")
    packer = reading.packer.for_document_kind(document_kind(reading.documents))
    is_split = packer.overlong == "split" or packer.cuts_documents
    return Known(tokens.train.lengths, is_split, packer.cuts_documents, reading.job.tokenizer)


def pack_size_of(
    data: Known | None, config: Config, parts: RunParts, has_data: bool = True
) -> tuple[int, str]:
    """Returns the tokens of a pack, and why: see `fitted_pack_size`, and without packing the
    longest document; whole slots, and at most the positions of the model and its teacher.

    has_data  False: rows come later, from memory; the positions of the model, or `MOST_PACK`
    """
    multiple = slots_of(config)
    if not has_data:
        model_config = parts.model.resolve_model_config({"vocab_size": LEAST_PACK})
        size, reason = _within_positions(model_config, MOST_PACK, "of rows in memory")
        return size // multiple * multiple, reason
    if data is None:
        raise ConfigError(
            f"{SIZE}=auto needs the lengths of all documents, which a stream does not know: set "
            f"{SIZE}={MOST_PACK}."
        )
    if parts.packer.is_ragged:  # each row has the length of its document: a longer pack costs none
        size = int(data.lengths.max())
        reason = "the longest document"
    else:
        size, reason = fitted_pack_size(
            data.lengths, config.training, data.is_split, data.is_wrapped, multiple
        )
    size = round_up(size, multiple)
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


def micro_batch_of(config: Config, packer: Packer, data: Known | None) -> int:
    """Returns the packs of a forward pass: as many of a rank's packs in a step as together have at
    most `MOST_PACK` tokens. Passes of a few hundred tokens leave a device idle.

    One, where documents are padded, where a stream packs them, and where the processes do not fit
    the mesh, which the run explains.
    """
    most = MOST_PACK // packer.packed_sequence_size
    if most < 2 or packer.is_ragged or data is None:
        return 1
    try:
        mesh = config.mesh
        shape = shape_of_dry_run(mesh) if config.dry_run else mesh_shape(mesh, world_size())
        dp = shape.dp
        batch = global_batch_size_of(config.training, dp)
    except ConfigError:
        return 1
    training = config.training
    tokens = int(data.lengths.sum(dtype=np.int64))
    num_packs = ceil_div(tokens, packer.packed_sequence_size)
    if training.global_batch_documents:
        steps = ceil_div(len(data.lengths), training.global_batch_documents)
        # passes that a step does not fill would be padding
        return max(1, min(most, num_packs // (steps * dp)))
    if training.global_batch_size == "auto" and training.max_steps is None:
        epochs, _ = epochs_of(training, len(data.lengths))
        batch = fitted_batch_size(dp, batch, min(packer.max_packs or num_packs, num_packs), epochs)
    share = batch // dp
    return max(size for size in range(1, most + 1) if share % size == 0)


def _within_positions(model_config: PretrainedConfig, size: int, reason: str) -> tuple[int, str]:
    limit = config_value(model_config.get_text_config(), "max_position_embeddings")
    if limit and size > limit:
        return limit, f"{reason}; the model has {limit:,} positions"
    return size, reason
