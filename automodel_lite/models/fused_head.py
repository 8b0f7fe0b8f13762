"""What meets the output head, a chunk of rows at a time, so that no [R, V] tensor is ever kept.

`linear_cross_entropy` is the fast case: a sum over rows, whose gradients are made in the forward
pass. `ChunkedRows` takes any function of logits that gives values row by row: the forward pass
evaluates it without a graph, the backward pass computes the logits of a chunk again and lets
autograd differentiate the function on that chunk alone. What is done with the values afterwards
(sums over documents, pairs, a sigmoid) is plain PyTorch on [R] vectors.

Legend: R rows that carry a label, C model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_lite import compat
from automodel_lite.config.sizes import round_up
from automodel_lite.graphs import compiled
from automodel_lite.tensors import at_least_fp32, wide_dtype

LEAST_CHUNK_TOKENS = 512
MAX_CHUNK_LOGITS = 2**30
"""Kernels that index with 32 bits fail from 2^31 on, and 4 GiB in fp32 fill any GPU."""
ROW_MULTIPLE = 16
"""Of the rows of a compiled chunk: a last chunk of one row would need a graph of its own (sizes 0
and 1 are constants to dynamo), which one rank compiles while the others wait.
"""


def chunk_rows(chunk_tokens: int | None, hidden_size: int, vocab_size: int) -> int:
    """Returns the number of rows of logits that exist at one time."""
    most = max(ROW_MULTIPLE, MAX_CHUNK_LOGITS // vocab_size // ROW_MULTIPLE * ROW_MULTIPLE)
    return min(chunk_tokens or max(LEAST_CHUNK_TOKENS, hidden_size), most)


def fits_whole(num_rows: int, head_shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Do gradients of all logits in the compute dtype need no more memory than chunks are counted
    with (`FusedLinearCrossEntropy.logits_bytes`)?

    A chunk of C rows in fp32 and in the compute dtype, beside the head's gradient in fp32, are
    8 + itemsize bytes x V x C. Of R rows the gradients of logits, and first a chunk of logits, then
    the head's gradient, are itemsize x V x (R + C).
    """
    return num_rows * dtype.itemsize <= 8 * max(LEAST_CHUNK_TOKENS, head_shape[1])


def linear_cross_entropy(
    hidden_RC: Tensor,
    weight_VC: Tensor,
    labels_R: Tensor,
    chunk_tokens: int | None = LEAST_CHUNK_TOKENS,
    softcap: float | None = None,
    backend: str | None = None,
    weights_R: Tensor | None = None,
) -> Tensor:
    """Sums cross-entropy(softcap(hidden @ weight.T), label) over rows, fp32 scalar; each times its
    weight in fp32, where there are weights.

    Both gradients are made in the forward pass, chunk by chunk, as Liger's kernel does
    (arXiv:2410.10989), so that the backward pass needs no logits. Rows labeled -100 must have been
    left out. No rows: zero, with zero gradients.

    chunk_tokens  None: `chunk_rows`, and where a trained head's compiled loss has room for it, one
                  product of all rows for each gradient
    """
    hidden_RC, weight_VC = in_compute_dtype(hidden_RC, weight_VC)
    # torch takes a trained weight for one that needs its gradient, with gradients off, too
    if not torch.is_grad_enabled():
        hidden_RC = hidden_RC.detach()
        weight_VC = weight_VC.detach()
    is_whole = False
    if chunk_tokens is None:
        vocab_size, hidden_size = weight_VC.shape
        chunk_tokens = chunk_rows(None, hidden_size, vocab_size)
        is_whole = backend is not None and weight_VC.requires_grad and len(labels_R) > 0
        is_whole = is_whole and fits_whole(len(labels_R), weight_VC.shape, weight_VC.dtype)
    if backend is not None:
        # Rows of weight 0 fill the last chunk up to a multiple of ROW_MULTIPLE, and chunks are
        # rounded up to one.
        added = -len(labels_R) % ROW_MULTIPLE
        weights_R = (
            torch.ones_like(labels_R, dtype=torch.float32) if weights_R is None else weights_R
        )
        labels_R = F.pad(labels_R, (0, added))
        weights_R = F.pad(weights_R, (0, added))
        hidden_RC = F.pad(hidden_RC, (0, 0, 0, added))
        chunk_tokens = round_up(chunk_tokens, ROW_MULTIPLE)
    function = _WholeCrossEntropy if is_whole else _LinearCrossEntropy
    with torch.autocast(hidden_RC.device.type, enabled=False):
        total: Tensor = function.apply(
            hidden_RC, weight_VC, labels_R, weights_R, chunk_tokens, softcap, backend
        )
    return total


