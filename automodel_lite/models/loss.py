"""What is learned: a loss is a SUM over what it counts, in fp32; the recipe divides by the count of
the whole step.

A loss gets `LossInputs` and gives `LossOutput`: the sum, and parts of it for the log. Most losses
count label tokens; one that counts pairs overrides `num_items`. A value per labeled row is a
function of logits that `LossInputs.rows` evaluates a chunk at a time; docs/extending.md shows one.

`LossModel` is the module whose forward returns the sum: batch in, sum out. It is the root for FSDP.
Only rows that carry a label meet the head.

Legend: T tokens of the stream (of this rank), N documents, R rows that carry a label, C model dim,
V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automodel_lite.attention.documents import MixerForward, runs_by_rows
from automodel_lite.config.rules import Positive
from automodel_lite.errors import ConfigError
from automodel_lite.models.fused_head import (
    ChunkedRows,
    RowFunction,
    apply_softcap,
    chunk_rows,
    in_compute_dtype,
    linear_cross_entropy,
)
from automodel_lite.models.layers import output_head, text_decoder
from automodel_lite.precision import at_least_fp32
from automodel_lite.thd import (
    COLUMNS,
    Column,
    MixerExchange,
    TargetsAhead,
    ThdBatch,
    declare_column,
)


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
        own_N = values_R.new_zeros(shape).index_add(0, document_R, values_R)
        exchange = self._exchange
        # The sum over ranks as a value, own rows as the gradient: each rank adds what its own rows
        # contribute.
        return own_N + (exchange.summed(own_N) - own_N.detach()) if exchange else own_N

    def per_row(self, values_R: Tensor) -> Tensor:
        """Sums over rows, [M] or [M, K]: as `per_document`, of the single rows of a tree.

        Rows of a tree share no label (the loss declares `separates_rows`), so the labels of a row
        are those of the node in which it ends.
        """
        row_R, num_rows = self._row_of_labels()
        own_M = values_R.new_zeros(num_rows, *values_R.shape[1:]).index_add(0, row_R, values_R)
        exchange = self._exchange
        return own_M + (exchange.summed(own_M) - own_M.detach()) if exchange else own_M

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


class Loss(ABC):
    """A loss; its fields are its options.

    columns          per-token columns of the data that it uses: others are refused, as they would
                     be ignored
    required         those of them that it cannot do without
    own_columns      those that the package does not know: their dtypes, and what stands for padding
    needs_logits     `inputs.head.rows` are logits of the model's own head, [R, V] at once
    needs_documents  calls `inputs.per_document` or `inputs.per_row`
    separates_rows   calls `inputs.per_row`: rows of a tree share no label
    needs_teacher    asks for `inputs.teacher`
    needs_reference  asks for the column `reference_log_probs` of the start model, which the program
                     computes
    """

    columns: ClassVar[frozenset[str]] = frozenset()
    required: ClassVar[frozenset[str]] = frozenset()
    own_columns: ClassVar[Mapping[str, Column]] = {}
    needs_logits: ClassVar[bool] = False
    needs_documents: ClassVar[bool] = False
    separates_rows: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        for name, column in cls.own_columns.items():
            declare_column(name, column)
        cls.columns |= cls.own_columns.keys()

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns the sum over this rank's rows."""

    @property
    def scored_by(self) -> str | None:
        """Returns the folder or hub name of the model whose stored values it compares with."""
        return None

    def complete(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[Any]]:
        """Returns rows in memory with the columns that follow from others of their group."""
        return [list(group) for group in groups]

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
    """Heads that predict tokens further on than the next one, and their loss (parts/mtp.py)."""

    coefficient: float

    @abstractmethod
    def targets(self, batch: ThdBatch) -> TargetsAhead:
        """Returns what the heads get of a whole stream."""

    @abstractmethod
    def hidden(self, hidden_TC: Tensor, batch: ThdBatch) -> Tensor:
        """Runs the heads on the decoder's output; returns the rows that carry their labels."""

    @abstractmethod
    def loss(self, head: Head, batch: ThdBatch) -> Tensor:
        """Returns the sum of their loss over these rows."""


