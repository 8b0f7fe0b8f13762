"""Collaters, and the preprocessor of single-turn datasets (`datasets.utils` in the reference).

Legend: B rows, S row length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from automodel_lite.columns import COLUMNS, IGNORE_INDEX
from automodel_lite.config.sizes import round_up
from automodel_lite.data.packing.packs import join_packs
from automodel_lite.thd import SEQ_LENS_PADDING

PAD_TOKEN_IDS = {"labels": IGNORE_INDEX, "attention_mask": 0, "loss_mask": 0, "input_ids": 0}
FLASH_IMPLEMENTATIONS = frozenset({"flash_attention_2", "flash_attention_3", "flash_attention_4"})
PAD_MULTIPLE = 8  # of the padded rows of SFTSingleTurnPreprocessor
PAD_TOKEN_IDS_KEY = "___PAD_TOKEN_IDS___"
"""Key of a row under which a dataset may name a pad value for each of its fields."""
Columns = dict[str, list]


def packed_sequence_thd_collater(batch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Packs (or loose rows) -> `input_ids, labels, position_ids` [B, S],
    `seq_lens, seq_lens_padded` filled up with -1000, `qkv_format`: the recipe's `join_packs`, in
    rows.

    Rows without `seq_lens` become one document each, padded to the longest row of the batch;
    ValueError for both kinds, and for packs of unequal length.
    """
    if not len(batch):
        return {}
    is_packed = ["seq_lens" in row for row in batch]
    if any(is_packed) and not all(is_packed):
        raise ValueError(
            "a batch holds either packs (with seq_lens) or loose rows (without), not both."
        )
    if not all(is_packed):
        batch = _rows_as_documents(batch)
    lengths = sorted({len(pack["input_ids"]) for pack in batch})
    if len(lengths) > 1:
        raise ValueError(f"input_ids: packs of a batch must have one length, got {lengths}.")
    collated = {
        name: x if name == "images" else x.unflatten(0, (len(batch), -1))
        for name, x in join_packs(batch).items()
        if not name.startswith("seq_lens")
    }
    for name in ("seq_lens", "seq_lens_padded"):
        collated[name] = torch.nn.utils.rnn.pad_sequence(
            [torch.as_tensor(pack[name], dtype=torch.long) for pack in batch],
            batch_first=True,
            padding_value=SEQ_LENS_PADDING,
        )
    return collated | {"qkv_format": "thd"}


