"""The THD batch: one flat stream of tokens, its document boundaries, and what attention and other mixers need to know.

    [B, S] rows                 row 0: doc doc doc . | doc doc . .      row 1: doc doc doc doc doc .
    one stream [T], T = B * S   cu_seqlens_padded   0    4    8    14   where each slot begins in the stream
                                cu_seqlens          0    3    5    10   running count of real tokens

A document may be followed by padding inside its slot. With a causal mask no real token sees it, so kernels need the
padded boundaries alone; the real ones serve statistics and the padding mask.

Layers that mix tokens in other ways than attention get the documents as right-padded rows. What follows a document
cannot reach back into it, so a causal mixer that starts over in each row keeps documents apart, whatever it does.
Documents of similar length share a tensor, which bounds the padding.

    cu_seqlens 0 5 7 11      rows  [0 1 2 3 4]      to_stream  0 1 2 3 4 | 8 9 | 10 11 ...
    (documents of 5, 2, 4)         [7 8 9 10 10]
                                   [5 6 6 6 6]      to_stream[t]: where token t is in the flattened rows

Legend: T tokens of the stream, N documents (slots), B rows, S row length, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

FREE_PADDING_TOKENS, FREE_PADDING_FRAC = 256, 0.1
"""Padding that a tensor of rows may hold: so many tokens, or so much of it. One more tensor is one more call of the
mixer, which costs a small model on a CPU as much as some hundred tokens.
"""


@dataclass(frozen=True)
class DocumentRows:
    """rows       int64 [n, L] each: positions in the stream; behind its end, a document's last position is repeated
    to_stream  int64 [T]: where each position of the stream is in all rows, flattened one after the other
    cu_seqlens int32 [N + 1] and seq_idx int32 [1, T] (the document of each token): what kernels of packages want
    cu_host    cu_seqlens, never mapped: some of those kernels read it on the host
    """

    rows: tuple[Tensor, ...]
    to_stream: Tensor
    cu_seqlens: Tensor
    seq_idx: Tensor
    cu_host: Tensor

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> DocumentRows:
        return replace(
            self,
            rows=tuple(function(rows) for rows in self.rows),
            to_stream=function(self.to_stream),
            cu_seqlens=function(self.cu_seqlens),
            seq_idx=function(self.seq_idx),
        )

    def each(self, mix: Callable[[list[Tensor]], Tensor], streams: Sequence[Tensor]) -> Tensor:
        """`mix` on the rows of each of `streams`, [T, ...] each -> [n, L, ...]; its results [n, L, ...] -> [T, ...]."""
        outs = []
        for rows in self.rows:
            at, shape = rows.flatten(), rows.shape
            outs.append(mix([x.index_select(0, at).unflatten(0, shape) for x in streams]).flatten(0, 1))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.index_select(0, self.to_stream)


def document_rows(cu_seqlens: Tensor) -> DocumentRows:
    """The rows of a stream with boundaries `cu_seqlens` (int [N + 1], on the host)."""
    starts, lens = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    document = torch.repeat_interleave(lens)
    order = lens.argsort(descending=True, stable=True)
    order = order[: int((lens > 0).sum())]
    rows, first = [], torch.zeros_like(starts)  # first: where a document begins in the flattened rows
    num_before = 0
    for documents in order.split(_rows_per_tensor(lens[order].tolist())):
        longest = int(lens[documents[0]])
        within = torch.minimum(torch.arange(longest), lens[documents, None] - 1)
        rows.append(starts[documents, None] + within)
        first[documents] = num_before + longest * torch.arange(len(documents))
        num_before += rows[-1].numel()
    rows = rows or [torch.zeros(1, 1, dtype=torch.long)]  # of no documents: a mixer has to run for its gradients
    to_stream = first[document] + torch.arange(len(document)) - starts[document]
    cu = cu_seqlens.to(torch.int32)
    return DocumentRows(tuple(rows), to_stream, cu, document[None].to(torch.int32), cu)


def _rows_per_tensor(lens: list[int]) -> list[int]:
    """How many documents share a tensor; `lens` from the longest to the shortest."""
    sizes: list[int] = []
    longest = padding = 0
    for length in lens:
        padding += longest - length
        if sizes and padding <= max(FREE_PADDING_TOKENS, FREE_PADDING_FRAC * longest * (sizes[-1] + 1)):
            sizes[-1] += 1
        else:
            sizes.append(1)
            longest, padding = length, 0
    return sizes


IGNORE_INDEX = -100
"""Label of a position that carries no loss."""


@dataclass(frozen=True)
class Column:
    """A value per token that goes with a document from its token row to the batch.

    stored   dtype on disk
    batched  dtype of its tensor in a batch
    padding  what stands where no document is; `input_ids` take the tokenizer's padding token
    """

    stored: str
    batched: str
    padding: float


COLUMNS = {
    "input_ids": Column("int32", "int64", 0),
    "labels": Column("int32", "int64", IGNORE_INDEX),
}
"""Every per-token column. Rows, packs, batches and shards carry what is listed here, and a field of the same name in
`ThdBatch` takes it to the model and the loss. Rows without a column get its padding.
"""

SEQ_LENS_PADDING = -1000
"""Fills up the rows of a collated `seq_lens` tensor; never reaches a `ThdBatch`."""


class Segments(NamedTuple):
    """What an attention kernel works on: segment i of the queries attends to segment i of the keys, causal, aligned
    bottom right.

    cu_q, cu_k    int32 [N + 1]; the very same tensor object unless context-parallel ranks gather each other's keys, so
                  that `cu_q is cu_k` means "plain packing"
    max_q, max_k  longest segment, in tokens
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer asks of its attention kernel.

    scale    of the logits
    window   visible keys, the query's own included; None sees all
    softcap  bound of the logits; None without
    sinks    [Hq], one more logit for each head; None without
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class Exchange(Protocol):
    """What context parallelism does around the kernel of each attention layer."""

    def attend(
        self,
        kernel: Callable[..., Tensor],
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        segments: Segments,
        options: AttentionOptions,
    ) -> Tensor:
        """This rank's q, k, v [T / cp, H, D] -> the output of its own tokens.

        segments  of the plan, or their cuts in a layer with chunked attention
        """

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Exchange:
        """The same exchange with `function` of each of its tensors."""


