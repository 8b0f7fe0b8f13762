"""The fewest packs, by trying every set of documents: for up to about ten documents."""

from __future__ import annotations

from functools import cache


def fewest_packs(lengths: list[int], size: int) -> int:
    fits = [mask for mask in range(1, 1 << len(lengths)) if _tokens(lengths, mask) <= size]

    @cache
    def packs(left: int) -> int:
        if not left:
            return 0
        lowest = left & -left
        return 1 + min(
            packs(left & ~mask) for mask in fits if mask & lowest and mask & left == mask
        )

    return packs((1 << len(lengths)) - 1)


def _tokens(lengths: list[int], mask: int) -> int:
    return sum(length for i, length in enumerate(lengths) if mask >> i & 1)