def in_compute_dtype(hidden_RC: Tensor, weight_VC: Tensor) -> tuple[Tensor, Tensor]:
    """Casts both to autocast's dtype, or to that of the hidden states without it.

    Under autocast the last norm gives fp32, and the weight is an fp32 master: a linear layer casts
    both.
    """
    device = hidden_RC.device.type
    dtype = (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_RC.dtype
    )
    return hidden_RC.to(dtype), weight_VC.to(dtype)


class _WholeCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RC: Tensor,
        weight_VC: Tensor,
        labels_R: Tensor,
        weights_R: Tensor,
        chunk_tokens: int,
        softcap: float | None,
        backend: str,
    ) -> Tensor:
        """Returns the loss, and keeps d loss / d logits of all rows, [R, V] in the compute dtype.

        Logits are made in chunks, so that one pass reads a chunk and writes its gradient elsewhere:
        in its place it would be two. The products of gradients wait for the backward pass, which
        begins here: one each, with no sum over chunks, and the incoming gradient scales [R, C]
        tensors in place of the head's.
        """
        grad_logits = hidden_RC.new_empty(len(hidden_RC), len(weight_VC))
        total = hidden_RC.new_zeros((), dtype=wide_dtype(hidden_RC.dtype))
        for start in range(0, len(hidden_RC), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = hidden_RC[rows] @ weight_VC.t()
            total += _run_chunk_loss(
                backend,
                logits,
                weight_VC.dtype,
                labels_R[rows].clone(),
                weights_R[rows].clone(),
                softcap,
                True,
                grad_logits[rows],
            )[0]
            del logits
        ctx.save_for_backward(grad_logits, hidden_RC, weight_VC)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_logits, hidden_RC, weight_VC = ctx.saved_tensors
        grad_hidden = (grad_logits @ weight_VC).mul_(grad) if ctx.needs_input_grad[0] else None
        grad_weight = grad_logits.t() @ (hidden_RC * grad)
        return grad_hidden, grad_weight, *[None] * 5


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
        """Returns the loss, and keeps both gradients. For each chunk of rows:

        1. logits [rows, V] = hidden @ weight.T
        2. the loss of the rows, and d loss / d logits in place of the logits
        3. the gradient of the rows [rows, C] = d loss / d logits @ weight
        4. that of the weight [V, C] += d loss / d logits.T @ hidden, in fp32

        Rows are independent, so that steps 1 to 3 need this chunk alone. The loss is linear in the
        incoming gradient, by which the backward pass scales what is kept.
        """
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_RC) if needs_hidden else None
        grad_weight: Tensor | None = None
        total = hidden_RC.new_zeros((), dtype=wide_dtype(hidden_RC.dtype))
        for start in range(0, hidden_RC.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            # Copies: to dynamo, views that begin at 0 and elsewhere are two kinds, each with a
            # graph.
            labels = labels_R[rows].clone()
            weights = None if weights_R is None else weights_R[rows].clone()
            logits = hidden_RC[rows] @ weight_VC.t()  # 1
            # here, as a callee frees no argument once dynamo stands behind every call
            if backend is None:
                logits = at_least_fp32(logits)
            needs_grad = needs_hidden or needs_weight
            # 2
            loss, grad_logits = _run_chunk_loss(
                backend, logits, weight_VC.dtype, labels, weights, softcap, needs_grad
            )
            del logits
            total += loss
            if grad_hidden is not None:  # 3
                torch.mm(grad_logits, weight_VC, out=grad_hidden[rows])
            if needs_weight:  # 4
                grad_weight = _accumulate(grad_weight, grad_logits, hidden_RC[rows])
            del grad_logits  # freed before the logits of the next chunk are made
        if needs_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight_VC)
        ctx.dtype = weight_VC.dtype
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # nobody else holds them, so they are scaled in place, or on the way out of fp32
        grads = [
            None if saved is None else torch.mul(saved, grad, out=_in_dtype(saved, ctx.dtype))
            for saved in ctx.saved_tensors
        ]
        return *grads, *[None] * 5


