"""flex as training on a GPU runs it: traced by dynamo with gradients, its mask made from the boundaries.

On a CPU torch refuses flex's backward; the refusal is taken away, and the backend runs the traced graphs uncompiled.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask

from automodel_lite.attention.kernel import ReferenceAttention, over_tree
from automodel_lite.errors import ConfigError
from automodel_lite.graphs import compiled, compiled_graphs
from automodel_lite.parts.kernels.flex import FlexAttention, block_mask, packed_block_mask
from automodel_lite.thd import AttentionOptions, Segments
from tests.attention.signatures import ON_GPU
from tests.attention.test_kernel import (
    at_once,
    attend,
    boundaries,
    in_two_visits,
    tensors_of_visits,
)
from tests.attention.trees import batch_of, random_rows

pytestmark = pytest.mark.numbers


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> FlexAttention:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    return FlexAttention(compiled(torch_flex.flex_attention, "aot_eager"))


OPTIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "softcap": ({"window": None, "softcap": 5.0}, False),
    "window, softcap": ({"window": 40, "softcap": 5.0}, False),
    "window, sinks": ({"window": 40, "softcap": None}, True),
}
IN_CI = [  # each part of a graph is in two of them
    pytest.param(option, marks=pytest.mark.system if option == "window, softcap" else ())
    for option in OPTIONS
]


def random_tensors(
    num_q: int, num_k: int, sinks: bool, dims: tuple[int, int] = (16, 16)
) -> list[torch.Tensor]:
    tensors = [
        torch.randn(num_q, 4, dims[0]),
        torch.randn(num_k, 2, dims[0]),
        torch.randn(num_k, 2, dims[1]),
    ]
    return [*tensors, torch.randn(4)] if sinks else tensors


@pytest.mark.parametrize("option", IN_CI)
def test_a_traced_training_step_equals_the_reference(traced: FlexAttention, option: str) -> None:
    """Outputs and gradients; packs of other documents and prefixes of other lengths need few graphs."""
    options, with_sinks = OPTIONS[option]
    for q_lens, k_lens in [
        ([150, 106], [150, 106]),
        ([3, 200, 53], [3, 200, 53]),
        ([80, 64], [90, 300]),
    ]:
        tensors = random_tensors(sum(q_lens), sum(k_lens), with_sinks)
        got = attend(traced, tensors, q_lens, k_lens, options)
        for one, other in zip(got, attend(ReferenceAttention(), tensors, q_lens, k_lens, options)):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert 1 <= compiled_graphs() <= 3  # the first, and with symbolic sizes


def test_two_visits_are_one_attention(traced: FlexAttention) -> None:
    lens = [150, 106]
    tensors = tensors_of_visits(lens)
    for got, want in zip(in_two_visits(traced, tensors, lens, 3.0), at_once(tensors, lens, 3.0)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_head_dims_of_latent_attention_are_traced(traced: FlexAttention) -> None:
    tensors, options = random_tensors(256, 256, False, (24, 16)), {"window": None, "softcap": None}
    got = attend(traced, tensors, [156, 100], [156, 100], options)
    for one, other in zip(
        got, attend(ReferenceAttention(), tensors, [156, 100], [156, 100], options)
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.same_on_every_cpu
def test_two_softcaps_in_one_process_are_two_graphs(traced: FlexAttention) -> None:
    """A float that dynamo made symbolic could not be traced with gradients."""
    for softcap in (30.0, 50.0):
        tensors, options = random_tensors(256, 256, False), {"window": None, "softcap": softcap}
        got = attend(traced, tensors, [256], [256], options)
        want = attend(ReferenceAttention(), tensors, [256], [256], options)
        torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)


@pytest.mark.same_on_every_cpu
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_short_streams_of_start_up_are_not_compiled() -> None:
    """Nor is anything that decides by itself: a kernel would take 5 to 10 s each for 8 and for 32 tokens."""
    calls: list[int] = []

    def compiled(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(q.shape[2])
        return torch_flex.flex_attention(q, *args, **kwargs)

    for num_tokens in (32, 127, 128, 300):
        tensors, cu = random_tensors(num_tokens, num_tokens, False), boundaries([num_tokens])
        with torch.no_grad():
            FlexAttention(compiled)(
                *tensors, Segments(cu, cu, 20, 20), AttentionOptions(0.25, softcap=5.0)
            )
    assert calls == [128, 300]


# -------------------------------------------------------------------------------------------------------- block masks
def _segments(cu: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(cu.diff())


def _visible(cu_q: torch.Tensor, cu_k: torch.Tensor, window: int | None) -> Any:
    """Same segment, causal bottom right, inside the window."""
    segment_q, segment_k = _segments(cu_q), _segments(cu_k)
    highest = torch.arange(len(segment_q)) + (cu_k[1:] - cu_q[1:])[segment_q]

    def mask_mod(b: Any, h: Any, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        distance = highest[i] - j
        return (segment_q[i] == segment_k[j]) & (distance >= 0) & (distance < (window or 10**6))

    return mask_mod


def _random_lengths(total: int, longest: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(
            min(int(torch.randint(1, longest, (1,), generator=generator)), total - sum(lengths))
        )
    return lengths


def _full_blocks(mask: Any) -> torch.Tensor:
    dense = torch.zeros_like(mask.to_dense()[0, 0])
    for row, (count, indices) in enumerate(
        zip(mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0])
    ):
        dense[row, indices[:count].long()] = 1
    return dense


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(
    ("total", "window"),
    [(1024, None), (1024, 200), (1000, None), (2048, 64), (700, 1), (128, None), (131, 500)],
)
def test_the_mask_from_the_boundaries_is_torchs_own(total: int, window: int | None) -> None:
    cu = boundaries(_random_lengths(total, 400, total))
    got = packed_block_mask(cu, cu, total, total, window)
    want = create_block_mask(_visible(cu, cu, window), None, None, total, total, "cpu")
    assert torch.equal(got.to_dense(), want.to_dense())
    assert torch.equal(_full_blocks(got), _full_blocks(want))


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("seed", range(4))
def test_the_mask_of_prefixes_misses_nothing(seed: int, window: int | None) -> None:
    """Queries of a context-parallel rank, more keys than queries: a block too many is only work."""
    q_lens = _random_lengths(900, 300, seed)
    k_lens = [q + more for q, more in zip(q_lens, _random_lengths(5000, 500, seed + 9))]
    cu_q, cu_k = boundaries(q_lens), boundaries(k_lens[: len(q_lens)])
    num_q, num_k = int(cu_q[-1]), int(cu_k[-1])
    got = packed_block_mask(cu_q, cu_k, num_q, num_k, window)
    want = create_block_mask(_visible(cu_q, cu_k, window), None, None, num_q, num_k, "cpu")
    assert (got.to_dense() >= want.to_dense()).all()
    assert (_full_blocks(got) <= _full_blocks(want)).all()
    assert got.to_dense().sum() - want.to_dense().sum() <= 14


@pytest.mark.same_on_every_cpu
def test_no_quadratic_memory_for_a_long_stream() -> None:
    """[T, T] of 65,536 tokens would be 4 GiB of booleans alone."""
    cu = torch.arange(0, 65536 + 1, 1024, dtype=torch.int32)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Sizes():
        mask = packed_block_mask(cu, cu, 65536, 65536, None)
    assert largest <= 4 * (65536 // 128) ** 2
    assert mask.kv_num_blocks.sum() == 512  # the diagonal is partial, what is below it is full


@pytest.mark.parametrize(
    "option",
    [
        pytest.param(name, marks=() if name == "window, sinks" else pytest.mark.system)
        for name in OPTIONS
    ],
)
def test_a_tree_is_a_causal_mask_with_expiry(traced: FlexAttention, option: str) -> None:
    """One integer per key against the reference on gathered paths; gradients too, and two trees of other shapes."""
    options, with_sinks = OPTIONS[option]
    for seed in (3, 4):
        r = random.Random(seed)
        batch, _ = batch_of(
            [random_rows(r, 50, most=9), random_rows(r, 50, 0), random_rows(r, 50, most=9)]
        )
        tree = batch.attention.tree
        assert tree is not None
        results = []
        tensors = random_tensors(len(batch.input_ids), len(batch.input_ids), with_sinks)
        for kernel in (traced, ReferenceAttention()):
            q, k, v, *sinks = leaves = [x.detach().requires_grad_() for x in tensors]
            given = AttentionOptions(0.25, sinks=sinks[0] if sinks else None, **options)
            out = over_tree(kernel, tree, is_cut=False)(q, k, v, batch.attention.segments, given)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for got, want in zip(*results):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("window", [None, 40])
def test_the_blocks_of_a_tree_hold_all_visible_pairs(window: int | None) -> None:
    """As many blocks as hold a visible pair, or few more with a window; a full block holds nothing else."""
    batch, _ = batch_of([random_rows(random.Random(seed), 50, most=12) for seed in range(6)])
    tree = batch.attention.tree
    assert tree is not None
    num = len(tree.until)
    mask = block_mask(torch.arange(num), tree.until, tree.position, tree.position, window)
    i, j = torch.arange(num)[:, None], torch.arange(num)[None]
    visible = (j <= i) & (i < tree.until[None])
    if window is not None:
        visible &= tree.position[:, None] - tree.position[None] < window
    missing = -num % 128
    blocks = (
        torch.nn.functional.pad(visible, (0, missing, 0, missing))
        .unflatten(1, (-1, 128))
        .unflatten(0, (-1, 128))
    )
    seen = blocks.transpose(1, 2).flatten(2).any(-1)
    full = blocks.transpose(1, 2).flatten(2).all(-1)
    assert num > 5 * 128
    taken = mask.to_dense()[0, 0].bool()
    assert not (seen & ~taken).any()
    assert taken.sum() <= seen.sum() + (0 if window is None else 3)
    of_full = torch.zeros_like(full)
    for block, count in enumerate(mask.full_kv_num_blocks[0, 0].tolist()):
        of_full[block, mask.full_kv_indices[0, 0, block, :count].long()] = True
    assert torch.equal(of_full, full) if window is None else not (of_full & ~full).any()


@pytest.mark.same_on_every_cpu
def test_heads_that_its_kernel_cannot_hold_are_refused() -> None:
    """Compiling the kernel fails below 16, as it did for the smoke preset in fp32 on a GPU."""
    kernel = FlexAttention()
    kernel.check(replace(ON_GPU, head_dim=16, value_head_dim=16))
    with pytest.raises(ConfigError, match="head dims 8 / 8: its kernel needs at least 16"):
        kernel.check(replace(ON_GPU, head_dim=8, value_head_dim=8))
