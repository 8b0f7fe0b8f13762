"""What is learned: a loss is a SUM over what it counts, in fp32; the recipe divides by the count of
the whole step.

A loss gets `LossInputs` and gives `LossOutput`: the sum, and parts of it for the log. Most losses
count label tokens; one that counts pairs overrides `num_items`. A value per labeled row is a
function of logits that `LossInputs.rows` evaluates a chunk at a time; docs/extending.md shows one.

Legend: T tokens of the stream (of this rank), N documents, R rows that carry a label, C model dim,
V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_lite.classes import Classes
from automodel_lite.columns import COLUMNS, Column, declare_column
from automodel_lite.config.rules import Positive
from automodel_lite.document_rows import MixerExchange
from automodel_lite.errors import ConfigError
from automodel_lite.models.fused_head import (
    ChunkedRows,
    RowFunction,
    apply_softcap,
    chunk_rows,
    in_compute_dtype,
    linear_cross_entropy,
)
from automodel_lite.tensors import at_least_fp32
from automodel_lite.thd import TargetsAhead, ThdBatch

Average = Literal["labels", "documents", "turns"]

NATS_PER_TOKEN = "nats per token"


def label_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns those of the labels, [r], of logits [r, V]."""
    return -F.cross_entropy(logits, labels, reduction="none")


class LossShape(NamedTuple):
    """What the loss of a micro-batch works on, of one rank; for the memory estimate."""

    num_tokens: float  # that may carry a label
    vocab_size: int
    hidden_size: int
    compute_bytes: int  # of a value in the compute dtype
    head_gradient_bytes: float  # in fp32; 0 where the head is frozen


class LossOutput(NamedTuple):
    """sum    fp32 scalar, this rank's share of the sum over what the loss counts
    parts  sums over the same, for the log; shares as well, without gradients
    """

    sum: Tensor
    parts: dict[str, Tensor]


@dataclass(frozen=True)
class Head:
    """Labeled rows at the output head: before one that is `softcap(rows @ weight.T)`, behind any
    other.

    rows       [R, C]; logits [R, V] where there is no weight
    weight_VC  the head's whole weight
    backend    of torch.compile, which makes one pass over a chunk's logits; None = eager
    """

    rows: Tensor
    weight_VC: Tensor | None = None
    softcap: float | None = None
    backend: str | None = None

    def logits(self, rows: Tensor) -> Tensor:
        """Returns the fp32 logits [r, V] of some `rows`, without gradients."""
        if self.weight_VC is None:
            return at_least_fp32(rows)
        return apply_softcap(rows.to(self.weight_VC.dtype) @ self.weight_VC.t(), self.softcap)


