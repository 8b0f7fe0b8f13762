"""The one signature of all attention kernels, and the reference kernel.

The reference is SDPA per document, on any device and in any dtype: the CPU default, and the twin
that every other kernel is tested against. No [T, T] mask exists at any time: at T = 4096 with 20
documents that is several times less work.

Legend: T tokens, H heads (Hq of the queries, Hkv of keys and values), D head dim; L tokens of one
segment (Lq queries, Lk keys).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.errors import ConfigError
from automodel_lite.tensors import at_least_fp32
from automodel_lite.thd import AttentionInputs, AttentionOptions, Segments, TreeKeys


class AttentionKernel(Protocol):
    """Packed attention: segment i of the queries attends to segment i of the keys.

    Causal, aligned bottom right: the last query of a segment sees its whole key segment. That one
    rule serves plain packing and context parallelism, where a rank's chunk of queries has the
    prefix of its document as keys.
    """

    name: str
    """As transformers knows it; must not contain sdpa, flash or flex_attention, which get checks of
    their own there.
    """

    def check(self, spec: AttentionSpec) -> None:
        """Raises ConfigError when this kernel does not support what the model needs."""

    def __call__(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        segments: Segments,
        options: AttentionOptions,
    ) -> Tensor:
        """q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv] -> [Tq, Hq, Dv]."""


@runtime_checkable
class BlockKernel(Protocol):
    """A kernel that attends to one block of the keys at a time, as ring exchange needs it.

    Segment i of the queries sees all of segment i of the keys, or, `causal`, what lies at or before
    each query; the two have the same length then. The outputs of several blocks are merged by their
    log-sum-exps. Of the options only scale and softcap apply.
    """

    def block(self, inputs: AttentionInputs, causal: bool) -> tuple[Tensor, Tensor]:
        """The output over these keys alone [Tq, Hq, Dv], and the log-sum-exp of their logits, fp32
        [Tq, Hq].
        """

    def block_backward(
        self,
        inputs: AttentionInputs,
        causal: bool,
        grad_THD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v through these keys; `out_THD`, `lse_TH` and its gradient are
        those over all keys.
        """


@runtime_checkable
class GraphKernel(Protocol):
    """A kernel that is one operation to the compiler, whatever the numbers of its documents and
    tokens.
    """

    is_one_operation: bool


@runtime_checkable
class ReasonedKernel(Protocol):
    """A kernel that knows why it is the first choice, once it has been checked."""

    reason: str


@runtime_checkable
class TreeKernel(Protocol):
    """A kernel that takes one integer per key, until when it is seen, where documents branch: no
    key is there twice.
    """

    def attend_tree(self, inputs: AttentionInputs, tree: TreeKeys) -> Tensor:
        """q, k, v are those of the stream, [T, H, D] each; query i sees key j if
        `j <= i < tree.until[j]`, and with a window only if their positions are close enough.
        """


@runtime_checkable
class AheadKernel(Protocol):
    """A kernel whose queries may see keys behind them: other tokens of the same image."""

    def attend_ahead(self, inputs: AttentionInputs, reach: Tensor) -> Tensor:
        """reach  int64 [Tq, 2]: of each query the last key of its segment that it sees, and the
        key from which its window counts (`AttentionPlan.reach`)
        """


def over_ahead(kernel: Any, reach: Tensor, tree: TreeKeys | None) -> Callable[..., Tensor]:
    """`kernel`, called with queries that see as far as `reach`; the keys of paths of a tree are
    gathered. Raises ConfigError for a kernel that cannot.
    """
    if not isinstance(kernel, AheadKernel):
        raise refuse(kernel, "images whose tokens see each other", AHEAD_CURE)

    def attend(
        q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, segments: Segments, options: AttentionOptions
    ) -> Tensor:
        k = k_THD
        v = v_THD
        if tree is not None:
            k, v = (x.index_select(0, tree.paths) for x in (k, v))
        return kernel.attend_ahead(AttentionInputs(q_THD, k, v, segments, options), reach)

    return attend


AHEAD_CURE = "use attention=flex on a GPU, or attention=reference"


def over_tree(kernel: Any, tree: TreeKeys, is_cut: bool) -> Callable[..., Tensor]:
    """`kernel`, called with the q, k and v of a stream that holds `tree`. One that is no
    `TreeKernel` gets the keys of each path gathered: nodes of queries, paths of keys, bottom right,
    so that windows and chunks are those of rows.

    is_cut  the segments are cut at chunks, which the integers of the keys know nothing of
    """

    def attend(
        q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, segments: Segments, options: AttentionOptions
    ) -> Tensor:
        if isinstance(kernel, TreeKernel) and not is_cut:
            return kernel.attend_tree(AttentionInputs(q_THD, k_THD, v_THD, segments, options), tree)
        k, v = (x.index_select(0, tree.paths) for x in (k_THD, v_THD))
        return kernel(q_THD, k, v, segments, options)

    return attend