@dataclass(frozen=True)
class AttentionPlan:
    """What this rank's kernel works on, see `Segments`, and what to do around it.

    exchange  None without context parallelism
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    exchange: Exchange | None = None

    @property
    def segments(self) -> Segments:
        return Segments(self.cu_q, self.cu_k, self.max_q, self.max_k)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> AttentionPlan:
        """The plan with `function` of its tensors; what was one tensor stays one."""
        cu_q = function(self.cu_q)
        cu_k = cu_q if self.cu_k is self.cu_q else function(self.cu_k)
        exchange = None if self.exchange is None else self.exchange.map_tensors(function)
        return replace(self, cu_q=cu_q, cu_k=cu_k, exchange=exchange)


class MixerExchange(Protocol):
    """What context parallelism does around a layer that mixes tokens in other ways than attention: each rank gets
    either all tokens of some heads, or whole documents. [T / cp] are this rank's tokens, [T] the whole stream, [T'] the
    documents that this rank owns.
    """

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def owned(self) -> DocumentRows:
        """The documents that this rank mixes when whole documents are distributed, as rows of [T']."""

    def own(self, x_T: Tensor) -> Tensor:
        """[T, ...] -> [T / cp, ...]."""

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks, without gradients."""

    def to_heads(self, xs_TH: Sequence[Tensor]) -> list[Tensor]:
        """[T / cp, H, ...] -> [T, H / cp, ...], of each."""

    def from_heads(self, x_TH: Tensor) -> Tensor:
        """[T, H / cp, ...] -> [T / cp, H, ...]."""

    def part(self, weight: Tensor, dim: int) -> Tensor:
        """The slice of a weight that belongs to this rank's heads."""

    def to_owner(self, x_TC: Tensor) -> Tensor:
        """[T / cp, ...] -> [T', ...]."""

    def from_owner(self, x_TC: Tensor) -> Tensor:
        """[T', ...] -> [T / cp, ...]."""

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> MixerExchange:
        """The same exchange with `function` of each of its tensors."""


@dataclass(frozen=True)
class MixerPlan:
    """What layers get that mix tokens in other ways than attention.

    stream    the documents of the whole stream
    exchange  what to do around such a layer; None without context parallelism
    """

    stream: DocumentRows
    exchange: MixerExchange | None = None

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> MixerPlan:
        exchange = None if self.exchange is None else self.exchange.map_tensors(function)
        return replace(self, stream=self.stream.map_tensors(function), exchange=exchange)


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
    mixers             what its other mixers get: state spaces, convolutions, linear attention; None for a model of
                       attention alone
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
    mixers: MixerPlan | None

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> ThdBatch:
        """The batch with `function` of each of its tensors."""
        tensors: dict[str, Any] = {
            name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        mixers = None if self.mixers is None else self.mixers.map_tensors(function)
        return replace(self, **tensors, attention=self.attention.map_tensors(function), mixers=mixers)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> ThdBatch:
        """The batch on `device`. The copies overlap with work on the GPU only if the batch was pinned."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> ThdBatch:
        """The batch in page-locked memory; the name is the one that torch's pinning thread calls."""
        return self.map_tensors(lambda tensor: tensor.pin_memory())

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of a Hugging Face causal LM that runs on one of our kernels.

        `use_cache=False` is not an optimization: with a cache, transformers drops its own packed mask in silence.
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
            "mixer_plan": self.mixers,
        }
        return inputs if plan.exchange is None else inputs | {"cp_exchange": plan.exchange}


def to_thd(batch: dict[str, Any], with_mixers: bool = True) -> ThdBatch:
    """A batch of `packed_sequence_thd_collater` -> the stream of its rows.

    batch  `input_ids, labels, position_ids` int64 [B, S]; `seq_lens, seq_lens_padded` [B, documents], filled up with
           SEQ_LENS_PADDING; each row of `seq_lens_padded` sums to S
    with_mixers  False for a model of attention alone: 21 bytes per token less on the device, 43 less under context
           parallelism; at a million tokens 70 ms of the host, 190 under context parallelism
    Raises ValueError when a row does not, or a document is longer than its slot.

        seq_lens [[3, 2], [5, -1000]], seq_lens_padded [[4, 4], [6, -1000]] would be S = 8 and S = 6: refused
        seq_lens [[3, 2], [5, -1000]], seq_lens_padded [[4, 2], [6, -1000]] -> cu_seqlens_padded [0, 4, 6, 12]
    """
    rows, row_length = batch["input_ids"].shape
    lens, slots = document_slots(batch["seq_lens"], batch["seq_lens_padded"], SEQ_LENS_PADDING, rows, row_length)
    row_sums = batch["seq_lens_padded"].clamp(min=0).sum(1)
    if bool((row_sums != row_length).any()):
        raise ValueError(
            f"seq_lens_padded rows sum to {row_sums.tolist()}, but the rows are {row_length} tokens long: "
            "the slots of a row must fill it."
        )
    cu_padded = cumulative(slots)
    max_seqlen = int(slots.max())
    label_rows = labeled_rows(batch["labels"].reshape(-1))
    return ThdBatch(
        **{name: batch[name].reshape(-1) for name in per_token()},
        label_rows=label_rows,
        cu_seqlens=cumulative(lens),
        cu_seqlens_padded=cu_padded,
        max_seqlen=max_seqlen,
        num_tokens=int(lens.sum()),
        num_label_tokens=len(label_rows),
        attention=AttentionPlan(cu_padded, cu_padded, max_seqlen, max_seqlen),
        mixers=MixerPlan(document_rows(cu_padded)) if with_mixers else None,
    )


def per_token() -> list[str]:
    """Fields of `ThdBatch` [T] that a rank has its own tokens of."""
    return [field.name for field in fields(ThdBatch) if field.name in COLUMNS or field.name == "position_ids"]


def labeled_rows(labels: Tensor) -> Tensor:
    """Positions that carry a label, int64 [R]; for tensors on the host."""
    return (labels != IGNORE_INDEX).nonzero().squeeze(1)


def cumulative(lengths: Tensor) -> Tensor:
    """int64 [N] -> int32 [N + 1], from 0."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def document_slots(
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
