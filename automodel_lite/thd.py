"""The THD batch: one flat stream of tokens, its document boundaries, and what attention and other
mixers need to know.

    [B, S] rows                 row 0: doc doc doc . | doc doc . .      row 1: doc doc doc doc doc .
    one stream [T], T = B * S   cu_seqlens_padded   0    4    8    14   where each slot begins in
    the stream
                                cu_seqlens          0    3    5    10   running count of real tokens

A document may be followed by padding inside its slot. With a causal mask no real token sees it, so
kernels need the padded boundaries alone; the real ones serve statistics and the padding mask.

Layers that mix tokens in other ways than attention get the documents as right-padded rows
(document_rows.py).

A document may be a tree of rows that share their beginning (prefix_trees.py): its positions go back
where it branches.

Legend: T tokens of the stream, N documents (slots), B rows, S row length, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from automodel_lite import compat
from automodel_lite.columns import COLUMNS, labeled_rows
from automodel_lite.document_rows import MixerPlan, document_rows
from automodel_lite.prefix_trees import Nodes, find_nodes
from automodel_lite.tensors import Tensors, cumulative

PER_TOKEN = ("input_ids", "labels", "position_ids")
"""Fields of `ThdBatch` [T] that, beside its `columns`, a rank has its own tokens of."""

SEQ_LENS_PADDING = -1000
"""Fills up the rows of a collated `seq_lens` tensor; never reaches a `ThdBatch`."""


class Segments(NamedTuple):
    """What an attention kernel works on: segment i of the queries attends to segment i of the keys,
    causal, aligned bottom right.

    cu_q, cu_k    int32 [N + 1]; the very same tensor object unless context-parallel ranks gather
                  each other's keys, so that `cu_q is cu_k` means "plain packing"
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


