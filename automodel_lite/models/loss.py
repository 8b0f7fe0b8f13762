"""The loss: a SUM over the tokens that carry a label, in fp32; the recipe divides by the label tokens of the whole
step.

Legend: T tokens of the stream (of this rank), N documents, R rows that carry a label, C model dim, V vocabulary,
E experts.

`LossModel` is the module whose forward returns the loss: batch in, summed loss out. It is the root for FSDP. Only rows
that carry a label meet the head.

A mixture of experts may have a load-balancing loss (Switch Transformer, arXiv:2101.03961), of each document by itself.
transformers takes its means over whatever shares a batch, so its loss depends on packs and ranks. Over one document,
with the tokens of all sparse layers counted together as transformers does, it depends on nothing else:

    balance(document) = E * sum over experts of  choices / rows * probabilities / rows      rows = tokens * layers
    added to the loss: coefficient * sum over documents of  label tokens * balance(document)

The choices have no gradient. So ranks that share a document need no more than their sum, and each rank adds what its
own tokens contribute.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automodel_lite.attention.documents import mixes_rows
from automodel_lite.config.rules import Positive
from automodel_lite.errors import ConfigError
from automodel_lite.graphs import strict_graphs
from automodel_lite.models.layers import output_head, text_decoder
from automodel_lite.models.source import chosen_experts
from automodel_lite.thd import IGNORE_INDEX, ThdBatch

LEAST_CHUNK_TOKENS = 512


@dataclass(frozen=True)
class LossShape:
    """What the loss of a micro-batch works on, for the memory estimate; all of one rank.

    num_tokens     rows that may carry a label
    compute_bytes  of a value in the compute dtype
    head_gradient_bytes  of the head's gradient in fp32; 0 where the head is frozen
    """

    num_tokens: float
    vocab_size: int
    hidden_size: int
    compute_bytes: int
    head_gradient_bytes: float


@runtime_checkable
class Measured(Protocol):
    """A loss that knows what it holds beside the hidden states; others are taken to hold all logits."""

    def logits_bytes(self, shape: LossShape) -> float:
        """Bytes of logits and of what is made from them, at the worst moment."""


def whole_logits_bytes(shape: LossShape) -> float:
    """All rows: in the compute dtype, in fp32, and their gradient in fp32."""
    return shape.num_tokens * shape.vocab_size * (shape.compute_bytes + 8)


@dataclass(frozen=True)
class CrossEntropy:
    """The model's own output head on the labeled rows, then cross-entropy: right for any head; holds [R, V] logits."""

    includes_head: ClassVar[Literal[False]] = False
    columns: ClassVar[frozenset[str]] = frozenset({"loss_weights"})

    def __call__(self, logits_RV: Tensor, labels_R: Tensor, weights_R: Tensor | None = None) -> Tensor:
        if weights_R is None:
            return F.cross_entropy(logits_RV.float(), labels_R, reduction="sum", ignore_index=IGNORE_INDEX)
        losses_R = F.cross_entropy(logits_RV.float(), labels_R, reduction="none", ignore_index=IGNORE_INDEX)
        return (losses_R * weights_R).sum()


