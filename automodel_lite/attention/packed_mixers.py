"""Convolution, gated delta rules and the Mamba-2 scan on a packed stream, in plain PyTorch.

The chunked ones cut the stream every CHUNK tokens, wherever its documents begin. Inside a chunk only pairs of tokens of
one document count; the state that a chunk gets from the one before counts for the document that goes on, and only the
chunk's last document writes to the state that it passes on. So a document needs no padding, however short it is.

    documents   0 0 0 0 0 1 | 1 1 2 2 2 3 | 3 3 3 3 3 3       what a chunk starts with:  nothing | of 1 | of 3
                                                              what it passes on:             1   |  3   | 3

All compute in fp32 at least, also under autocast. None takes or returns a state: that is for generation.

Legend: T tokens, M chunks of L tokens, H heads, G groups of R heads, D dim of keys, P dim of values, C channels,
K taps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

CHUNK = 64
"""The work inside a chunk grows with its length, the number of dependent steps falls with it."""

CHUNK_OF_CHANNELS = 16
"""Where each channel has a decay of its own, pairs of tokens cost D times as much memory."""


def causal_conv1d(
    seq_idx: Tensor, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Depthwise; seq_idx int [T], hidden_states [T, C], weight [C, K] -> [T, C]."""
    from transformers.activations import ACT2FN  # with the models' code

    out: Tensor = _DocumentConv.apply(hidden_states, weight, bias, seq_idx)
    return out if activation is None else ACT2FN[activation](out)  # type: ignore[no-any-return]


class _DocumentConv(torch.autograd.Function):
    """A multiply-add per tap, in blocks of tokens that stay in a CPU's cache: a third of the time of oneDNN's kernels,
    which also want another layout.
    """

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_CK: Tensor, bias: Tensor | None, seq_idx: Tensor) -> Tensor:
        ctx.save_for_backward(x_TC, weight_CK, seq_idx)
        ctx.has_bias = bias is not None
        taps = _wide(weight_CK).flip(1).unbind(1)
        out_TC = torch.empty_like(x_TC)
        for start, end in _blocks(x_TC):
            out = _wide(x_TC[start:end]) * taps[0]
            for back in range(1, len(taps)):
                first = max(start, back)
                before = _where_same(x_TC, seq_idx, first, end, -back)
                out[first - start :].addcmul_(before, taps[back])
            out_TC[start:end] = out if bias is None else out.add_(bias)
        return out_TC

    @staticmethod
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:  # type: ignore[override]
        x_TC, weight_CK, seq_idx = ctx.saved_tensors
        taps = _wide(weight_CK).flip(1).unbind(1)
        x_grad, tap_grads = torch.empty_like(x_TC), [torch.zeros_like(tap) for tap in taps]
        for start, end in _blocks(x_TC):
            x, grad = _wide(x_TC[start:end]), _wide(grad_TC[start:end])
            out = grad * taps[0]
            tap_grads[0] += (grad * x).sum(0)
            for ahead in range(1, len(taps)):
                last = max(start, min(end, len(x_TC) - ahead))
                after = _where_same(grad_TC, seq_idx, start, last, ahead)
                out[: last - start].addcmul_(after, taps[ahead])
                tap_grads[ahead] += (after * x[: last - start]).sum(0)
            x_grad[start:end] = out
        weight_grad = torch.stack(tap_grads[::-1], 1).to(weight_CK.dtype)
        bias_grad = _wide(grad_TC).sum(0).to(weight_CK.dtype) if ctx.has_bias else None
        return x_grad, weight_grad, bias_grad, None


def _where_same(x_TC: Tensor, seq_idx: Tensor, start: int, end: int, offset: int) -> Tensor:
    """Rows start + offset to end + offset; 0 where the document is not that of the row without the offset."""
    same = seq_idx[start:end] == seq_idx[start + offset : end + offset]
    return torch.where(same[:, None], _wide(x_TC[start + offset : end + offset]), 0.0)


