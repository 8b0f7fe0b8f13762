"""Dense block-causal masks of packed rows, for attention that takes a mask. The recipe's kernels need none.

lengths [2, 1]      1 0 0
                    1 1 0
                    0 0 1      a query (row) sees the keys (columns) of its own document up to itself
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

SeqLens = torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[int]]


def create_block_causal_mask(seq_lens: SeqLens) -> torch.Tensor:
    """bool [B, 1, T, T], True where a query may attend. seq_lens: document lengths of each row, rows of equal sum T.

    Raises ValueError when the rows have different sums.
    """
    rows = [torch.as_tensor(row, dtype=torch.int64) for row in seq_lens]
    totals = {int(row.sum()) for row in rows}
    if len(totals) != 1:
        raise ValueError(f"seq_lens rows sum to {sorted(totals)} and must have one sum: pad their last document.")
    return torch.stack([_block_causal(row) for row in rows])


def packed_block_causal_mask(seq_lens: SeqLens) -> torch.Tensor:
    """The same as create_block_causal_mask."""
    return create_block_causal_mask(seq_lens)


def build_block_causal_additive_mask(
    seq_lens: torch.Tensor, *, seq_length: int, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """[B, 1, T, T]: 0 where a query may attend, else the lowest number of `dtype`; T = seq_length.

    seq_lens: [B, max_docs], rows padded with 0. Raises ValueError if it is not 2-D or a row does not sum to seq_length.
    """
    if seq_lens.ndim != 2:
        raise ValueError(
            f"build_block_causal_additive_mask expects a 2D [B, max_docs] seq_lens tensor, got shape "
            f"{tuple(seq_lens.shape)}."
        )
    sums = seq_lens.sum(dim=1).tolist()
    if any(total != seq_length for total in sums):
        raise ValueError(f"Packed seq_lens rows must each sum to seq_length={seq_length}, got {sums}.")
    allowed = torch.stack([_block_causal(row) for row in seq_lens.to(device)])
    mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return mask.masked_fill(~allowed, torch.finfo(dtype).min)


def _block_causal(seq_lens: torch.Tensor) -> torch.Tensor:
    """bool [1, T, T] of one row."""
    document = torch.repeat_interleave(torch.arange(len(seq_lens), device=seq_lens.device), seq_lens)
    same = document[:, None] == document[None, :]
    return same.tril()[None]
