"""The THD batch: one flat stream of tokens, its document boundaries, and what attention needs to know of it.

    [B, S] rows                 row 0: doc doc doc . | doc doc . .      row 1: doc doc doc doc doc .
    one stream [T], T = B * S   cu_seqlens_padded   0    4    8    14   where each slot begins in the stream
                                cu_seqlens          0    3    5    10   running count of real tokens

A document may be followed by padding inside of its slot. With a causal mask no real token sees it, so kernels need
the padded boundaries alone; the real ones serve statistics and the padding mask.

Legend: T tokens of the stream, N documents (slots), B rows, S row length, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that carries no loss."""

SEQ_LENS_PADDING = -1000
"""Fills up the rows of a collated `seq_lens` tensor; never reaches a `ThdBatch`."""


class Exchange(Protocol):
    """What context parallelism does around the kernel of each attention layer."""

    @property
    def kernel_kwargs(self) -> dict[str, Any]:
        """Further keyword arguments of the kernel; empty unless the kernel exchanges by itself."""

    def before(
        self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """This rank's q, k, v, sinks -> those that the kernel attends with."""

    def after(self, out_THD: Tensor) -> Tensor:
        """The kernel's output -> the output of this rank's own tokens."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> Exchange:
        """The same exchange with each of its tensors moved."""


@dataclass(frozen=True)
class AttentionPlan:
    """The segments that this rank's kernel attends over: causal, aligned bottom right.

    cu_q, cu_k  int32 [N + 1], segment i of the queries attends to segment i of the keys; the very same tensor object
                unless context parallel ranks gather each other's keys, so that `cu_q is cu_k` means "plain packing"
    max_q, max_k  longest segment, in tokens
    exchange    what to do around the kernel; None without context parallelism
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    exchange: Exchange | None = None

    def moved(self, move: Callable[[Tensor], Tensor]) -> AttentionPlan:
        """The plan with its tensors moved; what was one tensor stays one."""
        cu_q = move(self.cu_q)
        cu_k = cu_q if self.cu_k is self.cu_q else move(self.cu_k)
        exchange = None if self.exchange is None else self.exchange.moved(move)
        return replace(self, cu_q=cu_q, cu_k=cu_k, exchange=exchange)


@dataclass(frozen=True)
class ThdBatch:
    """One micro-batch of one rank.

    input_ids, labels, position_ids  int64 [T], this rank's tokens (T / cp of them after `cp_shard`); labels are
                       next-token aligned (`labels[i]` is the target of position i), IGNORE_INDEX carries no loss
    label_rows         int64 [R], this rank's positions that carry a label; found on the host, because their number is
                       a shape: a GPU would have to be waited for
    cu_seqlens         int32 [N + 1], running count of real tokens of the whole stream
    cu_seqlens_padded  int32 [N + 1], slot boundaries in the whole stream
    max_seqlen         widest slot of the whole stream, in tokens
    num_tokens         real tokens of the whole stream
    num_label_tokens   positions of the whole stream that carry a label
    attention          what this rank's attention kernel gets
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    label_rows: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    max_seqlen: int
    num_tokens: int
    num_label_tokens: int
    attention: AttentionPlan

    def moved(self, move: Callable[[Tensor], Tensor]) -> ThdBatch:
        """The batch with each of its tensors moved."""
        return replace(
            self,
            input_ids=move(self.input_ids),
            labels=move(self.labels),
            position_ids=move(self.position_ids),
            label_rows=move(self.label_rows),
            cu_seqlens=move(self.cu_seqlens),
            cu_seqlens_padded=move(self.cu_seqlens_padded),
            attention=self.attention.moved(move),
        )

    def to(self, device: torch.device | str, non_blocking: bool = True) -> ThdBatch:
        """The batch on `device`. The copies overlap with work on the GPU only if the batch was pinned."""
        return self.moved(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> ThdBatch:
        """The batch in page-locked memory; the name is the one that torch's pinning thread calls."""
        return self.moved(lambda tensor: tensor.pin_memory())

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of a Hugging Face causal LM that runs on one of our kernels.

        `use_cache=False` is not an optimisation: with a cache, transformers drops its own packed mask in silence.
        """
        plan = self.attention
        inputs = {
            "input_ids": self.input_ids[None],
            "position_ids": self.position_ids[None],
            "use_cache": False,
            "cu_seq_lens_q": plan.cu_q,
            "cu_seq_lens_k": plan.cu_k,
            "max_length_q": plan.max_q,
            "max_length_k": plan.max_k,
        }
        return inputs if plan.exchange is None else inputs | {"cp_exchange": plan.exchange}


def to_thd(batch: dict[str, Any]) -> ThdBatch:
    """A batch of `packed_sequence_thd_collater` -> the stream of its rows.

    batch  `input_ids, labels, position_ids` int64 [B, S]; `seq_lens, seq_lens_padded` [B, documents], filled up with
           SEQ_LENS_PADDING; each row of `seq_lens_padded` sums to S
    Raises ValueError when a row does not, or a document is longer than its slot.

        seq_lens [[3, 2], [5, -1000]], seq_lens_padded [[4, 4], [6, -1000]] would be S = 8 and S = 6: refused
        seq_lens [[3, 2], [5, -1000]], seq_lens_padded [[4, 2], [6, -1000]] -> cu_seqlens_padded [0, 4, 6, 12]
    """
    rows, row_length = batch["input_ids"].shape
    lens, slots = _slots(batch["seq_lens"], batch["seq_lens_padded"], SEQ_LENS_PADDING, rows, row_length)
    row_sums = batch["seq_lens_padded"].clamp(min=0).sum(1)
    if bool((row_sums != row_length).any()):
        raise ValueError(
            f"seq_lens_padded rows sum to {row_sums.tolist()}, but the rows are {row_length} tokens long: "
            "the slots of a row must fill it."
        )
    cu_padded = _cumulative(slots)
    max_seqlen = int(slots.max())
    labels = batch["labels"].reshape(-1)
    label_rows = labelled_rows(labels)
    return ThdBatch(
        input_ids=batch["input_ids"].reshape(-1),
        labels=labels,
        position_ids=batch["position_ids"].reshape(-1),
        label_rows=label_rows,
        cu_seqlens=_cumulative(lens),
        cu_seqlens_padded=cu_padded,
        max_seqlen=max_seqlen,
        num_tokens=int(lens.sum()),
        num_label_tokens=len(label_rows),
        attention=AttentionPlan(cu_padded, cu_padded, max_seqlen, max_seqlen),
    )


def labelled_rows(labels: Tensor) -> Tensor:
    """Positions that carry a label, int64 [R]; for tensors on the host."""
    return (labels != IGNORE_INDEX).nonzero().squeeze(1)


def process_input_for_thd(
    batch: dict[str, Any], seq_lens_padding_value: int = SEQ_LENS_PADDING, padding_token_id: int = 0
) -> dict[str, Any]:
    """A collated batch of [B, S] rows -> the dict of its THD stream, T = B * S.

    input_ids     [B, S] -> [T], or embeddings [B, S, H] -> [T, H]; labels alike
    position_ids  [B, S] -> [T]; None -> None; mRoPE [R, B, S] -> [R, 1, T]
    cu_seqlens    int32 [N + 1]. When it differs from the padded boundaries in its last entry only, all padding is at
                  the end of the stream: the last entry becomes T
    cu_seqlens_padded  only when it differs from `cu_seqlens`
    max_seqlen    int32, 0-dim: widest step of `cu_seqlens`
    padding_mask  bool [T], True = padding, from the layout; without `seq_lens` from `padding_token_id`
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
        "position_ids": _flat_positions(batch.get("position_ids")),
    }
    if batch.get("seq_lens") is None:
        thd["padding_mask"] = thd_padding_mask_from_token_ids(input_ids, padding_token_id).flatten()
    else:
        thd |= _boundaries(batch["seq_lens"], batch.get("seq_lens_padded"), seq_lens_padding_value, rows, row_length)
    return {key: value for key, value in batch.items() if key not in consumed and key not in thd} | thd


