from __future__ import annotations

import pytest
import torch

from automodel_lite.nemo_api.packed_sequence import (
    build_block_causal_additive_mask,
    create_block_causal_mask,
    packed_block_causal_mask,
)

TWO_AND_ONE = [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
ALL_CAUSAL = [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("make", [create_block_causal_mask, packed_block_causal_mask])
@pytest.mark.parametrize(
    "seq_lens",
    [[[2, 1], [3]], [torch.tensor([2, 1]), torch.tensor([3])], torch.tensor([[2, 1], [3, 0]])],
    ids=["lists", "tensors", "padded"],
)
def test_block_causal(make, seq_lens) -> None:
    mask = make(seq_lens)
    assert (mask.dtype, mask.shape) == (torch.bool, (2, 1, 3, 3))
    assert mask[:, 0].int().tolist() == [TWO_AND_ONE, ALL_CAUSAL]


def test_rows_of_unequal_sums() -> None:
    with pytest.raises(ValueError, match=r"sum to \[2, 3\] and must have one sum"):
        create_block_causal_mask([[2, 1], [2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_additive(dtype: torch.dtype) -> None:
    mask = build_block_causal_additive_mask(torch.tensor([[2, 1], [3, 0]]), seq_length=3, dtype=dtype, device="cpu")
    assert (mask.dtype, mask.shape) == (dtype, (2, 1, 3, 3))
    assert (mask == 0)[:, 0].int().tolist() == [TWO_AND_ONE, ALL_CAUSAL]
    assert mask.unique().tolist() == [torch.finfo(dtype).min, 0]


def test_bad_seq_lens() -> None:
    with pytest.raises(ValueError, match=r"expects a 2D \[B, max_docs\] seq_lens tensor"):
        build_block_causal_additive_mask(torch.tensor([2, 1]), seq_length=3, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="Packed seq_lens rows must each sum to seq_length=4"):
        build_block_causal_additive_mask(torch.tensor([[2, 1]]), seq_length=4, dtype=torch.float32, device="cpu")
