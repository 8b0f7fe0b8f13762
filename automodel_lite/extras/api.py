"""The package from Python: what a notebook or a training loop of one's own needs, as functions of
plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from automodel_lite.attention.interface import choose_attention, install
from automodel_lite.attention.isolation import check_packing_isolation, model_logits
from automodel_lite.attention.kernel import AttentionKernel, ReferenceAttention
from automodel_lite.attention.positions import short_lengths
from automodel_lite.attention.spec import attention_specs
from automodel_lite.cli import Recipe, compose_config
from automodel_lite.config.check import check_config
from automodel_lite.config.schema import TRAIN_ON, TokenizeConfig, TrainOn
from automodel_lite.data.packing.packs import join_packs
from automodel_lite.data.reading.documents import DocumentList
from automodel_lite.data.reading.readers import placed
from automodel_lite.data.tokens.chunks import DocumentTokenizer, TokenizeJob
from automodel_lite.data.tokens.findings import check_set
from automodel_lite.data.tokens.token_rows import TokenizedDocuments
from automodel_lite.errors import ConfigError, RunStoppedError
from automodel_lite.run.folder import RunFolder
from automodel_lite.thd import ThdBatch, to_thd


def install_attention(
    model: transformers.PreTrainedModel, kernel: AttentionKernel | None = None
) -> str:
    """Makes a Hugging Face causal LM run on packed sequences, in place; returns which kernel, and
    why.

    kernel  None takes the best for the model's device and dtype, as `attention=auto` does
    Call the model with `to_thd(batch).model_inputs()` from then on. Two short documents are run
    through the model; raises ConfigError when one of them sees the other, or the family does not
    fit packed attention.
    """
    kernel, why = choose_attention(kernel, attention_specs(model.config, model.device, model.dtype))

    def logits(batch: ThdBatch) -> Tensor:
        """In the dtype that the model computes in: some families cast theirs to fp32."""
        return model_logits(model)(batch).to(model.dtype)

    with short_lengths(model) as has_lengths:
        if has_lengths:
            install(model, ReferenceAttention())
            check_packing_isolation(model, model.device, logits)
    install(model, kernel)
    check_packing_isolation(model, model.device, logits)
    return why


def tokenize_chats(
    chats: Sequence[Sequence[Mapping[str, Any]] | Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerFast,
    train_on: TrainOn = "assistant",
    template_kwargs: Mapping[str, Any] | None = None,
) -> TokenizedDocuments:
    """Chats (lists of {"role", "content", ...}, or rows {"messages": chat}) -> token rows:
    `lengths` int64 [N], `[i]` -> {"input_ids", "labels"}.

    Labels are next-token aligned, -100 where nothing is trained on. Raises DataError: a message
    that the template cannot render, or a set in which nothing is trained on; ConfigError for an
    unknown `train_on`, and for one chat in place of several.
    """
    if problem := TRAIN_ON.problem(train_on):
        raise ConfigError(f"train_on={train_on!r} must be {problem}")
    settings = TokenizeConfig(train_on=train_on, template_kwargs=dict(template_kwargs or {}))
    documents = []
    for chat in chats:
        messages = chat.get("messages") if isinstance(chat, Mapping) else chat
        if messages is None:
            raise ConfigError("tokenize_chats takes a list of chats, and got a message: [chat].")
        documents.append({"messages": [dict(message) for message in messages]})
    tokenizing = DocumentTokenizer(TokenizeJob(tokenizer, settings))
    chunk = tokenizing.chunk(placed(DocumentList(documents, "chats")))
    check_set("train", "messages", chunk.found, settings, tokenizer)
    return TokenizedDocuments(chunk.columns, np.append(0, np.cumsum(chunk.lengths)))


def hf_collater(packs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Packs of a PackedDataset -> the keyword arguments of a model under `install_attention`, for
    HF Trainer and TRL.

    input_ids, position_ids, labels, shift_labels  int64 [1, B * S]; the boundaries of the documents
                                                   beside them
    The labels are next-token aligned already. `shift_labels` says so to transformers, which would
    shift `labels` once more; `labels` stays for Trainer, which counts the label tokens of a step in
    it.
    """
    thd = to_thd(join_packs(packs))
    labels = thd.labels[None]
    return {**thd.model_inputs(), "labels": labels, "shift_labels": labels}


def train(config_name: str, *overrides: str, config_dir: str | None = None) -> Path:
    """Trains as `recipes/train_ft.py --config-name ... key=value ...` does; returns the run's
    folder.

    Raises ConfigError or DataError for a mistake, RunStoppedError when the run ends before its last
    step.
    """
    config = check_config(compose_config(config_name, list(overrides), config_dir=config_dir))
    main = Recipe("recipes.train_ft:main").function()
    code = main(config)
    if code:
        raise RunStoppedError(
            f"{config.output_dir} ended with exit code {code}: call train again to continue."
        )
    return RunFolder(config.output_dir).path
