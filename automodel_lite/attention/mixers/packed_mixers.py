"""Convolution, gated delta rules and the scans of Mamba 1 and 2 on a packed stream, in plain
PyTorch.

The chunked ones cut the stream every CHUNK tokens, wherever its documents begin. Inside a chunk
only pairs of tokens of one document count; the state that a chunk gets from the one before counts
for the document that goes on, and only the chunk's last document writes to the state that it passes
on. So a document needs no padding, however short it is.

    documents   0 0 0 0 0 1 | 1 1 2 2 2 3 | 3 3 3 3 3 3   a chunk starts with: nothing | of 1 | of 3
                                                           and passes on:       1  |  3   | 3

Where documents branch (prefix_trees.py), chunks are cut from pieces of the stream that follow the
end of another each: a chunk starts with the state of the chunk that its first token follows on its
path.

All compute in fp32 at least, also under autocast. None takes or returns a state: that is for
generation.

Legend: T tokens, M chunks of L tokens, H heads, G groups of R heads, D dim of keys, P dim of
values, C channels, K taps, N dim of a channel's state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from automodel_lite.compat import FakeTensor
from automodel_lite.config.sizes import ceil_div
from automodel_lite.document_rows import TreeRows
from automodel_lite.tensors import at_least_fp32

CHUNK = 64
"""The work inside a chunk grows with its length, the number of dependent steps falls with it."""

CHUNK_OF_CHANNELS = 16
"""Where each channel has a decay of its own, pairs of tokens cost D times as much memory."""


def causal_conv1d(
    seq_idx: Tensor,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Depthwise; seq_idx int [T], hidden_states [T, C], weight [C, K] -> [T, C]."""
    from transformers.activations import ACT2FN  # with the models' code

    out: Tensor = _DocumentConv.apply(hidden_states, weight, bias, seq_idx)
    return out if activation is None else ACT2FN[activation](out)