def split_batch_into_thd_chunks(
    batch: dict[str, Any],
    num_chunks: int,
    seq_lens_padding_value: int = SEQ_LENS_PADDING,
    padding_token_id: int = 0,
) -> dict[str, Any]:
    """`process_input_for_thd` of `num_chunks` equal slices of the batch dim, stacked to [num_chunks, ...].

    `cu_seqlens` (and `cu_seqlens_padded`, when any chunk has it) are filled up on the right with
    `seq_lens_padding_value`; `max_seqlen` is int32 [num_chunks]. Raises ValueError when the rows do not divide.
    """
    if num_chunks <= 1:
        return process_input_for_thd(batch, seq_lens_padding_value, padding_token_id)
    rows = batch["input_ids"].shape[0]
    if rows % num_chunks:
        raise ValueError(f"num_chunks={num_chunks} must divide the {rows} rows of the batch.")
    size = rows // num_chunks
    chunks = [
        process_input_for_thd(
            {key: _rows_of(key, value, rows, slice(i * size, (i + 1) * size)) for key, value in batch.items()},
            seq_lens_padding_value,
            padding_token_id,
        )
        for i in range(num_chunks)
    ]
    if any("cu_seqlens_padded" in chunk for chunk in chunks):
        chunks = [{"cu_seqlens_padded": chunk["cu_seqlens"]} | chunk for chunk in chunks]
    return stack_thd_chunks(chunks, seq_lens_padding_value)