class AttentionInputs(NamedTuple):
    """What a kernel is called with: q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    segments: Segments
    options: AttentionOptions


@dataclass(frozen=True)
class TreeKeys(Tensors):
    """The keys of a stream with trees. Segment i of the queries is a node; segment i of the keys is
    its path.

    paths     int64 [Tk]: places in the stream of the keys of all segments
    until     int64 [T]: the same in one integer per key, query i sees key j if j <= i < until[j]
    position  int64 [T]: place of each token on its path
    """

    paths: Tensor
    until: Tensor
    position: Tensor


class Exchange(Protocol):
    """What context parallelism does around the kernel of each attention layer."""

    def attend(self, kernel: Callable[..., Tensor], inputs: AttentionInputs) -> Tensor:
        """This rank's q, k, v, of T / cp tokens -> the output of its own tokens.

        The segments are those of the plan, or their cuts in a layer with chunked attention.
        """


@dataclass(frozen=True)
class AttentionPlan(Tensors):
    """segments  what this rank's kernel works on
    exchange  what to do around it; None without context parallelism
    tree      whose keys the kernel gets; None where no document branches, or where the exchange
              gathers its paths
    ahead     of layers without a window, and with one: int64 [Tq, 2], tokens behind itself that a
              query sees, and tokens before itself that it sees though its window ends; a kind that
              is plainly causal is not there
    before    int64 [N]: keys before the first query of each segment; None where its last query is
              at its last key
    """

    segments: Segments
    exchange: Exchange | None = None
    tree: TreeKeys | None = None
    ahead: dict[bool, Tensor] = field(default_factory=dict)
    before: Tensor | None = None

    def reach(self, window: int | None) -> Tensor | None:
        """Returns int64 [Tq, 2]: the last key of its segment that a query sees, and the key from
        which its window counts; None in layers that are plainly causal, bottom right.
        """
        ahead = self.ahead.get(window is not None)
        if ahead is None and self.before is None:
            return None
        if window not in self._reaches:
            seen = next(iter(self.ahead.values()))
            behind, kept = (torch.zeros_like(seen) if ahead is None else ahead).unbind(1)
            cu_q, cu_k, *_ = self.segments
            lens = cu_q.diff().long()
            shifts = cu_k.diff() - lens if self.before is None else self.before
            firsts = (shifts - cu_q[:-1]).repeat_interleave(lens, output_size=len(seen))
            at = torch.arange(len(seen), device=seen.device) + firsts
            start = at if window is None else at - (kept + 1 - window).clamp(min=0)
            self._reaches[window] = torch.stack([at + behind, start], 1)
        return self._reaches[window]

    @cached_property
    def _reaches(self) -> dict[int | None, Tensor]:
        return {}

    @cached_property
    def _cuts(self) -> dict[int, Segments]:
        return {}

    @cached_property
    def sizes(self) -> tuple[Tensor, Tensor] | None:
        """Boundaries, and a tensor as long as the longest segment: sizes in the graphs of layers,
        free to vary. None where attention takes more than that.
        """
        if self.exchange is not None or self.tree is not None or self.ahead:
            return None
        longest = self.segments.cu_q.new_empty(()).expand(max(self.segments.max_q, 2))
        for tensor in (self.segments.cu_q, longest):
            compat.dynamo.maybe_mark_dynamic(tensor, 0)
        return self.segments.cu_q, longest

    def cut(self, chunk: int | None) -> Segments:
        """The segments of a layer with chunked attention: made once, for all such layers. None is a
        layer without.
        """
        if chunk is None:
            return self.segments
        if chunk not in self._cuts:
            self._cuts[chunk] = cut_at_chunks(self.segments, chunk)
        return self._cuts[chunk]


def attention_of_trees(nodes: Nodes, position_ids: Tensor) -> AttentionPlan:
    """Returns the plan of a whole stream with trees."""
    lens = nodes.end - nodes.start
    own = Segments(
        cumulative(lens), cumulative(nodes.path_lens), int(lens.max()), int(nodes.path_lens.max())
    )
    return AttentionPlan(own, tree=TreeKeys(nodes.paths, nodes.until, position_ids))


def cut_at_chunks(segments: Segments, chunk: int) -> Segments:
    """Segments cut at multiples of `chunk` inside each document, so that queries see the keys of
    their own chunk only.

    A document has as many pieces as the longest one, the last of them empty: the number of pieces
    is known without waiting for the device. Queries are the last ones of their keys (context
    parallelism): early pieces may have none.

        cu [0, 5, 7], chunk 2 -> [0, 2, 4, 5, 7, 7, 7]      (pieces of 2, 2, 1 and 2, 0, 0)
    """
    cu_q, cu_k, max_q, max_k = segments
    starts = torch.arange(0, max_k, chunk, device=cu_k.device, dtype=cu_k.dtype)
    q_lens = cu_q.diff()[:, None]
    k_lens = cu_k.diff()[:, None]
    cut_q = cut_k = torch.cat([(cu_k[:-1, None] + starts.minimum(k_lens)).flatten(), cu_k[-1:]])
    if cu_k is not cu_q:
        within = (starts - (k_lens - q_lens)).clamp(min=0).minimum(q_lens)
        cut_q = torch.cat([(cu_q[:-1, None] + within).flatten(), cu_q[-1:]])
    return Segments(cut_q, cut_k, min(max_q, chunk), min(max_k, chunk))


@dataclass(frozen=True)
class TowerInputs(Tensors):
    """What the towers of a composite get of a micro-batch (parts/images/)."""

    @property
    def ahead(self) -> dict[bool, Tensor]:
        """Returns what tokens of images see behind them (`AttentionPlan`), of the whole stream."""
        return {}

    @property
    def flops(self) -> float:
        """Returns the work of the towers, forward and backward, for all images of the stream."""
        return 0.0

    def model_inputs(self, lm: Any, batch: ThdBatch) -> dict[str, Any]:
        """Returns the arguments of the composite's forward; runs its towers."""
        raise NotImplementedError

    def shard(self, batch: ThdBatch, mine: Tensor, group: Any) -> TowerInputs:
        """Returns those of a rank of a context-parallel group, which has the tokens `mine` of
        `batch`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class TargetsAhead(Tensors):
    """What heads that predict further tokens get of a micro-batch (models/mtp.py)."""

    def shard(self, mine: Tensor) -> TargetsAhead:
        """Returns those of a context-parallel rank, which has the tokens `mine` of the stream."""
        raise NotImplementedError


@dataclass(frozen=True)
class ThdBatch(Tensors):
    """One micro-batch of one rank.

    A document may be a tree of rows that share their beginning (prefix_trees.py), depth first:
    `position_ids` are those of the rows and go back where a branch begins. Whatever counts
    documents counts a tree as one.

    input_ids, labels, position_ids  int64 [T], this rank's tokens (T / cp of them after
                                     `cp_shard`); labels are
                       next-token aligned (`labels[i]` is the target of position i), IGNORE_INDEX
                       carries no loss
    label_rows         int64 [R], this rank's positions that carry a label; found on the host,
                       because their number is a shape: a GPU would have to be waited for
    document_lens      int32 [T], the real length of each token's document (of the longest row of a
                       tree) in the whole stream, 0 for padding behind the last: what rotations
                       choose their frequencies by
    cu_seqlens         int32 [N + 1], running count of real tokens of the whole stream
    cu_seqlens_padded  int32 [N + 1], slot boundaries in the whole stream
    max_seqlen         widest slot of the whole stream, in tokens
    num_tokens         real tokens of the whole stream
    num_label_tokens   positions of the whole stream that carry a label; with `loss_weights`, the
                       sum of their weights (in fp64, so exact for whole numbers)
    columns            optional per-token columns that the data bring, [T, ...] as `labels` are
    attention          what this rank's attention kernel gets
    mixers             what its other mixers get: state spaces, convolutions, linear attention; None
                       for a model of attention alone
    images             what the towers of a composite get; None for text
    ahead              what heads that predict further tokens get; None for a model without
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    label_rows: Tensor
    document_lens: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    max_seqlen: int
    num_tokens: int
    num_label_tokens: float
    attention: AttentionPlan
    mixers: MixerPlan | None
    columns: dict[str, Tensor] = field(default_factory=dict)
    images: TowerInputs | None = None
    ahead: TargetsAhead | None = None

    def to(self, device: torch.device | str, non_blocking: bool = True) -> ThdBatch:
        """Returns the batch on `device`. The copies overlap with work on the GPU only if the batch
        was pinned.
        """
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> ThdBatch:
        """Returns the batch in page-locked memory; the name is the one that torch's pinning thread
        calls.
        """
        return self.map_tensors(lambda tensor: tensor.pin_memory())

    def model_inputs(self) -> dict[str, Any]:
        """Returns keyword arguments of a Hugging Face causal LM on one of our kernels, which takes
        `packed` out.

        `use_cache=False` is not an optimization: with a cache, transformers drops its own packed
        mask in silence.
        """
        tokens = {"input_ids": self.input_ids[None], "position_ids": self.position_ids[None]}
        return {**tokens, "use_cache": False, "packed": self}