@dataclass(frozen=True)
class LinearCrossEntropy:
    """Head and cross-entropy in one, for heads that are `softcap(hidden @ weight.T)`."""

    includes_head: ClassVar[Literal[True]] = True
    columns: ClassVar[frozenset[str]] = frozenset()

    def __call__(
        self,
        hidden_RC: Tensor,
        weight_VC: Tensor,
        labels_R: Tensor,
        softcap: float | None,
        weights_R: Tensor | None = None,
    ) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class FusedLinearCrossEntropy(LinearCrossEntropy):
    """A chunk of rows at a time: never an [R, V] tensor (see `linear_cross_entropy`).

    With `chunk_tokens` at the model dim, the logits of a chunk take as much memory as the gradient of the head, which
    is there anyway. `backend` of torch.compile, which makes one pass over a chunk's logits, is set by training.compile.
    """

    columns: ClassVar[frozenset[str]] = frozenset({"loss_weights"})
    chunk_tokens: Positive | None = None  # rows of logits at a time; null = hidden size, at least 512
    backend: str | None = None

    def __call__(
        self,
        hidden_RC: Tensor,
        weight_VC: Tensor,
        labels_R: Tensor,
        softcap: float | None,
        weights_R: Tensor | None = None,
    ) -> Tensor:
        rows = chunk_rows(self.chunk_tokens, hidden_RC.shape[1])
        return linear_cross_entropy(hidden_RC, weight_VC, labels_R, rows, softcap, self.backend, weights_R)

    def logits_bytes(self, shape: LossShape) -> float:
        """Of a chunk of rows, in fp32 and in the compute dtype, beside the head's gradient, to which each chunk adds
        its own in the compute dtype when the fp32 logits are gone.
        """
        chunk = chunk_rows(self.chunk_tokens, shape.hidden_size)
        logits = min(shape.num_tokens, chunk) * shape.vocab_size
        sum_so_far = shape.head_gradient_bytes if shape.num_tokens > chunk else 0
        of_chunk = shape.head_gradient_bytes / 4 * shape.compute_bytes
        at_softmax = logits * (4 + shape.compute_bytes) + sum_so_far
        return max(at_softmax, logits * shape.compute_bytes + of_chunk + shape.head_gradient_bytes)


Loss = CrossEntropy | LinearCrossEntropy


def check_columns(loss: Loss, brought: Iterable[str]) -> None:
    """Raises ConfigError for a per-token column of the data that the loss would ignore."""
    known: frozenset[str] = getattr(loss, "columns", frozenset())
    if ignored := sorted({*brought} - known):
        raise ConfigError(
            f"the data bring the per-token column {', '.join(ignored)}, which loss={type(loss).__name__} does not use: "
            "take a loss that does (loss=fused_linear_cross_entropy uses loss_weights), name the column in the loss "
            "class's `columns`, or leave it out of the data."
        )


def chunk_rows(chunk_tokens: int | None, hidden_size: int) -> int:
    """Rows of logits that exist at one time."""
    return chunk_tokens or max(LEAST_CHUNK_TOKENS, hidden_size)


def linear_cross_entropy(
    hidden_RC: Tensor,
    weight_VC: Tensor,
    labels_R: Tensor,
    chunk_tokens: int = LEAST_CHUNK_TOKENS,
    softcap: float | None = None,
    backend: str | None = None,
    weights_R: Tensor | None = None,
) -> Tensor:
    """Sum over rows of cross-entropy(softcap(hidden @ weight.T), label), fp32 scalar; each times its weight in fp32,
    where there are weights.

    Both gradients are made in the forward pass, chunk by chunk, as Liger's kernel does (arXiv:2410.10989), so that the
    backward pass needs no logits. Rows labeled -100 must have been left out. No rows: zero, with zero gradients.
    """
    hidden_RC, weight_VC = in_compute_dtype(hidden_RC, weight_VC)
    with torch.autocast(hidden_RC.device.type, enabled=False):
        total: Tensor = _LinearCrossEntropy.apply(
            hidden_RC, weight_VC, labels_R, weights_R, chunk_tokens, softcap, backend
        )
    return total


