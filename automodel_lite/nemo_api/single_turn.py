"""`SFTSingleTurnPreprocessor`, for code written against NeMo AutoModel's class of this name."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import datasets
from transformers import PreTrainedTokenizerBase

from automodel_lite.thd import IGNORE_INDEX

PAD_MULTIPLE = 8
Columns = dict[str, list]


class SingleTurn(Protocol):
    """Says which text of a batch of raw rows is given, and which is to be written."""

    def get_context(self, examples: Columns) -> list[str]: ...

    def get_target(self, examples: Columns) -> list[str]: ...


class SFTSingleTurnPreprocessor:
    """Tokenises context and target of each row, with next-token aligned labels on the target.

    Attributes:
        block_size: no row is padded to, or longer than, more tokens; None: no limit.
        preprocessing_num_workers: processes.
        overwrite_cache: tokenise again although `datasets` has the result.
        pad_to_max_length: pad all rows to the longest, rounded up to a multiple of 8.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.block_size: int | None = None
        self.preprocessing_num_workers = 1
        self.overwrite_cache = False
        self.pad_to_max_length = True

    def process(self, raw_dataset: datasets.Dataset, ds: SingleTurn) -> datasets.Dataset:
        """Rows `input_ids, attention_mask, labels, loss_mask` (label != -100) in the order of `raw_dataset`.

        context a b, target c d:   input_ids a b c d,   labels _ c d _
        """
        apply = partial(
            datasets.Dataset.map,
            batched=True,
            num_proc=self.preprocessing_num_workers if self.preprocessing_num_workers > 1 else None,
            load_from_cache_file=not self.overwrite_cache,
        )
        tokenized = apply(
            raw_dataset, partial(_tokenize, ds=ds, tokenizer=self.tokenizer), remove_columns=raw_dataset.column_names
        )
        if not self.pad_to_max_length:
            return tokenized
        longest = max((len(ids) for ids in tokenized["input_ids"]), default=0)
        width = -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE
        width = min(width, self.block_size) if self.block_size is not None else width
        return apply(tokenized, partial(_pad, width=width, pad_id=self.tokenizer.pad_token_id or 0))


def _tokenize(examples: Columns, ds: SingleTurn, tokenizer: PreTrainedTokenizerBase) -> Columns:
    specials = set(tokenizer.all_special_ids)
    contexts, targets = (tokenizer(texts)["input_ids"] for texts in (ds.get_context(examples), ds.get_target(examples)))
    rows: Columns = {"input_ids": [], "attention_mask": [], "labels": [], "loss_mask": []}
    for context, target in zip(contexts, targets):
        context = context[:-1] if context and context[-1] in specials else context  # an end token between the two
        target = target[1:] if target and target[0] in specials else target  # a second begin token
        labels = [*[IGNORE_INDEX] * len(context), *target, IGNORE_INDEX][1:]
        rows["input_ids"].append(context + target)
        rows["attention_mask"].append([1] * len(labels))
        rows["labels"].append(labels)
        rows["loss_mask"].append([int(label != IGNORE_INDEX) for label in labels])
    return rows


def _pad(rows: Columns, width: int, pad_id: int) -> Columns:
    fills = {"input_ids": pad_id, "attention_mask": 0, "labels": IGNORE_INDEX, "loss_mask": 0}
    return {
        name: [(values + [fill] * (width - len(values)))[:width] for values in rows[name]]
        for name, fill in fills.items()
    }