class _DocumentConv(torch.autograd.Function):
    """A multiply-add per tap, in blocks of tokens that stay in a CPU's cache: a third of the time
    of oneDNN's kernels, which also want another layout.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, weight_CK: Tensor, bias: Tensor | None, seq_idx: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_TC, weight_CK, seq_idx)
        ctx.has_bias = bias is not None
        taps = at_least_fp32(weight_CK).flip(1).unbind(1)
        out_TC = torch.empty_like(x_TC)
        for start, end in _blocks(x_TC):
            out = at_least_fp32(x_TC[start:end]) * taps[0]
            for back in range(1, len(taps)):
                first = max(start, back)
                before = _where_same(x_TC, seq_idx, first, end, -back)
                out[first - start :].addcmul_(before, taps[back])
            out_TC[start:end] = out if bias is None else out.add_(bias)
        return out_TC

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_TC: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x_TC, weight_CK, seq_idx = ctx.saved_tensors
        taps = at_least_fp32(weight_CK).flip(1).unbind(1)
        x_grad = torch.empty_like(x_TC)
        tap_grads = [torch.zeros_like(tap) for tap in taps]
        for start, end in _blocks(x_TC):
            x = at_least_fp32(x_TC[start:end])
            grad = at_least_fp32(grad_TC[start:end])
            out = grad * taps[0]
            tap_grads[0] += (grad * x).sum(0)
            for ahead in range(1, len(taps)):
                last = max(start, min(end, len(x_TC) - ahead))
                after = _where_same(grad_TC, seq_idx, start, last, ahead)
                out[: last - start].addcmul_(after, taps[ahead])
                tap_grads[ahead] += (after * x[: last - start]).sum(0)
            x_grad[start:end] = out
        weight_grad = torch.stack(tap_grads[::-1], 1).to(weight_CK.dtype)
        bias_grad = at_least_fp32(grad_TC).sum(0).to(weight_CK.dtype) if ctx.has_bias else None
        return x_grad, weight_grad, bias_grad, None


def _where_same(x_TC: Tensor, seq_idx: Tensor, start: int, end: int, offset: int) -> Tensor:
    """Rows start + offset to end + offset; 0 where the document is not that of the row without the
    offset.
    """
    same = seq_idx[start:end] == seq_idx[start + offset : end + offset]
    return torch.where(same[:, None], at_least_fp32(x_TC[start + offset : end + offset]), 0.0)


def _blocks(x_TC: Tensor) -> Iterator[tuple[int, int]]:
    """256 KiB of fp32 on a CPU; a GPU gets the whole, and so does one that is simulated."""
    tokens = max(16, 2**16 // x_TC.shape[1]) if _has_cache(x_TC) else max(1, len(x_TC))
    for start in range(0, len(x_TC), tokens):
        yield start, min(start + tokens, len(x_TC))


def _has_cache(x: Tensor) -> bool:
    return x.is_cpu and not isinstance(x, FakeTensor)


@dataclass(frozen=True)
class Chunks:
    """document  int [M, L]: the document of each token; -1 behind the end of the stream
    before    int [M, 1]: the document of the token before each chunk; -1 = none
    parents   the chunk whose state each one starts with; -1 = none
    places    int64 [M L]: the token at each place of a tree's chunks, T where there is none; None:
              the stream's order
    own       int64 [T]: the place of each token
    """

    document: Tensor
    before: Tensor
    parents: Sequence[int]
    num_tokens: int
    places: Tensor | None = None
    own: Tensor | None = None

    @classmethod
    def of(cls, stream: Tensor | TreeRows, length: int) -> Chunks:
        """Made, with its masks, by the first layer that asks; others find it by the identity of the
        stream's tensor.
        """
        known = _CHUNKS.setdefault(stream.own if isinstance(stream, TreeRows) else stream, {})
        if length not in known:
            if isinstance(stream, TreeRows):
                known[length] = cls._of_tree(stream, length)
            else:
                document = F.pad(stream, (0, -len(stream) % length), value=-1).unflatten(
                    0, (-1, length)
                )
                before = F.pad(document[:-1, -1:], (0, 0, 1, 0), value=-1)
                known[length] = cls(document, before, range(-1, len(document) - 1), len(stream))
        return known[length]

    @classmethod
    def _of_tree(cls, tree: TreeRows, length: int) -> Chunks:
        """Cuts each piece by itself. Its last chunk is filled up with zeros, which leave a state as
        it is.
        """
        assert tree.pieces is not None
        starts, lens, parents = tree.pieces
        counts = ceil_div(lens, length)
        first = counts.cumsum(0) - counts
        piece = torch.repeat_interleave(counts)  # of each chunk
        # tokens of the piece before each chunk
        behind = length * (torch.arange(len(piece)) - first[piece])
        # A chunk goes on from the one before it, the first of a piece from the last of its parent,
        # that of a root from nothing.
        following = torch.arange(len(piece)) - 1
        following[first] = torch.where(parents < 0, -1, (first + counts)[parents] - 1)
        # the token in each place of each chunk, or the zero behind all tokens; and back
        within = torch.arange(length)
        num_tokens = int(lens.sum())
        is_token = within < (lens[piece] - behind)[:, None]
        places = torch.where(
            is_token, (starts[piece] + behind)[:, None] + within, num_tokens
        ).flatten()
        own = torch.empty(num_tokens, dtype=torch.int64)
        own[places[is_token.flatten()]] = is_token.flatten().nonzero().squeeze(1)
        # One document in each chunk: 0 goes on, -1 is nobody's state.
        before = following.clamp(max=0)[:, None]
        document = torch.zeros(len(piece), length, dtype=torch.int64)
        device = [x.to(tree.own.device, non_blocking=True) for x in (document, before, places, own)]
        return cls(device[0], device[1], following.tolist(), num_tokens, *device[2:])

    def cut(self, x_TH: Tensor) -> Tensor:
        """[T, H, ...] -> [M, H, L, ...]."""
        padding = 1 if self.places is not None else self.document.numel() - self.num_tokens
        if padding:
            x_TH = F.pad(x_TH, (0,) * (2 * x_TH.ndim - 1) + (padding,))
        if self.places is not None:
            x_TH = x_TH.index_select(0, self.places)
        return x_TH.unflatten(0, self.document.shape).transpose(1, 2).contiguous()

    def join(self, x_MHL: Tensor) -> Tensor:
        """[M, H, L, ...] -> [T, H, ...]."""
        x_TH = x_MHL.transpose(1, 2).flatten(0, 1)
        if self.own is not None:
            return x_TH.index_select(0, self.own)
        return x_TH if len(x_TH) == self.num_tokens else x_TH[: self.num_tokens]

    @cached_property
    def same(self) -> Tensor:
        """bool [M, L, L]: is the second token at or before the first, in the same document?"""
        return (self.document[:, :, None] == self.document[:, None, :]).tril()

    @cached_property
    def first(self) -> Tensor:
        """int64 [M, L]: place in the chunk of the first token of each token's document."""
        return self.same.byte().argmax(-1)

    def decays(self, log_decay: Tensor) -> Decays:
        """log_decay [M, H, L, D] of each token.

        The sum runs in fp64 and then starts over with each document, so that a short one loses
        nothing to those before.
        """
        # A product with a triangle of ones: `cumsum` of floats has no deterministic form on CUDA,
        # and is refused there under training.deterministic. Its gradient is a product, too.
        ones = torch.ones(2 * (log_decay.shape[2],), dtype=torch.float64, device=log_decay.device)
        total = (log_decay.double().mT @ ones.triu()).mT
        so_far = total - F.pad(total, (0, 0, 1, 0)).gather(
            2, self.first[:, None, :, None].expand_as(log_decay)
        )
        dtype = log_decay.dtype
        continues = (self.document == self.before)[:, None, :, None]
        stays = (self.document == self.document[:, -1:])[:, None, :, None]
        return Decays(
            # Differences, and their gradients' sums, which nearly cancel, in fp64: that of two long
            # sums would lose its last digits in fp32.
            between=_exp(
                (so_far[:, :, :, None] - so_far[:, :, None]).to(dtype),
                self.same[:, None, :, :, None],
            ),
            from_before=_exp(so_far.to(dtype), continues),
            to_end=_exp((so_far[:, :, -1:] - so_far).to(dtype), stays),
        )