def _rows_as_documents(batch: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of any lengths -> packs of one document each, as long as the longest."""
    longest = max(len(row["input_ids"]) for row in batch)
    packs = []
    for row in batch:
        pack: dict[str, Any] = {}
        padding = {name: column.padding for name, column in COLUMNS.items()}
        padding["input_ids"] = row.get(PAD_TOKEN_IDS_KEY, {}).get("input_ids", 0)
        for name in [name for name in COLUMNS if name in row]:
            values = torch.as_tensor(row[name])
            behind = values.new_full((longest - len(values), *values.shape[1:]), padding[name])
            pack[name] = torch.cat([values, behind])
        length = len(row["input_ids"])
        num_real = int(torch.as_tensor(row.get("attention_mask", 0)).sum()) or length
        packs.append(
            pack
            | {"position_ids": range(longest), "seq_lens": [num_real], "seq_lens_padded": [longest]}
        )
    return packs


def pack_features_for_thd(
    features: Sequence[Mapping[str, Any]], *, ignore_index: int = IGNORE_INDEX
) -> dict[str, list[int]]:
    """Loose examples -> one pre-packed record:
    `input_ids, labels, position_ids, seq_lens, seq_lens_padded`.

    An example without labels carries no loss (`ignore_index`). Raises ValueError without examples,
    for an empty one, and where labels and ids differ in length.
    """
    if not features:
        raise ValueError("pack_features_for_thd requires at least one feature")
    record: dict[str, list[int]] = {
        "input_ids": [],
        "labels": [],
        "position_ids": [],
        "seq_lens": [],
    }
    for feature in features:
        ids = _as_list(feature["input_ids"])
        labels = (
            _as_list(feature["labels"])
            if feature.get("labels") is not None
            else [ignore_index] * len(ids)
        )
        if not ids:
            raise ValueError("pack_features_for_thd cannot pack an empty sequence")
        if len(labels) != len(ids):
            raise ValueError(
                f"labels length {len(labels)} does not match input_ids length {len(ids)}"
            )
        record["input_ids"] += ids
        record["labels"] += labels
        record["position_ids"] += range(len(ids))
        record["seq_lens"].append(len(ids))
    return record | {"seq_lens_padded": list(record["seq_lens"])}


def _as_list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)


def default_collater(
    batch: Sequence[Mapping[str, Any]], pad_seq_len_divisible: int | None = None
) -> dict[str, Tensor]:
    """Rows of any lengths -> padded tensors, and `padding_mask` (bool [B, S], True = padding).

    Lists are padded to the longest (rounded up to `pad_seq_len_divisible`), tensors get a batch dim
    and are concatenated. The mask comes from `attention_mask` where the rows have one, else from
    the pad id.
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
            rows = pad_within_micro(
                values, get_pad_token_from_key(key, pad_ids), pad_seq_len_divisible
            )
            collated[key] = batchify(torch.LongTensor(rows))
    if "attention_mask" in collated:
        collated["padding_mask"] = collated["attention_mask"].eq(0)
    elif "input_ids" in collated:
        pad_id: Any = get_pad_token_from_key("input_ids", pad_ids)
        collated["padding_mask"] = collated["input_ids"].eq(pad_id)
    return collated


def neat_packed_collater(
    batch: Sequence[Mapping[str, Any]], attn_implementation: str = "sdpa"
) -> dict[str, Tensor]:
    """Rows of `neat_packing.neat_pack_dataset` -> tensors [B, S] for transformers' own attention.

    `attention_mask` holds the 1-based document index (0 = padding); all but flash attention get it
    as a bool mask [B, 1, S, S]. `_packed_seq_ids` is that index, added when a row has more than one
    document.
    """
    collated = {
        key: torch.stack([torch.as_tensor(row[key], dtype=torch.long) for row in batch])
        for key in ("input_ids", "labels", "position_ids", "attention_mask")
    }
    indexed = collated["attention_mask"]
    if attn_implementation not in FLASH_IMPLEMENTATIONS:
        collated["attention_mask"] = _indexed_mask_to_4d_block_causal(indexed)
    return collated | {"_packed_seq_ids": indexed} if int(indexed.max()) > 1 else collated


def batchify(tensor: Any, default_tensor_cls: Any = torch.LongTensor) -> Tensor:
    """Returns a tensor with a batch dim; what is not a tensor becomes a `default_tensor_cls`."""
    if not isinstance(tensor, Tensor):
        tensor = default_tensor_cls(tensor)
    return tensor[None] if tensor.ndim == 1 else tensor


def extract_key_from_dicts(batch: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """Returns the values of `key`, in order."""
    return [row[key] for row in batch]


def pad_within_micro(
    batch: Sequence[Sequence[Any]],
    pad_token_id: Any | None,
    pad_seq_len_divisible: int | None = None,
) -> list[list[Any]]:
    """Lists padded on the right to the longest, rounded up to a multiple of
    `pad_seq_len_divisible`.

    `pad_token_id` None pads with the last value of the first row. Raises ValueError for an empty
    batch.
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
    """Index before the trailing run of `value`; None without such a run, and where there is nothing
    before it.
    """
    if not lst or lst[-1] != value:
        return None
    return next((i for i in reversed(range(len(lst))) if lst[i] != value), None)


def get_pad_token_from_key(val: str, pad_token_ids: Mapping[str, Any] | None = None) -> Any | None:
    """What to pad the field `val` with: the dataset's choice, else PAD_TOKEN_IDS, else None."""
    return {**PAD_TOKEN_IDS, **(pad_token_ids or {})}.get(val)


def make_attention_mask_from_labels(
    ids: Sequence[int], ignore_token: int = IGNORE_INDEX
) -> list[int]:
    """0 on the trailing run of `ignore_token`, else 1; labels that are ignored throughout give all
    1.

    [-100, 5, 6, -100, -100] -> [1, 1, 1, 0, 0].
    """
    last = find_last_non_pad_token(ids, ignore_token)
    num_real = len(ids) if last is None else last + 1
    return [1] * num_real + [0] * (len(ids) - num_real)


def create_causal_mask_mapping(
    model_config: PretrainedConfig,
    batch_size: int,
    seq_len: int,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """transformers' own masks by layer type: `full_attention`, and `sliding_attention` for configs
    with a window.
    """
    arguments: dict[str, Any] = {
        "config": model_config,
        # of which only the shape is read
        "inputs_embeds": torch.empty((batch_size, seq_len), device=device),
        "attention_mask": attention_mask,
        "past_key_values": None,
        "position_ids": position_ids,
    }
    masks = {"full_attention": create_causal_mask(**arguments)}
    # a key that only some families have
    if getattr(model_config, "sliding_window", None) is not None:
        masks["sliding_attention"] = create_sliding_window_causal_mask(**arguments)
    return masks


def add_causal_masks_to_batch(
    batch_dict: dict[str, Any], model_config: PretrainedConfig
) -> dict[str, Any]:
    """Adds `causal_mask_mapping` to the batch (in place: the dict is the batch's own) and gives it
    back.
    """
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


class SFTSingleTurnPreprocessor:
    """Tokenizes context and target of each row, with next-token aligned labels on the target.

    `ds.get_context` and `ds.get_target` give the texts of a batch of raw rows, {column: values}.

    Attributes:
        block_size: no row is padded to, or longer than, more tokens; None: no limit.
        preprocessing_num_workers: processes.
        overwrite_cache: tokenize again although `datasets` has the result.
        pad_to_max_length: pad all rows to the longest, rounded up to a multiple of 8.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.block_size: int | None = None
        self.preprocessing_num_workers = 1
        self.overwrite_cache = False
        self.pad_to_max_length = True

    def process(self, raw_dataset: datasets.Dataset, ds: Any) -> datasets.Dataset:
        """Rows `input_ids, attention_mask, labels, loss_mask` (label != -100) in the order of
        `raw_dataset`.

        context a b, target c d:   input_ids a b c d,   labels _ c d _
        """
        apply = partial(
            datasets.Dataset.map,
            batched=True,
            num_proc=self.preprocessing_num_workers if self.preprocessing_num_workers > 1 else None,
            load_from_cache_file=not self.overwrite_cache,
        )
        tokenized = apply(
            raw_dataset,
            partial(_tokenize, ds=ds, tokenizer=self.tokenizer),
            remove_columns=raw_dataset.column_names,
        )
        if not self.pad_to_max_length:
            return tokenized
        longest = max((len(ids) for ids in tokenized["input_ids"]), default=0)
        width = round_up(longest, PAD_MULTIPLE)
        width = min(width, self.block_size) if self.block_size is not None else width
        return apply(
            tokenized,
            partial(_pad, width=width, pad_id=getattr(self.tokenizer, "pad_token_id", None) or 0),
        )


def _tokenize(examples: Columns, ds: Any, tokenizer: Any) -> Columns:
    specials = set(getattr(tokenizer, "all_special_ids", ()))  # any callable serves as a tokenizer
    contexts, targets = (
        tokenizer(texts)["input_ids"]
        for texts in (ds.get_context(examples), ds.get_target(examples))
    )
    rows: Columns = {"input_ids": [], "attention_mask": [], "labels": [], "loss_mask": []}
    for context, target in zip(contexts, targets):
        # an end token between context and target, or a second begin token, is not text of the
        # document
        context = context[:-1] if len(context) > 1 and context[-1] in specials else context
        target = target[1:] if target and target[0] in specials else target
        labels = [*[IGNORE_INDEX] * len(context), *target, IGNORE_INDEX][1:]
        rows["input_ids"].append([*context, *target])
        rows["attention_mask"].append([1] * len(labels))
        rows["labels"].append(labels)
        rows["loss_mask"].append([int(label != IGNORE_INDEX) for label in labels])
    return rows


def _pad(rows: Columns, width: int, pad_id: int) -> Columns:
    pads = PAD_TOKEN_IDS | {"input_ids": pad_id}
    return {
        name: [(row + [pad] * (width - len(row)))[:width] for row in rows[name]]
        for name, pad in pads.items()
    }