def _in_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the tensor itself, or an empty one of its shape in another dtype."""
    return values if values.dtype == dtype else torch.empty_like(values, dtype=dtype)


def _run_chunk_loss(backend: str | None, logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Calls `_chunk_loss`, compiled once for all numbers of rows where there is a backend."""
    if backend is None:
        return _chunk_loss(logits, *arguments)
    for tensor in (logits, *arguments):
        if isinstance(tensor, Tensor) and tensor.ndim:
            compat.dynamo.maybe_mark_dynamic(tensor, 0)
    return compiled(_chunk_loss, backend)(logits, *arguments)  # type: ignore[no-any-return]


def _chunk_loss(
    logits: Tensor,
    dtype: torch.dtype,
    labels: Tensor,
    weights: Tensor | None,
    softcap: float | None,
    needs_grad: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the loss sum of a chunk and d loss / d (uncapped logits) in `dtype`, which is written
    to `out` where there is one; uses up logits in fp32.

    log_softmax in its own input: one pass of exp instead of two and no second [rows, V] tensor; 3
    times faster than logsumexp, subtract, exp (V = 128,000, CPU).
    """
    logits = at_least_fp32(logits)
    # capped = softcap * tanh(logits / softcap), whose slope is 1 - tanh^2: taken while the tanh is
    # at hand.
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
    if torch.compiler.is_compiling():
        # A comparison is part of the pass that makes the exp; before a scatter, compilers write the
        # fp32 [rows, V].
        grad = torch.where(
            torch.arange(grad.shape[1], device=grad.device) == labels[:, None], grad - 1.0, grad
        )
    else:
        grad.scatter_add_(1, labels[:, None], grad.new_full((len(labels), 1), -1.0))
    if weights is not None:
        grad.mul_(weights[:, None])
    if slope is not None:
        grad.mul_(slope)
    return loss, grad.to(dtype) if out is None else out.copy_(grad)


def _accumulate(total_VC: Tensor | None, grad_RV: Tensor, hidden_RC: Tensor) -> Tensor:
    """Adds this chunk's gradient of the head to the sum so far, in fp32; the first chunk needs no
    zeros.
    """
    if total_VC is None:
        return at_least_fp32(grad_RV.t() @ hidden_RC)
    if grad_RV.dtype == total_VC.dtype:
        return total_VC.addmm_(grad_RV.t(), hidden_RC)
    return total_VC.add_(grad_RV.t() @ hidden_RC)


RowFunction = Callable[..., Tensor]
"""(fp32 logits [r, V], columns [r, ...] ...) -> values [r] or [r, K], each from its own row."""


def apply_softcap(logits: Tensor, softcap: float | None) -> Tensor:
    """Returns the logits in fp32, bounded by the softcap where there is one."""
    logits = at_least_fp32(logits)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class ChunkedRows(torch.autograd.Function):
    """Values of all rows; gradients of hidden states and weight are exact, columns have none. See
    `LossInputs.rows`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        function: RowFunction,
        chunk: int,
        hidden_RC: Tensor,
        weight_VC: Tensor,
        *columns: Tensor,
    ) -> Tensor:
        ctx.function = function
        ctx.chunk = chunk
        ctx.save_for_backward(hidden_RC, weight_VC, *columns)
        chunks = zip(hidden_RC.split(chunk), *(column.split(chunk) for column in columns))
        return torch.cat(
            [function(at_least_fp32(hidden @ weight_VC.t()), *parts) for hidden, *parts in chunks]
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RC, weight_VC, *columns = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[2:4]
        grad_hidden = torch.empty_like(hidden_RC) if needs_hidden else None
        grad_weight: Tensor | None = None
        chunks = zip(*(x.split(ctx.chunk) for x in (hidden_RC, grad_R, *columns)))
        for number, (hidden, grad, *parts) in enumerate(chunks):
            # The logits are a leaf: autograd differentiates the function of this chunk, and nothing
            # behind it.
            logits = at_least_fp32(hidden @ weight_VC.t()).requires_grad_()
            with torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
                values = ctx.function(logits, *parts)
            (grad_logits,) = torch.autograd.grad(values, logits, grad)
            del values, logits
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(
                    grad_logits,
                    weight_VC,
                    out=grad_hidden[number * ctx.chunk : number * ctx.chunk + len(hidden)],
                )
            if needs_weight:
                grad_weight = _accumulate(grad_weight, grad_logits, hidden)
        grads = grad_hidden, None if grad_weight is None else grad_weight.to(weight_VC.dtype)
        return None, None, *grads, *[None] * len(columns)