class RepeatedBlocks:
    """Gives a kernel whose `block` autograd differentiates its `block_backward`."""

    def block_backward(
        self: BlockKernel,
        inputs: AttentionInputs,
        causal: bool,
        grad_THD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Runs the block once more, and goes back through its share exp(lse_block - lse) of the
        output.
        """
        q, k, v = leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        with torch.enable_grad():
            out, lse = self.block(inputs._replace(q=q, k=k, v=v), causal)
        share = (lse.detach() - lse_TH).exp()[..., None]
        # wide, as it is small beside both
        difference = out.detach() - at_least_fp32(out_THD)
        change = (at_least_fp32(grad_THD) * difference).sum(-1, keepdim=True)
        grads = ((grad_THD * share).to(out.dtype), (share * change).squeeze(-1))
        dq, dk, dv = torch.autograd.grad((out, lse), leaves, grads)
        return dq, dk, dv


def refuse(kernel: AttentionKernel, asked: str, cure: str) -> ConfigError:
    """The error for a model that needs something that `kernel` does not support."""
    return ConfigError(
        f"attention={kernel.name.removeprefix('thd_')} does not support {asked}: {cure}."
    )


def require_cuda(kernel: AttentionKernel, spec: AttentionSpec, half: bool = True) -> None:
    """Raises ConfigError off CUDA and, with `half`, outside fp16 and bf16."""
    if spec.device.type != "cuda":
        raise refuse(
            kernel, f"device={spec.device}", "it runs on CUDA only, use attention=reference"
        )
    if half and spec.dtype not in (torch.float16, torch.bfloat16):
        cure = "set training.precision=bf16, or use attention=flex or attention=reference"
        raise refuse(kernel, f"dtype={spec.dtype}", cure)


QUERY_BLOCK = 1024
"""Queries that share one explicit mask: bounds it to QUERY_BLOCK x keys for long documents."""

SHORT_TOKENS = 256
"""Keys up to which a CPU computes bf16 in fp32: oneDNN compiles a kernel for every new length, and
packs its operands. Forward and backward of 8 x 32 heads: 2.3 times faster at 150 tokens, 4 times
for lengths not seen before; of 8 x 64 heads 0.76 times as fast at 512. The step of a small Llama on
GSM8K: 1.34 times faster.
"""


class ReferenceAttention(RepeatedBlocks):
    """Scaled dot product attention, one call a document; all options, no limits but speed."""

    name = "thd_reference"

    def check(self, spec: AttentionSpec) -> None:
        """Does not raise: it supports everything."""

    def __call__(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        segments: Segments,
        options: AttentionOptions,
    ) -> Tensor:
        """See `AttentionKernel`."""
        q_lens = segments.cu_q.cpu().diff().tolist()
        k_lens = q_lens if segments.cu_k is segments.cu_q else segments.cu_k.cpu().diff().tolist()
        if len(set(zip(q_lens, k_lens))) == 1:  # rows of one length: one call for all of them
            q, k, v = (
                x.unflatten(0, (len(q_lens), -1)).transpose(1, 2) for x in (q_THD, k_THD, v_THD)
            )
            out = _segment(q, k, v, options).transpose(1, 2).flatten(0, 1)
            # as the documents below: another layout is another graph of compiled layers
            return out.contiguous()
        # split, not slices: its backward is one concatenation, a slice's is a zero-filled [T, H, D]
        outs = []
        for parts in zip(q_THD.split(q_lens), k_THD.split(k_lens), v_THD.split(k_lens)):
            q, k, v = (x.transpose(0, 1)[None] for x in parts)
            if q.shape[2]:
                outs.append(_segment(q, k, v, options).squeeze(0).transpose(0, 1))
        return torch.cat(outs)

    def attend_ahead(self, inputs: AttentionInputs, reach: Tensor) -> Tensor:
        """See `AheadKernel`."""
        q_THD, k_THD, v_THD, segments, options = inputs
        q_lens = segments.cu_q.cpu().diff().tolist()
        k_lens = segments.cu_k.cpu().diff().tolist()
        outs = []
        for *parts, seen in zip(
            q_THD.split(q_lens), k_THD.split(k_lens), v_THD.split(k_lens), reach.split(q_lens)
        ):
            q, k, v = (x.transpose(0, 1)[None] for x in parts)
            if q.shape[2]:
                outs.append(_segment(q, k, v, options, seen).squeeze(0).transpose(0, 1))
        return torch.cat(outs)

    def block(self, inputs: AttentionInputs, causal: bool) -> tuple[Tensor, Tensor]:
        """See `BlockKernel`."""
        q_THD, k_THD, v_THD, segments, options = inputs
        outs = []
        lses = []
        with torch.autocast(q_THD.device.type, enabled=False):
            for rows, keys, mask in _blocks(segments, causal, q_THD.device):
                q, k, v = (
                    # [Hkv, Hq / Hkv or 1, L, D]
                    at_least_fp32(x).transpose(0, 1).unflatten(0, (k_THD.shape[1], -1))
                    for x in (q_THD[rows], k_THD[keys], v_THD[keys])
                )
                logits = _logits(q, k, mask, options)
                lse = logits.logsumexp(-1, keepdim=True)
                outs.append(((logits - lse).exp() @ v).flatten(0, 1).transpose(0, 1))
                lses.append(lse.flatten(0, 1).squeeze(-1).t())
        return torch.cat(outs), torch.cat(lses)

    def block_backward(
        self, inputs: AttentionInputs, *of_block: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel`; gradients in fp32, as those of other blocks are added to them."""
        q, k, v = map(at_least_fp32, inputs[:3])
        return super().block_backward(inputs._replace(q=q, k=k, v=v), *of_block)


def _blocks(
    segments: Segments, causal: bool, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Rows of at most QUERY_BLOCK queries, the rows of their keys, and which of those each may see
    (None = all).
    """
    q_starts = segments.cu_q.tolist()
    k_starts = segments.cu_k.tolist()
    for q_start, q_stop, k_start, k_stop in zip(q_starts, q_starts[1:], k_starts, k_starts[1:]):
        for rows, keys in _query_blocks(q_stop - q_start, k_stop - k_start, None):
            mask = _visible(rows, keys, 0, None, device) if causal else None
            seen = slice(k_start, k_start + keys.stop if causal else k_stop)
            yield slice(q_start + rows.start, q_start + rows.stop), seen, mask


def _logits(q: Tensor, k: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """Returns the logits, -inf where `mask` hides a key."""
    logits = (q @ k.transpose(-1, -2)) * options.scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    return logits if mask is None else logits.masked_fill(~mask, float("-inf"))


def _segment(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, reach: Tensor | None = None
) -> Tensor:
    """One segment, or several of one length: q [B, Hq, Lq, D], k, v [B, Hkv, Lk, D] -> [B, Hq, Lq,
    Dv].

    reach  int64 [Lq, 2] of queries that see keys behind them
    """
    lq = q.shape[2]
    lk = k.shape[2]
    scale = options.scale
    window = options.window
    sees_all = reach is None and (window is None or window >= lk)
    grouped = q.shape[1] != k.shape[1]
    is_plain = options.softcap is None and options.sinks is None
    if is_plain and sees_all and (lq == lk or lq == 1):
        if lk <= SHORT_TOKENS and q.device.type == "cpu" and q.dtype == torch.bfloat16:
            with torch.autocast("cpu", enabled=False):
                q = q.float()
                k = k.float()
                v = v.float()
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=lq == lk, scale=scale, enable_gqa=grouped
                )
            return out.to(torch.bfloat16)
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=lq == lk, scale=scale, enable_gqa=grouped
        )
    if grouped and not is_plain:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outs = []
    for rows, keys in _query_blocks(lq, lk, window):
        if reach is None:
            mask = _visible(rows, keys, lk - lq, window, q.device)
        else:
            keys = slice(0, lk)
            mask = within_reach(reach[rows], lk, window)
        qb = q[:, :, rows]
        kb = k[:, :, keys]
        vb = v[:, :, keys]
        if is_plain:
            out = F.scaled_dot_product_attention(
                qb, kb, vb, attn_mask=mask, scale=scale, enable_gqa=grouped
            )
        else:
            # Written out in fp32, for the two options that SDPA lacks (Gemma-2's softcap, GPT-OSS's
            # sinks); autocast would take the fp32 products to bf16.
            with torch.autocast(q.device.type, enabled=False):
                logits = _logits(at_least_fp32(qb), at_least_fp32(kb), mask, options)
                if options.sinks is not None:
                    sinks = options.sinks.to(logits.dtype).view(1, -1, 1, 1)
                    column = sinks.expand(*logits.shape[:3], 1)
                    logits = torch.cat([logits, column], -1)
                out = (logits.softmax(-1)[..., : kb.shape[2]] @ at_least_fp32(vb)).to(vb.dtype)
        outs.append(out)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def _query_blocks(lq: int, lk: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the range of keys that any of its queries sees."""
    shift = lk - lq
    for start in range(0, lq, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, lq)
        first = 0 if window is None else max(0, start + shift - window + 1)
        yield slice(start, stop), slice(first, stop + shift)


def _visible(
    rows: slice, keys: slice, shift: int, window: int | None, device: torch.device
) -> Tensor:
    """bool [queries, keys] of a block, True = may attend; query i sits on key i + shift."""
    i = torch.arange(rows.start, rows.stop, device=device)[:, None] + shift
    j = torch.arange(keys.start, keys.stop, device=device)[None]
    return j <= i if window is None else (j <= i) & (i - j < window)


def within_reach(reach: Tensor, num_keys: int, window: int | None) -> Tensor:
    """Returns bool [queries, keys]: does each query, which sees as far as `AttentionPlan.reach`
    says, see each key?
    """
    keys = torch.arange(num_keys, device=reach.device)[None]
    visible = keys <= reach[:, :1]
    return visible if window is None else visible & (reach[:, 1:] - keys < window)
