"""Chunks of the fused head: how large they are, how many graphs they need, and what a compiler writes for one."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.utils.flop_counter import FlopCounterMode

from automodel_lite.graphs import compiled_graphs
from automodel_lite.models.fused_head import (
    MAX_CHUNK_LOGITS,
    _chunk_loss,
    chunk_rows,
    fits_whole,
    linear_cross_entropy,
)
from automodel_lite.models.loss import FusedLinearCrossEntropy, LossShape

V, C = 211, 16


def results(
    rows: int, chunk: int | None, backend: str | None, weights: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The loss and both gradients; all rows fit up to 512."""
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = (
        torch.randn(n, C, generator=generator, dtype=torch.float64).requires_grad_()
        for n in (rows, V)
    )
    labels = torch.randint(0, V, (rows,), generator=generator)
    loss = linear_cross_entropy(hidden, weight, labels, chunk, 5.0, backend, weights)
    (loss * 0.37).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize(
    ("asked", "hidden", "vocabulary", "rows"),
    [
        (None, 4096, 128256, 4096),
        (None, 256, 128256, 512),
        (100, 4096, 128256, 100),
        # 2^30 / 151,936 = 7,067: 2.5e9 logits in one chunk were over 2^31
        (None, 16384, 151936, 7056),
        (10**6, 64, 2**31, 16),
    ],
)
def test_a_chunk_stays_below_2_to_the_30(
    asked: int | None, hidden: int, vocabulary: int, rows: int
) -> None:
    assert chunk_rows(asked, hidden, vocabulary) == rows
    assert rows == 16 or rows * vocabulary <= MAX_CHUNK_LOGITS


def test_the_memory_of_a_chunk_is_bounded_too() -> None:
    shape = LossShape(1e6, 151936, 16384, compute_bytes=2, head_gradient_bytes=0.0)
    assert FusedLinearCrossEntropy().logits_bytes(shape) <= 6 * MAX_CHUNK_LOGITS


@pytest.mark.parametrize("rows", [1, 15, 16, 33, 64, 97])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk", [32, None], ids=["chunks", "whole"])
def test_compiled_chunks_give_the_same_numbers(
    rows: int, weighted: bool, chunk: int | None
) -> None:
    """Padded to a multiple of 16, with a comparison in place of a scatter; gradients of all rows
    are multiplied in the backward pass.
    """
    torch._dynamo.reset()
    weights = torch.rand(rows, generator=torch.Generator().manual_seed(1)) if weighted else None
    for got, want in zip(results(rows, chunk, "eager", weights), results(rows, 32, None, weights)):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "head", "dtype", "fits"),
    [
        (8192, (128256, 2048), torch.bfloat16, True),  # 10 bytes x V x C, as chunks of 2,048
        (8193, (128256, 2048), torch.bfloat16, False),
        (4096, (128256, 2048), torch.float32, True),
        (4097, (128256, 2048), torch.float32, False),
    ],
)
def test_all_rows_take_no_more_memory_than_is_counted(
    rows: int, head: tuple[int, int], dtype: torch.dtype, fits: bool
) -> None:
    assert fits_whole(rows, head, dtype) == fits
    vocab_size, hidden_size = head
    weights = vocab_size * hidden_size
    shape = LossShape(1e6, vocab_size, hidden_size, dtype.itemsize, head_gradient_bytes=4 * weights)
    needed = dtype.itemsize * (vocab_size * rows + weights)
    if fits:
        assert needed <= FusedLinearCrossEntropy().logits_bytes(shape)


def test_all_rows_keep_gradients_of_logits_between_the_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No pass over a gradient of the head but the product that makes it."""
    torch._dynamo.reset()
    products = []
    multiply = torch.Tensor.__matmul__

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        products.append((*a.shape, b.shape[1]))
        return multiply(a, b)

    hidden, weight = torch.randn(32, C).requires_grad_(), torch.randn(V, C).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.arange(32), None, None, "eager")
    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    kept = [x.shape for x in loss.grad_fn.saved_tensors]  # type: ignore[union-attr]
    assert kept == [(32, V), (32, C), (V, C)]
    (loss / 32).backward()
    assert products == [(32, V, C), (V, 32, C)]


def test_a_loss_that_is_not_trained_makes_no_gradient_of_the_head() -> None:
    """Validation: torch says of the weight that it needs one with gradients off, too."""
    weight = torch.randn(V, C).requires_grad_()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        linear_cross_entropy(torch.randn(32, C), weight, torch.arange(32), 16)
    assert counter.get_total_flops() == 2 * 32 * V * C


def test_a_last_chunk_of_one_row_needs_no_graph_of_its_own() -> None:
    """One graph for any number of rows; dynamo takes sizes of 0 and 1 for constants."""
    torch._dynamo.reset()
    before = compiled_graphs()
    results(96, 32, "eager")
    results(80, 32, "eager")  # a last chunk of 16
    warm = compiled_graphs()
    assert warm - before == 1
    for rows in (65, 33, 1, 66, 79, 97, 31, 2):
        results(rows, 32, "eager")
    assert compiled_graphs() == warm


@pytest.mark.slow
def test_a_compiler_writes_no_logits_but_their_gradient() -> None:
    """Of a chunk in bf16: with a scatter, the fp32 [rows, V] came first."""
    torch._dynamo.reset()
    logits, labels = torch.randn(64, 4096).bfloat16(), torch.randint(0, 4096, (64,))
    compiled = torch.compile(_chunk_loss, fullgraph=True)
    want = _chunk_loss(logits.float(), logits.dtype, labels, torch.ones(64), None, True)[1]
    grad = torch.empty_like(logits)
    _, codes = run_and_get_code(
        compiled, logits, logits.dtype, labels, torch.ones(64), None, True, grad
    )
    assert not re.findall(r"empty_strided_cpu\(\(64, 4096\)", codes[0])
    torch.testing.assert_close(grad, want)
