"""Batches as dicts in THD format: the dict form of `thd.to_thd`.

Legend: T tokens of the stream, N documents, B rows, S row length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from automodel_lite.errors import counted
from automodel_lite.tensors import cumulative
from automodel_lite.thd import SEQ_LENS_PADDING


def process_input_for_thd(
    batch: dict[str, Any], seq_lens_padding_value: int = SEQ_LENS_PADDING, padding_token_id: int = 0
) -> dict[str, Any]:
    """Turns a collated batch of [B, S] rows into the dict of its THD stream, T = B * S.

    input_ids     [B, S] -> [T], or embeddings [B, S, H] -> [T, H]; labels alike
    position_ids  [B, S] -> [T]; None -> None; mRoPE [R, B, S] -> [R, 1, T]
    cu_seqlens    int32 [N + 1]. When it differs from the padded boundaries in its last entry only,
                  all padding is at the end of the stream: the last entry becomes T
    cu_seqlens_padded  only when it differs from `cu_seqlens`
    max_seqlen    int32, 0-dim: widest step of `cu_seqlens`
    padding_mask  bool [T], True = padding, from the layout; without `seq_lens` from
                  `padding_token_id`
    Other keys pass through. Raises ValueError on slots that do not fit their row.

        lens [[3, 2], [6, -1000]], padded [[4, 2], [6, -1000]], S = 6
        -> cu_seqlens [0, 3, 5, 11], cu_seqlens_padded [0, 4, 6, 12], max_seqlen 6
    """
    input_ids = batch["input_ids"]
    rows, row_length = input_ids.shape[:2]
    consumed = {"input_ids", "labels", "position_ids", "seq_lens", "seq_lens_padded"}
    thd = {
        "input_ids": input_ids.flatten(0, 1),
        "labels": None if batch.get("labels") is None else batch["labels"].flatten(0, 1),
        "position_ids": batch.get("position_ids"),
    }
    if (positions := thd["position_ids"]) is not None:
        thd["position_ids"] = (
            positions.flatten(1)[:, None] if positions.ndim == 3 else positions.flatten()
        )
    if batch.get("seq_lens") is None:
        thd["padding_mask"] = thd_padding_mask_from_token_ids(input_ids, padding_token_id).flatten()
    else:
        thd |= _boundaries(
            batch["seq_lens"],
            batch.get("seq_lens_padded"),
            seq_lens_padding_value,
            rows,
            row_length,
        )
    rest = {key: value for key, value in batch.items() if key not in consumed}
    return rest | thd


def split_batch_into_thd_chunks(
    batch: dict[str, Any],
    num_chunks: int,
    seq_lens_padding_value: int = SEQ_LENS_PADDING,
    padding_token_id: int = 0,
) -> dict[str, Any]:
    """`process_input_for_thd` of `num_chunks` equal slices of the batch dim, stacked to
    [num_chunks, ...].

    `cu_seqlens` (and `cu_seqlens_padded`, when any chunk has it) are filled up on the right with
    `seq_lens_padding_value`; `max_seqlen` is int32 [num_chunks]. Raises ValueError when the rows do
    not divide.
    """
    if num_chunks <= 1:
        return process_input_for_thd(batch, seq_lens_padding_value, padding_token_id)
    rows = batch["input_ids"].shape[0]
    if rows % num_chunks:
        raise ValueError(f"num_chunks={num_chunks} must divide the {rows} rows of the batch.")
    size = rows // num_chunks
    chunks = []
    for first in range(0, rows, size):
        own = slice(first, first + size)
        part = {key: _rows_of(key, value, rows, own) for key, value in batch.items()}
        chunks.append(process_input_for_thd(part, seq_lens_padding_value, padding_token_id))
    if any("cu_seqlens_padded" in chunk for chunk in chunks):
        chunks = [{"cu_seqlens_padded": chunk["cu_seqlens"]} | chunk for chunk in chunks]
    return stack_thd_chunks(chunks, seq_lens_padding_value)


def stack_thd_chunks(
    chunks: list[dict[str, Any]], seq_lens_padding_value: int = SEQ_LENS_PADDING
) -> dict[str, Any]:
    """THD dicts with the same keys -> one dict of tensors [num_chunks, ...]; what is not a tensor
    is taken once.
    """
    stacked: dict[str, Any] = {}
    for key, first in chunks[0].items():
        if not isinstance(first, Tensor):
            stacked[key] = first
        elif key in ("cu_seqlens", "cu_seqlens_padded"):
            stacked[key] = torch.nn.utils.rnn.pad_sequence(
                [chunk[key] for chunk in chunks],
                batch_first=True,
                padding_value=seq_lens_padding_value,
            )
        else:
            stacked[key] = torch.stack([chunk[key] for chunk in chunks])
    return stacked


def thd_padding_mask_from_token_ids(input_ids: Tensor, padding_token_id: int) -> Tensor:
    """bool, shaped like `input_ids` ([T] or [B, S]); True on the run of `padding_token_id` that
    ends each row.

    Raises ValueError when the id also occurs elsewhere: content cannot be told from padding then.
    """
    is_pad = input_ids == padding_token_id
    at_the_end = is_pad.flip(-1).long().cumprod(-1).flip(-1).bool()
    if not torch.equal(at_the_end, is_pad):
        raise ValueError(
            f"padding_token_id={padding_token_id} also occurs as content, so padding cannot be "
            "told from the token ids: give seq_lens and seq_lens_padded, or pad with an id that "
            "no document has."
        )
    return is_pad


def _boundaries(
    seq_lens: Tensor, seq_lens_padded: Tensor | None, sentinel: int, rows: int, row_length: int
) -> dict[str, Tensor]:
    """`cu_seqlens`, `cu_seqlens_padded` (when it differs), `max_seqlen` and `padding_mask` of a
    batch.
    """
    total = rows * row_length
    lens, slots = document_slots(seq_lens, seq_lens_padded, sentinel, rows, row_length)
    # tokens after the last slot, if any, are one more slot without a document
    all_lens = torch.nn.functional.pad(lens, (0, 1))
    all_slots = torch.cat([slots, (total - slots.sum()).reshape(1)])
    start_of_slot = (all_slots.cumsum(0) - all_slots).repeat_interleave(all_slots)
    place_in_slot = torch.arange(total, device=lens.device) - start_of_slot
    cu = cumulative(lens)
    cu_padded = cumulative(slots)
    if torch.equal(cu[:-1], cu_padded[:-1]) and cu[-1] != cu_padded[-1] and int(cu[-1]) < total:
        cu = cu.clone()
        cu[-1] = total
        cu_padded = cu
    result = {
        "cu_seqlens": cu,
        "max_seqlen": cu.diff().max().to(torch.int32) if len(cu) > 1 else cu.new_zeros(()),
        "padding_mask": place_in_slot >= all_lens.repeat_interleave(all_slots),
    }
    return result if torch.equal(cu, cu_padded) else result | {"cu_seqlens_padded": cu_padded}


def document_slots(
    seq_lens: Tensor, seq_lens_padded: Tensor | None, sentinel: int, rows: int, row_length: int
) -> tuple[Tensor, Tensor]:
    """Returns real and padded lengths, int64 [N] each, row-major, the sentinel dropped.

    Without `seq_lens_padded` the last document of a row keeps the rest of the row.
    """
    seq_lens = seq_lens.reshape(rows, -1).long()
    valid = seq_lens != sentinel
    if seq_lens_padded is None:
        is_last = valid & (valid.cumsum(1) == valid.sum(1, keepdim=True))
        rest = row_length - torch.where(valid, seq_lens, 0).sum(1, keepdim=True)
        padded = torch.where(is_last, seq_lens + rest, seq_lens)
        lens = seq_lens[valid]
        slots = padded[valid]
    else:
        padded = seq_lens_padded.reshape(rows, -1).long()
        lens = seq_lens[valid]
        slots = padded[padded != sentinel]
    if (
        len(lens) != len(slots)
        or bool((lens > slots).any())
        or int(slots.sum()) > rows * row_length
    ):
        raise ValueError(
            f"seq_lens={lens.tolist()} and seq_lens_padded={slots.tolist()} do not describe "
            f"{counted(rows, 'row')} of {counted(row_length, 'token')}: each document needs one "
            "slot at least as long as itself, inside the batch."
        )
    return lens, slots


def _rows_of(key: str, value: Any, rows: int, chunk: slice) -> Any:
    """Returns the chunk's part of one entry of the batch; what has no batch dim goes to every
    chunk.
    """
    if not isinstance(value, Tensor):
        return value
    if key == "position_ids" and value.ndim == 3:
        return value[:, chunk]
    return value[chunk] if value.ndim > 0 and value.shape[0] == rows else value