_CHUNKS: MutableMapping[Tensor, dict[int, Chunks]] = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Decays:
    """D = 1 where all channels decay alike.

    between      [M, H, L, L, D], from the second token to the first, which is included; 0 for
                 tokens of two documents
    from_before  [M, H, L, D], of the state before the chunk; 0 for a document that begins inside
    to_end       [M, H, L, D], from a token to the end of the chunk; 0 for a document that ends
                 before it
    """

    between: Tensor
    from_before: Tensor
    to_end: Tensor


def _exp(log: Tensor, keep: Tensor) -> Tensor:
    """0 where not `keep`, and below 1e-19 (in fp32), of which nothing is left beside a token's own
    contribution: with the subnormal numbers that decays soon lead to, a CPU multiplies matrices
    many times slower.
    """
    floor = 0.5 * math.log(torch.finfo(log.dtype).tiny)
    return log.masked_fill((log < floor).logical_or_(~keep), -torch.inf).exp_()


def gated_delta_rule(
    stream: Tensor | TreeRows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """query, key [T, G, D], value [T, H, P], g [T, H] or, with a decay for each channel, [T, H, D],
    beta [T, H] -> [T, H, P].

    state = exp(g) state;  state += beta key (value - key^T state)^T;  out = query^T state / sqrt(D)

    In a chunk, what each token writes depends on what those before it wrote: a triangular system,
    solved once for the values and once for what the state before the chunk contributes (the UT
    transform of arXiv:2406.06484).
    """
    dtype = query.dtype
    heads = value.shape[1]
    with torch.autocast(query.device.type, enabled=False):
        chunks = Chunks.of(stream, CHUNK if g.ndim == 2 else CHUNK_OF_CHANNELS)
        query, key, value, g, beta = map(at_least_fp32, (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = (
                x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key)
            )
        query = query * query.shape[-1] ** -0.5
        query, key = (
            x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
            for x in (query, key)
        )
        q, k, v, beta = (chunks.cut(x) for x in (query, key, value, beta[..., None]))
        decays = chunks.decays(chunks.cut(g if g.ndim == 3 else g[..., None]))
        # Decayed products of queries, and of keys, with the keys, [M, H, L, L] each.
        if decays.between.shape[-1] == 1:
            by_query, by_key = (x @ k.mT * decays.between.squeeze(-1) for x in (q, k))
        else:
            by_query, by_key = ((decays.between * k[:, :, None]) @ torch.stack([q, k], -1)).unbind(
                -1
            )
        inputs = torch.cat([v, k * decays.from_before], -1) * beta
        solved = torch.linalg.solve_triangular(
            by_key * beta, inputs, upper=False, unitriangular=True
        )
        written, read = solved.split([v.shape[-1], k.shape[-1]], -1)
        decay = decays.from_before[:, :, -1, :, None]
        states, written = _DeltaStates.apply(
            written, read, k * decays.to_end, decay, chunks.parents
        )
        out = (q * decays.from_before) @ states + by_query @ written
    return chunks.join(out).to(dtype)


class _DeltaStates(torch.autograd.Function):
    """The state before each chunk [M, H, D, P], and what its tokens write, now that the state is
    known [M, H, L, P].

    Step by step only what needs the step before, in place: autograd would keep each state twice,
    and take five times as many steps.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        written: Tensor,
        read: Tensor,
        keys: Tensor,
        decay: Tensor,
        parents: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        shape = (len(keys) + 1, *keys.shape[1:2], keys.shape[-1], written.shape[-1])
        # those at the ends of the chunks; first what follows nothing
        ends = written.new_zeros(shape)
        outs = written.clone()
        end_of = ends.unbind()
        for i, (out, r, k, d) in enumerate(
            zip(outs.unbind(), read.unbind(), keys.mT.unbind(), decay.unbind())
        ):
            state = end_of[parents[i] + 1]
            out.baddbmm_(r, state, alpha=-1)
            end_of[i + 1].addcmul_(state, d).baddbmm_(k, out)
        states = _of_parents(ends, parents)
        ctx.save_for_backward(read, keys, decay, states, outs)
        ctx.parents = parents
        return states, outs

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_states: Tensor, grad_outs: Tensor
    ) -> tuple[Any, ...]:
        read, keys, decay, states, outs = ctx.saved_tensors
        by_state = grad_states.clone()
        by_out = grad_outs.clone()
        by_end = states.new_zeros(len(states) + 1, *states.shape[1:])
        end_of = by_end.unbind()
        steps = zip(by_state.unbind(), by_out.unbind(), read.mT.unbind(), keys.unbind(), decay)
        for i, (state, out, r, k, d) in reversed(list(enumerate(steps))):
            end = end_of[i + 1]
            out.baddbmm_(k, end)
            state.addcmul_(end, d).baddbmm_(r, out, alpha=-1)
            end_of[ctx.parents[i] + 1].add_(state)
        by_end = by_end[1:]
        by_decay = (by_end * states).sum_to_size(decay.shape)
        return by_out, -(by_out @ states.mT), outs @ by_end.mT, by_decay, None


def _of_parents(ends: Tensor, parents: Sequence[int]) -> Tensor:
    """The ends of the chunks, the first of them that of none -> the state before each chunk."""
    if isinstance(parents, range):  # each follows the one before it
        return ends[:-1]
    return ends[[parent + 1 for parent in parents]]


def mamba2_chunk_scan(
    stream: Tensor | TreeRows,
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

    Inside a chunk this is causal attention of C to B, a matrix product per head; to and from the
    state, all heads of a group share B and C and are one product.
    """
    with torch.autocast(dt.device.type, enabled=False):
        chunks = Chunks.of(stream, CHUNK)
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        dt = at_least_fp32((F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit))
        hidden_states = at_least_fp32(hidden_states)
        decays = chunks.decays(chunks.cut((dt * A.to(dt.dtype))[..., None]))
        x, b, c = (chunks.cut(at_least_fp32(y)) for y in (hidden_states * dt[..., None], B, C))
        by_group = (-1, x.shape[1] // b.shape[1])
        between = decays.between.squeeze(-1).unflatten(1, by_group)
        inside = ((c @ b.mT)[:, :, None] * between).flatten(1, 2) @ x
        added = b.mT @ _heads_last(x * decays.to_end, by_group)
        decay = _heads_last(
            decays.from_before[:, :, -1:].expand(*x.shape[:2], 1, x.shape[-1]), by_group
        )
        from_before = (
            (c @ _states(added, decay, chunks.parents))
            .unflatten(-1, (-1, x.shape[-1]))
            .transpose(2, 3)
            .flatten(1, 2)
        )
        out = chunks.join(inside + from_before * decays.from_before)
        return out if D is None else out + D[:, None] * hidden_states


def _heads_last(x: Tensor, by_group: tuple[int, int]) -> Tensor:
    """[M, H, L, P] -> [M, G, L, R P]."""
    return x.unflatten(1, by_group).transpose(2, 3).flatten(3)


def _states(added: Tensor, decay: Tensor, parents: Sequence[int]) -> Tensor:
    """[M, ...]: the state before each chunk."""
    ends = [torch.zeros_like(added[0])]
    states = []
    for a, d, parent in zip(added.unbind(), decay.unbind(), parents):
        states.append(ends[parent + 1])
        ends.append(torch.addcmul(a, states[-1], d))
    return torch.stack(states)


def selective_scan(
    seq_idx: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
) -> Tensor:
    """hidden_states, dt, z [T, C], A [C, N], B, C [T, 1, N], D, delta_bias [C] -> [T, C].

    state = exp(dt A) state + dt hidden B;  out = (C^T state + D hidden) silu(z)
    (arXiv:2312.00752)
    """
    dtype = hidden_states.dtype
    with torch.autocast(dt.device.type, enabled=False):
        if delta_bias is not None:
            dt = dt + delta_bias.to(dt.dtype)
        dt = at_least_fp32(F.softplus(dt) if delta_softplus else dt)
        hidden_states = at_least_fp32(hidden_states)
        # A CPU is fastest token by token, in its cache; elsewhere chunks go side by side.
        chunks = Chunks.of(seq_idx, len(seq_idx) if _has_cache(seq_idx) else CHUNK)
        out = _scan(
            chunks,
            A.to(dt.dtype),
            dt,
            dt * hidden_states,
            at_least_fp32(B.squeeze(1)),
            at_least_fp32(C.squeeze(1)),
        )
        if D is not None:
            out = out + D * hidden_states
        if z is not None:
            out = out * F.silu(at_least_fp32(z))
    return out.to(dtype)


SCAN_STEPS = 32
"""Tokens of a chunk whose states [C, N] are in memory at once; of those before, the backward pass
makes them again.
"""


def _scan(
    chunks: Chunks, A: Tensor, dt_TC: Tensor, written_TC: Tensor, B_TN: Tensor, C_TN: Tensor
) -> Tensor:
    """Each dim of a channel's state decays by itself, so no matrix product does the work of many
    tokens: their steps are taken one after the other, in all chunks at once. With several chunks a
    first round finds what they pass on.
    """
    # [L, M, ...]: step by step, of all chunks; a document's first token sees no state.
    cut = [chunks.cut(x[:, None])[:, 0].transpose(0, 1) for x in (dt_TC, written_TC, B_TN, C_TN)]
    before = torch.cat([chunks.before, chunks.document[:, :-1]], 1)
    new = (
        torch.zeros_like(before, dtype=A.dtype)
        .masked_fill_(chunks.document != before, -torch.inf)
        .t()
    )

    def take_steps(
        state: Tensor, new: Tensor, dt: Tensor, written: Tensor, B: Tensor, C: Tensor
    ) -> list[Tensor]:
        decays = torch.addcmul(new[..., None, None], dt[..., None], A).exp()
        states = []
        for decay, added in zip(decays.unbind(), (written[..., None] * B[:, :, None]).unbind()):
            state = torch.addcmul(added, decay, state)
            states.append(state)
        return [(torch.stack(states) @ C[..., None]).squeeze(-1), state]

    def run(state: Tensor) -> tuple[Tensor, Tensor]:
        outs = []
        for steps in zip(*(x.split(SCAN_STEPS) for x in (new, *cut))):
            out, state = checkpoint(
                take_steps, state, *steps, use_reentrant=False, preserve_rng_state=False
            )
            outs.append(out)
        return torch.cat(outs), state

    state = A.new_zeros(len(chunks.document), *A.shape)
    if len(state) > 1:
        decay = torch.addcmul(new.sum(0)[:, None, None], cut[0].sum(0)[..., None], A).exp()
        state = _states(run(state)[1], decay, chunks.parents)
    return chunks.join(run(state)[0].transpose(0, 1)[:, None])[:, 0]
