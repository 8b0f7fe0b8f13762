"""Settings that a configuration leaves to the data and the model: `auto` becomes a number.

Every program resolves them first, so that all of them see the same packs and rates; a run saves the
numbers, and resumes with them.

    packed_sequence.packed_sequence_size   from the lengths of the documents
    optimizer.lr                           from the kind of training and the width of the model
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from automodel_lite.attention.spec import config_value
from automodel_lite.config.components import build
from automodel_lite.config.schema import Config, TrainingConfig
from automodel_lite.config.sizes import AUTO_BATCH_SIZE, LEAST_STEPS
from automodel_lite.data.feeding.planned import document_kind, epochs_of
from automodel_lite.data.feeding.source import AdaptingDataset, PackingDataset
from automodel_lite.data.tokens.tokenize import job_of, tokenize_documents
from automodel_lite.errors import ConfigError
from automodel_lite.models.loss import Loss
from automodel_lite.models.source import CausalLM
from automodel_lite.telemetry.console import Console
from automodel_lite.training.plan import AUTO, Parts, build_parts
from automodel_lite.training.start import try_settings

SIZE = "packed_sequence.packed_sequence_size"
COVERED_FRAC = 0.995  # of the documents, which fit a pack whole
LEAST_PACK = 128  # tokens
FEW_DOCUMENTS = 4  # of a typical length: as many leave little of a pack empty
LEAST_SPLIT_PACK = 512  # of text, which is split: a shorter context teaches little
MOST_PACK = 4096  # tokens; longer packs are for documents that need them
# of AUTO_BATCH_SIZE packs: where a run has more, longer packs waste less time per step
MANY_STEPS = 500


def resolve_auto(config: Config, console: Console, has_data: bool) -> Config:
    """Returns the configuration with numbers instead of `auto`; prints each with its reason.

    has_data  False: rows come later, from memory; packs are as long as the model's positions, and
              no longer than `MOST_PACK`
    Raises ConfigError or DataError as the run would: for settings that cannot work, before
    anything is tokenized; for a stream, whose lengths are not known.
    """
    is_auto = config.packed_sequence.get("packed_sequence_size") == AUTO
    least = 2 * config.mesh.cp if config.mesh.cp > 1 else 1
    multiple = config.packed_sequence.get("slot_multiple") or least
    # a size that any slots divide, to try the other settings with
    trial = with_pack_size(config, -(-MOST_PACK // multiple) * multiple) if is_auto else config
    parts = build_parts(trial)
    if config.optimizer.get("lr") == AUTO:
        lr, reason = learning_rate(parts.model, parts.loss, config.peft)
        config = replace(config, optimizer=config.optimizer | {"lr": lr})
        console.say("auto", f"optimizer.lr: {lr:g} ({reason})")
    if is_auto:
        try_settings(trial, parts)
        if has_data:
            size, reason = pack_size_of(config, parts, multiple)
        else:
            model_config = parts.model.resolve_model_config({"vocab_size": LEAST_PACK})
            size, reason = _within_positions(model_config, MOST_PACK, "of rows in memory")
            size = size // multiple * multiple
        config = with_pack_size(config, size)
        console.say("auto", f"{SIZE}: {size:,} ({reason})")
    return config


def with_pack_size(config: Config, size: int) -> Config:
    """Returns the configuration with packs of this many tokens."""
    return replace(config, packed_sequence=config.packed_sequence | {"packed_sequence_size": size})


def pack_size_of(config: Config, parts: Parts, multiple: int) -> tuple[int, str]:
    """Returns the tokens of a pack, and why: see `fitted_pack_size`; a multiple of `multiple`, and
    at most the positions of the model and its teacher.
    """
    documents = build(config.dataset)
    if isinstance(documents, PackingDataset):
        raise ConfigError(
            f"{SIZE}=auto needs the lengths of all documents, which a stream does not know: set "
            f"{SIZE}={MOST_PACK}."
        )
    # trees that documents share would be as long as the pack: of `tree=all`, each document's own
    tree = "auto" if parts.packer.tree == "all" else parts.packer.tree
    job = job_of(config, documents, tree)
    packer = parts.packer
    if isinstance(documents, AdaptingDataset):
        documents, job, packer = documents.adapt(config, job, packer)
    lengths = tokenize_documents(documents, job, config.cache_dir).train.lengths
    packer = packer.for_document_kind(document_kind(documents))
    is_split = packer.overlong == "split" or packer.cuts_documents
    size, reason = fitted_pack_size(lengths, config.training, is_split)
    for model in (parts.model, parts.teacher):
        if model:
            size, reason = _within_positions(model.config(job.tokenizer), size, reason)
    return max(multiple, size // multiple * multiple), reason


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


# AdamW's rates for a hidden size of 4,096, where most published recipes are
RATES = {"the whole model": 2e-5, "an adapter": 2e-4, "a model from scratch": 3e-4}
RATE_WIDTH = 4096
PAIRS_FRAC = 1 / 20  # of these for pairs of answers, whose loss pushes the answers apart


def learning_rate(model: CausalLM, loss: Loss, peft: Mapping[str, Any]) -> tuple[float, str]:
    """Returns the learning rate of `optimizer.lr=auto`, and why: by what is trained, and inversely
    to the width of the model (Yang et al., 2022, arXiv:2203.03466).
    """
    kind = "the whole model"
    if peft:
        kind = "an adapter"
    elif not model.pretrained:
        kind = "a model from scratch"
    config = model.resolve_model_config({"vocab_size": 64}).get_text_config()
    width = config_value(config, "hidden_size", RATE_WIDTH)
    is_pairs = "answers" in loss.required
    rate = RATES[kind] * RATE_WIDTH / max(width, 256) * (PAIRS_FRAC if is_pairs else 1)
    on_pairs = " on pairs of answers" if is_pairs else ""
    return float(f"{rate:.2g}"), f"trains {kind}{on_pairs}, hidden size {width:,}"