def in_compute_dtype(hidden_RC: Tensor, weight_VC: Tensor) -> tuple[Tensor, Tensor]:
    """Both in autocast's dtype, or in that of the hidden states without it.

    Under autocast the last norm gives fp32, and the weight is an fp32 master: a linear layer casts both.
    """
    device = hidden_RC.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_RC.dtype
    return hidden_RC.to(dtype), weight_VC.to(dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RC: Tensor,
        weight_VC: Tensor,
        labels_R: Tensor,
        weights_R: Tensor | None,
        chunk_tokens: int,
        softcap: float | None,
        backend: str | None,
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_RC) if needs_hidden else None
        grad_weight: Tensor | None = None
        total = torch.zeros((), dtype=torch.float32, device=hidden_RC.device)
        for start in range(0, hidden_RC.shape[0], chunk_tokens):
            # Rows are independent: the loss of a chunk and d loss / d logits need the logits of this chunk alone.
            rows = slice(start, start + chunk_tokens)
            weights = None if weights_R is None else weights_R[rows]
            loss, grad_logits = _chunk_loss_by(backend)(
                hidden_RC[rows] @ weight_VC.t(), labels_R[rows], weights, softcap, needs_hidden or needs_weight
            )
            total += loss
            # logits = hidden @ weight.T, so the gradient of hidden is grad_logits @ weight, a row from a row; that of
            # the weight is grad_logits.T @ hidden, a sum over all rows, added up over the chunks in fp32.
            if grad_hidden is not None:
                torch.mm(grad_logits, weight_VC, out=grad_hidden[rows])
            if needs_weight:
                grad_weight = _accumulated(grad_weight, grad_logits, hidden_RC[rows])
            del grad_logits  # freed before the logits of the next chunk are made
        if needs_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight_VC)
        # The loss is linear in the incoming gradient, so backward only scales what is saved here.
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight_VC.dtype))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors  # nobody else holds them, so they are scaled in place
        of_hidden = None if grad_hidden is None else grad_hidden.mul_(grad)
        of_weight = None if grad_weight is None else grad_weight.mul_(grad)
        return of_hidden, of_weight, *[None] * 5