class PlainLoss(Loss):
    """Next-token cross-entropy in one of its forms: what validation compares all losses by."""

    columns = frozenset({"loss_weights"})


@dataclass(frozen=True)
class CrossEntropy(PlainLoss):
    """The model's own output head on the labeled rows, then cross-entropy: right for any head;
    holds [R, V] logits.
    """

    needs_logits = True

    def __call__(self, inputs: LossInputs) -> LossOutput:
        logits_RV = at_least_fp32(inputs.head.rows)
        weights_R = inputs.columns.get("loss_weights")
        if weights_R is None:
            return LossOutput(F.cross_entropy(logits_RV, inputs.labels_R, reduction="sum"), {})
        # The sum is divided by the sum of weights of the step, so a weight of 2 is like meeting the
        # label twice.
        losses_R = F.cross_entropy(logits_RV, inputs.labels_R, reduction="none")
        return LossOutput((losses_R * weights_R).sum(), {})


@dataclass(frozen=True)
class FusedLinearCrossEntropy(PlainLoss):
    """A chunk of rows at a time: never an [R, V] tensor (see `linear_cross_entropy`).

    With `chunk_tokens` at the model dim, the logits of a chunk take as much memory as the gradient
    of the head, which is there anyway. Logits of a head that is not plain are there already.
    """

    # rows of logits at a time; null = hidden size, at least 512
    chunk_tokens: Positive | None = None

    def __call__(self, inputs: LossInputs) -> LossOutput:
        head = inputs.head
        if head.weight_VC is None:
            return CrossEntropy()(inputs)
        vocab_size, hidden_size = head.weight_VC.shape
        total = linear_cross_entropy(
            head.rows,
            head.weight_VC,
            inputs.labels_R,
            chunk_rows(self.chunk_tokens, hidden_size, vocab_size),
            head.softcap,
            head.backend,
            inputs.columns.get("loss_weights"),
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
        "__call__(self, inputs: LossInputs) -> LossOutput, as docs/extending.md shows; one of "
        "(logits, labels) sets needs_logits = True and reads inputs.head.rows and inputs.labels_R."
    )


def check_columns(loss: Loss, brought: Iterable[str]) -> None:
    """Raises ConfigError for a per-token column of the data that the loss would ignore."""
    for_loss = {name for name in brought if name not in COLUMNS or COLUMNS[name].is_for_loss}
    if ignored := sorted(for_loss - loss.columns):
        raise ConfigError(
            f"the data bring the per-token column {', '.join(ignored)}, which "
            f"loss={type(loss).__name__} does not use: take a loss that does "
            "(loss=fused_linear_cross_entropy uses loss_weights, loss=dpo answers), name the "
            "column in the loss class's `columns`, or leave it out of the data."
        )
    if missing := sorted(loss.required - {*brought}):
        cure = _CURES.get(missing[0], "bring it with the token rows")
        raise ConfigError(
            f"loss={type(loss).__name__} needs the per-token column {', '.join(missing)}: {cure}."
        )


_CURES = {
    "answers": (
        "train on preference pairs, dataset.format=preference, or take a loss for single answers"
    ),
    "reference_log_probs": "a training client computes them inside `with client.reference():`",
    "teacher_ids": "automodel-lite score --config-name ... writes a teacher's",
}


def _loss_and_hit(logits: Tensor, labels: Tensor) -> Tensor:
    is_hit = logits.argmax(-1) == labels
    losses = F.cross_entropy(logits, labels, reduction="none")
    return torch.stack([losses, is_hit.to(logits.dtype)], 1)


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


