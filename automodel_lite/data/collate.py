"""Samples of a dataset -> the tensors of a batch. Samples are never changed: datasets may cache them.

Legend: B rows, S row length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_lite.data.packing.packs import StackedPacks
from automodel_lite.thd import IGNORE_INDEX, SEQ_LENS_PADDING

PAD_TOKEN_IDS_KEY = "___PAD_TOKEN_IDS___"
"""Key of a sample under which a dataset may name a pad value for each of its fields."""

PAD_TOKEN_IDS = {"labels": IGNORE_INDEX, "attention_mask": 0, "loss_mask": 0, "input_ids": 0}
FLASH_IMPLEMENTATIONS = frozenset({"flash_attention_2", "flash_attention_3", "flash_attention_4"})


def packed_sequence_thd_collater(batch: Sequence[Mapping[str, Any]] | StackedPacks) -> dict[str, Any]:
    """Packs (or loose rows) -> the batch that `thd.to_thd` and `thd.process_input_for_thd` take.

    input_ids, labels, position_ids  int64 [B, S]
    seq_lens, seq_lens_padded        int64 [B, longest list], filled up with SEQ_LENS_PADDING
    qkv_format                       "thd"
    Rows without `seq_lens` become one document each, padded to the longest row of the batch. Raises ValueError for
    packs of unequal length. StackedPacks, which a DataLoader fetches from PackedDataset, hold the batch already.
    """
    if not batch:
        return {}
    if isinstance(batch, StackedPacks):
        return batch.columns | {"qkv_format": "thd"}
    packed = ["seq_lens" in row for row in batch]
    if any(packed) and not all(packed):
        raise ValueError("a batch holds either packs (with seq_lens) or loose rows (without), not both.")
    rows = batch if all(packed) else _rows_as_documents(batch)
    collated: dict[str, Any] = {
        key: _stack_rows(key, [row[key] for row in rows]) for key in ("input_ids", "labels", "position_ids")
    }
    for key in ("seq_lens", "seq_lens_padded"):
        collated[key] = torch.nn.utils.rnn.pad_sequence(
            [torch.as_tensor(row[key], dtype=torch.long) for row in rows],
            batch_first=True,
            padding_value=SEQ_LENS_PADDING,
        )
    return collated | {"qkv_format": "thd"}


def pack_features_for_thd(
    features: Sequence[Mapping[str, Any]], *, ignore_index: int = IGNORE_INDEX
) -> dict[str, list[int]]:
    """Loose examples -> one pre-packed record: `input_ids, labels, position_ids, seq_lens, seq_lens_padded`.

    An example without labels carries no loss (`ignore_index`). Raises ValueError without examples, for an empty one,
    and where labels and ids differ in length.
    """
    if not features:
        raise ValueError("pack_features_for_thd requires at least one feature")
    record: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": [], "seq_lens": []}
    for feature in features:
        ids = _as_list(feature["input_ids"])
        labels = _as_list(feature["labels"]) if feature.get("labels") is not None else [ignore_index] * len(ids)
        if not ids:
            raise ValueError("pack_features_for_thd cannot pack an empty sequence")
        if len(labels) != len(ids):
            raise ValueError(f"labels length {len(labels)} does not match input_ids length {len(ids)}")
        record["input_ids"] += ids
        record["labels"] += labels
        record["position_ids"] += range(len(ids))
        record["seq_lens"].append(len(ids))
    return record | {"seq_lens_padded": list(record["seq_lens"])}


def default_collater(batch: Sequence[Mapping[str, Any]], pad_seq_len_divisible: int | None = None) -> dict[str, Tensor]:
    """Rows of any lengths -> padded tensors, and `padding_mask` (bool [B, S], True = padding).

    Lists are padded to the longest (rounded up to `pad_seq_len_divisible`), tensors get a batch dim and are
    concatenated. The mask comes from `attention_mask` where the rows have one, else from the pad id.
    """
    pad_ids = batch[0].get(PAD_TOKEN_IDS_KEY)
    collated: dict[str, Tensor] = {}
    for key in batch[0]:
        if key == PAD_TOKEN_IDS_KEY:
            continue
        values = extract_key_from_dicts(batch, key)
        if isinstance(values[0], Tensor):
            collated[key] = torch.cat([batchify(value) for value in values])
        else:
            rows = pad_within_micro(values, get_pad_token_from_key(key, pad_ids), pad_seq_len_divisible)
            collated[key] = batchify(torch.LongTensor(rows))
    if "attention_mask" in collated:
        collated["padding_mask"] = collated["attention_mask"].eq(0)
    elif "input_ids" in collated:
        pad_id: Any = get_pad_token_from_key("input_ids", pad_ids)
        collated["padding_mask"] = collated["input_ids"].eq(pad_id)
    return collated


def neat_packed_collater(batch: Sequence[Mapping[str, Any]], attn_implementation: str = "sdpa") -> dict[str, Tensor]:
    """Rows of `packing.neat_pack_dataset` -> tensors [B, S] for transformers' own attention.

    `attention_mask` holds the 1-based document index (0 = padding); all but flash attention get it as a bool mask
    [B, 1, S, S]. `_packed_seq_ids` is that index, added when a row has more than one document.
    """
    indexed = torch.stack([torch.as_tensor(row["attention_mask"], dtype=torch.long) for row in batch])
    collated = {
        key: torch.stack([torch.as_tensor(row[key], dtype=torch.long) for row in batch])
        for key in ("input_ids", "labels", "position_ids")
    }
    two_dims = attn_implementation in FLASH_IMPLEMENTATIONS
    collated["attention_mask"] = indexed if two_dims else _indexed_mask_to_4d_block_causal(indexed)
    return collated | {"_packed_seq_ids": indexed} if int(indexed.max()) > 1 else collated


def batchify(tensor: Any, default_tensor_cls: Any = torch.LongTensor) -> Tensor:
    """A tensor with a batch dim; what is no tensor becomes a `default_tensor_cls`."""
    if not isinstance(tensor, Tensor):
        tensor = default_tensor_cls(tensor)
    return tensor[None] if tensor.ndim == 1 else tensor


def extract_key_from_dicts(batch: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """The values of `key`, in order."""
    return [row[key] for row in batch]


def pad_within_micro(
    batch: Sequence[Sequence[Any]], pad_token_id: Any | None, pad_seq_len_divisible: int | None = None
) -> list[list[Any]]:
    """Lists padded on the right to the longest, rounded up to a multiple of `pad_seq_len_divisible`.

    `pad_token_id` None pads with the last value of the first row. Raises ValueError for an empty batch.
    """
    if not batch:
        raise ValueError("pad_within_micro needs at least one row")
    length = max(map(len, batch))
    if pad_seq_len_divisible:
        length = math.ceil(length / pad_seq_len_divisible) * pad_seq_len_divisible
    if pad_token_id is None:
        pad_token_id = batch[0][-1]
    return [list(row) + [pad_token_id] * (length - len(row)) for row in batch]


def find_last_non_pad_token(lst: Sequence[int], value: int) -> int | None:
    """Index before the trailing run of `value`; None without such a run, and where there is nothing before it."""
    if not lst or lst[-1] != value:
        return None
    return next((i for i in range(len(lst) - 1, -1, -1) if lst[i] != value), None)


def get_pad_token_from_key(val: str, pad_token_ids: Mapping[str, Any] | None = None) -> Any | None:
    """What to pad the field `val` with: the dataset's choice, else PAD_TOKEN_IDS, else None."""
    if pad_token_ids is not None and val in pad_token_ids:
        return pad_token_ids[val]
    return PAD_TOKEN_IDS.get(val)