def to_thd(batch: dict[str, Any], with_mixers: bool = True) -> ThdBatch:
    """Turns packs into a stream: one, several behind each other, or the rows of a collated batch.

    batch  `input_ids, labels, position_ids` int64 [T]; `seq_lens, seq_lens_padded` int64 [N], real
           tokens and slots of each document, of which the slots sum to T. Optional columns of
           COLUMNS, [T] or [T, K]. Or all with a dim of rows before, see `flat_row`
    with_mixers  False for a model of attention alone: 21 bytes per token less on the device, 43
                 less under context parallelism; at a million tokens 70 ms of the host, 190 under
                 context parallelism
    Raises ValueError for slots that do not fill the stream, or are shorter than their documents.
    """
    if batch["input_ids"].ndim == 2:
        batch = flat_row(batch)
    positions = batch["position_ids"]
    lens = batch["seq_lens"]
    slots = batch["seq_lens_padded"]
    fits = len(lens) == len(slots) and not bool((lens > slots).any())
    if not fits or int(slots.sum()) != len(positions):
        raise ValueError(
            f"seq_lens={lens.tolist()} and seq_lens_padded={slots.tolist()} do not describe a "
            f"stream of {len(positions)} tokens: each document needs one slot at least as long as "
            "itself, and the slots must fill the stream."
        )
    cu_padded = cumulative(slots)
    max_seqlen = int(slots.max())
    nodes = find_nodes(cu_padded, positions, lens)
    starts = slots.cumsum(0) - slots
    # bool [T]: False for the padding behind each document
    is_real = torch.arange(len(positions)) < (starts + lens).repeat_interleave(slots)
    label_rows = labeled_rows(batch["labels"])
    columns = {name: batch[name] for name, c in COLUMNS.items() if c.is_optional and name in batch}
    weights = columns.get("loss_weights")
    document_lens = lens
    attention = AttentionPlan(Segments(cu_padded, cu_padded, max_seqlen, max_seqlen))
    if nodes is not None:
        attention = attention_of_trees(nodes, positions)
        # those of the longest row of each tree: positions say how far a row has come
        document = torch.repeat_interleave(slots)
        firsts = positions[starts.clamp(max=len(positions) - 1)][document]
        places = torch.where(is_real, positions - firsts + 1, 0)
        document_lens = torch.zeros_like(lens).scatter_reduce(0, document, places, "amax")
    images: TowerInputs | None = batch.get("images")
    if images is not None:
        attention = replace(attention, ahead=images.ahead)
    return ThdBatch(
        input_ids=batch["input_ids"],
        labels=batch["labels"],
        # Those of padding run on, in a pack, beyond what a table of learned positions may hold.
        position_ids=positions.where(is_real, 0),
        label_rows=label_rows,
        document_lens=document_lens.to(torch.int32).repeat_interleave(slots),
        cu_seqlens=cumulative(lens),
        cu_seqlens_padded=cu_padded,
        max_seqlen=max_seqlen,
        num_tokens=int(lens.sum()),
        num_label_tokens=len(label_rows)
        if weights is None
        else float(weights[label_rows].sum(dtype=torch.float64)),
        attention=attention,
        mixers=MixerPlan(document_rows(cu_padded, nodes)) if with_mixers else None,
        columns=columns,
        images=images,
    )