class LossModel(nn.Module):
    """A Hugging Face causal LM and a loss. `forward(batch)` returns the loss and its parts, SUMS
    over this rank's rows.

    A loss runs inside the head's own forward: only there has FSDP gathered its weight.

    has_plain_head   logits are `softcap(hidden @ weight.T)`; of any other head (`probe` sees it)
                     every loss takes the logits that the head computes itself
    loss_backend     of torch.compile, for what a loss compiles; None = nothing
    items_per_label  of the whole step: what the loss is divided by over what a balance is, which
                     counts labels
    """

    def __init__(
        self,
        lm: transformers.PreTrainedModel,
        loss: Loss,
        balance: Callable[[Sequence[Tensor], ThdBatch], Tensor] | None = None,
        heads: LookAhead | None = None,
    ) -> None:
        super().__init__()
        self.lm = lm
        self.loss = loss
        self.balance = balance
        self.heads = heads
        # in a tuple, it is no submodule: neither trained, sharded nor saved
        self._teacher: tuple[LossModel, ...] = ()
        self.items_per_label = 1.0
        self.has_plain_head = True
        self.loss_backend: str | None = None
        self.softcap: float | None = getattr(
            lm.config.get_text_config(), "final_logit_softcapping", None
        )
        self.wrap_head()

    def wrap_head(self) -> None:
        """Lets the head compute a loss in place of its product; again when something else has
        replaced its forward.
        """
        # Both are looked for among all modules, once and not in every forward; in a tuple they are
        # not registered as submodules a second time.
        self._decoder_and_head = text_decoder(self.lm), output_head(self.lm)
        head = self._decoder_and_head[1]
        product = head.forward

        def forward(hidden: Tensor, compute: Callable[[Head], Any] | None = None) -> Any:
            if compute is None:
                return product(hidden)
            weight = head.weight
            if isinstance(weight, DTensor):
                weight = weight.full_tensor()
            return compute(Head(hidden, weight, self.softcap, self.loss_backend))

        head.forward = forward

    def set_teacher(self, teacher: LossModel) -> None:
        """Gives the loss the rows of a frozen second model's head."""
        self._teacher = (teacher,)

    @property
    def needs_mixer_metadata(self) -> bool:
        """Whether it reads `ThdBatch.mixers`."""
        for lm in (self.lm, *(teacher.lm for teacher in self._teacher)):
            forwards = (vars(module).get("forward") for module in lm.modules())
            if runs_by_rows(lm) or any(isinstance(x, MixerForward) for x in forwards):
                return True
        return self.balance is not None or self.loss.needs_documents

    def look_ahead(self, batch: ThdBatch) -> ThdBatch:
        """Returns a whole stream with what the heads for further tokens get of it."""
        return replace(batch, ahead=self.heads.targets(batch)) if self.heads else batch

    def forward(self, batch: ThdBatch, loss: Loss | None = None) -> LossOutput:
        """Returns the loss, or another `loss` of the same rows. Outside training its parts also
        hold `token_accuracy`, the number of labels that are the likeliest token, and, where the
        loss is not plain, `cross_entropy`, its sum over the label tokens. Heads for further tokens
        are trained beside the model's own loss.
        """
        heads = self.heads if self.training and loss is None else None
        loss = loss or self.loss
        teacher_rows = None
        if self._teacher:
            with torch.no_grad():
                teacher_rows = self._teacher[0].before_head(batch)
        balance = self.balance if self.training else None
        router_logits: list[Tensor] = []
        if balance is None:
            rows = self.before_head(batch, loss, heads)
        else:
            rows = self._record_routing(router_logits, batch, loss, heads)
        evaluate = partial(self._evaluate, batch, loss, heads)
        output: LossOutput
        if teacher_rows is None:
            output = self._at_head(rows, evaluate, loss)
        else:

            def at_own_head(teacher_head: Head) -> Any:
                return self._at_head(rows, partial(evaluate, teacher=teacher_head), loss)

            # inside the teacher's: both weights are whole there, and in the backward pass
            output = self._teacher[0]._at_head(teacher_rows, at_own_head)
        if balance is None:
            return output
        # gradients in training, but no part of the value
        of_experts = self.items_per_label * balance(router_logits, batch)
        return output._replace(sum=output.sum + (of_experts - of_experts.detach()))

    def _record_routing(
        self, router_logits: list[Tensor], batch: ThdBatch, loss: Loss, heads: LookAhead | None
    ) -> Tensor:
        """Returns what `before_head` does; adds the logits of the routers, layer by layer."""

        def record(module: nn.Module, args: Any, output: Any) -> None:
            router_logits.extend(output.router_logits)

        # removed where the model raises, too
        with self._decoder_and_head[0].register_forward_hook(record):
            return self.before_head(batch, loss, heads, output_router_logits=True)

    def _evaluate(
        self,
        batch: ThdBatch,
        loss: Loss,
        heads: LookAhead | None,
        head: Head,
        teacher: Head | None = None,
    ) -> LossOutput:
        """Evaluates the loss at the head."""
        rows = batch.label_rows
        # A pack of padding alone, of a rank that runs short, was made of no rows, and brings no
        # columns.
        brought = batch.columns if len(rows) else loss.example_columns(batch) | batch.columns
        check_columns(loss, brought)
        labels_R = batch.labels.index_select(0, rows)
        columns = {name: column.index_select(0, rows) for name, column in brought.items()}
        # rows of the heads that predict further ahead stand behind those of the labels
        own = replace(head, rows=head.rows[: len(rows)]) if heads else head
        inputs = LossInputs(own, labels_R, columns, batch, teacher)
        total, parts = loss(inputs)
        if heads:
            # gradients in training, but no part of the value
            ahead = heads.loss(replace(head, rows=head.rows[len(rows) :]), batch)
            total = total + heads.coefficient * (ahead - ahead.detach())
            parts = {**parts, "mtp_loss": ahead}
        # by which runs of different losses compare
        if not self.training:
            losses_R, hits_R = inputs.rows(_loss_and_hit, labels_R).unbind(-1)
            weights_R = columns.get("loss_weights", torch.ones_like(hits_R))
            parts = {**parts, "token_accuracy": (hits_R * weights_R).sum()}
            if not isinstance(loss, PlainLoss):
                parts["cross_entropy"] = (losses_R * weights_R).sum()
        return LossOutput(total, {name: part.detach() for name, part in parts.items()})

    def _takes_logits(self, loss: Loss) -> bool:
        return loss.needs_logits or not self.has_plain_head

    def before_head(
        self,
        batch: ThdBatch,
        loss: Loss | None = None,
        heads: LookAhead | None = None,
        **options: Any,
    ) -> Tensor:
        """Returns the labeled rows before the head [R, C], behind them those of `heads`; or logits
        [R, V].
        """
        inputs = {**self._inputs(batch), **options}
        if self._takes_logits(loss or self.loss):
            logits = self.lm(**inputs, logits_to_keep=batch.label_rows).logits.squeeze(0)
            is_whole = len(logits) != len(batch.label_rows)  # of families without that argument
            return logits.index_select(0, batch.label_rows) if is_whole else logits
        decoder = self._decoder_and_head[0]
        if batch.images is None:
            output = decoder(**inputs)
        elif self.lm.base_model is not self.lm:
            # features of images take their places inside the composite's own forward
            output = self.lm.base_model(**inputs)
        else:  # Llama 4 has its head in there, too
            outputs = []
            hook = decoder.register_forward_hook(lambda *call: outputs.append(call[2]))
            with hook:
                self.lm(**inputs, logits_to_keep=1)
            output = outputs[0]
        hidden_TC: Tensor = output.last_hidden_state.squeeze(0)
        rows = hidden_TC.index_select(0, batch.label_rows)
        if heads:  # their rows go through the output head, too
            rows = torch.cat([rows, heads.hidden(hidden_TC, batch)])
        return rows

    def _inputs(self, batch: ThdBatch) -> dict[str, Any]:
        if batch.images is None:
            return batch.model_inputs()
        return batch.images.model_inputs(self.lm, batch)

    def _at_head(
        self, rows: Tensor, compute: Callable[[Head], Any], loss: Loss | None = None
    ) -> Any:
        """Evaluates `compute` at the head of such rows: inside its forward, unless
        they are logits.
        """
        if self._takes_logits(loss or self.loss):
            return compute(Head(rows))
        return self._decoder_and_head[1](rows, compute=compute)

    @torch.no_grad()
    def values(self, batch: ThdBatch, function: RowFunction) -> Tensor:
        """Returns `function(logits, labels)` of the labeled rows, [R, K]."""
        labels_R = batch.labels.index_select(0, batch.label_rows)

        def evaluate(head: Head) -> Tensor:
            return LossInputs(head, labels_R).rows(function, labels_R)

        return self._at_head(self.before_head(batch), evaluate)

    def logits(self, batch: ThdBatch, num_last: int = 0) -> Tensor:
        """Returns those of the stream's last tokens, [num_last, V]; 0 = of all."""
        return self.lm(**self._inputs(batch), logits_to_keep=num_last).logits.squeeze(0)

    @torch.no_grad()
    def plain_logits(self, ids_T: Tensor) -> Tensor:
        """Returns those of one document [T, V], by a model with an attention of
        transformers' own.
        """
        return self.lm(input_ids=ids_T[None], use_cache=False).logits[0]

    @torch.no_grad()
    def generate(self, **options: Any) -> Tensor:
        """Returns what transformers' `generate` does, on an attention of its own, with its
        caches.
        """
        configs = {id(x): x for x in (self.lm.config, self.lm.config.get_text_config())}.values()
        packed = [(config, config._attn_implementation) for config in configs]
        try:
            for config in configs:
                config._attn_implementation = "eager"
            generate: Any = self.lm.generate
            return generate(**options)  # type: ignore[no-any-return]
        finally:
            for config, name in packed:
                config._attn_implementation = name

    @torch.no_grad()
    def probe(self, batch: ThdBatch) -> tuple[Tensor, bool]:
        """Returns logits [T, V], and whether they are `softcap(hidden @ weight.T)`: those of
        Granite, Cohere, MiniCPM and of heads with a bias or an adapter are not.
        """
        # What enters the head and leaves the layers in a forward of the model itself, scaled or
        # not.
        inputs = []
        outputs = []
        head = self._decoder_and_head[1]
        hooks = [
            head.register_forward_pre_hook(lambda _, args: inputs.append(args[0])),
            self._decoder_and_head[0].register_forward_hook(
                lambda *call: outputs.append(call[2].last_hidden_state)
            ),
        ]
        logits_TV: Tensor = self.lm(**batch.model_inputs()).logits[0]
        for hook in hooks:
            hook.remove()
        # a fresh adapter adds no value yet, but its name
        names = [name for name, _ in head.named_parameters()]
        # MiniCPM scales in between
        is_plain = names == ["weight"] and torch.equal(inputs[0], outputs[0])
        if not is_plain:
            return logits_TV, False
        # The product alone: a head that scales or biases its logits gives others.
        got_TV: Tensor = head(inputs[0][0], compute=lambda own: own.logits(own.rows))
        # autocast rounds the product of fp32 states to bf16, and two products may round apart
        is_fp32 = inputs[0].dtype == torch.float32 and not torch.is_autocast_enabled(
            got_TV.device.type
        )
        tolerance = 1e-4 if is_fp32 else 5e-2
        error = (got_TV - logits_TV.float()).abs().max()
        return logits_TV, bool(error <= tolerance * logits_TV.abs().max().clamp(min=1))