def make_attention_mask_from_labels(ids: Sequence[int], ignore_token: int = IGNORE_INDEX) -> list[int]:
    """0 on the trailing run of `ignore_token`, else 1; labels that are ignored throughout give all 1.

    [-100, 5, 6, -100, -100] -> [1, 1, 1, 0, 0].
    """
    last = find_last_non_pad_token(ids, ignore_token)
    num_real = len(ids) if last is None else last + 1
    return [1] * num_real + [0] * (len(ids) - num_real)


# transformers.masking_utils takes 1.3 CPU-s to import (flex_attention, torch._dynamo), and packed batches have no masks
def create_causal_mask(**arguments: Any) -> Any:
    """transformers' own, imported at its first use."""
    return import_module("transformers.masking_utils").create_causal_mask(**arguments)


def create_sliding_window_causal_mask(**arguments: Any) -> Any:
    """transformers' own, imported at its first use."""
    return import_module("transformers.masking_utils").create_sliding_window_causal_mask(**arguments)


def create_causal_mask_mapping(
    model_config: PretrainedConfig,
    batch_size: int,
    seq_len: int,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """transformers' own masks by layer type: `full_attention`, and `sliding_attention` for configs with a window."""
    arguments: dict[str, Any] = {
        "config": model_config,
        "inputs_embeds": torch.empty((batch_size, seq_len), device=device),  # of which only the shape is read
        "attention_mask": attention_mask,
        "past_key_values": None,
        "position_ids": position_ids,
    }
    masks = {"full_attention": create_causal_mask(**arguments)}
    if getattr(model_config, "sliding_window", None) is not None:  # a key that only some families have
        masks["sliding_attention"] = create_sliding_window_causal_mask(**arguments)
    return masks


def add_causal_masks_to_batch(batch_dict: dict[str, Any], model_config: PretrainedConfig) -> dict[str, Any]:
    """Adds `causal_mask_mapping` to the batch (in place: the dict is the batch's own) and gives it back."""
    batch_size, seq_len = batch_dict["input_ids"].shape[:2]
    batch_dict["causal_mask_mapping"] = create_causal_mask_mapping(
        model_config,
        batch_size,
        seq_len,
        position_ids=batch_dict.get("position_ids"),
        attention_mask=batch_dict.get("attention_mask"),
        device=batch_dict["input_ids"].device,
    )
    return batch_dict


def _indexed_mask_to_4d_block_causal(mask: Tensor) -> Tensor:
    """Document index [B, S] (0 = padding) -> bool [B, 1, S, S], True = same document and causal."""
    same = (mask[:, :, None] == mask[:, None, :]) & (mask != 0)[:, None, :]
    return torch.tril(same)[:, None]


def _rows_as_documents(batch: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of any lengths -> packs of one document each, as long as the longest."""
    longest = max(len(row["input_ids"]) for row in batch)
    packs = []
    for row in batch:
        ids, labels = _as_list(row["input_ids"]), _as_list(row["labels"])
        missing = longest - len(ids)
        pad_id = row.get(PAD_TOKEN_IDS_KEY, {}).get("input_ids", 0)
        mask = row.get("attention_mask")
        num_real = len(ids) if mask is None else int(sum(_as_list(mask))) or len(ids)
        packs.append(
            {
                "input_ids": ids + [pad_id] * missing,
                "labels": labels + [IGNORE_INDEX] * (longest - len(labels)),
                "position_ids": list(range(longest)),
                "seq_lens": [num_real],
                "seq_lens_padded": [longest],
            }
        )
    return packs


def _stack_rows(key: str, rows: list[Any]) -> Tensor:
    """int64 [B, S]."""
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise ValueError(f"{key}: packs of a batch must have one length, got {lengths}.")
    return torch.stack([torch.as_tensor(row, dtype=torch.long) for row in rows])


def _as_list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)


class SingleTurnSource(Protocol):
    """What `SFTSingleTurnPreprocessor` asks of a dataset class: texts of a batch of raw examples."""

    def get_context(self, examples: Any) -> list[str]:
        """What the model is given."""

    def get_target(self, examples: Any) -> list[str]:
        """What it should write."""


class SFTSingleTurnPreprocessor:
    """Tokenises context and target of single-turn examples, with labels on the target only.

    block_size  cap of the padded length, in tokens; None for no cap
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.block_size: int | None = None
        self.preprocessing_num_workers = 1
        self.overwrite_cache = False
        self.pad_to_max_length = True

    def process(self, raw_dataset: Any, ds: SingleTurnSource) -> Any:
        """A `datasets.Dataset` of raw examples -> `input_ids, attention_mask, labels, loss_mask`.

        labels are next-token aligned: [-100] * (len(context) - 1) + target + [-100].
        """
        tokenized = raw_dataset.map(
            lambda examples: self._tokenize(examples, ds),
            batched=True,
            num_proc=self.preprocessing_num_workers if self.preprocessing_num_workers > 1 else None,
            remove_columns=raw_dataset.column_names,
            load_from_cache_file=not self.overwrite_cache,
        )
        if not self.pad_to_max_length:
            return tokenized
        longest = math.ceil(max(map(len, tokenized["input_ids"])) / 8) * 8
        length = longest if self.block_size is None else min(longest, self.block_size)
        return tokenized.map(
            lambda examples: self._pad(examples, length),
            batched=True,
            load_from_cache_file=not self.overwrite_cache,
        )

    def _tokenize(self, examples: Any, ds: SingleTurnSource) -> dict[str, list[list[int]]]:
        special = set(getattr(self.tokenizer, "all_special_ids", ()))  # any callable serves as a tokenizer
        contexts = self.tokenizer(ds.get_context(examples))["input_ids"]
        targets = self.tokenizer(ds.get_target(examples))["input_ids"]
        columns: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": [], "loss_mask": []}
        for context, target in zip(contexts, targets):
            # an end token between context and target, or a second start token, is no text of the document
            context = context[:-1] if len(context) > 1 and context[-1] in special else context
            target = target[1:] if target and target[0] in special else target
            labels = [IGNORE_INDEX] * (len(context) - 1) + list(target) + [IGNORE_INDEX]
            columns["input_ids"].append(list(context) + list(target))
            columns["attention_mask"].append([1] * (len(context) + len(target)))
            columns["labels"].append(labels)
            columns["loss_mask"].append([int(label != IGNORE_INDEX) for label in labels])
        return columns

    def _pad(self, examples: Any, length: int) -> dict[str, list[list[int]]]:
        pads = PAD_TOKEN_IDS | {"input_ids": getattr(self.tokenizer, "pad_token_id", None) or 0}
        return {
            key: [(row + [pad] * (length - len(row)))[:length] for row in examples[key]] for key, pad in pads.items()
        }