@dataclass(frozen=True)
class LossInputs:
    """What a loss sees of a micro-batch of one rank.

    head      the rows that carry a label, before or behind the output head
    labels_R  int64, their targets
    columns   per-token columns of the data, [R, ...] by name
    batch     the whole micro-batch: boundaries of documents, token ids; None only for a head on its
              own
    teacher   the head of a frozen second model, at the same rows; None without one
    """

    head: Head
    labels_R: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    batch: ThdBatch | None = None
    teacher: Head | None = None

    def rows(self, function: RowFunction, *columns: Tensor) -> Tensor:
        """Evaluates `function(logits fp32 [r, V], *columns [r, ...])` on all rows: fp32 [R] or [R,
        K], with exact gradients.

        No [R, V] tensor is kept: the function runs on a chunk of rows at a time, and once more in
        the backward pass.
        """
        head = self.head
        if head.weight_VC is None:
            return function(at_least_fp32(head.rows), *columns)
        rows_RC, weight_VC = in_compute_dtype(head.rows, head.weight_VC)
        # Autograd keeps some four tensors of a chunk's logits: a quarter of the rows takes the
        # memory of a fused chunk.
        chunk = chunk_rows(None, weight_VC.shape[1] // 4, weight_VC.shape[0])

        def of_product(logits: Tensor, *parts: Tensor) -> Tensor:
            return function(apply_softcap(logits, head.softcap), *parts)

        with torch.autocast(rows_RC.device.type, enabled=False):
            return ChunkedRows.apply(of_product, chunk, rows_RC, weight_VC, *columns)

    def rows_with_teacher(self, function: RowFunction, *columns: Tensor) -> Tensor:
        """Evaluates `function(logits, teacher's logits, *columns)` as `rows` does. Vocabularies may
        differ by padding: the teacher's is cut to the student's, which may be the longer one.
        """
        teacher = self.teacher
        assert teacher is not None

        def with_teacher(logits: Tensor, teacher_rows: Tensor, *parts: Tensor) -> Tensor:
            theirs = teacher.logits(teacher_rows)[:, : logits.shape[-1]]
            return function(logits, theirs, *parts)

        return self.rows(with_teacher, teacher.rows, *columns)

    def log_probs(self) -> Tensor:
        """Returns those of the labels, fp32 [R]; computed once."""
        if "_log_probs_R" not in vars(self):
            vars(self)["_log_probs_R"] = self.rows(label_log_probs, self.labels_R)
        return vars(self)["_log_probs_R"]  # type: ignore[no-any-return]

    @property
    def _exchange(self) -> MixerExchange | None:
        """How the ranks that share the documents exchange sums."""
        return (
            self.batch.mixers.exchange
            if self.batch is not None and self.batch.mixers is not None
            else None
        )

    def per_document(self, values_R: Tensor) -> Tensor:
        """Sums over documents, [N] or [N, K], over all ranks that share them; the gradient is that
        of own rows.

        The loss declares `needs_documents`.
        """
        assert self.batch is not None
        document_R = document_of_tokens(self.batch)[0].index_select(0, self.batch.label_rows)
        shape = len(self.batch.cu_seqlens) - 1, *values_R.shape[1:]
        return self._over_ranks(values_R.new_zeros(shape).index_add(0, document_R, values_R))

    def per_row(self, values_R: Tensor) -> Tensor:
        """Sums over rows, [M] or [M, K]: as `per_document`, of the single rows of a tree.

        Rows of a tree share no label (the loss declares `separates_rows`), so the labels of a row
        are those of the node in which it ends.
        """
        row_R, num_rows = self._row_of_labels()
        shape = num_rows, *values_R.shape[1:]
        return self._over_ranks(values_R.new_zeros(shape).index_add(0, row_R, values_R))

    def _over_ranks(self, own: Tensor) -> Tensor:
        """Returns the sum over the ranks that share the documents as a value, and own rows as the
        gradient: each rank adds what its own rows contribute.
        """
        exchange = self._exchange
        return own + (exchange.summed(own) - own.detach()) if exchange else own

    def at_labels(self, values_M: Tensor) -> Tensor:
        """Returns the values of rows at each of their labels, [M, ...] -> [R, ...]."""
        return values_M.index_select(0, self._row_of_labels()[0])

    def _row_of_labels(self) -> tuple[Tensor, int]:
        assert self.batch is not None
        row_T, num_rows = row_of_tokens(self.batch)
        return row_T.index_select(0, self.batch.label_rows), num_rows

    def share(self, value: Tensor) -> Tensor:
        """Counts a value once that all ranks of a context-parallel group know; its gradient stays
        whole.
        """
        exchange = self._exchange
        return value - value.detach() * (1 - 1 / exchange.size) if exchange else value


class StepMean(NamedTuple):
    """A mean over all micro-batches of a step, of every rank, that a loss needs before the
    gradients of any: a forward pass without gradients goes before them.

    column    in which every token gets it
    function  (logits fp32 [r, V], labels [r], *columns [r]) -> what each label adds to the sum and
              to the count, [r, 2]
    columns   that the function reads
    least     the mean is at least this
    """

    column: str
    function: RowFunction
    columns: Sequence[str]
    least: float


class Loss(ABC):
    """A loss; its fields are its options.

    columns          per-token columns of the data that it uses: others are refused, as they would
                     be ignored
    required         those of them that it cannot do without
    own_columns      those that the package does not know: their dtypes, and what stands for padding
    needs_logits     `inputs.head.rows` are logits of the model's own head, [R, V] at once
    settings_of      setting -> the column without which it does nothing
    needs_documents  calls `inputs.per_document` or `inputs.per_row`
    separates_rows   calls `inputs.per_row`: rows of a tree share no label
    needs_teacher    asks for `inputs.teacher`
    head             which head of the model it reads: `lm`, over the vocabulary, or `score`
    of_text          labels are tokens to be written: token accuracy, perplexity and heads for
                     further tokens are of these; never of a score head
    needs_reference  asks for the column `reference_log_probs` of the start model, which the program
                     computes
    unit             of its mean, as a report writes it; empty of a loss that has none
    """

    columns: ClassVar[frozenset[str]] = frozenset()
    required: ClassVar[frozenset[str]] = frozenset()
    own_columns: ClassVar[Mapping[str, Column]] = {}
    needs_logits: ClassVar[bool] = False
    settings_of: ClassVar[Mapping[str, str]] = {}
    needs_documents: ClassVar[bool] = False
    separates_rows: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    head: ClassVar[str] = "lm"
    of_text: ClassVar[bool] = True
    unit: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        for name, column in cls.own_columns.items():
            declare_column(name, column)
        cls.columns |= cls.own_columns.keys()
        cls.of_text = cls.of_text and cls.head == "lm"

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns the sum over this rank's rows."""

    @property
    def scored_by(self) -> str | None:
        """Returns the folder or hub name of the model whose stored values it compares with."""
        return None

    @property
    def step_mean(self) -> StepMean | None:
        """Returns the mean over the whole step that it needs before its gradients."""
        return None

    def complete(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[Any]]:
        """Returns rows in memory with the columns that follow from others of their group."""
        return [list(group) for group in groups]

    def counts_of(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
        """Counts what a loop wants to know of rows in memory, as they were given, by name."""
        return {}

    def derived(self, brought: Iterable[str]) -> frozenset[str]:
        """Names the columns that `derive` makes of those which the data bring."""
        return frozenset()

    def derive(
        self, columns: Mapping[str, np.ndarray], offsets: np.ndarray, trains: bool
    ) -> dict[str, np.ndarray]:
        """Returns columns [tokens of all rows] that follow from those of a whole set of rows.

        offsets  where rows begin, and the end of the last one
        trains   are these the rows that are learned from, or is their loss looked at?
        """
        return {}

    def prepare(self, batch: ThdBatch) -> ThdBatch:
        """Returns a whole stream, on the host, with the columns that the loss makes of it before
        ranks share it.
        """
        return batch

    def rows_to_judge(self, inputs: LossInputs) -> Tensor | None:
        """Returns values of each label, [R, K], that validation collects from all packs for
        `judge`; None of a loss whose parts are sums.
        """
        return None

    def judge(self, rows: Sequence[np.ndarray]) -> dict[str, float]:
        """Returns what validation finds in the values of all labels, by name."""
        return {}

    def details(
        self, judged: Mapping[str, Sequence[np.ndarray]], documents: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns what a run keeps of a validation beside its numbers, from the values of all
        labels and the documents of each set: a line of its decisions.jsonl.
        """
        return {}

    def of_classes(self, classes: Classes | None) -> Loss:
        """Returns the loss of these labels, which the data bring; raises ConfigError where it
        learns others.
        """
        return self

    def num_items(self, batch: ThdBatch) -> float:
        """Counts on the host what the sum of a step is divided by, in a whole stream that is not
        sharded yet.
        """
        return batch.num_label_tokens

    def example_columns(self, batch: ThdBatch) -> dict[str, Tensor]:
        """Makes the required columns [T, ...] of a batch that brings none: padding, compilations
        and dry runs.
        """
        kinds = {name: COLUMNS[name] for name in sorted(self.required)}
        return {
            name: torch.full_like(batch.labels, kind.padding, dtype=getattr(torch, kind.batched))
            for name, kind in kinds.items()
        }

    def logits_bytes(self, shape: LossShape) -> float:
        """Estimates the bytes of logits and of what is made from them, at the worst moment: of all
        rows in the compute dtype, in fp32 and their gradient in fp32; or of a chunk, four times in
        fp32, beside the head's gradient.
        """
        if self.needs_logits:
            return shape.num_tokens * shape.vocab_size * (shape.compute_bytes + 8)
        chunk = min(shape.num_tokens, chunk_rows(None, shape.hidden_size // 4, shape.vocab_size))
        heads = 2 if self.needs_teacher else 1
        return heads * 4 * chunk * shape.vocab_size * 4 + shape.head_gradient_bytes


class LookAhead(ABC):
    """Heads that predict tokens further on than the next one, and their loss (models/mtp.py).

    depth  their number
    """

    coefficient: float
    depth: int

    @abstractmethod
    def targets(self, batch: ThdBatch) -> TargetsAhead:
        """Returns what the heads get of a whole stream."""

    @abstractmethod
    def hidden(self, hidden_TC: Tensor, batch: ThdBatch) -> Tensor:
        """Runs the heads on the decoder's output; returns the rows that carry their labels."""

    @abstractmethod
    def loss(self, head: Head, batch: ThdBatch) -> Tensor:
        """Returns the sum of their loss over these rows."""


class AveragedLoss(Loss):
    """A loss per label, averaged over all labels of the step, or over its documents or turns, of
    the mean over the labels of each; all by the weights of the labels.

    average  labels
             documents  rows as they are trained: those of a tree are single ones, and so are those
                        of a chat that its template splits into one per turn
             turns      runs of labels in a document: what an assistant says between two others
    """

    columns = frozenset({"loss_weights"})
    average: str

    def __post_init__(self) -> None:
        # rows of a tree that train the same label would be in each other's means
        if self.average != "labels":
            object.__setattr__(self, "separates_rows", True)

    def prepare(self, batch: ThdBatch) -> ThdBatch:
        if self.average == "labels":
            return batch
        unit_R, weights_R, sums_U = label_units(batch, self.average)
        column_T = torch.zeros(len(batch.labels))
        # a unit whose labels all weigh 0 is left out
        shares_R = weights_R / sums_U[unit_R].clamp(min=torch.finfo(torch.float64).tiny)
        column_T[batch.label_rows] = shares_R.float()
        return replace(batch, columns=batch.columns | {"average_weights": column_T})

    def num_items(self, batch: ThdBatch) -> float:
        """Counts labels by their weights; or the documents or turns that have a label which weighs
        more than 0.
        """
        if self.average == "labels":
            return batch.num_label_tokens
        return int((label_units(batch, self.average)[2] > 0).sum())

    def label_weights(self, inputs: LossInputs) -> Tensor | None:
        """Returns what each label counts, [R]; None where all count 1."""
        name = "loss_weights" if self.average == "labels" else "average_weights"
        return inputs.columns.get(name) if self.average == "labels" else inputs.columns[name]

    def example_columns(self, batch: ThdBatch) -> dict[str, Tensor]:
        """Makes the column of an average, too."""
        made = super().example_columns(batch)
        if self.average != "labels":
            made["average_weights"] = torch.zeros(len(batch.labels), device=batch.labels.device)
        return made


def label_units(batch: ThdBatch, average: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns of a whole stream the document or turn of each label, int64 [R], the labels' weights
    [R], and their sums over each unit [U], fp64.

        labels  _ a b _ c │ _ d     documents  0 0 0 │ 1     turns  0 0 1 │ 2
    """
    # A row goes on where positions count on inside a document: a row of a tree ends with the node
    # that holds all of its labels, as rows that are averaged apart share none.
    positions_T = batch.position_ids
    begins_T = torch.ones_like(positions_T, dtype=torch.bool)
    begins_T[1:] = positions_T[1:] != positions_T[:-1] + 1
    starts = batch.cu_seqlens_padded[:-1].long()
    begins_T[starts[starts < len(begins_T)]] = True
    rows = batch.label_rows
    node_R = begins_T.cumsum(0)[rows]
    is_first_R = torch.ones_like(rows, dtype=torch.bool)
    is_first_R[1:] = node_R.diff() != 0
    if average == "turns":
        is_first_R[1:] |= rows.diff() != 1
    unit_R = is_first_R.cumsum(0) - 1
    weights = batch.columns.get("loss_weights")
    weights_R = torch.ones(len(rows)) if weights is None else weights[rows]
    weights_R = weights_R.to(torch.float64)
    num_units = int(is_first_R.sum())
    return unit_R, weights_R, weights_R.new_zeros(num_units).index_add(0, unit_R, weights_R)


class PlainLoss(AveragedLoss):
    """Next-token cross-entropy in one of its forms."""

    unit = NATS_PER_TOKEN

    @property
    def is_plain(self) -> bool:
        """Whether it is what validation compares all losses by."""
        return self.average == "labels"


@dataclass(frozen=True)
class CrossEntropy(PlainLoss):
    """The model's own output head on the labeled rows, then cross-entropy: right for any head;
    holds [R, V] logits.
    """

    needs_logits = True

    # over all labels of a step, or over its documents or turns of the mean over each
    average: Average = "labels"

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(_cross_entropy(inputs, self.label_weights(inputs)), {})


def _cross_entropy(inputs: LossInputs, weights_R: Tensor | None) -> Tensor:
    logits_RV = at_least_fp32(inputs.head.rows)
    if weights_R is None:
        return F.cross_entropy(logits_RV, inputs.labels_R, reduction="sum")
    # The sum is divided by the sum of weights of the step, so a weight of 2 is like meeting the
    # label twice.
    losses_R = F.cross_entropy(logits_RV, inputs.labels_R, reduction="none")
    return (losses_R * weights_R).sum()


@dataclass(frozen=True)
class FusedLinearCrossEntropy(PlainLoss):
    """A chunk of rows at a time: never an [R, V] tensor (see `linear_cross_entropy`).

    With `chunk_tokens` at the model dim, the logits of a chunk take as much memory as the gradient
    of the head, which is there anyway. Logits of a head that is not plain are there already.
    """

    # rows of logits at a time; null = hidden size, at least 512
    chunk_tokens: Positive | None = None
    # over all labels of a step, or over its documents or turns of the mean over each
    average: Average = "labels"

    def __call__(self, inputs: LossInputs) -> LossOutput:
        head = inputs.head
        weights_R = self.label_weights(inputs)
        if head.weight_VC is None:
            return LossOutput(_cross_entropy(inputs, weights_R), {})
        vocab_size, hidden_size = head.weight_VC.shape
        chunk = self.chunk_tokens
        if chunk is not None:
            chunk = chunk_rows(chunk, hidden_size, vocab_size)
        total = linear_cross_entropy(
            head.rows,
            head.weight_VC,
            inputs.labels_R,
            chunk,
            head.softcap,
            head.backend,
            weights_R,
        )
        return LossOutput(total, {})

    def logits_bytes(self, shape: LossShape) -> float:
        """Counts a chunk of rows, in fp32 and in the compute dtype, beside the head's gradient, to
        which each chunk adds its own in the compute dtype when the fp32 logits are gone.
        """
        chunk = chunk_rows(self.chunk_tokens, shape.hidden_size, shape.vocab_size)
        logits = min(shape.num_tokens, chunk) * shape.vocab_size
        sum_so_far = shape.head_gradient_bytes if shape.num_tokens > chunk else 0
        of_chunk = shape.head_gradient_bytes / 4 * shape.compute_bytes
        at_softmax = logits * (4 + shape.compute_bytes) + sum_so_far
        return max(at_softmax, logits * shape.compute_bytes + of_chunk + shape.head_gradient_bytes)


def checked_loss(loss: Any) -> Loss:
    """Returns the loss; raises ConfigError with what to write for one of another signature."""
    if isinstance(loss, Loss):
        return loss
    raise ConfigError(
        f"loss={type(loss).__name__} must be a subclass of automodel_lite.models.loss.Loss with "
        "__call__(self, inputs: LossInputs) -> LossOutput, as automodel-lite docs extending shows; "
        "one of (logits, labels) sets needs_logits = True and reads inputs.head.rows and "
        "inputs.labels_R."
    )


def check_columns(loss: Loss, brought: Iterable[str]) -> None:
    """Raises ConfigError for a per-token column of the data that the loss would ignore."""
    for_loss = {name for name in brought if name not in COLUMNS or COLUMNS[name].is_for_loss}
    if ignored := sorted(for_loss - loss.columns):
        raise ConfigError(
            f"the data bring the per-token column {', '.join(ignored)}, which "
            f"loss={type(loss).__name__} does not use: take a loss that does "
            "(loss=fused_linear_cross_entropy uses loss_weights, loss=dpo answers, loss=kto "
            "verdicts, loss=decisions choice_ids, loss=reward "
            "margins), name the "
            "column in the loss class's `columns`, or leave it out of the data."
        )
    if missing := sorted(loss.required - {*brought}):
        cure = _CURES.get(missing[0], "bring it with the token rows (those with images have none)")
        raise ConfigError(
            f"loss={type(loss).__name__} needs the per-token column {', '.join(missing)}: {cure}."
        )


_CURES = {
    "answers": (
        "train on preference pairs, dataset.format=preference, or take a loss for single answers"
    ),
    "verdicts": (
        "train on answers with a label, dataset.format=verdict (columns prompt, completion, "
        "label), or take a loss for other data"
    ),
    "choice_ids": (
        "train on questions with fixed choices, dataset.format=decisions (columns state, "
        "questions, answers), or take a loss for other data"
    ),
    "reference_log_probs": "a training client computes them inside `with client.reference():`",
    "teacher_ids": "automodel-lite score --config-name ... writes a teacher's",
}


def document_of_tokens(batch: ThdBatch) -> tuple[Tensor, Tensor]:
    """Returns the documents of this rank's tokens, int64 [T], and their places in them, in tokens
    of the slot.
    """
    exchange = batch.mixers.exchange if batch.mixers else None
    device = batch.labels.device
    places = torch.arange(len(batch.labels) * (exchange.size if exchange else 1), device=device)
    own = exchange.own(places) if exchange else places
    starts = batch.cu_seqlens_padded.long()
    document = torch.bucketize(own, starts[1:], right=True)
    return document, own - starts[document]


def row_of_tokens(batch: ThdBatch) -> tuple[Tensor, int]:
    """Returns the documents of this rank's tokens, int64 [T], and their number; of a tree, each
    node is one, as a row ends in it.
    """
    assert batch.mixers is not None
    document, within = document_of_tokens(batch)
    tree = batch.mixers.stream.tree
    if tree is None:
        return document, len(batch.cu_seqlens) - 1
    stream = batch.mixers.stream
    node_of_stream = stream.document.index_select(0, tree.own)
    places = batch.cu_seqlens_padded.long()[document] + within
    return node_of_stream.index_select(0, places), len(stream.cu_seqlens) - 1