def _blocks(x_TC: Tensor) -> Iterator[tuple[int, int]]:
    """256 KiB of fp32 on a CPU; a GPU gets the whole, and so does one that is simulated."""
    has_cache = x_TC.is_cpu and not isinstance(x_TC, FakeTensor)
    tokens = max(16, 2**16 // x_TC.shape[1]) if has_cache else max(1, len(x_TC))
    for start in range(0, len(x_TC), tokens):
        yield start, min(start + tokens, len(x_TC))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class Chunks:
    """document  int [M, L]: the document of each token; -1 behind the end of the stream"""

    document: Tensor
    num_tokens: int

    @classmethod
    def of(cls, seq_idx: Tensor, length: int) -> Chunks:
        padding = -len(seq_idx) % length
        return cls(F.pad(seq_idx, (0, padding), value=-1).unflatten(0, (-1, length)), len(seq_idx))

    def cut(self, x_TH: Tensor) -> Tensor:
        """[T, H, ...] -> [M, H, L, ...]."""
        padding = self.document.numel() - self.num_tokens
        if padding:
            x_TH = F.pad(x_TH, (0,) * (2 * x_TH.ndim - 1) + (padding,))
        return x_TH.unflatten(0, self.document.shape).transpose(1, 2).contiguous()

    def join(self, x_MHL: Tensor) -> Tensor:
        """[M, H, L, ...] -> [T, H, ...]."""
        return x_MHL.transpose(1, 2).flatten(0, 1)[: self.num_tokens]

    def decays(self, log_decay: Tensor) -> Decays:
        """log_decay [M, H, L, D] of each token.

        The sum runs in fp64 and then starts over with each document, so that a short one loses nothing to those before.
        """
        same = (self.document[:, :, None] == self.document[:, None, :]).tril()
        first = same.byte().argmax(-1)[:, None, :, None].expand_as(log_decay)
        total = log_decay.double().cumsum(2)
        so_far = total - F.pad(total, (0, 0, 1, 0)).gather(2, first)
        before = F.pad(self.document[:-1, -1:], (0, 0, 1, 0), value=-1)
        continues = (self.document == before)[:, None, :, None]
        stays = (self.document == self.document[:, -1:])[:, None, :, None]
        return Decays(
            between=_Between.apply(so_far, same, log_decay.dtype),
            from_before=_exp(so_far.to(log_decay.dtype), continues),
            to_end=_exp((so_far[:, :, -1:] - so_far).to(log_decay.dtype), stays),
        )


@dataclass(frozen=True)
class Decays:
    """D = 1 where all channels decay alike.

    between      [M, H, L, L, D], from the second token to the first, which is included; 0 for tokens of two documents
    from_before  [M, H, L, D], of the state before the chunk; 0 for a document that begins inside
    to_end       [M, H, L, D], from a token to the end of the chunk; 0 for a document that ends before it
    """

    between: Tensor
    from_before: Tensor
    to_end: Tensor


class _Between(torch.autograd.Function):
    """so_far fp64 [M, H, L, D], the log of the decay since the document's first token in the chunk, and same [M, L, L],
    the pairs that count -> `Decays.between`.

    The differences are as exact as in fp64: in fp32 alone, that of two long sums would lose its last digits.
    """

    @staticmethod
    def forward(ctx: Any, so_far: Tensor, same: Tensor, dtype: torch.dtype) -> Tensor:
        high = so_far.to(dtype)
        low = (so_far - high).to(dtype)
        log = (high[:, :, :, None] - high[:, :, None]).add_(low[:, :, :, None] - low[:, :, None])
        out = _exp(log, same[:, None, :, :, None])
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """The two sums nearly cancel, so they are sums in fp64."""
        log_grad = (grad * ctx.saved_tensors[0]).double()
        return log_grad.sum(3) - log_grad.sum(2), None, None


def _exp(log: Tensor, keep: Tensor) -> Tensor:
    """0 where not `keep`, and below 1e-19 (in fp32), of which nothing is left beside a token's own contribution: with
    the subnormal numbers that decays soon lead to, a CPU multiplies matrices many times slower.
    """
    floor = 0.5 * math.log(torch.finfo(log.dtype).tiny)
    return log.masked_fill((log < floor).logical_or_(~keep), -torch.inf).exp_()


def gated_delta_rule(
    seq_idx: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """query, key [T, G, D], value [T, H, P], g [T, H] or, with a decay for each channel, [T, H, D], beta [T, H]
    -> [T, H, P].

    state = exp(g) state;  state += beta key (value - key^T state)^T;  out = query^T state / sqrt(D)

    In a chunk, what each token writes depends on what those before it wrote: a triangular system, solved once for the
    values and once for what the state before the chunk contributes (the UT transform of arXiv:2406.06484).
    """
    dtype, heads = query.dtype, value.shape[1]
    with torch.autocast(query.device.type, enabled=False):
        chunks = Chunks.of(seq_idx, CHUNK if g.ndim == 2 else CHUNK_OF_CHANNELS)
        query, key, value, g, beta = map(_wide, (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
        query = query * query.shape[-1] ** -0.5
        query, key = (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1) for x in (query, key))
        q, k, v, beta = (chunks.cut(x) for x in (query, key, value, beta[..., None]))
        decays = chunks.decays(chunks.cut(g if g.ndim == 3 else g[..., None]))
        by_query, by_key = _scores(q, k, decays.between)
        inputs = torch.cat([v, k * decays.from_before], -1) * beta
        solved = torch.linalg.solve_triangular(by_key * beta, inputs, upper=False, unitriangular=True)
        written, read = solved.split([v.shape[-1], k.shape[-1]], -1)
        states, written = _delta_states(written, read, k * decays.to_end, decays.from_before[:, :, -1, :, None])
        out = (q * decays.from_before) @ states + by_query @ written
    return chunks.join(out).to(dtype)


def _scores(q: Tensor, k: Tensor, between: Tensor) -> tuple[Tensor, Tensor]:
    """Decayed products of queries, and of keys, with the keys, [M, H, L, L] each."""
    if between.shape[-1] == 1:
        return q @ k.mT * between.squeeze(-1), k @ k.mT * between.squeeze(-1)
    products = (between * k[:, :, None]) @ torch.stack([q, k], -1)
    by_query, by_key = products.unbind(-1)
    return by_query, by_key


def _delta_states(written: Tensor, read: Tensor, keys: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk [M, H, D, P], and what its tokens write, now that the state is known [M, H, L, P]."""
    state = written.new_zeros(*keys.shape[1:2], keys.shape[-1], written.shape[-1])
    states, outs = [], []
    for w, r, k, d in zip(written.unbind(), read.unbind(), keys.mT.unbind(), decay.unbind()):
        states.append(state)
        outs.append(torch.baddbmm(w, r, state, alpha=-1))
        state = torch.baddbmm(state * d, k, outs[-1])
    return torch.stack(states), torch.stack(outs)


def mamba2_chunk_scan(
    seq_idx: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """hidden_states [T, H, P], dt [T, H], A, D, dt_bias [H], B, C [T, G, D] -> [T, H, P] in fp32.

    state = exp(dt A) state + dt B hidden^T;  out = C^T state + D hidden       (arXiv:2405.21060)

    Inside a chunk this is causal attention of C to B, a matrix product per head; to and from the state, all heads of a
    group share B and C and are one product.
    """
    with torch.autocast(dt.device.type, enabled=False):
        chunks = Chunks.of(seq_idx, CHUNK)
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        dt = _wide((F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit))
        hidden_states = _wide(hidden_states)
        decays = chunks.decays(chunks.cut((dt * A.to(dt.dtype))[..., None]))
        x, b, c = (chunks.cut(_wide(y)) for y in (hidden_states * dt[..., None], B, C))
        by_group = (-1, x.shape[1] // b.shape[1])
        between = decays.between.squeeze(-1).unflatten(1, by_group)
        inside = ((c @ b.mT)[:, :, None] * between).flatten(1, 2) @ x
        added = b.mT @ _heads_last(x * decays.to_end, by_group)
        decay = _heads_last(decays.from_before[:, :, -1:].expand(*x.shape[:2], 1, x.shape[-1]), by_group)
        from_before = (c @ _states(added, decay)).unflatten(-1, (-1, x.shape[-1])).transpose(2, 3).flatten(1, 2)
        out = chunks.join(inside + from_before * decays.from_before)
        return out if D is None else out + D[:, None] * hidden_states


def _heads_last(x: Tensor, by_group: tuple[int, int]) -> Tensor:
    """[M, H, L, P] -> [M, G, L, R P]."""
    return x.unflatten(1, by_group).transpose(2, 3).flatten(3)


def _states(added: Tensor, decay: Tensor) -> Tensor:
    """[M, ...]: the state before each chunk."""
    state = torch.zeros_like(added[0])
    states = []
    for a, d in zip(added.unbind(), decay.unbind()):
        states.append(state)
        state = torch.addcmul(a, state, d)
    return torch.stack(states)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "causal_conv1d_fn": causal_conv1d,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_chunk_scan,
}
"""By the names of transformers' functions, whose arguments they take."""

RETURN_STATES = frozenset({"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"})
"""transformers' functions that return a state, or None, beside their output."""

NOT_ON_A_STREAM = frozenset(
    {"kwargs", "chunk_size", "initial_state", "initial_states", "output_final_state", "return_final_states"}
)
"""Arguments of transformers' functions that ours need not have: states, the length of chunks, what is ignored."""