def stack_thd_chunks(chunks: list[dict[str, Any]], seq_lens_padding_value: int = SEQ_LENS_PADDING) -> dict[str, Any]:
    """THD dicts with the same keys -> one dict of tensors [num_chunks, ...]; what is no tensor is taken once."""
    stacked: dict[str, Any] = {}
    for key, first in chunks[0].items():
        if not isinstance(first, Tensor):
            stacked[key] = first
        elif key in ("cu_seqlens", "cu_seqlens_padded"):
            stacked[key] = torch.nn.utils.rnn.pad_sequence(
                [chunk[key] for chunk in chunks], batch_first=True, padding_value=seq_lens_padding_value
            )
        else:
            stacked[key] = torch.stack([chunk[key] for chunk in chunks])
    return stacked


def thd_padding_mask_from_token_ids(input_ids: Tensor, padding_token_id: int) -> Tensor:
    """bool, shaped like `input_ids` ([T] or [B, S]); True on the run of `padding_token_id` that ends each row.

    Raises ValueError when the id also occurs elsewhere: content cannot be told from padding then.
    """
    is_pad = input_ids == padding_token_id
    at_the_end = is_pad.flip(-1).long().cumprod(-1).flip(-1).bool()
    if not torch.equal(at_the_end, is_pad):
        raise ValueError(
            f"padding_token_id={padding_token_id} also occurs as content, so padding cannot be told from the token "
            "ids: give seq_lens and seq_lens_padded, or pad with an id that no document has."
        )
    return is_pad


def _cumulative(lengths: Tensor) -> Tensor:
    """int64 [N] -> int32 [N + 1], from 0."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _slots(
    seq_lens: Tensor, seq_lens_padded: Tensor | None, sentinel: int, rows: int, row_length: int
) -> tuple[Tensor, Tensor]:
    """Real and padded lengths, int64 [N] each, row-major, the sentinel dropped.

    Without `seq_lens_padded` the last document of a row keeps the rest of the row.
    """
    seq_lens = seq_lens.reshape(rows, -1).long()
    valid = seq_lens != sentinel
    if seq_lens_padded is None:
        is_last = valid & (valid.cumsum(1) == valid.sum(1, keepdim=True))
        rest = row_length - torch.where(valid, seq_lens, 0).sum(1, keepdim=True)
        padded = torch.where(is_last, seq_lens + rest, seq_lens)
        lens, slots = seq_lens[valid], padded[valid]
    else:
        padded = seq_lens_padded.reshape(rows, -1).long()
        lens, slots = seq_lens[valid], padded[padded != sentinel]
    if len(lens) != len(slots) or bool((lens > slots).any()) or int(slots.sum()) > rows * row_length:
        raise ValueError(
            f"seq_lens={lens.tolist()} and seq_lens_padded={slots.tolist()} do not describe {rows} rows of "
            f"{row_length} tokens: each document needs one slot at least as long as itself, inside the batch."
        )
    return lens, slots


def _boundaries(
    seq_lens: Tensor, seq_lens_padded: Tensor | None, sentinel: int, rows: int, row_length: int
) -> dict[str, Tensor]:
    """`cu_seqlens`, `cu_seqlens_padded` (when it differs), `max_seqlen` and `padding_mask` of a batch."""
    total = rows * row_length
    lens, slots = _slots(seq_lens, seq_lens_padded, sentinel, rows, row_length)
    # tokens after the last slot, if any, are one more slot without a document
    all_lens = torch.nn.functional.pad(lens, (0, 1))
    all_slots = torch.cat([slots, (total - slots.sum()).reshape(1)])
    start_of_slot = (all_slots.cumsum(0) - all_slots).repeat_interleave(all_slots)
    place_in_slot = torch.arange(total, device=lens.device) - start_of_slot
    cu, cu_padded = _cumulative(lens), _cumulative(slots)
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


def _flat_positions(position_ids: Tensor | None) -> Tensor | None:
    """[B, S] -> [B * S]; mRoPE [R, B, S] -> [R, 1, B * S]."""
    if position_ids is None:
        return None
    return position_ids.flatten(1)[:, None] if position_ids.ndim == 3 else position_ids.flatten()


def _rows_of(key: str, value: Any, rows: int, chunk: slice) -> Any:
    """The chunk's part of one entry of the batch; what has no batch dim goes to every chunk."""
    if not isinstance(value, Tensor):
        return value
    if key == "position_ids" and value.ndim == 3:
        return value[:, chunk]
    return value[chunk] if value.ndim > 0 and value.shape[0] == rows else value
