"""The reference kernel against attention written token by token in fp64, and flex against the reference.

Segments of queries are shorter than those of keys, as under context parallelism.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from automodel_lite.attention import kernel as reference
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.parts.kernels.flex import FlexAttention
from automodel_lite.thd import AttentionInputs, AttentionOptions, AttentionPlan, Segments


def token_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: list[int],
    k_lens: list[int],
    scale: float,
    options: dict[str, Any],
) -> Tensor:
    """fp64; every query by itself, over the keys that it may see."""
    window, softcap, sinks = options["window"], options["softcap"], options["sinks"]
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    outs, q_start, k_start = [], 0, 0
    for q_len, k_len in zip(q_lens, k_lens):
        for place in range(k_len - q_len, k_len):
            first = 0 if window is None else max(0, place - window + 1)
            seen = slice(k_start + first, k_start + place + 1)
            logits = (
                torch.einsum("hd,jhd->hj", q[q_start + place - (k_len - q_len)], k[seen]) * scale
            )
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if sinks is not None:
                logits = torch.cat([logits, sinks[:, None]], 1)
            weights = logits.softmax(1)[:, : seen.stop - seen.start]
            outs.append(torch.einsum("hj,jhd->hd", weights, v[seen]))
        q_start, k_start = q_start + q_len, k_start + k_len
    return torch.stack(outs)


def boundaries(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def packed(q_lens: list[int], k_lens: list[int] | None = None) -> Segments:
    """Without `k_lens` the keys are those of the queries."""
    cu_q, k_lens = boundaries(q_lens), k_lens or q_lens
    return Segments(
        cu_q, cu_q if k_lens is q_lens else boundaries(k_lens), max(q_lens), max(k_lens)
    )


def attend(
    kernel: Any,
    tensors: list[Tensor],
    q_lens: list[int],
    k_lens: list[int],
    options: dict[str, Any],
) -> list[Tensor]:
    """Output and gradients of q, k, v (and sinks), in fp64."""
    leaves = [x.detach().clone().double().requires_grad_() for x in tensors]
    sinks = leaves[3] if len(leaves) == 4 else None
    options = options | {"sinks": sinks}
    if kernel is token_by_token:
        out = token_by_token(*leaves[:3], q_lens, k_lens, 0.25, options)
    else:
        out = kernel(*leaves[:3], packed(q_lens, k_lens), AttentionOptions(0.25, **options))
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
    return [out.detach(), *(x.grad for x in leaves)]


def random_tensors(
    q_lens: list[int], k_lens: list[int], heads: tuple[int, int], value_dim: int, sinks: bool
) -> list:
    torch.manual_seed(len(q_lens) + sum(k_lens))
    num_heads, num_kv_heads = heads
    tensors = [torch.randn(sum(q_lens), num_heads, 16), torch.randn(sum(k_lens), num_kv_heads, 16)]
    tensors.append(torch.randn(sum(k_lens), num_kv_heads, value_dim))
    return tensors + ([torch.randn(num_heads)] if sinks else [])


SHAPES = {
    "packed": ([5, 17, 1, 33, 8], [5, 17, 1, 33, 8]),
    "rows of one length": ([9, 9, 9], [9, 9, 9]),
    "prefixes": ([5, 17, 1, 33, 8], [12, 17, 9, 40, 8]),
    "prefixes of one length": ([4, 4], [9, 9]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"window": None, "softcap": None},
    "window": {"window": 7, "softcap": None},
    "window of one": {"window": 1, "softcap": None},
    "softcap": {"window": None, "softcap": 5.0},
    "window and softcap": {"window": 7, "softcap": 5.0},
}


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("heads", "value_dim"), [((4, 2), 16), ((4, 4), 8)], ids=["grouped", "value dim 8"]
)
def test_reference_equals_token_by_token(
    heads: tuple[int, int], value_dim: int, shape: str, option: str, with_sinks: bool
) -> None:
    q_lens, k_lens = SHAPES[shape]
    tensors = random_tensors(q_lens, k_lens, heads, value_dim, with_sinks)
    got = attend(ReferenceAttention(), tensors, q_lens, k_lens, OPTIONS[option])
    want = attend(token_by_token, tensors, q_lens, k_lens, OPTIONS[option])
    for one, other in zip(got, want):
        assert (one - other).abs().max() < 1e-12


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=6),
    st.sampled_from([None, 1, 3, 50]),
)
def test_reference_on_random_documents(segments: list[tuple[int, int]], window: int | None) -> None:
    """Gradients too, over blocks of queries much smaller than the documents."""
    q_lens, k_lens = [q for q, _ in segments], [q + more for q, more in segments]
    tensors = random_tensors(q_lens, k_lens, (2, 1), 16, False)
    options = {"window": window, "softcap": None}
    whole, reference.QUERY_BLOCK = reference.QUERY_BLOCK, 4
    try:
        got = attend(ReferenceAttention(), tensors, q_lens, k_lens, options)
    finally:
        reference.QUERY_BLOCK = whole
    for one, other in zip(got, attend(token_by_token, tensors, q_lens, k_lens, options)):
        assert (one - other).abs().max() < 1e-12


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("lengths", [[12], [6, 6], [5, 7]], ids=str)
def test_the_output_has_one_layout(lengths: list[int], softcap: float | None) -> None:
    """Compiled layers take it in: an output of another layout for a pack of one document was three more graphs."""
    q, k, v = torch.randn(12, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    out = ReferenceAttention()(q, k, v, packed(lengths), AttentionOptions(0.3, softcap=softcap))
    assert out.stride() == (32, 8, 1)


def test_empty_segments_are_skipped() -> None:
    tensors = random_tensors([3, 4], [3, 4], (2, 2), 16, False)
    cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    got = ReferenceAttention()(*tensors, Segments(cu, cu, 4, 4), AttentionOptions(0.25))
    want = ReferenceAttention()(*tensors, packed([3, 4]), AttentionOptions(0.25))
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_reference_keeps_the_dtype(dtype: torch.dtype) -> None:
    tensors = [x.to(dtype) for x in random_tensors([5, 3], [5, 3], (4, 2), 16, False)]
    for softcap in (None, 5.0):
        out = ReferenceAttention()(
            *tensors, packed([5, 3]), AttentionOptions(0.25, softcap=softcap)
        )
        assert out.dtype == dtype


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("option", ["plain", "window", "softcap"])
@pytest.mark.parametrize("shape", ["packed", "prefixes"])
def test_flex_forward_equals_the_reference(shape: str, option: str, with_sinks: bool) -> None:
    """Its backward needs a GPU: benchmarks/gpu_check.py."""
    q_lens, k_lens = SHAPES[shape]
    tensors = random_tensors(q_lens, k_lens, (4, 2), 16, with_sinks)
    sinks = tensors[3] if with_sinks else None
    arguments = (
        *tensors[:3],
        packed(q_lens, k_lens),
        AttentionOptions(0.25, **OPTIONS[option], sinks=sinks),
    )
    flex = FlexAttention()
    for _ in range(2):  # the second layer takes the first one's block mask
        with torch.no_grad():
            got, want = flex(*arguments), ReferenceAttention()(*arguments)
        assert (got - want).abs().max() < 1e-5


def test_flex_makes_a_new_mask_for_a_new_batch() -> None:
    flex = FlexAttention()
    tensors = random_tensors([8, 4], [8, 4], (2, 2), 16, False)
    for lens in ([8, 4], [4, 8], [12]):
        segments = packed(lens)
        with torch.no_grad():
            got = flex(*tensors, segments, AttentionOptions(0.25))
            want = ReferenceAttention()(*tensors, segments, AttentionOptions(0.25))
        assert (got - want).abs().max() < 1e-5


def in_two_visits(
    kernel: Any, tensors: list[Tensor], lens: list[int], softcap: float | None
) -> list[Tensor]:
    """Attention over each document's own keys, then over as many that it all sees; put together by hand."""
    q, k, v, more_k, more_v, grad = tensors
    how = packed(lens), AttentionOptions(0.25, softcap=softcap)
    visits = [
        (AttentionInputs(q, k, v, *how), True),
        (AttentionInputs(q, more_k, more_v, *how), False),
    ]
    parts = [kernel.block(*visit) for visit in visits]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(out_of * (lse_of - lse).exp()[..., None] for out_of, lse_of in parts).to(q.dtype)
    backward = [kernel.block_backward(*visit, grad, out, lse) for visit in visits]
    return [out, backward[0][0] + backward[1][0], *backward[0][1:], *backward[1][1:]]