def flat_row(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the rows of a collated batch (`packed_sequence_thd_collater`) one behind the other.

    batch  columns [B, S, ...]; `seq_lens, seq_lens_padded` [B, documents], filled up with
           SEQ_LENS_PADDING; each row of `seq_lens_padded` sums to S
    Raises ValueError when a row does not.

        seq_lens [[3, 2], [5, -1000]], seq_lens_padded [[4, 2], [6, -1000]] -> [3, 2, 5], [4, 2, 6]
    """
    lens = batch["seq_lens"].long()
    slots = batch["seq_lens_padded"].long()
    row_length = batch["input_ids"].shape[1]
    row_sums = slots.clamp(min=0).sum(1)
    if bool((row_sums != row_length).any()):
        raise ValueError(
            f"seq_lens_padded rows sum to {row_sums.tolist()}, but the rows are {row_length} "
            "tokens long: the slots of a row must fill it."
        )
    tokens = {
        name: batch[name].flatten(0, 1) for name in (*COLUMNS, "position_ids") if name in batch
    }
    boundaries = {
        "seq_lens": lens[lens != SEQ_LENS_PADDING],
        "seq_lens_padded": slots[slots != SEQ_LENS_PADDING],
    }
    return {**batch, **tokens, **boundaries}


def stream_of(
    documents: Iterable[Tensor],
    device: torch.device | str = "cpu",
    trees: dict[int, Tensor] | None = None,
) -> ThdBatch:
    """Returns the unpadded stream of documents, int64 [L] each; their labels are the ids
    themselves.

    trees  the positions of those that branch, by their number
    """
    documents = list(documents)
    trees = trees or {}
    ids = torch.cat(documents)
    lens = torch.tensor([len(document) for document in documents])
    positions = torch.cat(
        [trees.get(i, torch.arange(len(document))) for i, document in enumerate(documents)]
    )
    row = {"input_ids": ids, "labels": ids, "position_ids": positions}
    return to_thd({**row, "seq_lens": lens, "seq_lens_padded": lens}).to(device)