@functools.cache
def _chunk_loss_by(backend: str | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """`_chunk_loss`, compiled when a backend is named. The number of rows is symbolic from its second value on."""
    if backend is None:
        return _chunk_loss
    strict_graphs()
    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(_chunk_loss, fullgraph=True, backend=backend)
    return compiled


def _chunk_loss(
    logits: Tensor, labels: Tensor, weights: Tensor | None, softcap: float | None, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """Loss sum of a chunk and d loss / d (uncapped logits) in the logits' dtype; the fp32 logits are used up.

    log_softmax in its own input: one pass of exp instead of two and no second [rows, V] tensor; 3 times faster than
    logsumexp, subtract, exp (V = 128,000, CPU).
    """
    dtype = logits.dtype
    logits = logits.float()
    # capped = softcap * tanh(logits / softcap), whose slope is 1 - tanh^2: taken while the tanh is at hand.
    slope: Tensor | None = None
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = 1 - logits**2 if needs_grad else None
        logits.mul_(softcap)
    # Cross-entropy of a row is -log p[label]; every row here has a label.
    log_probs = torch.log_softmax(logits, 1, out=logits)
    losses = -log_probs.gather(1, labels[:, None])
    loss = losses.sum() if weights is None else (losses[:, 0] * weights).sum()
    if not needs_grad:
        return loss, log_probs
    # d loss / d capped = p - onehot(label); the chain rule multiplies it by the slope.
    grad = log_probs.exp_()
    grad.scatter_add_(1, labels[:, None], grad.new_full((len(labels), 1), -1.0))
    if weights is not None:
        grad.mul_(weights[:, None])
    return loss, (grad if slope is None else grad.mul_(slope)).to(dtype)


def _accumulated(total_VC: Tensor | None, grad_RV: Tensor, hidden_RC: Tensor) -> Tensor:
    """The sum so far plus this chunk's gradient of the head, in fp32; the first chunk needs no zeros to add to."""
    if total_VC is None:
        return (grad_RV.t() @ hidden_RC).float()
    if grad_RV.dtype == torch.float32:
        return total_VC.addmm_(grad_RV.t(), hidden_RC)
    return total_VC.add_(grad_RV.t() @ hidden_RC)


HeadResult = Callable[[Tensor, Tensor], Tensor]
"""(hidden states, the head's whole weight [V, C]) -> what the head's forward returns."""


class LossModel(nn.Module):
    """A Hugging Face causal LM and a loss. `forward(batch) -> fp32 scalar`, the SUM over this rank's label tokens.

    A loss that includes the head runs inside the head's own forward: only there has FSDP gathered its weight.
    """

    def __init__(self, lm: transformers.PreTrainedModel, loss: Loss, balance: Balance | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.loss = loss
        self.balance = balance
        self.softcap: float | None = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)
        self.wrap_head()

    def wrap_head(self) -> None:
        """Lets the head compute a loss in place of its product; again when something else has replaced its forward."""
        head = output_head(self.lm)
        head.forward = _computing_inside(head)

    @property
    def takes_mixers(self) -> bool:
        """Does it read `ThdBatch.mixers`?"""
        return self.balance is not None or mixes_rows(self.lm)

    def forward(self, batch: ThdBatch) -> Tensor:
        """The load-balancing loss of a mixture has gradients in training, but is not part of the value."""
        if self.balance is None or not self.training:
            return self._cross_entropy(batch, batch.model_inputs())
        with recorded_routers(self.lm) as router_logits:
            loss = self._cross_entropy(batch, batch.model_inputs() | {"output_router_logits": True})
        balance = self.balance(router_logits, batch)
        return loss + (balance - balance.detach())

    def _cross_entropy(self, batch: ThdBatch, inputs: dict[str, Any]) -> Tensor:
        labels_R = batch.labels.index_select(0, batch.label_rows)
        check_columns(self.loss, batch.columns)
        weights = batch.columns.get("loss_weights")
        more = () if weights is None else (weights.index_select(0, batch.label_rows),)
        if self.loss.includes_head:
            hidden_TC = text_decoder(self.lm)(**inputs).last_hidden_state.squeeze(0)
            hidden_RC = hidden_TC.index_select(0, batch.label_rows)
            loss = self.loss
            return self.in_head(hidden_RC, lambda hidden, weight: loss(hidden, weight, labels_R, self.softcap, *more))
        logits_RV = self.lm(**inputs, logits_to_keep=batch.label_rows).logits.squeeze(0)
        return self.loss(logits_RV, labels_R, *more)

    def logits(self, batch: ThdBatch, num_last: int = 0) -> Tensor:
        """[num_last, V] of the stream's last tokens; 0 = of all."""
        logits_TV: Tensor = self.lm(**batch.model_inputs(), logits_to_keep=num_last).logits.squeeze(0)
        return logits_TV

    @torch.no_grad()
    def plain_logits(self, ids_T: Tensor) -> Tensor:
        """[T, V] of one document by a model with an attention of transformers' own."""
        logits_TV: Tensor = self.lm(input_ids=ids_T[None], use_cache=False).logits[0]
        return logits_TV

    def in_head(self, hidden_RC: Tensor, compute: HeadResult) -> Tensor:
        """`compute(hidden, weight)` inside the forward of the output head."""
        result: Tensor = output_head(self.lm)(hidden_RC, compute=compute)
        return result

    @torch.no_grad()
    def probe(self, batch: ThdBatch) -> tuple[Tensor, bool]:
        """Logits [T, V], and are they `softcap(hidden @ weight.T)`? Granite, Cohere, MiniCPM and heads with a bias or
        an adapter are not.
        """
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        head = output_head(self.lm)
        hooks = [
            head.register_forward_pre_hook(lambda _, args: inputs.append(args[0])),
            text_decoder(self.lm).register_forward_hook(lambda *call: outputs.append(call[2].last_hidden_state)),
        ]
        logits_TV: Tensor = self.lm(**batch.model_inputs()).logits[0]
        for hook in hooks:
            hook.remove()
        names = [name for name, _ in head.named_parameters()]  # a fresh adapter adds no value yet, but its name
        is_plain = names == ["weight"] and torch.equal(inputs[0], outputs[0])  # MiniCPM scales in between
        return logits_TV, is_plain and self._is_product(inputs[0][0], logits_TV.float())

    def _is_product(self, hidden_TC: Tensor, want_TV: Tensor) -> bool:
        got_TV = self.in_head(hidden_TC, lambda hidden, weight: F.linear(hidden.to(weight.dtype), weight)).float()
        if self.softcap is not None:
            got_TV = self.softcap * torch.tanh(got_TV / self.softcap)
        # autocast rounds the product of fp32 states to bf16, and two products may round apart
        is_fp32 = hidden_TC.dtype == torch.float32 and not torch.is_autocast_enabled(hidden_TC.device.type)
        tolerance = 1e-4 if is_fp32 else 5e-2
        return bool((got_TV - want_TV).abs().max() <= tolerance * want_TV.abs().max().clamp(min=1))


def _computing_inside(head: nn.Module) -> Callable[..., Tensor]:
    """The head's forward, which takes `compute`, a function of its input and weight, in place of its own product."""
    product = head.forward

    def forward(hidden: Tensor, compute: HeadResult | None = None) -> Tensor:
        if compute is None:
            return product(hidden)
        weight: Any = head.weight
        return compute(hidden, weight.full_tensor() if isinstance(weight, DTensor) else weight)  # sharded over tp

    return forward


@dataclass(frozen=True)
class Balance:
    """coefficient  of the loss
    top_k        experts that a token is sent to
    """

    coefficient: float
    top_k: int

    def __call__(self, router_logits_TE: Sequence[Tensor], batch: ThdBatch) -> Tensor:
        """Of this rank's tokens; of each sparse layer its logits."""
        document_T, is_real_T = _documents(batch)
        num_documents, num_experts = len(batch.cu_seqlens) - 1, router_logits_TE[0].shape[-1]
        choices_NE = probabilities_NE = torch.zeros(num_documents, num_experts, device=document_T.device)
        for logits_TE in router_logits_TE:
            probs_TE = logits_TE.flatten(0, -2).float().softmax(-1)
            chosen_TE = torch.zeros_like(probs_TE).scatter_(1, probs_TE.topk(self.top_k).indices, 1.0)
            choices_NE = choices_NE.index_add(0, document_T, chosen_TE * is_real_T[:, None])
            probabilities_NE = probabilities_NE.index_add(0, document_T, probs_TE * is_real_T[:, None])
        of_labels = batch.label_rows
        labels_N = choices_NE.new_zeros(num_documents).index_add(0, document_T[of_labels], is_real_T[of_labels])
        known = torch.cat([choices_NE, labels_N[:, None]], 1)
        assert batch.mixers is not None
        if batch.mixers.exchange is not None:
            known = batch.mixers.exchange.summed(known)
        choices_NE, labels_N = known[:, :-1], known[:, -1]
        rows_N = batch.cu_seqlens.diff().clamp(min=1) * len(router_logits_TE)
        products_N = (choices_NE * probabilities_NE).sum(1) / rows_N**2
        return self.coefficient * num_experts * (labels_N * products_N).sum()


def _documents(batch: ThdBatch) -> tuple[Tensor, Tensor]:
    """Of this rank's tokens: their documents, int64 [T], and 1.0, or 0.0 for padding."""
    assert batch.mixers is not None
    if batch.mixers.stream.tree is not None:
        raise ConfigError(
            "model.router_aux_loss counts a row's tokens together, which trees spread over branches: set "
            "packed_sequence.tree=off, or model.router_aux_loss=0."
        )
    document = batch.mixers.stream.document.long()
    within = torch.arange(len(document), device=document.device) - batch.cu_seqlens_padded[document]
    is_real = (within < batch.cu_seqlens.diff()[document]).float()
    exchange = batch.mixers.exchange
    return (document, is_real) if exchange is None else (exchange.own(document), exchange.own(is_real))


@contextmanager
def recorded_routers(lm: transformers.PreTrainedModel) -> Iterator[list[Tensor]]:
    """What the routers of a forward with `output_router_logits=True` answer, layer by layer."""
    found: list[Tensor] = []
    hook = text_decoder(lm).register_forward_hook(lambda *call: found.extend(call[2].router_logits))
    try:
        yield found
    finally:
        hook.remove()


def balance_of(lm: transformers.PreTrainedModel, coefficient: float) -> Balance | None:
    """None for a coefficient of 0; raises ConfigError for families that transformers gives no such loss."""
    if coefficient == 0:
        return None
    top_k = chosen_experts(lm.config.get_text_config())
    if top_k is None or "load_balancing_loss_func" not in vars(sys.modules[type(lm).__module__]):
        raise ConfigError(
            f"model.router_aux_loss={coefficient}: transformers has no load-balancing loss for {type(lm).__name__} (no "
            "experts, or experts that are balanced by a bias): set model.router_aux_loss=0."
        )
    return Balance(coefficient, top_k)