def at_once(tensors: list[Tensor], lens: list[int], softcap: float | None) -> list[Tensor]:
    """The same by the kernel, over keys that begin with those of the second visit."""
    *leaves, grad = (x.detach().clone().requires_grad_() for x in tensors)
    q, k, v, more_k, more_v = leaves
    k, v = (
        torch.cat([part for pair in zip(more.split(lens), own.split(lens)) for part in pair])
        for more, own in ((more_k, k), (more_v, v))
    )
    segments = packed(lens, [2 * length for length in lens])
    out = ReferenceAttention()(q, k, v, segments, AttentionOptions(0.25, softcap=softcap))
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def tensors_of_visits(lens: list[int]) -> list[Tensor]:
    torch.manual_seed(len(lens))
    return [torch.randn(sum(lens), heads, 16) for heads in (4, 2, 2, 2, 2, 4)]


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_two_visits_are_one_attention(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "QUERY_BLOCK", 16)
    lens = [5, 17, 1, 33]
    tensors = tensors_of_visits(lens)
    for got, want in zip(
        in_two_visits(ReferenceAttention(), tensors, lens, softcap), at_once(tensors, lens, softcap)
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_two_visits_in_bf16_round_as_one_attention() -> None:
    """Sums over both are rounded once: outputs that were rounded before had errors 1.4 times as large, gradients of queries
    1.6 times.
    """
    lens = [5, 17, 1, 33]
    tensors = [x.bfloat16() for x in tensors_of_visits(lens)]
    truths = at_once([x.double() for x in tensors], lens, 3.0)
    visits = in_two_visits(ReferenceAttention(), tensors, lens, 3.0)
    for got, once, truth in zip(visits, at_once(tensors, lens, 3.0), truths):
        assert (got.bfloat16() - truth).norm() < 1.2 * (once - truth).norm()


def seen_one_by_one(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, window: int | None
) -> Tensor:
    """Every query by itself, over the keys that `ahead` lets it see."""
    outs, segments = [], plan.segments
    for n in range(len(segments.cu_q) - 1):
        (q_start, q_stop), (k_start, k_stop) = (
            cu[n : n + 2].tolist() for cu in (segments.cu_q, segments.cu_k)
        )
        before = k_stop - k_start - (q_stop - q_start) if plan.before is None else plan.before[n]
        for i in range(q_start, q_stop):
            behind, kept = plan.ahead[window is not None][i].tolist()
            at = int(before) + i - q_start
            first = 0 if window is None else max(0, min(at - window + 1, at - kept))
            keys = slice(k_start + first, k_start + at + behind + 1)
            weights = (torch.einsum("hd,jhd->hj", q[i], k[keys]) * 0.5).softmax(1)
            outs.append(torch.einsum("hj,jhd->hd", weights, v[keys]))
    return torch.stack(outs)


@pytest.mark.parametrize("kernel", [ReferenceAttention(), FlexAttention()], ids=lambda x: x.name)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("before", [None, [2, 1]], ids=["whole", "cut"])
def test_tokens_of_an_image_see_each_other(
    kernel: Any, window: int | None, before: list[int] | None
) -> None:
    """Images of 5 and 2 tokens; a rank's queries may end before its keys do."""
    behind = [0, 4, 3, 2, 1, 0, 0, 1, 0]
    kept = [0, 0, 1, 2, 3, 4, 0, 0, 1]
    ahead = {kind: torch.tensor([behind, kept]).T for kind in (False, True)}
    segments = packed([6, 3]) if before is None else packed([6, 3], [10, 5])
    tensors = torch.tensor(before) if before else None
    plan = AttentionPlan(segments, ahead=ahead, before=tensors)
    q, k, v = (
        torch.randn(int(cu[-1]), 2, 16, dtype=torch.float64)
        for cu in (segments.cu_q, segments.cu_k, segments.cu_k)
    )
    reach = plan.reach(window)
    assert reach is not None
    got = kernel.attend_ahead(
        AttentionInputs(q, k, v, segments, AttentionOptions(0.5, window)), reach
    )
    torch.testing.assert_close(got, seen_one_by_one(q, k, v, plan, window))
